"""What a checkpoint holds, from its headers, index and config: totals, formats by module, heads, drafts, warnings.

A checkpoint of 230,000 tensors has a few dozen name templates. Tensors are counted in *cells* (template, layer, dtype,
shape) in one pass; everything else looks at one tensor of each cell. Differences between experts of one layer that
show in neither dtype nor shape nor count are therefore not seen here.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .checkpoint import Checkpoint
from .consumers import LINEAR_CLASS, Declared, by_compressed_tensors, declared
from .errors import Finding
from .families import Kind, classifier, config_value, declared_drafts, draft_part, embedding_of, head_of, is_tied
from .names import split
from .plan import Ref
from .stored import COMPANIONS, WEIGHTS, Stored, declared_label, split_name, stored_format

_UP_TO_INDEX = re.compile(r"(?:[^.]+\.)*?\d+(?=\.)")


class Total(NamedTuple):
    """A line of a summary. ``parameters`` counts numbers of the model: unpacked, and no scales."""

    key: str
    tensors: int
    parameters: int
    bytes: int


class ModuleRow(NamedTuple):
    """Modules of one template that are stored and declared alike. ``bytes`` includes scales and the like."""

    module: str
    kind: str
    modules: int
    stored: str
    declared: str | None
    quantized: bool
    parameters: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Quantization:
    """What the config declares: the method, its format, and for compressed-tensors the scheme of each group."""

    method: str
    format: str | None
    groups: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Head:
    """An output head that is stored."""

    module: str
    stored: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """All that ``ckptkit inspect`` tells of a checkpoint."""

    architectures: tuple[str, ...]
    model_type: str | None
    quantization: Quantization | None
    total: Total
    shards: int
    dtypes: tuple[Total, ...]
    modules: tuple[ModuleRow, ...]
    embedding: str | None
    heads: tuple[Head, ...]
    tied: bool
    drafts: tuple[Total, ...]
    declared_drafts: Mapping[str, Any]
    warnings: tuple[Finding, ...]


class Cell(NamedTuple):
    """Tensors of one template, layer, dtype and shape: the first of them, and how many there are."""

    first: Ref
    count: int

    @property
    def bytes(self) -> int:
        return self.first.nbytes * self.count


class Module(NamedTuple):
    """A weight's cell with what is known of it, and its companions' cells by the last part of their names."""

    name: str
    template: str
    kind: Kind
    weight: Cell
    companions: Mapping[str, Cell]
    stored: Stored
    group: str | None

    @property
    def parameters(self) -> int:
        return math.prod(self.weight.first.shape) * self.stored.per_element * self.weight.count


def summarize(checkpoint: Checkpoint, tensors: Iterable[Ref]) -> Summary:
    """The summary of ``tensors``, all or some of the checkpoint's."""
    tensors = list(tensors)
    config = checkpoint.config or {}
    cells = count_cells(tensors)
    quantization, targets, findings = declared_quantization(config)
    modules = list(_modules(cells, config, quantization, targets))
    plain = [cell for cell in cells if split_name(cell.first.name)[1] not in WEIGHTS | COMPANIONS]
    names = [cell.first.name for cell in cells]
    whole = len(tensors) == len(checkpoint.tensors)
    embedding = embedding_of(names, config)
    drafts = tuple(_drafts(cells, modules, config))
    warnings = [*checkpoint.warnings, *findings, *_scale_warnings(modules, tensors)]
    if whole:
        warnings += [*_declaration_warnings(modules, quantization), *_head_warnings(config, embedding, names)]
        warnings += _draft_warnings(config, drafts)
    return Summary(
        architectures=_strings(config.get("architectures")),
        model_type=config_value(config, "model_type"),
        quantization=quantization,
        total=_sum("total", cells, modules, plain),
        shards=len({ref.file for ref in tensors}),
        dtypes=tuple(_by_dtype(cells, modules, plain)),
        modules=tuple(_rows(modules, quantization)),
        embedding=embedding,
        heads=tuple(Head(m.name, m.stored.label, m.weight.first.shape) for m in modules if m.kind is Kind.HEAD),
        tied=is_tied(config),
        drafts=drafts,
        declared_drafts=declared_drafts(config),
        warnings=tuple(warnings),
    )
