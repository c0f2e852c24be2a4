"""The number formats a second time: slow, obvious, numpy and Python integers only.

Everything is exact in float64; where a format or a dtype rounds, :func:`rounded` says so. Weights are float64 arrays
of values that their dtype holds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Float(NamedTuple):
    """A binary float: bits of the mantissa, the smallest normal exponent, the largest value, the step at 1."""

    mantissa: int
    lowest: int
    largest: float

    @property
    def eps(self) -> float:
        return 2.0**-self.mantissa

    @property
    def tiny(self) -> float:
        return 2.0**self.lowest


FLOATS = {
    "BF16": Float(7, -126, 2.0**127 * (2 - 2.0**-7)),
    "F16": Float(10, -14, 65504.0),
    "F32": Float(23, -126, 2.0**127 * (2 - 2.0**-23)),
}
E4M3 = Float(3, -6, 448.0)
E2M1 = Float(1, 0, 6.0)


def rounded(x: Array, to: Float) -> Array:
    """The nearest value of a float format, ties to the even mantissa; infinity past the largest."""
    _, exponent = np.frexp(x)
    step = np.exp2(np.maximum(exponent - 1, to.lowest) - to.mantissa)
    near = np.rint(x / step) * step
    return np.where(np.abs(near) > to.largest, np.copysign(np.inf, x), near)


def divided(x: Array, by: Array | float, dtype: Float) -> Array:
    return rounded(x / by, dtype)


def clamped(x: Array, to: Float) -> Array:
    """Rounded to a format that has no infinity."""
    return rounded(np.clip(x, -to.largest, to.largest), to)


def grouped(w: Array, group: int | None) -> Array:
    size = group or w.shape[1]
    return w.reshape(len(w), w.shape[1] // size, size)


def scales(peak: Array, top: float, dtype: Float) -> Array:
    found = divided(peak, top, dtype)
    return np.where(found == 0, dtype.eps, found)


# --- integers ----------------------------------------------------------------------------------------------


def integers(w: Array, dtype: str, bits: int, group: int | None, arithmetic: str) -> tuple[NDArray[np.int64], Array]:
    """Codes [r, c] and scales [r, groups]."""
    half = 2 ** (bits - 1)
    x = grouped(w, group)
    scale = scales(np.abs(x).max(-1), (2**bits - 1) / 2, FLOATS[dtype])
    ratio = divided(x, scale[..., None], FLOATS["F32" if arithmetic == "float32" else dtype])
    codes = np.rint(np.clip(ratio, -half, half - 1))
    return codes.reshape(w.shape).astype(np.int64), scale


def packed_words(codes: NDArray[np.int64], bits: int) -> bytes:
    """Rows of codes as one long little-endian integer each, the first code in its lowest bits."""
    half = 2 ** (bits - 1)
    rows = (sum((int(code) + half) << (bits * i) for i, code in enumerate(row)) for row in codes)
    return b"".join(row.to_bytes(codes.shape[1] * bits // 8, "little") for row in rows)


# --- FP8 ---------------------------------------------------------------------------------------------------


def _e4m3_value(byte: int) -> float:
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 15, byte & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


E4M3_VALUES = np.array([_e4m3_value(byte) for byte in range(0x7F)])


def e4m3_bytes(x: Array) -> bytes:
    """Values that E4M3 holds, as its bytes."""
    code = np.searchsorted(E4M3_VALUES, np.abs(x))
    assert (E4M3_VALUES[code] == np.abs(x)).all()
    return (code + 0x80 * np.signbit(x)).astype(np.uint8).tobytes()


def fp8_channel(w: Array, dtype: str) -> tuple[bytes, Array]:
    scale = scales(np.abs(w).max(-1, keepdims=True), E4M3.largest, FLOATS[dtype])
    return e4m3_bytes(clamped(divided(w, scale, FLOATS[dtype]), E4M3)), scale


def fp8_block(w: Array, dtype: str, height: int, width: int) -> tuple[bytes, Array]:
    rows, cols = w.shape
    codes, scale = np.empty_like(w), np.empty((-(-rows // height), -(-cols // width)))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
            scale[i, j] = scales(np.abs(w[part]).max(), E4M3.largest, FLOATS[dtype])
            codes[part] = clamped(divided(w[part], scale[i, j], FLOATS[dtype]), E4M3)
    return e4m3_bytes(codes), scale


# --- FP4 ---------------------------------------------------------------------------------------------------

E2M1_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e2m1_bytes(ratio: Array) -> bytes:
    """Two codes to a byte, the first in the low half. Zero is +0, but what is rounded to it keeps its sign."""
    values = clamped(ratio, E2M1)
    codes = np.array([E2M1_VALUES.index(value) for value in np.abs(values).flat]) + 8 * (ratio < 0).ravel()
    return (codes[::2] + 16 * codes[1::2]).astype(np.uint8).tobytes()


def global_scale(peak: float, dtype: str) -> float:
    """2688 / peak, by the reciprocal, in the dtype; past its range in float32; 1 where that overflows too."""
    if peak == 0:
        return 1.0
    top, kind, wide = E4M3.largest * E2M1.largest, FLOATS[dtype], FLOATS["F32"]
    found = float(rounded(rounded(np.float64(1 / peak), kind) * top, kind))
    if np.isinf(found):
        found = float(rounded(rounded(np.float64(1 / peak), wide) * top, wide))
    return 1.0 if np.isinf(found) else found


def nvfp4(w: Array, dtype: str, overall: float, group: int = 16) -> tuple[bytes, bytes]:
    """Packed codes and E4M3 scales, under a global scale."""
    kind, wide = FLOATS[dtype], FLOATS["F32"]
    x = grouped(w, group)
    local = divided(np.abs(x).max(-1), E2M1.largest, kind)
    local = clamped(rounded(local * overall, wide), E4M3)
    local = np.where(local == 0, 0.125, local)
    ratio = divided(x, divided(local, overall, wide)[..., None], wide)
    return e2m1_bytes(ratio), e4m3_bytes(local)


# --- microscaling ------------------------------------------------------------------------------------------


def power_of_two(peak: Array, dtype: str, exponent: int) -> tuple[Array, Array]:
    """Stored exponents and scales: peak's power of two, from 1.75 times it on the next, over 2**exponent.

    Below the normal range there is none, but from three quarters of the smallest normal on that is taken.
    """
    kind = FLOATS[dtype]
    mantissa, power = np.frexp(np.maximum(peak, kind.tiny))
    reached = power - 1 + (mantissa * 2 >= 1.75) - (peak < 0.75 * kind.tiny)
    stored = np.where(reached >= kind.lowest, np.maximum(reached + 127 - exponent, 0), 0)
    scale = rounded(np.exp2(stored - 127.0), kind)
    return np.where(scale == 0, 127, stored), np.where(scale == 0, 1.0, scale)


def mxfp4(w: Array, dtype: str) -> tuple[bytes, bytes]:
    x = grouped(w, 32)
    stored, scale = power_of_two(np.abs(x).max(-1), dtype, 2)
    return e2m1_bytes(divided(x, scale[..., None], FLOATS[dtype])), stored.astype(np.uint8).tobytes()


def mxfp8(w: Array, dtype: str) -> tuple[bytes, bytes]:
    x = grouped(w, 32)
    stored, scale = power_of_two(np.abs(x).max(-1), dtype, 8)
    return e4m3_bytes(clamped(divided(x, scale[..., None], FLOATS[dtype]), E4M3)), stored.astype(np.uint8).tobytes()
