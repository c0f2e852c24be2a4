"""Columns of a weight that is stored as the transpose: a few of its rows, without decoding all of it."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..files.header import nbytes
from ..plan import Ref
from .layout import Encoded

WHOLE = 32  # columns fill whole words, bytes and groups wherever they begin and end at multiples of this, or at the end


class Strip(NamedTuple):
    """Rows [row, row_stop) of a tensor, and of those the elements [col, col_stop)."""

    row: int
    row_stop: int
    col: int
    col_stop: int


def strips(weight: Encoded, matrix: int, first: int, stop: int) -> dict[str, Strip]:
    """What columns [first, stop) of a matrix of the stack need, by role. ``first`` and ``stop``: see :data:`WHOLE`."""
    found = {role: _strip(weight, ref, matrix, first, stop) for role, ref in weight.parts.items()}
    if weight.order is not None:
        found["order"] = Strip(0, 1, 0, weight.rows)
    if weight.overall is not None:
        found["overall"] = _number(weight.overall.shape, matrix)
    return found


def columns(weight: Encoded, first: int, stop: int) -> Encoded:
    """Columns [first, stop) of a matrix of the stack as a weight of its own, of which :func:`strips` are all bytes."""

    def part(ref: Ref | None) -> Ref | None:
        if ref is None:
            return None
        row, row_stop, col, col_stop = _strip(weight, ref, 0, first, stop)
        shape = (row_stop - row, col_stop - col)
        return ref._replace(shape=shape, start=0, stop=nbytes(ref.dtype, shape))

    codes, scale = part(weight.codes), part(weight.scale)
    assert codes is not None
    assert scale is not None
    grid = scale.shape[0], scale.shape[1]
    return weight._replace(
        rows=weight.stack, cols=stop - first, codes=codes, scale=scale, zero=part(weight.zero), grid=grid
    )


def _number(shape: tuple[int, ...], matrix: int) -> Strip:
    """The matrix's own number of a tensor that has one for each, or one for all."""
    row, col = divmod(matrix if math.prod(shape) > 1 else 0, shape[-1] if shape else 1)
    return Strip(row, row + 1, col, col + 1)


def _strip(weight: Encoded, ref: Ref, matrix: int, first: int, stop: int) -> Strip:
    rows = math.prod(ref.shape[:-1]) * weight.stack // weight.rows
    col, col_stop = (column * ref.shape[-1] // weight.cols for column in (first, stop))
    return Strip(matrix * rows, (matrix + 1) * rows, col, col_stop)
