"""The formats once more, in the most obvious way: bits taken one by one, numbers by their definitions, plain loops.

Written from the formats' descriptions, sharing nothing with the package. Numbers are Python floats, in which products
and quotients of two float32 are exact enough to be rounded to float32 but once.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from functools import cache

Matrix = list[list[float]]
Codes = list[list[int]]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


# --- numbers -----------------------------------------------------------------------------------------------


def e2m1(code: int) -> float:
    """One sign, two exponent bits with bias 1, one mantissa bit; no infinity, no NaN."""
    return small_float(code, exponent_bits=2, mantissa_bits=1, bias=1)


def e4m3(code: int) -> float:
    return math.nan if code & 0x7F == 0x7F else small_float(code, exponent_bits=4, mantissa_bits=3, bias=7)


def e5m2(code: int) -> float:
    if code & 0x7C == 0x7C:
        return math.nan if code & 3 else math.copysign(math.inf, -1 if code & 0x80 else 1)
    return small_float(code, exponent_bits=5, mantissa_bits=2, bias=15)


def e8m0(code: int) -> float:
    return math.nan if code == 255 else 2.0 ** (code - 127)


def small_float(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    negative = code >> exponent_bits + mantissa_bits & 1
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = code & (1 << mantissa_bits) - 1
    if exponent == 0:
        size = mantissa * 2.0 ** (1 - bias - mantissa_bits)
    else:
        size = (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)
    return -size if negative else size


def float32(x: float) -> float:
    """``x`` rounded to float32, half to even."""
    try:
        found: float = struct.unpack("<f", struct.pack("<f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)
    return found


def floats(data: bytes, dtype: str) -> list[float]:
    match dtype:
        case "F8_E4M3":
            return [e4m3(byte) for byte in data]
        case "F8_E5M2":
            return [e5m2(byte) for byte in data]
        case "F8_E8M0" | "U8":
            return [e8m0(byte) for byte in data]
        case "BF16":
            return [struct.unpack("<f", b"\0\0" + data[i : i + 2])[0] for i in range(0, len(data), 2)]
        case "F16":
            return list(struct.unpack(f"<{len(data) // 2}e", data))
    return list(struct.unpack(f"<{len(data) // 4}f", data))


# --- codes: where the bits of a number lie -----------------------------------------------------------------

Place = Callable[[int, int, int], int]  # row, column, bit of the code -> bit of the data, bit 0 the lowest of byte 0


def along_columns(cols: int, bits: int, row_bits: int = 0) -> Place:
    """One number after the other; a row fills ``row_bits``. Bytes, nibbles and little-endian words alike."""
    return lambda row, col, bit: row * (row_bits or cols * bits) + col * bits + bit


def along_rows(cols: int, bits: int) -> Place:
    """In words of 32 bits, of which ``cols`` lie side by side: the numbers of a column, one after the other."""
    return lambda row, col, bit: 32 * ((row * bits + bit) // 32 * cols + col) + (row * bits + bit) % 32


def as_awq(cols: int) -> Place:
    """In words of eight numbers; which column the i-th from the low bits belongs to is told by AWQ_ORDER."""
    return lambda row, col, bit: (row * cols + col // 8 * 8 + AWQ_ORDER.index(col % 8)) * 4 + bit


def taken(data: bytes, rows: int, cols: int, bits: int, place: Place) -> Codes:
    """The unsigned codes [rows][cols] in ``data``."""
    return [[_code(data, row, col, bits, place) for col in range(cols)] for row in range(rows)]


def _code(data: bytes, row: int, col: int, bits: int, place: Place) -> int:
    at = [place(row, col, bit) for bit in range(bits)]
    return sum((data[i // 8] >> i % 8 & 1) << bit for bit, i in enumerate(at))


def put(codes: Codes, bits: int, place: Place, size: int) -> bytes:
    """``size`` bytes that hold ``codes``, other bits zero: the inverse of :func:`taken`."""
    data = bytearray(size)
    for row, line in enumerate(codes):
        for col, code in enumerate(line):
            for bit in range(bits):
                i = place(row, col, bit)
                data[i // 8] |= (code >> bit & 1) << i % 8
    return bytes(data)


# --- values ------------------------------------------------------------------------------------------------

At = Callable[[int, int], float]  # row, column -> what the number there has: a scale, a zero point


def values(codes: Codes, number: Callable[[int], float], scale: At, zero: At = lambda row, col: 0.0) -> Matrix:
    """Scale times (number less zero point), in float32."""
    return [
        [float32((number(code) - zero(row, col)) * scale(row, col)) for col, code in enumerate(line)]
        for row, line in enumerate(codes)
    ]


def codes_of(found: Sequence[Sequence[float]], number: Callable[[int], float], bits: int, scale: At, zero: At) -> Codes:
    """The code of every value, told by its bits (so that -0 is not 0), given scales and zero points."""
    return [
        [_codes(number, bits, scale(row, col), zero(row, col))[struct.pack("<f", x)] for col, x in enumerate(line)]
        for row, line in enumerate(found)
    ]


@cache
def _codes(number: Callable[[int], float], bits: int, scale: float, zero: float) -> dict[bytes, int]:
    """Codes of finite numbers by the bits of their values; no two have the same."""
    codes = [code for code in range(1 << bits) if math.isfinite(number(code))]
    found = {struct.pack("<f", float32((number(code) - zero) * scale)): code for code in codes}
    assert len(found) == len(codes)
    return found
