"""Rows of a weight from the bytes they need: numbers and scales apart, or multiplied out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..errors import fail
from ..plan import Ref
from .layout import Coding, Encoded, is_ordered_by_row, scale_row, scale_rows, zero_is_packed_along_rows
from .numbers import Bytes, Floats, codes, fp4, in_awq_order, integers, to_float32


class Unpacked(NamedTuple):
    """``numbers`` [rows, cols], the zero point taken off, and the scale of each block: ``scale`` [rows or 1, blocks].

    ``width`` columns share a scale, the last block may be narrower. Dense weights have a scale of 1. ``zero`` are the
    zero points, shaped as the scale; ``overall`` is what multiplies all scales, included in ``scale``: the greatest, if
    each matrix of a stack has its own.
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
    """Rows [start, stop) with numbers and scales apart. Raises UserError: ``data.group-order``."""
    raw = {role: np.frombuffer(content, np.uint8) for role, content in data.items()}
    numbers = _numbers(weight, raw["codes"], start, stop)
    if weight.scale is None:
        return Unpacked(numbers, np.ones((1, 1), np.float32), weight.cols)
    order = None if weight.order is None else _order(weight, weight.order, raw["order"])
    scale = _of_rows(weight, to_float32(raw["scale"], weight.scale.dtype), start, stop, order)
    overall = np.ones((1, 1), np.float32)
    if weight.overall is not None:
        stated = _of_stack(weight, to_float32(raw["overall"], weight.overall.dtype), start, stop)
        scale, overall = (scale / stated, np.reciprocal(stated)) if weight.divides else (scale * stated, stated)
    zero = None if weight.zero is None else _zero_points(weight, raw["zero"], start, stop, order)
    width = weight.width
    if order is not None and not is_ordered_by_row(weight):
        scale, zero, width = scale[:, order], None if zero is None else zero[:, order], 1
    if zero is not None:
        for part, offset in blocks(numbers, zero, width):
            np.subtract(part, offset, out=part)
    return Unpacked(numbers, scale, width, zero, float(overall.max()))


def _numbers(weight: Encoded, raw: Bytes, start: int, stop: int) -> Floats:
    """The numbers of rows [start, stop), zero points not yet taken off."""
    rows, cols, bits = stop - start, weight.cols, weight.bits
    match weight.coding:
        case Coding.WORDS:
            return integers(raw, rows, cols, bits, offset=1 << bits - 1)
        case Coding.GPTQ:
            return _along_rows(raw, rows, cols, bits, start * bits % 32)
        case Coding.AWQ:
            return in_awq_order(integers(raw, rows, cols, bits))
        case Coding.FP4:
            return fp4(raw).reshape(rows, cols)
        case Coding.CODES:
            return codes(raw).reshape(rows, cols)
    return to_float32(raw, weight.codes.dtype).reshape(rows, cols)


def _along_rows(raw: Bytes, rows: int, cols: int, bits: int, first: int, offset: int = 0) -> Floats:
    """Integers that are packed along the rows, the first of them from bit ``first`` on: [rows, cols]."""
    words = np.ascontiguousarray(raw.view("<u4").reshape(-1, cols).T)
    return np.ascontiguousarray(integers(words.view(np.uint8).ravel(), cols, rows, bits, first, offset).T)


def _order(weight: Encoded, ref: Ref, raw: Bytes) -> Any:
    """The scale's row or column for each row or column; None where compressed-tensors left it at -1, not in use."""
    order = raw.view("<i8" if ref.dtype == "I64" else "<i4")
    by_row = is_ordered_by_row(weight)
    least, count = order.min(initial=0), weight.grid[0 if by_row else 1]
    if least < 0 and not by_row:
        return None
    if least < 0 or order.max(initial=0) >= count:
        message = f"{ref.name} names groups from {least} to {order.max()}, and there are {count}"
        raise fail("data.group-order", message, file=ref.file, tensor=ref.name)
    return order


def _of_rows(weight: Encoded, flat: Floats, start: int, stop: int, order: Any) -> Floats:
    """Scales as read, one row of them for each row of the weight; [1, blocks] where all rows share one."""
    table = flat.reshape(-1, weight.grid[1])
    if order is not None and is_ordered_by_row(weight):
        found: Floats = table[order]
        return found
    if weight.grid[0] == 1 or (len(table) == stop - start and weight.height == 1):
        return table
    first, _ = scale_rows(weight, start, stop)
    of_rows: Floats = table[scale_row(weight, np.arange(start, stop)) - first]
    return of_rows


def _of_stack(weight: Encoded, flat: Floats, start: int, stop: int) -> Floats:
    """What each matrix of the stack has one of, for each row: [rows, 1], or [1, 1] if all share one."""
    return flat[np.arange(start, stop) // weight.stack if len(flat) > 1 else [0]].reshape(-1, 1)


def _zero_points(weight: Encoded, raw: Bytes, start: int, stop: int, order: Any) -> Floats:
    """float32 [rows, blocks] or [1, blocks]."""
    assert weight.zero is not None
    cols, bits = weight.grid[1], weight.bits
    if zero_is_packed_along_rows(weight):
        return _along_rows(raw, stop - start, cols, bits, start * bits % 32, offset=1 << bits - 1)
    if weight.coding in {Coding.GPTQ, Coding.AWQ}:
        flat = integers(raw, len(raw) * weight.grid[0] // weight.zero.nbytes, cols, bits, offset=-weight.zero_bias)
        flat = in_awq_order(flat) if weight.coding is Coding.AWQ else flat
    else:
        flat = to_float32(raw, weight.zero.dtype)
    return _of_rows(weight, flat, start, stop, order)
