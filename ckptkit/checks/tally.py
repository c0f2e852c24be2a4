"""Counting what is odd in the bytes of a tensor, piece by piece: NaN, Inf, zeros, codes at the ends of their range.

A :class:`Tally` is what one piece shows; those of all pieces add up (:func:`add`). Numbers are counted by their bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..plan import Ref
from .roles import Role, What, is_spread

Array = np.ndarray[Any, Any]
Count = Callable[[memoryview], "Tally"]

TILE = 256 << 10  # bytes worked on at a time, which stay in the processor's cache
COUNTED = 4  # the ends of packed codes are counted in one of so many tiles: their share is a statistic

# Signed integers of a number's width, the bits of infinity, and the bits of the magnitude.
_FORMATS = {
    "F64": ("<i8", 0x7FF << 52), "F32": ("<i4", 0x7F800000), "F16": ("<i2", 0x7C00), "BF16": ("<i2", 0x7F80),
    "F8_E5M2": ("i1", 0x7C), "F8_E4M3": ("i1", 0x7E),
}  # fmt: skip


class Rows(NamedTuple):
    """Rows of a table: a hash of each, and its largest magnitude's bits."""

    hashes: Array
    peaks: Array


class Tally(NamedTuple):
    """What was seen. ``peak`` is the largest magnitude's bits, 0 where all are zero; codes ``low`` to ``high``.

    ``ends`` of ``counted`` codes lie at an end of their range. ``values``: the tensor's own, of a few integers.
    """

    peak: int = 0
    nan: int = 0
    inf: int = 0
    zero: int = 0
    negative: int = 0
    low: int = 255
    high: int = 0
    ends: int = 0
    counted: int = 0
    rows: tuple[Rows, ...] = ()
    values: tuple[int, ...] = ()


def add(a: Tally, b: Tally) -> Tally:
    """What both show together."""
    return Tally(
        max(a.peak, b.peak), a.nan + b.nan, a.inf + b.inf, a.zero + b.zero, a.negative + b.negative,
        min(a.low, b.low), max(a.high, b.high), a.ends + b.ends, a.counted + b.counted, a.rows + b.rows,
        a.values + b.values,
    )  # fmt: skip


def counter(ref: Ref, role: Role) -> Count | None:
    """The function that counts in pieces of ``ref``; None where there is nothing to count."""
    match role.what:
        case What.FLOATS | What.WEIGHT if ref.dtype in _FORMATS:
            return partial(_floats, dtype=ref.dtype)
        case What.TABLE if ref.dtype in _FORMATS:
            return partial(_table, dtype=ref.dtype, width=ref.nbytes // max(ref.shape[0], 1))
        case What.SCALE:
            return _exponents if ref.dtype in {"U8", "F8_E8M0"} else partial(_scales, dtype=ref.dtype)
        case What.CODES:
            return _codes(ref, role)
        case What.SHAPE:
            return lambda view: Tally(
                values=tuple(np.frombuffer(view, "<i8" if ref.dtype == "I64" else "<i4").tolist())
            )
    return None


def _floats(view: memoryview, dtype: str) -> Tally:
    """The largest of all as signed integers is the largest positive number, as unsigned ones the most negative."""
    integers, infinity = _FORMATS[dtype]
    bits = np.frombuffer(view, integers)
    sign = 1 << 8 * bits.itemsize - 1
    top = int(bits.view(f"u{bits.itemsize}").max())
    peak = max(int(bits.max()), top - sign if top >= sign else 0, 0)
    if peak <= infinity and (peak < infinity or dtype == "F8_E4M3"):
        return Tally(peak=peak)
    size = bits & (sign - 1)
    inf = 0 if dtype == "F8_E4M3" else int(np.count_nonzero(size == infinity))
    return Tally(peak=peak, nan=int(np.count_nonzero(size > infinity)), inf=inf)


def _scales(view: memoryview, dtype: str) -> Tally:
    """A NaN's sign says nothing."""
    found = _floats(view, dtype)
    integers, infinity = _FORMATS[dtype]
    bits = np.frombuffer(view, integers)
    size = bits & ((1 << 8 * bits.itemsize - 1) - 1)
    negative = int(np.count_nonzero((bits < 0) & (size > 0) & (size <= infinity)))
    return found._replace(zero=int(np.count_nonzero(size == 0)), negative=negative)


def _exponents(view: memoryview) -> Tally:
    """E8M0: a power of two, or NaN for 255."""
    raw = np.frombuffer(view, np.uint8)
    return Tally(peak=1, nan=int(np.count_nonzero(raw == 255)) if raw.max() == 255 else 0)


def _table(view: memoryview, dtype: str, width: int) -> Tally:
    found = _floats(view, dtype)
    if not width or len(view) % width:
        return found
    raw = np.frombuffer(view, np.uint8).reshape(-1, width)
    integers, _ = _FORMATS[dtype]
    bits = raw.view(integers)
    peaks = (bits & ((1 << 8 * bits.itemsize - 1) - 1)).max(axis=1)
    return found._replace(rows=(Rows(_hashes(raw), peaks),))


def _hashes(raw: Array) -> Array:
    """A number for each row: its words times fixed random odd numbers, added up modulo 2**64."""
    words = raw.view("<u8") if raw.shape[1] % 8 == 0 else raw.astype(np.uint64)
    factors = np.random.default_rng(1).integers(0, 1 << 63, words.shape[1], np.uint64) * np.uint64(2) + np.uint64(1)
    found: Array = (words * factors).sum(axis=1, dtype=np.uint64)
    return found


# --- codes -------------------------------------------------------------------------------------------------


def _codes(ref: Ref, role: Role) -> Count | None:
    if ref.dtype in {"F8_E4M3", "F8_E5M2"}:
        return partial(_tiled, each=partial(_fp8, dtype=ref.dtype))
    if role.label.startswith(("nvfp4", "mxfp4")):
        return partial(_tiled, each=_spread if is_spread(ref.name) else _fp4)
    match ref.dtype, role.bits:
        case "I8", 8:
            return partial(_tiled, each=partial(_bytes, zero=0, ends=(0x80, 0x7F)))
        case "I32", 8:
            return partial(_tiled, each=partial(_bytes, zero=0x80, ends=(0x00, 0xFF)))
        case "I32", 4:
            return partial(_tiled, each=_nibbles)
    return None


def _tiled(view: memoryview, each: Callable[[Array, bool], Tally]) -> Tally:
    raw = np.frombuffer(view, np.uint8)
    found = Tally()
    for number, start in enumerate(range(0, len(raw), TILE)):
        found = add(found, each(raw[start : start + TILE], number % COUNTED == 0))
    return found


def _fp8(raw: Array, count: bool, dtype: str) -> Tally:
    found = _floats(raw.data, dtype)
    top = 0x7E if dtype == "F8_E4M3" else 0x7B
    ends = int(np.count_nonzero((raw & 0x7F) == top)) if count and found.peak >= top else 0
    return found._replace(low=int(raw.min()), high=int(raw.max()), ends=ends, counted=len(raw) if count else 0)


def _bytes(raw: Array, count: bool, zero: int, ends: tuple[int, int]) -> Tally:
    low, high = int(raw.min()), int(raw.max())
    at_ends = sum(int(np.count_nonzero(raw == end)) for end in ends) if count else 0
    peak = int(not low == high == zero)
    return Tally(peak=peak, low=low, high=high, ends=at_ends, counted=len(raw) if count else 0)


def _nibbles(raw: Array, count: bool) -> Tally:
    """Offset by 8: 0 and 15 are the ends, where a nibble's bits are all equal."""
    low, high = int(raw.min()), int(raw.max())
    found = Tally(peak=int(not low == high == 0x88), low=low, high=high)
    if not count:
        return found
    changes = raw ^ (raw >> 1)
    ends = np.count_nonzero((changes & 0x07) == 0) + np.count_nonzero((changes & 0x70) == 0)
    return found._replace(ends=int(ends), counted=2 * len(raw))


def _spread(raw: Array, count: bool) -> Tally:
    """As :func:`_fp4`, a code a byte; ``high`` tells one that is none."""
    ends = int(np.count_nonzero((raw & 0x07) == 0x07)) if count else 0
    peak, counted = int((raw & 0xF7).max()), len(raw) if count else 0
    return Tally(peak=peak, low=int(raw.min()), high=int(raw.max()), ends=ends, counted=counted)


def _fp4(raw: Array, count: bool) -> Tally:
    """Bit 3 is the sign; 7 is the largest magnitude."""
    found = Tally(peak=int((raw & 0x77).max()), low=int(raw.min()), high=int(raw.max()))
    if not count:
        return found
    ends = np.count_nonzero((raw & 0x07) == 0x07) + np.count_nonzero((raw & 0x70) == 0x70)
    return found._replace(ends=int(ends), counted=2 * len(raw))
