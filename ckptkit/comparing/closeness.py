"""How far one tensor's values are from another's. Imports numpy: import it only to compute.

Values are compared as float32, as float64 where one of the two is F64. Squares are summed in float32 within a tile of
values and in float64 over tiles; a tile whose squares leave float32's range is done in float64.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

TILE = 1 << 16  # values computed with at once: they stay in a processor's cache

_LEAST = 1e-30  # below it squares of float32 lose digits, and are lost in the end

_STORED = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32, "F64": np.float64}


class Tolerance(NamedTuple):
    """Values a and b are close if ``|a - b| <= absolute + relative * |a|``."""

    relative: float = 0.0
    absolute: float = 0.0


class Sums(NamedTuple):
    """What adds up over the parts of two tensors a and b with d = a - b, NaN and Inf left aside.

    ``odd`` counts values of which one is NaN or Inf and the other is not the same; ``beyond`` those and all that are
    not within the tolerance.
    """

    max_abs: float = 0.0
    beyond: int = 0
    odd: int = 0
    dd: float = 0.0
    aa: float = 0.0
    bb: float = 0.0
    ab: float = 0.0

    def plus(self, other: Sums) -> Sums:
        """The sums over both parts."""
        return Sums(
            max(self.max_abs, other.max_abs), self.beyond + other.beyond, self.odd + other.odd,
            self.dd + other.dd, self.aa + other.aa, self.bb + other.bb, self.ab + other.ab,
        )  # fmt: skip

    @property
    def rel_rms(self) -> float | None:
        """RMS of a - b over that of a; None if a is all zero and b is not."""
        return _ratio(self.dd, self.aa) if self.dd else 0.0

    @property
    def cosine(self) -> float | None:
        """Of a and b as vectors; None if one of them is all zero."""
        squared = _ratio(self.ab * self.ab, self.aa * self.bb)
        return None if squared is None else math.copysign(min(squared, 1.0), self.ab)


def _ratio(x: float, y: float) -> float | None:
    """The root of x / y; None where that is no number."""
    return math.sqrt(x / y) if y and math.isfinite(x) and math.isfinite(y) else None


def sums(a: bytearray, a_dtype: str, b: bytearray, b_dtype: str, tolerance: Tolerance) -> Sums:
    """Compare two runs of as many values, given as the bytes of dtypes BF16, F16, F32 or F64."""
    found = Sums()
    one, other = np.frombuffer(a, _STORED[a_dtype]), np.frombuffer(b, _STORED[b_dtype])
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(one), TILE):
            tile = slice(start, start + TILE)
            found = found.plus(_tile(_floats(one[tile]), _floats(other[tile]), tolerance))
    return found


def _floats(stored: Array) -> Array:
    """float32 of BF16's bits and of F16; F32 and F64 as they are."""
    if stored.dtype == np.uint16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32) if stored.dtype == np.float16 else stored


def _tile(a: Array, b: Array, tolerance: Tolerance) -> Sums:
    found = _finite(a, b, tolerance)
    lost = (found.dd < _LEAST and found.max_abs > 0) or _are_lost(found.aa, a) or _are_lost(found.bb, b)
    if math.isfinite(sum(found)) and not lost:
        return found
    both = np.isfinite(a) & np.isfinite(b)
    odd = int(np.count_nonzero(~(both | (a == b) | (np.isnan(a) & np.isnan(b)))))
    found = _finite(np.where(both, a, 0).astype(np.float64), np.where(both, b, 0).astype(np.float64), tolerance)
    return found._replace(odd=odd, beyond=found.beyond + odd)


def _are_lost(squares: float, values: Array) -> bool:
    return squares < _LEAST and bool(values.any())


def _finite(a: Array, b: Array, tolerance: Tolerance) -> Sums:
    d = a - b
    dd, aa, bb, ab = float(d @ d), float(a @ a), float(b @ b), float(a @ b)
    np.abs(d, out=d)
    limit = tolerance.absolute + tolerance.relative * np.abs(a) if tolerance.relative else tolerance.absolute
    return Sums(float(d.max(initial=0)), int(np.count_nonzero(d > limit)), 0, dd, aa, bb, ab)
