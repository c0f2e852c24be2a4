"""From float32 to what is stored: one rounding to nearest, ties to even. Bits are handled as unsigned integers.

Without torch: a run that only dequantizes need not import it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class Word(NamedTuple):
    """How a float dtype lies in an unsigned integer: that integer, the bits of infinity, those of a quiet NaN."""

    dtype: np.dtype[Any]
    infinity: int
    nan: int

    @property
    def unsigned(self) -> int:
        """All bits but the sign."""
        return (1 << 8 * self.dtype.itemsize - 1) - 1


WORDS = {
    "BF16": Word(np.dtype("<u2"), 0x7F80, 0x7FC0),
    "F16": Word(np.dtype("<u2"), 0x7C00, 0x7E00),
    "F32": Word(np.dtype("<u4"), 0x7F800000, 0x7FC00000),
}


def rounded(x: Array, dtype: str) -> Array:
    """float32 of any shape -> the bits of ``dtype``. What is too large becomes Inf; there is one NaN, the quiet one."""
    word = WORDS[dtype]
    nan = np.isnan(x)
    match dtype:
        case "BF16":
            made = _upper_half(x.view(np.uint32))
        case "F16":
            with np.errstate(over="ignore"):
                made = x.astype(np.float16).view(word.dtype)
        case _:
            made = x.view(word.dtype)
    if nan.any():
        made = np.where(nan, word.dtype.type(word.nan), made)
    return made


def _upper_half(bits: Array) -> Array:
    """uint32 -> uint16: the upper half, rounded. A carry out of the mantissa is the next exponent, as it should be."""
    up = bits >> 16
    up &= 1
    up += 0x7FFF
    up += bits
    up >>= 16
    return up.astype(np.uint16)


def put(out: Array, found: Array) -> None:
    """``out[:] = found``, both [rows, cols], by strips where ``out`` is a transpose: they stay in the nearest cache."""
    strip = len(out) if out.flags.c_contiguous else 32
    for row in range(0, len(out), max(strip, 1)):
        out[row : row + strip] = found[row : row + strip]


def is_finite(bits: Array, dtype: str) -> bool:
    """Whether all of the numbers are finite."""
    word = WORDS[dtype]
    return int((bits & word.dtype.type(word.unsigned)).max(initial=0)) < word.infinity
