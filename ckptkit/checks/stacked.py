"""Stacked experts of one checkpoint against the experts one by one of another: which piece is which module."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from ..decode import Encoded
from ..families.config import model_types
from ..families.experts import INTERLEAVED
from ..layout_config import PROJECTIONS, W_NAMES, facts_of, noted, original
from ..plan import Ref
from .views import View

Parts = Mapping[str, Ref]
Modules = Mapping[str, Parts]
BARE = ""  # the part that a tensor is which has no name of a part: a bias, stacked experts

_WEIGHTS = ("weight", "weight_packed", "blocks", "weight_codes", "codes", "qweight", BARE)
_FP4_STACKS = frozenset({"blocks", "codes"})
# Which of gate, up and down a stacked tensor holds.
_MEMBERS = {"gate_up_proj": (0, 1), "gate_proj": (0,), "up_proj": (1,), "down_proj": (2,)}
_STACKED = re.compile(rf"((?:.*\.)?experts)\.({'|'.join(_MEMBERS)})(_bias)?")


class Piece(NamedTuple):
    """One projection of one of ``experts``, or its bias: of its outputs, every ``step``-th from ``start`` on.

    ``turned``: they are columns of the stacked matrix.
    """

    experts: int
    expert: int
    outputs: int
    start: int
    step: int
    turned: bool
    is_bias: bool

    def view(self, stored: Encoded) -> View:
        """The piece as [out, in], a bias as [out, 1]."""
        depth = stored.rows // self.experts
        cols = 1 if self.is_bias else depth if self.turned else stored.cols
        return View(stored, self.outputs, cols, self.expert * depth, self.start, self.step, self.turned)


class Held(NamedTuple):
    """Tensors by part, of a module or of the stack that holds it as a ``piece``."""

    module: str
    parts: Parts
    piece: Piece | None = None

    @property
    def last(self) -> str | None:
        """Which part holds the numbers; None for companions without a weight."""
        return next((part for part in _WEIGHTS if part in self.parts), None)


class Stated(NamedTuple):
    """How stacked experts of floats may lie, the likeliest first: transposed or not; and if gate and up alternate."""

    columns: Sequence[bool]
    alternate: bool


def stated(config: Mapping[str, Any], against: Mapping[str, Any], manifest: Mapping[str, Any]) -> Stated:
    """What a conversion left word of, and model types tell."""
    base, note = original(config), noted(config) or noted(against)
    told = {key: note[key] for key in ("columns", "alternate") if isinstance(note.get(key), bool)}
    facts = facts_of(str(base.get("model_type")), told)
    alternate = facts.alternate or not INTERLEAVED.isdisjoint(model_types(base))
    match manifest:
        case {"settings": {"recipe": {"recipe": {"groups": dict() as groups}}}}:
            said = {group.get("experts") for group in groups.values() if isinstance(group, dict)} - {None}
            if len(said) == 1:
                return Stated([said == {"columns"}], alternate)
    return Stated([facts.columns, not facts.columns], alternate)


def expanded(mine: Modules, theirs: Modules, known: Stated) -> dict[str, Held]:
    """What ``mine`` are, stacked experts taken apart where ``theirs`` are one by one, by the names they have there."""
    held = {module: Held(module, parts) for module, parts in mine.items()}
    for stacks in _stacks(held.values(), theirs):
        fp4 = any(not _FP4_STACKS.isdisjoint(stack.parts) for stack in stacks)
        ways = product((PROJECTIONS, W_NAMES), (False,) if fp4 else known.columns)
        cuts = [_cut(stacks, names, columns, known.alternate or fp4) for names, columns in ways]
        best = max(cuts, key=lambda cut: sum(_fits(name, piece, theirs) for name, piece in cut.items()))
        if any(name in theirs for name in best):
            for stack in stacks:
                del held[stack.module]
            held |= best
    return held


def _stacks(held: Iterable[Held], theirs: Modules) -> Iterator[list[Held]]:
    """The stacked tensors that ``theirs`` do not have, layer by layer."""
    layers: dict[str, list[Held]] = defaultdict(list)
    for item in held:
        found = _STACKED.fullmatch(item.module)
        last = item.last
        if found and last is not None and item.module not in theirs:
            rank = len(item.parts[last].shape)
            if rank == 2 if found[3] else rank > 2:
                layers[found[1]].append(item)
    yield from layers.values()


def _cut(stacks: Sequence[Held], names: Sequence[str], columns: bool, alternate: bool) -> dict[str, Held]:
    """The pieces of a layer's stacks, by module; of a bias by its own name."""
    found = {}
    for module, parts, _ in stacks:
        path, stem, bias = _STACKED.fullmatch(module).groups()  # type: ignore[union-attr]
        members = _MEMBERS[stem]
        ref = parts[Held(module, parts).last or BARE]
        turned = columns or bias is not None
        experts, outputs = ref.shape[0], (ref.shape[-1] if turned else ref.shape[1]) // len(members)
        for expert in range(experts):
            for at, member in enumerate(members):
                start, step = (at, len(members)) if alternate else (at * outputs, 1)
                piece = Piece(experts, expert, outputs, start, step, turned, bias is not None)
                name = f"{path}.{expert}.{names[member]}{'.bias' if bias else ''}"
                found[name] = Held(module, parts, piece)
    return found


def _fits(name: str, held: Held, theirs: Modules) -> bool:
    """Whether there is a module of that name with as many outputs."""
    other = Held(name, theirs.get(name, {}))
    assert held.piece is not None
    return other.last is not None and other.parts[other.last].shape[:1] == (held.piece.outputs,)
