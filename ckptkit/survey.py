"""The tensors of a checkpoint counted by likeness, and how each module among them is stored and declared.

A checkpoint of 230,000 tensors has a few dozen name templates. Its tensors are counted in *cells* (template, layer,
dtype, shape) in one pass, and everything else looks at the first tensor of each cell. A difference between the experts
of one layer that shows in neither dtype nor shape nor count is therefore not seen here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .consumers import LINEAR_CLASS, by_compressed_tensors
from .families import LINEAR_LIKE, Kind, classifier
from .names import split
from .plan import Ref
from .stored import COMPANIONS, WEIGHTS, Quantization, Stored, split_name, stored_format

Key = tuple[str, str, str, tuple[int, ...]]


class Cell(NamedTuple):
    """The first of ``count`` tensors of one template, layer, dtype and shape."""

    first: Ref
    count: int

    @property
    def bytes(self) -> int:
        return self.first.nbytes * self.count


class Module(NamedTuple):
    """The modules whose weights are one cell. ``companions``: cells of scales and the like, by the parts' names.

    ``group`` is the one that a compressed-tensors config gives them.
    """

    name: str
    kind: Kind
    weight: Cell
    companions: Mapping[str, Cell]
    stored: Stored
    group: str | None

    @property
    def bytes(self) -> int:
        return self.weight.bytes + sum(cell.bytes for cell in self.companions.values())


@dataclass(frozen=True, slots=True)
class Survey:
    """Tensors, counted. ``parameters`` are those in each tensor of a cell: numbers of the model, unpacked, no scales."""

    tensors: Sequence[Ref]
    cells: Mapping[Key, Cell]
    modules: Sequence[Module]
    parameters: Mapping[Key, int]


def survey(tensors: Sequence[Ref], config: Mapping[str, Any], quantization: Quantization | None) -> Survey:
    """Count ``tensors`` and find out how each module among them is stored and declared."""
    cells = _cells(tensors)
    modules = list(_modules(cells.values(), config, quantization))
    parameters = {key: math.prod(cell.first.shape) for key, cell in cells.items()}
    for module in modules:
        parameters[key_of(module.weight.first)] *= module.stored.per_element
        parameters |= {key_of(cell.first): 0 for cell in module.companions.values()}
    return Survey(tensors, cells, modules, parameters)


def key_of(ref: Ref) -> Key:
    """The cell that a tensor is counted in; the layer is the first number in its name."""
    template, indices = split(ref.name)
    return template, indices[0] if indices else "", ref.dtype, ref.shape


def _cells(tensors: Iterable[Ref]) -> dict[Key, Cell]:
    first: dict[Key, Ref] = {}
    counts: dict[Key, int] = defaultdict(int)
    for ref in tensors:
        key = key_of(ref)
        first.setdefault(key, ref)
        counts[key] += 1
    return {key: Cell(ref, counts[key]) for key, ref in first.items()}


def _modules(cells: Iterable[Cell], config: Mapping[str, Any], quantization: Quantization | None) -> Iterator[Module]:
    classify = classifier(config)
    places: dict[tuple[str, str], list[tuple[str, str, Cell]]] = defaultdict(list)
    for cell in cells:
        name, last = split_name(cell.first.name)
        if last not in WEIGHTS | COMPANIONS and classify(cell.first.name, cell.first.shape) is Kind.EXPERTS:
            name, last = cell.first.name, "weight"
        template, indices = split(name)
        places[template, indices[0] if indices else ""].append((name, last, cell))
    for parts in places.values():
        companions = {last: cell for _, last, cell in parts if last in COMPANIONS}
        beside = {last: cell.first for last, cell in companions.items()}
        for name, last, cell in parts:
            if last in WEIGHTS:
                kind = classify(f"{name}.weight", cell.first.shape)
                group = _group(quantization, name, kind)
                bits = quantization.bits(group) if quantization else None
                yield Module(name, kind, cell, companions, stored_format(last, cell.first, beside, bits), group)
                companions = {}  # counted once, should a module's weights fall into several cells


def _group(quantization: Quantization | None, module: str, kind: Kind) -> str | None:
    """The group that the config gives a module. Routers are parameters of their own in the models that have one."""
    if quantization is None or quantization.declared is None:
        return None
    class_name = LINEAR_CLASS if kind in LINEAR_LIKE - {Kind.ROUTER} else None
    return by_compressed_tensors(quantization.declared, module, class_name)
