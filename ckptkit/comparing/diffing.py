"""Two checkpoints compared, whatever their sharding: names, specs, bytes, values.

Nothing is read that is known already: tensors of one file under two names, and tensors of which both checkpoints
recorded the digest. Everything else streams through a few MiB for each thread. Imports no torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from functools import partial, reduce
from heapq import nlargest
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from ..files.checkpoint import Checkpoint
from ..files.header import DTYPE_BITS, FLOATS
from ..files.parallel import in_order, threads
from ..manifest import known_digests, read_manifest
from ..plan import Ref

if TYPE_CHECKING:
    from ..execute import Progress
    from .closeness import Sums, Tolerance

CHUNK = 4 << 20  # bytes read at once
AHEAD = 256  # tensors handed to the threads before the first of them is done


Sides = tuple[Checkpoint, Checkpoint]


class Level(IntEnum):
    """How deep two checkpoints are compared; each level includes those before it."""

    NAMES = 1
    SPECS = 2
    DIGESTS = 3
    VALUES = 4


class Pair(NamedTuple):
    """The same tensor in both checkpoints; the names may differ by a rename rule."""

    a: Ref
    b: Ref

    @property
    def changed(self) -> tuple[str, ...]:
        """What of the spec differs: ``dtype``, ``shape``."""
        return tuple(key for key in ("dtype", "shape") if getattr(self.a, key) != getattr(self.b, key))


class Verdict(NamedTuple):
    """What the content of a pair showed: ``same`` bytes, or values within the tolerance.

    ``sums`` say how close they are; None where bytes are all that was compared, or were the same. ``read`` is False
    where the answer was known.
    """

    pair: Pair
    same: bool
    sums: Sums | None
    read: bool


@dataclass(frozen=True, slots=True)
class Diff:
    """All that differs between the tensors of two checkpoints, at one level.

    ``equal`` and ``differ`` are the pairs whose content was compared, ``unread`` of them without reading it;
    ``worst`` are those whose values are furthest apart, within the tolerance or not.
    """

    level: Level
    only_a: Sequence[Ref]
    only_b: Sequence[Ref]
    pairs: Sequence[Pair]
    respecified: Sequence[Pair]
    differ: Sequence[Verdict]
    equal: int
    unread: int
    worst: Sequence[Verdict]

    @property
    def is_empty(self) -> bool:
        return not (self.only_a or self.only_b or self.respecified or self.differ)


def compare(
    a: Checkpoint,
    b: Checkpoint,
    called: Mapping[str, str],
    level: Level,
    wanted: Callable[[str], bool] = lambda name: True,
    tolerance: Tolerance | None = None,
    top: int = 20,
    jobs: int = 0,
    progress: Progress | None = None,
) -> Diff:
    """Compare the tensors of ``a`` and ``b`` that are ``wanted`` by a name they have in either.

    ``called`` maps the names in ``a`` to those in ``b``; ``tolerance`` is needed for values; ``top`` limits ``worst``.
    Raises UserError ``source.read``.
    """
    pairs = [Pair(ref, b.tensors[new]) for old, ref in a.tensors.items() if (new := called[old]) in b.tensors]
    pairs = [pair for pair in pairs if wanted(pair.a.name) or wanted(pair.b.name)]
    met = {called[old] for old in a.tensors}
    only_a = [ref for old, ref in a.tensors.items() if called[old] not in b.tensors and wanted(old)]
    only_b = [ref for name, ref in b.tensors.items() if name not in met and wanted(name)]
    respecified = [pair for pair in pairs if pair.changed] if level >= Level.SPECS else []
    verdicts = []
    if level >= Level.DIGESTS:
        comparable = [pair for pair in pairs if _is_comparable(pair, tolerance is not None)]
        comparable.sort(key=lambda pair: (pair.a.file, pair.a.start))
        if progress:
            progress.start(0, sum(pair.a.nbytes for pair in comparable))
        for verdict in _contents((a, b), comparable, tolerance, jobs):
            verdicts.append(verdict)
            if progress:
                progress.advance(verdict.pair.a.nbytes)
    return Diff(
        level, only_a, only_b, pairs, respecified,
        differ=[verdict for verdict in verdicts if not verdict.same],
        equal=sum(verdict.same for verdict in verdicts),
        unread=sum(not verdict.read for verdict in verdicts),
        worst=nlargest(top, filter(_distance, verdicts), key=_distance),
    )  # fmt: skip


def _is_comparable(pair: Pair, by_value: bool) -> bool:
    """If the content of a pair can be compared: as bytes for one dtype, or as values of two kinds of floats."""
    return pair.a.shape == pair.b.shape and (pair.a.dtype == pair.b.dtype or (by_value and _are_floats(pair)))


def _are_floats(pair: Pair) -> bool:
    return {pair.a.dtype, pair.b.dtype} <= FLOATS


def _distance(verdict: Verdict) -> tuple[int, float, float] | tuple[()]:
    """What the worst are found by: nothing where no value differs."""
    sums = verdict.sums
    if sums is None or not (sums.odd or sums.max_abs):
        return ()
    return sums.odd, math.inf if sums.rel_rms is None else sums.rel_rms, sums.max_abs


# --- content -----------------------------------------------------------------------------------------------


def _contents(sides: Sides, pairs: Iterable[Pair], tolerance: Tolerance | None, jobs: int) -> Iterator[Verdict]:
    """A verdict on each of ``pairs``, floats by value if there is a tolerance; what needs no reading comes first."""
    recorded = [_recorded(side) for side in sides]
    same_file = _same_files(*sides)
    unknown = []
    for pair in pairs:
        digests = [known.get(ref.name) for known, ref in zip(recorded, pair, strict=True)]
        same = _known(pair, digests, same_file)
        if same or (same is False and (tolerance is None or not _are_floats(pair))):
            yield Verdict(pair, same, None, read=False)
        else:
            unknown.append(partial(_judge, sides, pair, digests, tolerance))
    with ThreadPoolExecutor(threads(jobs), "ckptkit") as pool:
        yield from in_order(unknown, pool, AHEAD)


def _recorded(checkpoint: Checkpoint) -> dict[str, str]:
    """By tensor, the xxh3-128 that the checkpoint's manifest holds, of files that are still those it describes."""
    source = checkpoint.source
    known = known_digests(read_manifest(source) or {}, source.files)
    return {
        name: digest
        for file, tensors in known.items()
        for name, digest in tensors.items()
        if name in checkpoint.tensors and checkpoint.tensors[name].file == file
    }


def _same_files(a: Checkpoint, b: Checkpoint) -> Callable[[str, str], bool]:
    """If a file of ``a`` and one of ``b`` are one file, by a link or because they are one folder."""
    found: dict[tuple[str, str], bool] = {}

    def same(one: str, other: str) -> bool:
        if (one, other) not in found:
            first, second = a.source.files[one], b.source.files[other]
            equal = first.identity == second.identity
            found[one, other] = equal and os.path.samefile(first.path, second.path)
        return found[one, other]

    return same


def _known(pair: Pair, digests: Sequence[str | None], same_file: Callable[[str, str], bool]) -> bool | None:
    """If the bytes are the same; None where only reading tells."""
    a, b = pair
    if a.dtype != b.dtype:
        return None
    if not a.nbytes or (a.start == b.start and same_file(a.file, b.file)):
        return True
    return digests[0] == digests[1] if all(digests) else None


def _judge(sides: Sides, pair: Pair, digests: Sequence[str | None], tolerance: Tolerance | None) -> Verdict:
    if pair.a.dtype == pair.b.dtype and _same_bytes(sides, pair, digests):
        return Verdict(pair, True, None, read=True)
    if tolerance is None or not _are_floats(pair):
        return Verdict(pair, False, None, read=True)
    sums = _sums(sides, pair, tolerance)
    return Verdict(pair, not sums.beyond, sums, read=True)


def _same_bytes(sides: Sides, pair: Pair, digests: Sequence[str | None]) -> bool:
    """Of a tensor whose digest one side recorded, only the other side is read."""
    if any(digests):
        found = [known or _digest(side, ref) for known, side, ref in zip(digests, sides, pair, strict=True)]
        return found[0] == found[1]
    return all(one == other for one, other in _pieces(sides, pair, pair.a.nbytes, CHUNK, (1, 1)))


def _digest(side: Checkpoint, ref: Ref) -> str:
    digest = xxhash.xxh3_128()
    for start in range(ref.start, ref.stop, CHUNK):
        digest.update(side.source.read(ref.file, start, min(start + CHUNK, ref.stop)))
    return str(digest.hexdigest())


def _sums(sides: Sides, pair: Pair, tolerance: Tolerance) -> Sums:
    from .closeness import Sums, sums

    widths = tuple(DTYPE_BITS[ref.dtype] // 8 for ref in pair)
    pieces = _pieces(sides, pair, math.prod(pair.a.shape), CHUNK // max(widths), widths)
    found = (sums(one, pair.a.dtype, other, pair.b.dtype, tolerance) for one, other in pieces)
    return reduce(Sums.plus, found, Sums())


def _pieces(
    sides: Sides, pair: Pair, count: int, step: int, widths: Sequence[int]
) -> Iterator[tuple[bytearray, bytearray]]:
    """Both tensors in pieces of ``step`` elements of so many bytes each."""
    for start in range(0, count, step):
        piece = [bytearray(min(step, count - start) * width) for width in widths]
        for side, ref, width, data in zip(sides, pair, widths, piece, strict=True):
            side.source.read_into(ref.file, ref.start + start * width, memoryview(data))
        yield piece[0], piece[1]
