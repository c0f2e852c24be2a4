"""What a checkpoint holds, from its headers, index and config: totals, formats by module, heads, drafts, warnings."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..checks import Level, Subject, run
from ..errors import Finding
from ..families import LINEAR_LIKE, Kind, config_value, declared_drafts, draft_part, embedding_of, is_tied
from ..files.checkpoint import Checkpoint
from ..naming.names import to_template
from ..plan import Ref
from ..stored import Quantization, declared_quantization, split_name
from .survey import Module, Survey, keyed, survey

# What stands out of a summary's contradictions; ``ckptkit verify`` looks for more.
_TOLD = frozenset({
    "config.quant-undeclared", "config.quant-dense", "names.weight-without-scale", "names.scale-without-weight",
    "config.tie", "names.draft-missing",
})  # fmt: skip
_UP_TO_INDEX = re.compile(r"(?:[^.]+\.)*?\d+(?=\.)")
_NUMBER = re.compile(r"\d+")


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
    bytes: int


class Head(NamedTuple):
    """An output head that is stored."""

    module: str
    stored: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """All that ``ckptkit inspect`` tells of a checkpoint, or of some of its tensors (not ``whole``)."""

    whole: bool
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
    vocab_order: Mapping[str, Any] | None = None


def summarize(checkpoint: Checkpoint, tensors: Sequence[Ref]) -> Summary:
    """The summary of ``tensors``: all of the checkpoint's, or some, about which no warning is given."""
    subject, config = Subject(checkpoint), checkpoint.config or {}
    quantization, findings = declared_quantization(config)
    whole = len(tensors) == len(checkpoint.tensors)
    found = subject.survey if whole else survey(tensors, config, quantization)
    names = [cell.first.name for cell in found.cells.values()]
    drafts = tuple(_drafts(found, config))
    embedding = embedding_of(names)
    if whole:
        told = run(subject, Level.STATIC, _TOLD.__contains__).findings
        findings += [*checkpoint.warnings, *(finding.as_warning() for finding in told)]
    architectures = config.get("architectures")
    model_type = config_value(config, "model_type")
    heads = [module for module in found.modules if module.kind is Kind.HEAD]
    return Summary(
        whole=whole,
        architectures=tuple(map(str, architectures)) if isinstance(architectures, list) else (),
        model_type=None if model_type is None else str(model_type),
        quantization=quantization,
        total=next(iter(_totals(found, lambda ref: "total")), Total("total", 0, 0, 0)),
        shards=len({ref.file for ref in tensors}),
        dtypes=tuple(sorted(_totals(found, lambda ref: ref.dtype), key=lambda row: -row.bytes)),
        modules=tuple(_module_rows(found.modules, quantization)),
        embedding=embedding,
        heads=tuple(Head(head.name, head.stored.label, head.shape) for head in heads),
        tied=is_tied(config),
        drafts=drafts,
        declared_drafts=declared_drafts(config),
        warnings=tuple(findings),
        vocab_order=order if isinstance(order := config.get("vocab_order"), Mapping) else None,
    )


# --- totals ------------------------------------------------------------------------------------------------


def _totals(found: Survey, key: Callable[[Ref], str | None]) -> list[Total]:
    """Totals by what ``key`` says of the first tensor of a cell, in the order of first appearance; None is left out."""
    rows: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for cell in found.cells.values():
        name = key(cell.first)
        if name is not None:
            row = rows[name]
            row[0] += cell.number
            row[1] += cell.number * found.parameters[cell.key]
            row[2] += cell.bytes
    return [Total(name, *row) for name, row in rows.items()]


def _module_of(ref: Ref) -> str:
    return split_name(ref.name)[0] or ref.name


def _layer_of(ref: Ref) -> str:
    found = _UP_TO_INDEX.match(ref.name)
    return found[0] if found else _module_of(ref)


GROUPS: Mapping[str, Callable[[Ref], str]] = {
    "layer": _layer_of,
    "module": lambda ref: to_template(_module_of(ref)),
    "dtype": lambda ref: ref.dtype,
    "shard": lambda ref: ref.file,
}


def grouped(checkpoint: Checkpoint, tensors: Sequence[Ref], by: str) -> list[Total]:
    """Totals of ``tensors`` by one of :data:`GROUPS`, sorted, numbers as numbers.

    ``layer``: each layer, and each module outside of them. ``module``: modules whose names differ in numbers only.
    """
    config = checkpoint.config or {}
    quantization, _ = declared_quantization(config)
    found = survey(tensors, config, quantization)
    rows: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for ref, key in keyed(tensors):
        row = rows[GROUPS[by](ref)]
        row[0] += 1
        row[1] += found.parameters[key]
        row[2] += ref.nbytes
    return [Total(name, *rows[name]) for name in sorted(rows, key=_in_order)]


def _in_order(name: str) -> str:
    return _NUMBER.sub(lambda number: number[0].zfill(20), name)


def _module_rows(modules: Iterable[Module], quantization: Quantization | None) -> Iterator[ModuleRow]:
    rows: dict[tuple[str, str, str, str | None], list[int]] = defaultdict(lambda: [0, 0])
    for module in modules:
        if module.kind in LINEAR_LIKE | {Kind.EXPERTS, Kind.EMBEDDING} or module.stored.quantized:
            declared = quantization.label(module.group) if quantization else None
            row = rows[to_template(module.name), module.kind.value, module.stored.label, declared]
            row[0] += module.weight.number
            row[1] += module.bytes
    for (name, kind, stored, declared), (count, nbytes) in sorted(rows.items(), key=lambda item: item[0][:3]):
        yield ModuleRow(name, kind, count, stored, declared, nbytes)


def _drafts(found: Survey, config: Mapping[str, Any]) -> list[Total]:
    """Tensors of parts that draft tokens, by the part: ``mtp.0``, ``model.layers.61``, ``eagle3``."""
    part_of = draft_part(config)

    def part(ref: Ref) -> str | None:
        if part_of(ref.name) is None:
            return None
        index = _UP_TO_INDEX.match(ref.name)
        return index[0] if index else ref.name.partition(".")[0]

    return _totals(found, part)
