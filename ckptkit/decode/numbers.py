"""Bytes to float32, by the definition of each dtype. Tables are made once, from the definitions."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]

# Exponent bits, mantissa bits, bias, and whether the topmost exponent holds infinity (E4M3 has a single NaN instead).
_FLOAT8 = {"F8_E4M3": (4, 3, 7, False), "F8_E5M2": (5, 2, 15, True)}


def to_float32(raw: Bytes, dtype: str) -> Floats:
    """The numbers in ``raw``, flat. F64 is rounded; all else is exact."""
    match dtype:
        case "BF16":
            wide = raw.view(np.uint16).astype(np.uint32)
            return np.left_shift(wide, 16, out=wide).view(np.float32)
        case "F16" | "F32" | "F64" | "I8":
            return raw.view({"F16": "<f2", "F32": "<f4", "F64": "<f8", "I8": "i1"}[dtype]).astype(np.float32)
        case "F8_E4M3" | "F8_E5M2":
            return _looked_up(raw, float8(dtype))
        case "F8_E8M0" | "U8":
            return _looked_up(raw, exponents())
    raise ValueError(f"{dtype} is no dtype of weights or scales")


def rounded(x: Floats, dtype: str) -> Floats:
    """The nearest numbers of BF16, F16 or F32, ties to even."""
    if dtype == "F16":
        return x.astype(np.float16).astype(np.float32)
    if dtype != "BF16":
        return x
    bits = x.view(np.uint32)
    found = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isnan(x), x, found)


def _looked_up(raw: Bytes, table: Floats) -> Floats:
    """What ``table`` [256, n] holds for each byte: n numbers. Small tables stay in the processor's nearest cache."""
    found = np.empty((len(raw), table.shape[1]), np.float32)
    wide = np.dtype((np.void, 4 * table.shape[1]))
    np.take(table.view(wide).ravel(), raw, out=found.view(wide).ravel(), mode="clip")
    return found.ravel()


@lru_cache
def float8(dtype: str) -> Floats:
    """The value of each byte (OFP8 1.0), [256, 1]."""
    exponent_bits, mantissa_bits, bias, has_infinity = _FLOAT8[dtype]
    code = np.arange(256)
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = code & (1 << mantissa_bits) - 1
    fraction = mantissa / (1 << mantissa_bits) + (exponent > 0)
    size = np.ldexp(fraction, np.maximum(exponent, 1) - bias)
    top = (1 << exponent_bits) - 1
    if has_infinity:
        size = np.where(exponent == top, np.where(mantissa == 0, np.inf, np.nan), size)
    else:
        size = np.where((code & 0x7F) == 0x7F, np.nan, size)
    return np.where(code < 128, size, -size).astype(np.float32).reshape(256, 1)


@lru_cache
def exponents() -> Floats:
    """E8M0 (MX 1.0): byte b is 2**(b - 127), 255 is NaN; [256, 1]."""
    found = np.ldexp(1.0, np.arange(256) - 127)
    found[255] = np.nan
    return found.astype(np.float32).reshape(256, 1)


# E2M1 (MX 1.0): the value of each code below 8; the same negated from 8 on.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def fp4(raw: Bytes) -> Floats:
    """E2M1 numbers, two in a byte."""
    return _looked_up(raw, _fp4())


def codes(raw: Bytes) -> Floats:
    """E2M1 numbers, one in a byte; bytes that are no code are NaN."""
    return _looked_up(raw, _codes())


@lru_cache
def _codes() -> Floats:
    found = np.full((256, 1), np.nan, np.float32)
    found[:16, 0] = [*E2M1, *(-value for value in E2M1)]
    return found


@lru_cache
def _fp4() -> Floats:
    return _in_each_byte(np.array([*E2M1, *(-value for value in E2M1)], np.float32), 4)


def integers(raw: Bytes, rows: int, cols: int, bits: int, first: int = 0, offset: int = 0) -> Floats:
    """Integers of ``bits`` bits less ``offset``, [rows, cols], packed into the 32-bit words of each row.

    The first of a row starts at bit ``first``; one may lie across two words, and the last word need not be full.
    """
    if 8 % bits:
        return fields(raw.view("<u4").reshape(rows, -1), cols, bits, first).astype(np.float32) - np.float32(offset)
    if bits == 8:
        found = np.subtract(raw, np.float32(offset), dtype=np.float32)
    else:
        found = _looked_up(raw, _integers(bits, offset))
    found = found.reshape(rows, -1)
    return np.ascontiguousarray(found[:, first // bits :][:, :cols])


@lru_cache
def _integers(bits: int, offset: int) -> Floats:
    return _in_each_byte(np.arange(1 << bits, dtype=np.float32) - offset, bits)


def _in_each_byte(values: Floats, bits: int) -> Floats:
    """The values of the codes in each byte, low bits first, [256, 8 / bits]."""
    codes = np.arange(256)[:, None] >> np.arange(0, 8, bits) & (1 << bits) - 1
    return np.ascontiguousarray(values[codes])


def fields(words: np.ndarray[Any, Any], count: int, bits: int, first: int = 0) -> np.ndarray[Any, Any]:
    """``count`` unsigned numbers of ``bits`` bits from bit ``first`` on, in each row of uint32 ``words``."""
    at = first + bits * np.arange(count)
    wide = np.pad(words.astype(np.uint64), ((0, 0), (0, 1)))
    pairs = wide | np.roll(wide, -1, axis=1) << np.uint64(32)
    found: np.ndarray[Any, Any] = pairs[:, at // 32] >> (at % 32).astype(np.uint64) & np.uint64((1 << bits) - 1)
    return found


# AutoAWQ's GEMM layout: the numbers of columns 0, 2, 4, 6, 1, 3, 5 and 7 lie in a word from the low bits up.
_PLACE_IN_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)


def in_awq_order(numbers: Floats) -> Floats:
    """Columns in their order, from numbers in that of the words, [rows, cols]."""
    return numbers.reshape(len(numbers), -1, 8)[:, :, _PLACE_IN_AWQ].reshape(numbers.shape)
