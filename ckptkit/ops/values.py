"""Rows of a stored weight as bits of a float dtype: scaled in float32, rounded once.

By tables of finished values where there are any, else by :func:`ckptkit.decode.decode`; the bits are the same. Works on
tiles of rows, so that what it allocates stays small and near the processor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..decode import Encoded, spans
from ..decode.numbers import to_float32
from ..decode.rows import decode, unpack
from ..files.memory import keep_freed_memory
from . import NonFinite, Overflow
from .rounding import Array, is_finite, put, rounded
from .tables import Table, look_up, table

TILE = 64 << 10  # numbers

Data = Mapping[str, Any]


def fill(out: Array, weight: Encoded, start: int, data: Data, dtype: str, nonfinite_error: bool = True) -> None:
    """Fill ``out`` [rows, cols], words of ``dtype``, with the rows of ``weight`` from ``start`` on.

    ``data`` holds the bytes of :func:`ckptkit.decode.spans` for these rows, by role. Raises NonFinite and Overflow,
    whose index counts the roles in that order, unless NaN and Inf are to be kept.
    """
    stop = start + len(out)
    found = table(weight, start, stop, data, dtype)
    step = max(1, TILE // weight.cols)
    for first in range(start, stop, step):
        last = min(first + step, stop)
        tile = out[first - start : last - start]
        if found is None or not _looked_up(found, weight, first - start, last - start, data, tile):
            part = _part(weight, start, stop, first, last, data)
            put(tile, _computed(weight, first, last, part, dtype, nonfinite_error))


def _looked_up(found: Table, weight: Encoded, first: int, last: int, data: Data, out: Array) -> bool:
    """Fill ``out`` with rows [first, last) of those that ``data`` holds, if all their codes are finite."""
    codes = np.frombuffer(data["codes"], np.uint8, (last - first) * weight.row_bytes, first * weight.row_bytes)
    of_rows = found.first[first:last] if len(found.first) > 1 else found.first
    return look_up(found, codes.reshape(last - first, -1), of_rows, out)


def _part(weight: Encoded, start: int, stop: int, first: int, last: int, data: Data) -> Data:
    """What rows [first, last) need of the bytes for rows [start, stop)."""
    whole = spans(weight, start, stop)
    return {
        role: memoryview(data[role])[span.start - whole[role].start : span.stop - whole[role].start]
        for role, span in spans(weight, first, last).items()
    }


def _computed(weight: Encoded, start: int, stop: int, data: Data, dtype: str, nonfinite_error: bool) -> Array:
    """Rows [start, stop) by the definition of the format."""
    with np.errstate(all="ignore"):
        x = decode(weight, start, stop, data)
        made = rounded(x, dtype)
        if nonfinite_error and not is_finite(made, dtype):
            raise _fault(weight, start, stop, data, x, dtype)
    return made


def check_overall(weight: Encoded, data: Data) -> None:
    """Raise NonFinite for a scale of scales that is none: divided by infinity all values would be finite, and 0."""
    if weight.overall is None:
        return
    stated = to_float32(np.frombuffer(data["overall"], np.uint8), weight.overall.dtype)
    wrong = stated[~np.isfinite(stated)]
    if wrong.size:
        raise NonFinite(list(data).index("overall"), "NaN" if np.isnan(wrong).any() else "Inf")
    if weight.divides and not stated.all():
        raise NonFinite(list(data).index("overall"), "Inf", "0, which scales are divided by")


def _fault(weight: Encoded, start: int, stop: int, data: Data, x: Array, dtype: str) -> Exception:
    """What is to be said of rows that are not finite: the part that is not so by itself, or the overflow."""
    unpacked = unpack(weight, start, stop, data)
    parts: dict[str, Array] = {"codes": unpacked.numbers, "scale": unpacked.scale}
    for role, values in parts.items():
        wrong = values[~np.isfinite(values)]
        if wrong.size:
            return NonFinite(list(data).index(role), "NaN" if np.isnan(wrong).any() else "Inf")
    largest = x[np.unravel_index(np.abs(x).argmax(), x.shape)]
    return Overflow(0, f"{largest:g}, too large for {dtype}")


keep_freed_memory()
