"""Rows of a weight from the bytes they need: numbers and scales apart, or multiplied out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .layout import Coding, Encoded, is_packed, scale_row, scale_rows
from .numbers import Bytes, Floats, fields, fp4, small_integers, to_float32


class Unpacked(NamedTuple):
    """``numbers`` [rows, cols], the zero point taken off, and the scale of each block: ``scale`` [rows or 1, blocks].

    ``width`` columns share a scale, the last block may be narrower. Dense weights have a scale of 1. ``zero`` are the
    zero points, shaped as the scale; ``overall`` is what multiplies all scales, included in ``scale``.
    """

    numbers: Floats
    scale: Floats
    width: int
    zero: Floats | None = None
    overall: float = 1.0


def decode(weight: Encoded, start: int, stop: int, data: Mapping[str, Any]) -> Floats:
    """Rows [start, stop) as float32 [stop - start, cols]; ``data`` holds the bytes of :func:`~ckptkit.decode.spans`."""
    unpacked = unpack(weight, start, stop, data)
    return unpacked.numbers if weight.scale is None else scaled(unpacked)


def scaled(unpacked: Unpacked) -> Floats:
    """The values: ``numbers`` times their scales. Overwrites the numbers."""
    for part, by in blocks(unpacked.numbers, unpacked.scale, unpacked.width):
        np.multiply(part, by, out=part)
    return unpacked.numbers


def blocks(x: Floats, scale: Floats, width: int) -> list[tuple[Floats, Floats]]:
    """Views of ``x`` [rows, cols] with the scale that each multiplies with: whole blocks at once, then a narrower one."""
    rows, cols = x.shape
    whole = cols // width
    pairs = []
    if whole:
        view = (
            x[:, : whole * width].reshape(rows, whole, width) if whole * width < cols else x.reshape(rows, whole, width)
        )
        pairs.append((view, scale[:, :whole, None]))
    if whole * width < cols:
        pairs.append((x[:, whole * width :], scale[:, whole : whole + 1]))
    return pairs


def unpack(weight: Encoded, start: int, stop: int, data: Mapping[str, Any]) -> Unpacked:
    """Rows [start, stop) with numbers and scales apart."""
    raw = {role: np.frombuffer(content, np.uint8) for role, content in data.items()}
    numbers = _numbers(weight, raw["codes"], stop - start)
    if weight.scale is None:
        return Unpacked(numbers, np.ones((1, 1), np.float32), weight.cols)
    scale = _of_rows(weight, to_float32(raw["scale"], weight.scale.dtype), start, stop)
    overall = np.float32(1)
    if weight.overall is not None:
        stated = to_float32(raw["overall"], weight.overall.dtype)[0]
        scale, overall = (scale / stated, 1 / stated) if weight.divides else (scale * stated, stated)
    zero = None if weight.zero is None else _zero_points(weight, raw["zero"], start, stop)
    width = weight.width
    if weight.order is not None and (order := raw["order"].view("<i4")).min(initial=0) >= 0:
        scale, zero, width = scale[:, order], None if zero is None else zero[:, order], 1
    if zero is not None:
        for part, offset in blocks(numbers, zero, width):
            np.subtract(part, offset, out=part)
    return Unpacked(numbers, scale, width, zero, float(overall))


def _numbers(weight: Encoded, raw: Bytes, rows: int) -> Floats:
    match weight.coding:
        case Coding.DENSE | Coding.INT8 | Coding.FP8:
            return to_float32(raw, weight.codes.dtype).reshape(rows, weight.cols)
        case Coding.FP4:
            return fp4(raw).reshape(rows, weight.cols)
    if weight.bits == 8:
        numbers = to_float32(raw ^ np.uint8(0x80), "I8").reshape(rows, -1)
    elif weight.bits in {1, 2, 4}:
        numbers = small_integers(raw, weight.bits).reshape(rows, -1)
    else:
        numbers = _offset(fields(raw.view("<u4").reshape(rows, -1), weight.cols, weight.bits), weight.bits)
    return numbers if numbers.shape[1] == weight.cols else np.ascontiguousarray(numbers[:, : weight.cols])


def _offset(unsigned: np.ndarray[Any, Any], bits: int) -> Floats:
    return unsigned.astype(np.float32) - np.float32(1 << bits - 1)


def _of_rows(weight: Encoded, flat: Floats, start: int, stop: int) -> Floats:
    """Scales as read, one row of them for each row of the weight; [1, blocks] where all rows share one."""
    table = flat.reshape(-1, weight.grid[1])
    if weight.grid[0] == 1 or (len(table) == stop - start and weight.height == 1):
        return table
    first, _ = scale_rows(weight, start, stop)
    return table[[scale_row(weight, row) - first for row in range(start, stop)]]


def _zero_points(weight: Encoded, raw: Bytes, start: int, stop: int) -> Floats:
    """float32 [rows, blocks] or [1, blocks]."""
    assert weight.zero is not None
    if not is_packed(weight.zero):
        return _of_rows(weight, to_float32(raw, weight.zero.dtype), start, stop)
    words = raw.view("<u4").reshape(-1, weight.grid[1])
    found = fields(words.T, stop - start, weight.bits, start * weight.bits % 32)
    return _offset(found.T, weight.bits)
