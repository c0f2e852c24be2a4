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

from ..consumers import LINEAR_CLASS, by_compressed_tensors
from ..families import LINEAR_LIKE, Kind, classifier
from ..naming.names import layered
from ..plan import Ref
from ..stored import COMPANIONS, WEIGHTS, Quantization, Stored, split_name, stored_format

# (The parent's template, the layer: the first number in the name), the name's last part, dtype, shape.
Key = tuple[tuple[str, str], str, str, tuple[int, ...]]


class Cell(NamedTuple):
    """The first of ``number`` tensors that are counted under ``key``."""

    key: Key
    first: Ref
    number: int

    @property
    def bytes(self) -> int:
        return self.first.nbytes * self.number


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
    def shape(self) -> tuple[int, ...]:
        """The unpacked weight's shape, as far as the number of values in an element is known."""
        shape, packed = self.weight.first.shape, self.stored.per_element
        if self.weight.first.name.endswith(".qweight"):  # GPTQ and AWQ: [in, out], GPTQ packed along the first
            return shape
        return (*shape[:-1], shape[-1] * packed)

    @property
    def bytes(self) -> int:
        return self.weight.bytes + sum(cell.bytes for cell in self.companions.values())


@dataclass(frozen=True, slots=True)
class Survey:
    """Tensors, counted. ``parameters`` are those in one tensor of a cell: numbers of the model, unpacked, no scales."""

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
        parameters[module.weight.key] *= module.stored.per_element
        parameters |= {cell.key: 0 for cell in module.companions.values()}
    return Survey(tensors, cells, modules, parameters)


def keyed(tensors: Iterable[Ref]) -> Iterator[tuple[Ref, Key]]:
    """Each tensor with the key of its cell. Names that differ in their last part only are split once."""
    places: dict[str, tuple[str, str]] = {}
    for ref in tensors:
        parent, _, last = ref.name.rpartition(".")
        place = places.get(parent)
        if place is None:
            place = places[parent] = layered(parent)
        yield ref, (place, last, ref.dtype, ref.shape)


def _cells(tensors: Iterable[Ref]) -> dict[Key, Cell]:
    first: dict[Key, Ref] = {}
    numbers: dict[Key, int] = {}
    for ref, key in keyed(tensors):
        if key in numbers:
            numbers[key] += 1
        else:
            first[key], numbers[key] = ref, 1
    return {key: Cell(key, ref, numbers[key]) for key, ref in first.items()}


def _modules(cells: Iterable[Cell], config: Mapping[str, Any], quantization: Quantization | None) -> Iterator[Module]:
    classify = classifier(config)
    places: dict[tuple[str, str], list[tuple[str, str, Cell]]] = defaultdict(list)
    for cell in cells:
        name, last = split_name(cell.first.name)
        if last not in WEIGHTS | COMPANIONS and classify(cell.first.name, cell.first.shape) is Kind.EXPERTS:
            name, last = cell.first.name, "weight"
        places[layered(name)].append((name, last, cell))
    for parts in places.values():
        companions = {last: cell for _, last, cell in parts if last in COMPANIONS}
        beside = {last: cell.first for last, cell in companions.items()}
        for name, last, cell in parts:
            if last in WEIGHTS:
                kind = classify(f"{name}.weight", cell.first.shape)
                group = _group(quantization, name, kind)
                bits, block = (quantization.bits(group), quantization.block(group)) if quantization else (None, None)
                stored = stored_format(last, cell.first, beside, bits, block)
                yield Module(name, kind, cell, companions, stored, group)
                companions = {}  # counted once, should a module's weights fall into several cells


def _group(quantization: Quantization | None, module: str, kind: Kind) -> str | None:
    """The group that the config gives a module. Routers are parameters of their own in the models that have one."""
    if quantization is None or quantization.declared is None:
        return None
    class_name = LINEAR_CLASS if kind in LINEAR_LIKE - {Kind.ROUTER} else None
    return by_compressed_tensors(quantization.declared, module, class_name)
