"""A checkpoint's weights as they lie on disk: each with the parts (scales, zero points, …) that say how to read it.

Works on the survey's cells: where all modules of one place (template and layer) are alike, one cell of each part
stands for all of them. Only where they are not, names are looked at one by one, so that a single odd expert among
thousands is seen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ..errors import Finding
from ..families import Kind, classifier
from ..families.kinds import Classify
from ..inspecting.survey import Cell, Key, keyed
from ..naming.names import split
from ..plan import Ref
from ..stored import COMPANIONS, SCALES, WEIGHTS, split_name
from . import Subject
from .folding import EXAMPLES

FP8 = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})
CODES = FP8 | {"I8", "U8", "F4"}
_PARTS = WEIGHTS | COMPANIONS

Place = tuple[str, str]
Parts = Mapping[str, Ref]


class Weight(NamedTuple):
    """``number`` modules stored alike; the rest is said of the first of them, ``name``.

    ``part`` is the last part of the name of the tensor that holds the weights, ``ref`` that tensor, ``parts`` the
    tensors beside it by the last parts of their names.
    """

    name: str
    kind: Kind
    number: int
    part: str
    ref: Ref
    parts: Parts

    @property
    def quantized(self) -> bool:
        """Whether codes are stored, whatever is or is not beside them."""
        return self.part != "weight" or self.ref.dtype in CODES

    @property
    def scale(self) -> Ref | None:
        return next((self.parts[part] for part in SCALES if part in self.parts), None)

    @property
    def template(self) -> str:
        return split(self.name)[0]


def place_of(module: str) -> Place:
    """A module's template, and the first index in its name."""
    template, indices = split(module)
    return template, indices[0] if indices else ""


def weights(subject: Subject) -> list[Weight]:
    """Every weight of the checkpoint, dense ones too; modules of one place that are alike are one."""
    classify = classifier(subject.config)
    places: dict[Place, dict[str, list[Cell]]] = defaultdict(lambda: defaultdict(list))
    for cell in subject.survey.cells.values():
        module, part = _parted(cell.first, classify)
        if part in _PARTS:
            places[place_of(module)][part].append(cell)
    found: list[Weight] = []
    mixed: set[Key] = set()
    for parts in places.values():
        if any(len(cells) > 1 for cells in parts.values()) or len(parts.keys() & WEIGHTS) > 1:
            mixed |= {cell.key for cells in parts.values() for cell in cells}
        else:
            number = next((cells[0].number for part, cells in parts.items() if part in WEIGHTS), 0)
            found += _weights({part: cells[0].first for part, cells in parts.items()}, number, classify)
    if mixed:
        found += _one_by_one((ref for ref, key in keyed(subject.survey.tensors) if key in mixed), classify)
    return found


def _parted(ref: Ref, classify: Classify) -> tuple[str, str]:
    """The module and the part that a tensor is; stacked experts without a suffix are weights."""
    module, part = split_name(ref.name)
    if part not in _PARTS and not part.endswith("bias") and classify(ref.name, ref.shape) is Kind.EXPERTS:
        return ref.name, "weight"
    return module, part


def _weights(parts: Parts, number: int, classify: Classify) -> Iterator[Weight]:
    beside = {part: ref for part, ref in parts.items() if part in COMPANIONS}
    for part, ref in parts.items():
        if part in WEIGHTS:
            module, _ = _parted(ref, classify)
            yield Weight(module, classify(f"{module}.weight", ref.shape), number, part, ref, beside)


def _one_by_one(tensors: Iterable[Ref], classify: Classify) -> list[Weight]:
    """The weights among ``tensors`` looked at by name; those of one place that are alike are counted as one again."""
    modules: dict[str, dict[str, Ref]] = defaultdict(dict)
    for ref in tensors:
        module, part = _parted(ref, classify)
        modules[module][part] = ref
    alike: dict[object, Weight] = {}
    for module, parts in modules.items():
        shapes = frozenset((part, ref.dtype, ref.shape) for part, ref in parts.items())
        for weight in _weights(parts, 1, classify):
            key = place_of(module), weight.part, shapes
            seen = alike.get(key)
            alike[key] = weight if seen is None else seen._replace(number=seen.number + 1)
    return list(alike.values())


# --- telling -----------------------------------------------------------------------------------------------


class Fault(NamedTuple):
    """What is wrong with a weight: ``text`` continues a sentence that begins with its name. ``ref``: the tensor meant."""

    id: str
    weight: Weight
    text: str
    ref: Ref | None = None
    hint: str | None = None
    severity: str = "error"


def tell(faults: Iterable[Fault]) -> Iterator[Finding]:
    """Findings, one for all faults of one id and text in one template."""
    alike: dict[tuple[str, str, str], list[Fault]] = defaultdict(list)
    for fault in faults:
        alike[fault.id, fault.weight.template, fault.text].append(fault)
    for (id, template, text), group in alike.items():
        first, number = group[0], sum(fault.weight.number for fault in group)
        ref = first.ref or first.weight.ref
        more = f" (and {number - 1:,} more of {template})" if number > 1 else ""
        data = {"count": number, "examples": [fault.weight.name for fault in group[:EXAMPLES]]}
        message = f"{first.weight.name} {text}{more}"
        yield Finding(id, message, ref.file, ref.name, first.hint, first.severity, data)
