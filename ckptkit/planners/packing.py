"""Which tensors go into which file: the source's layout kept, or its shards split and joined to a limit. No I/O.

Cost follows the change: a shard that fits and that has no neighbour to be joined with stays a file of its own, which
is linked if nothing in it changes. Packing what was packed to the same limit changes nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

from ..errors import Finding
from ..files.checkpoint import INDEX_SUFFIX, Checkpoint
from ..files.header import Spec
from ..files.numbering import is_whole, numbered
from ..plan import COPY, Shard, Step
from ..stored import split_name

_DIGITS = re.compile(r"(\d+)")
_FRAME = 64  # bytes of a file around its entries: the length, braces, padding


class Packed(NamedTuple):
    """The files to make, and what is worth knowing about them (warnings)."""

    shards: tuple[Shard, ...]
    notes: list[Finding]


def pack(checkpoint: Checkpoint, steps: Mapping[str, Step], limit: int | None) -> Packed:
    """Put ``steps``, by the name of the source tensor, into files; none larger than ``limit`` bytes, header included.

    Without a limit the source's files are kept. A tensor that is larger alone has a file of its own
    (``plan.oversized-tensor``). Names are kept where files are, unless numbers would no longer be 1 to N of N.
    """
    kept = list(_kept(checkpoint, steps))
    fills = [[_whole(shard)] for shard in kept] if limit is None else list(_fills(kept, limit))
    shards = [_shard(units) for units in fills]
    notes = [*_contradictions(fills), *(_oversized(shards, limit) if limit else ())]
    if shards != kept:
        return Packed(tuple(renumbered(shards, stem(checkpoint))), notes)
    return Packed(as_whole(checkpoint, shards), notes)


def as_whole(checkpoint: Checkpoint, shards: Sequence[Shard]) -> tuple[Shard, ...]:
    """Shards of the source, numbered anew if some are gone, so that the names are 1 to N of N again."""
    files = [shard.name for shard in shards]
    if all(map(numbered, files)) and not is_whole(files):
        return tuple(renumbered(shards, stem(checkpoint)))
    return tuple(shards)


def _kept(checkpoint: Checkpoint, steps: Mapping[str, Step]) -> Iterator[Shard]:
    """The source's shards with what is left in them; one that nothing is left in is gone."""
    for name, header in checkpoint.shards.items():
        mine = [entry.name for entry in header.entries if checkpoint.tensors[entry.name].file == name]
        left = tuple(steps[tensor] for tensor in mine if tensor in steps)
        linked = len(left) == len(header.entries) and all(map(_is_untouched, left))
        if left or linked:
            yield Shard(name, name, header.metadata, left, linked)


def _is_untouched(step: Step) -> bool:
    return step.op == COPY and step.outputs[0].name == step.inputs[0].name


# --- to a limit --------------------------------------------------------------------------------------------


class _Unit(NamedTuple):
    """Steps that stay together, of one shard: all of it, those of a module, or one."""

    steps: Sequence[Step]
    shard: Shard
    is_whole: bool

    def room(self, limit: int) -> int:
        """Bytes that it takes at most in a file of ``limit`` bytes."""
        specs = (spec for step in self.steps for spec in step.outputs)
        metadata = len(json.dumps(self.shard.metadata))
        return metadata + sum(spec.nbytes + _entry_bytes(spec, limit) for spec in specs)


def _entry_bytes(spec: Spec, limit: int) -> int:
    """Bytes of a tensor's entry in a header, with offsets as wide as the limit."""
    entry = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": (limit, limit)}
    return len(json.dumps({spec.name: entry}, separators=(",", ":"), ensure_ascii=False).encode())


def _whole(shard: Shard) -> _Unit:
    return _Unit(shard.steps, shard, True)


def _fills(kept: Iterable[Shard], limit: int) -> Iterator[list[_Unit]]:
    """What goes into each file, in the order of the shards: as many units as fit."""
    held: list[_Unit] = []
    free = 0
    for unit in (unit for shard in kept for unit in _units(shard, limit)):
        room = unit.room(limit)
        if held and room > free:
            yield held
            held = []
        free = (free if held else limit - _FRAME) - room
        held.append(unit)
    if held:
        yield held


def _units(shard: Shard, limit: int) -> Iterator[_Unit]:
    """The whole shard if it fits, else its modules in the order of their numbers, else single tensors."""
    if _file_size(shard) <= limit or len(shard.steps) == 1:
        yield _whole(shard)
        return
    for _, group in groupby(sorted(shard.steps, key=_natural), key=_module):
        unit = _Unit(tuple(group), shard, False)
        fits = unit.room(limit) <= limit - _FRAME
        yield from [unit] if fits else [unit._replace(steps=(step,)) for step in unit.steps]


def _file_size(shard: Shard) -> int:
    if shard.linked:
        return max((ref.stop for step in shard.steps for ref in step.inputs), default=0)
    return shard.layout[1].file_size


def _natural(step: Step) -> list[Any]:
    """A sort key that puts layer 2 before layer 10."""
    parts: list[Any] = _DIGITS.split(step.outputs[0].name)
    parts[1::2] = map(int, parts[1::2])
    return parts


def _module(step: Step) -> str:
    return split_name(step.outputs[0].name)[0]


# --- the files made ----------------------------------------------------------------------------------------


def _shard(units: Sequence[_Unit]) -> Shard:
    """The file for ``units``: a shard of the source as it is, or a new one with its first shard's permission bits."""
    first = units[0].shard
    if len(units) == 1 and units[0].is_whole:
        return first
    values = _metadata(units)
    agreed = {key: found[0] for key, found in values.items() if len(found) == 1}
    has_metadata = any(unit.shard.metadata is not None for unit in units)
    steps = tuple(step for unit in units for step in unit.steps)
    return Shard(first.name, first.source, agreed if has_metadata else None, steps)


def _metadata(units: Iterable[_Unit]) -> dict[str, list[str]]:
    """Every key of the shards' ``__metadata__`` with the different values it has."""
    values: dict[str, list[str]] = {}
    for unit in units:
        for key, value in (unit.shard.metadata or {}).items():
            if value not in values.setdefault(key, []):
                values[key].append(value)
    return values


def _contradictions(fills: Iterable[Sequence[_Unit]]) -> Iterator[Finding]:
    keys = {key: None for units in fills for key, found in _metadata(units).items() if len(found) > 1}
    if keys:
        message = f"shards that are joined contradict each other in __metadata__: {', '.join(keys)} is left out there"
        yield Finding("plan.metadata", message, severity="warning", data={"keys": list(keys)})


def _oversized(shards: Iterable[Shard], limit: int) -> Iterator[Finding]:
    found = [shard.steps[0].outputs[0] for shard in shards if _file_size(shard) > limit]
    if found:
        first = max(found, key=lambda spec: spec.nbytes)
        message = (
            f"{first.name} takes {first.nbytes:,} bytes, more than a shard of at most {limit:,} has room for:"
            f" it has one of its own, as do all such tensors ({len(found):,})"
        )
        data = {"tensors": [spec.name for spec in found]}
        yield Finding("plan.oversized-tensor", message, tensor=first.name, severity="warning", data=data)


def renumbered(shards: Sequence[Shard], stem: str) -> Iterator[Shard]:
    """``model-00001-of-00002.safetensors`` and so on; a single file is ``model.safetensors``."""
    for number, shard in enumerate(shards, 1):
        part = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        yield replace(shard, name=f"{stem}{part}.safetensors")


def stem(checkpoint: Checkpoint) -> str:
    """What the numbered names begin with: what the index is called by, usually ``model``."""
    return checkpoint.index.file.removesuffix(INDEX_SUFFIX) if checkpoint.index else "model"
