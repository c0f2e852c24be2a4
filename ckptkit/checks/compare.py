"""Comparing a converted weight with its source, some rows at a time. Imports numpy: import it only to compute."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..comparing.closeness import Sums
from ..decode import Coding
from ..decode.numbers import Floats, rounded
from ..decode.rows import Unpacked, blocks, scaled
from ..files.memory import keep_freed_memory
from ..files.reading import PIECE
from ..files.source import Range, Source
from .bounds import EXACT, Bound
from .matching import Pair
from .viewing import unpacked, values

ELEMENTS = 1 << 18  # numbers compared at once: few enough for the processor's cache, many for one turn of Python
PIECE_OF_PRODUCT = 1 << 12
_E4M3_NORMAL = 2.0**-6
_LARGEST = float(np.finfo(np.float32).max)
TURNED = 512  # rows of what lies transposed that are read at once: each is a few bytes of every row as stored


class Worst(NamedTuple):
    """The element that is furthest beyond its bound, where it is stored, and the source's tensor.

    ``ratio``: how many times the bound it is off; where nothing may be off, by how much.
    """

    ratio: float
    row: int
    column: int
    source: str = ""


class Measured(NamedTuple):
    """What was seen of a weight. ``allowed`` is the sum of the squares of what its elements may be off."""

    sums: Sums = Sums()
    elements: int = 0
    allowed: float = 0.0
    worst: Worst | None = None

    def plus(self, other: Measured) -> Measured:
        worst = max((item for item in (self.worst, other.worst) if item), key=lambda item: item.ratio, default=None)
        return Measured(self.sums.plus(other.sums), self.elements + other.elements, self.allowed + other.allowed, worst)

    @property
    def rel_bound(self) -> float | None:
        """The RMS of what is allowed over that of the source."""
        return math.sqrt(self.allowed / self.sums.aa) if self.sums.aa and math.isfinite(self.allowed) else None


def first_difference(made: Source, mine: Range, source: Source, theirs: Range) -> int | None:
    """The first byte in which two ranges of the same length differ, or None."""
    for at in range(0, mine.stop - mine.start, PIECE):
        size = min(PIECE, mine.stop - mine.start - at)
        a = made.read(mine.file, mine.start + at, mine.start + at + size)
        b = source.read(theirs.file, theirs.start + at, theirs.start + at + size)
        if a != b:
            return at + int(np.flatnonzero(np.frombuffer(a, np.uint8) != np.frombuffer(b, np.uint8))[0])
    return None


def rows_at_once(pair: Pair) -> int:
    """How many rows are compared at once."""
    return TURNED if pair.made.turned or pair.source.turned else max(ELEMENTS // max(pair.made.cols, 1), 1)


def compare_rows(pair: Pair, made: Source, source: Source, bound: Bound, start: int, stop: int) -> Measured:
    """Compare rows [start, stop)."""
    found = Measured()
    step = rows_at_once(pair)
    with np.errstate(all="ignore"):
        for at in range(start, stop, step):
            end = min(at + step, stop)
            theirs, mine = values(pair.source, source, at, end), unpacked(pair.made, made, at, end)
            if bound == EXACT:
                here = _equal(_as_made(theirs, pair), _scaled(mine), at)
            else:
                here = _measure(theirs, mine, bound, at)
            found = found.plus(_located(here, pair))
    return found


def _located(found: Measured, pair: Pair) -> Measured:
    """With the worst element where it is stored."""
    if found.worst is None:
        return found
    place = pair.made.place(found.worst.row, found.worst.column)
    return found._replace(worst=Worst(found.worst.ratio, *place, pair.source.name))


# --- equal -------------------------------------------------------------------------------------------------


def _as_made(theirs: Floats, pair: Pair) -> Floats:
    """The source's values as the weight can hold them: rounded to its dtype where it is dense."""
    made, source = pair.made.stored, pair.source.stored
    if made.coding is not Coding.DENSE or source.coding is Coding.DENSE:
        return theirs
    return rounded(theirs, made.codes.dtype)


def _scaled(mine: Unpacked) -> Floats:
    is_plain = mine.scale.shape == (1, 1) and mine.scale[0, 0] == 1
    return mine.numbers if is_plain else scaled(mine)


def _equal(theirs: Floats, mine: Floats, first: int) -> Measured:
    """Nothing may differ, signs of zeros included; NaN is NaN. Rows are those from ``first`` on."""
    unequal = theirs.view(np.uint32) != mine.view(np.uint32)
    if not unequal.any() and math.isfinite(aa := _squares(theirs)):
        return Measured(Sums(aa=aa, bb=aa, ab=aa), theirs.size)
    at = np.flatnonzero(unequal & ~(np.isnan(theirs) & np.isnan(mine)))
    d = theirs - mine
    off = np.nan_to_num(np.abs(d.reshape(-1)[at]), nan=_LARGEST)
    sums = _sums(theirs, d)._replace(beyond=len(at))
    if not len(at):
        return Measured(sums, theirs.size)
    row, column = divmod(int(at[off.argmax()]), theirs.shape[1])
    return Measured(sums, theirs.size, 0.0, Worst(float(off.max()), first + row, column))


# --- within bounds -----------------------------------------------------------------------------------------


def _measure(theirs: Floats, mine: Unpacked, bound: Bound, first: int) -> Measured:
    """``theirs`` are the source's rows from ``first`` on; they are overwritten where they are NaN or Inf."""
    d = np.empty(theirs.shape, np.float32)
    for out, part, scale in _blocks(mine, d, mine.numbers):
        np.multiply(part, scale, out=out)
    np.subtract(theirs, d, out=d)
    sums = _sums(theirs, d)
    np.abs(d, out=d)
    over, allowed = _over(d, mine, bound)
    if not over.any():
        return Measured(sums, theirs.size, allowed)
    beyond, worst = _look_closer(d, mine, bound, np.flatnonzero(over), first)
    return Measured(sums._replace(beyond=sums.odd + beyond), theirs.size, allowed, worst)


def _sums(theirs: Floats, d: Floats) -> Sums:
    """Of the source's values and what they are off. Both are overwritten where one is NaN or Inf."""
    dd, odd = _squares(d), 0
    if not math.isfinite(dd):
        whole = np.isfinite(theirs)
        odd = int(np.count_nonzero(whole & ~np.isfinite(d)))
        whole &= np.isfinite(d)
        theirs[~whole] = d[~whole] = 0
        dd = _squares(d)
    aa, ad = _squares(theirs), _product(theirs, d)
    largest = float(max(d.max(initial=0), -d.min(initial=0)))
    return Sums(largest, odd, odd, dd, aa, max(aa - 2 * ad + dd, 0.0), aa - ad)


def _product(x: Floats, y: Floats) -> float:
    """The sum of the products. In short pieces: for long vectors BLAS would start threads of its own."""
    whole = x.size // PIECE_OF_PRODUCT * PIECE_OF_PRODUCT
    a, b = x.reshape(-1), y.reshape(-1)
    pieces = np.vecdot(a[:whole].reshape(-1, PIECE_OF_PRODUCT), b[:whole].reshape(-1, PIECE_OF_PRODUCT))
    return float(pieces.sum(dtype=np.float64) + np.vecdot(a[whole:], b[whole:]))


def _squares(x: Floats) -> float:
    return _product(x, x)


def _blocks(mine: Unpacked, *arrays: Any) -> Iterator[tuple[Any, ...]]:
    """The arrays' views by blocks of columns, and last the scale that goes with them."""
    cut = [blocks(array, mine.scale, mine.width) for array in arrays]
    for views in zip(*cut, strict=True):
        yield (*(view for view, _ in views), views[0][1])


def _over(d: Floats, mine: Unpacked, bound: Bound) -> tuple[Any, float]:
    """Where ``d`` is over what is allowed away from the ends of the range, and the sum of the squares of that."""
    over, total = np.empty(d.shape, np.bool_), 0.0
    for out, part, numbers, scale in _blocks(mine, over, d, mine.numbers):
        if bound.relative:
            allowed = _relative(numbers, bound) * np.abs(scale)
            total += _squares(allowed)
        else:
            allowed = np.float32(bound.step) * np.abs(scale)
            total += float(np.sum(np.square(allowed))) * (part.size // allowed.size)
        np.greater(part, allowed, out=out)
    return over, total


def _relative(numbers: Floats, bound: Bound) -> Floats:
    """What is allowed for each number, in units of its scale: by the power of two that it reaches."""
    found = (numbers.view(np.uint32) & np.uint32(0x7F800000)).view(np.float32)
    found *= np.float32(bound.relative)
    return np.maximum(found, np.float32(bound.step), out=found)


def limits(mine: Unpacked, bound: Bound) -> Floats:
    """What is allowed for each number [rows, cols], absolute."""
    found = np.empty(mine.numbers.shape, np.float32)
    zeros = np.zeros_like(mine.scale) if mine.zero is None else mine.zero
    offsets = [offset for _, offset in blocks(found, zeros, mine.width)]
    for (out, numbers, scale), zero in zip(_blocks(mine, found, mine.numbers), offsets, strict=True):
        out[...] = _limit(numbers, zero, scale, mine.overall, bound)
    return found


def _limit(numbers: Floats, zero: Floats, scale: Floats, overall: float, bound: Bound) -> Floats:
    """What is allowed for ``numbers`` of these zero points and scales, absolute."""
    allowed = _relative(numbers, bound) if bound.relative else np.full_like(numbers, bound.step)
    stored = numbers + zero
    allowed[(stored <= bound.low) | (stored >= bound.high)] = bound.end
    small = bound.subnormal * overall * (scale < _E4M3_NORMAL * overall)
    return np.asarray(allowed * np.abs(scale) + small + bound.rest, np.float32)


def _look_closer(d: Floats, mine: Unpacked, bound: Bound, at: Any, first: int) -> tuple[int, Worst | None]:
    """Look at single elements of ``d``, flat: how many are beyond the bound, and the one that is furthest."""
    rows, columns = np.divmod(at, d.shape[1])
    scale, zero = (_at(table, rows, columns // mine.width) for table in (mine.scale, mine.zero))
    limit = _limit(mine.numbers[rows, columns], zero, scale, mine.overall, bound)
    ratio: Floats = d[rows, columns] / limit
    beyond = int(np.count_nonzero(ratio > 1))
    if not beyond:
        return 0, None
    worst = int(ratio.argmax())
    return beyond, Worst(float(ratio[worst]), first + int(rows[worst]), int(columns[worst]))


def _at(table: Floats | None, rows: Any, columns: Any) -> Floats:
    """Single entries of a table that has a row for each row of the weight, or one for all, or is not there."""
    if table is None:
        return np.zeros(len(rows), np.float32)
    found: Floats = table[rows if len(table) > 1 else 0, columns]
    return found


keep_freed_memory()
