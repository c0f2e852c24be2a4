"""What is looked for in a tensor's bytes, told by what it is: a weight, a scale, codes of some format …"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import NamedTuple

from ..families import Kind
from ..files.header import FLOATS
from ..inspecting.survey import Key, Module, keyed
from ..plan import Ref
from ..stored import SCALES, split_name
from . import Subject

_FP8 = frozenset({"F8_E4M3", "F8_E5M2"})
_INTEGERS = re.compile(r"int(\d+)")
_SCALES = frozenset({*SCALES[:4], "weight_scale_2", "weight_global_scale", "input_scale", "input_global_scale"})


class What(Enum):
    """What a tensor is, as far as its bytes are looked at."""

    FLOATS = auto()  # a bias, a sink, a buffer: may be all zero
    WEIGHT = auto()
    TABLE = auto()  # the dense rows of an embedding or a head
    SCALE = auto()
    CODES = auto()
    SHAPE = auto()  # weight_shape: the unpacked weight's rows and columns
    OTHER = auto()  # integers that may be anything


class Role(NamedTuple):
    """``label`` and ``bits`` are the format of codes, ``share`` how many of them have one scale.

    ``shape`` is, for a weight_shape, what it must say: rows, the most columns, and how many fewer they may be.
    """

    what: What
    kind: Kind = Kind.OTHER
    label: str = ""
    bits: int = 0
    share: float = math.inf
    packed: tuple[int, ...] = ()


FLOATS_ROLE, OTHER_ROLE = Role(What.FLOATS), Role(What.OTHER)


def is_spread(name: str) -> bool:
    """Whether these are 4-bit codes, one a byte."""
    return split_name(name)[1] in {"weight_codes", "codes"}


def roles(subject: Subject) -> Callable[[Ref], Role]:
    """The role of each tensor of the checkpoint."""
    known: dict[Key, Role] = {}
    for module in subject.survey.modules:
        known |= _of_module(module)
    by_name = {ref.name: role for ref, key in keyed(subject.survey.tensors) if (role := known.get(key))}
    return lambda ref: by_name.get(ref.name) or _unnamed(ref)


def _unnamed(ref: Ref) -> Role:
    return FLOATS_ROLE if ref.dtype in FLOATS | _FP8 else OTHER_ROLE


def _of_module(module: Module) -> Mapping[Key, Role]:
    weight, label = module.weight.first, module.stored.label
    if not module.stored.quantized:
        table = module.kind in {Kind.EMBEDDING, Kind.HEAD} and len(weight.shape) == 2
        return {module.weight.key: Role(What.TABLE if table else What.WEIGHT, module.kind)}
    integers = _INTEGERS.match(label)
    bits = int(integers[1]) if integers else 0
    found = {module.weight.key: Role(What.CODES, module.kind, label, bits, _share(module))}
    for part, cell in module.companions.items():
        if part in _SCALES:
            found[cell.key] = Role(What.SCALE, module.kind, label)
        elif part == "weight_shape" and bits:
            found[cell.key] = Role(What.SHAPE, module.kind, label, bits, packed=weight.shape)
    return found


def _share(module: Module) -> float:
    """Codes for each scale."""
    codes = math.prod(module.weight.first.shape) * module.stored.per_element
    scale = next((module.companions[part] for part in SCALES if part in module.companions), None)
    return math.inf if scale is None else codes / max(math.prod(scale.first.shape), 1)
