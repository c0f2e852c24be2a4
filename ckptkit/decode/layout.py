"""A weight as it is stored: what its numbers are, which of them share a scale, and which bytes some rows need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from ..plan import Ref


class Coding(StrEnum):
    """What the stored numbers are."""

    DENSE = "dense"  # floats, no scale
    WORDS = "words"  # integers of 1 to 8 bits in 32-bit words along the columns, offset to be unsigned
    GPTQ = "gptq"  # unsigned integers of 2, 3, 4 or 8 bits in 32-bit words along the rows
    AWQ = "awq"  # unsigned integers of 4 bits in 32-bit words along the columns, in an order of their own
    INT8 = "int8"
    FP8 = "fp8"
    FP4 = "fp4"  # E2M1, two in a byte
    CODES = "codes"  # E2M1, one in a byte


class Span(NamedTuple):
    """Bytes [start, stop) of a file."""

    file: str
    start: int
    stop: int


class Encoded(NamedTuple):
    """A weight as stored. Leading dimensions are flattened: it is a matrix [rows, cols], unpacked.

    ``bits`` are those of a number. A block of ``height`` x ``width`` shares a scale; blocks are counted anew in each of
    the matrices of ``stack`` rows that a stacked tensor is made of. ``grid`` is the scale's shape [rows, cols].
    ``inferred``: no config gave the size of the blocks, it was taken from the shape of the scale, which other sizes
    would fit as well. ``overall``, one number or one for each matrix, multiplies all scales, or divides them if
    ``divides``. ``order``: the scale's column for each column, in GPTQ its row for each row. ``zero_bias`` is added to
    the stored zero points. ``transposed``: the module's weight is the transpose of each matrix of the stack.
    """

    coding: Coding
    bits: int
    rows: int
    cols: int
    codes: Ref
    scale: Ref | None = None
    zero: Ref | None = None
    overall: Ref | None = None
    order: Ref | None = None
    divides: bool = False
    stack: int = 0
    height: int = 0
    width: int = 0
    grid: tuple[int, int] = (1, 1)
    inferred: bool = False
    zero_bias: int = 0
    transposed: bool = False

    @property
    def name(self) -> str:
        return self.codes.name

    @property
    def row_bytes(self) -> int:
        """Bytes of the codes of a row, on average where they are packed along the rows."""
        return self.codes.nbytes // self.rows if self.rows else 0

    @property
    def parts(self) -> dict[str, Ref]:
        """The tensors that are read to decode it, by role."""
        roles = ("codes", "scale", "zero", "overall", "order")
        return {role: ref for role in roles if (ref := getattr(self, role)) is not None}


def dense(ref: Ref) -> Encoded:
    """A tensor of floats as it is; a vector is one row."""
    rows, cols = matrix(ref.shape)
    return Encoded(Coding.DENSE, 8 * ref.nbytes // max(rows * cols, 1), rows, cols, ref)


def matrix(shape: Sequence[int]) -> tuple[int, int]:
    """A shape with its leading dimensions flattened."""
    return math.prod(shape[:-1]), (shape[-1] if shape else 1)


# --- bytes -------------------------------------------------------------------------------------------------


def scale_rows(weight: Encoded, start: int, stop: int) -> tuple[int, int]:
    """The rows of the scale that rows [start, stop) of the weight need; with rows in any order, all of them."""
    if weight.grid[0] == 1 or is_ordered_by_row(weight):
        return 0, weight.grid[0]
    return scale_row(weight, start), scale_row(weight, stop - 1) + 1


def scale_row(weight: Encoded, row: Any) -> Any:
    """The row of the scale that ``row``, or each of an array of rows, has."""
    per_stack = weight.grid[0] * weight.stack // weight.rows
    return row // weight.stack * per_stack + row % weight.stack // weight.height


def spans(weight: Encoded, start: int, stop: int) -> dict[str, Span]:
    """The bytes that rows [start, stop) need, by role. ``start`` < ``stop``."""
    found = {"codes": _cut(weight.codes, *_code_bytes(weight, start, stop))}
    if weight.scale is not None:
        found["scale"] = _scale_cut(weight, weight.scale, start, stop)
    if weight.zero is not None:
        packed = zero_is_packed_along_rows(weight)
        found["zero"] = (
            _cut(weight.zero, *_word_bytes(weight, weight.grid[1], start, stop))
            if packed
            else _scale_cut(weight, weight.zero, start, stop)
        )
    if weight.overall is not None:
        found["overall"] = _cut(weight.overall, 0, weight.overall.nbytes)
    if weight.order is not None:
        size = weight.order.nbytes // weight.rows if is_ordered_by_row(weight) else 0
        found["order"] = _cut(weight.order, start * size, stop * size if size else weight.order.nbytes)
    return found


def is_ordered_by_row(weight: Encoded) -> bool:
    """Whether each row names its row of the scale."""
    return weight.order is not None and weight.coding is Coding.GPTQ


def zero_is_packed_along_rows(weight: Encoded) -> bool:
    """Zero points beside words are packed along the rows; those of a whole tensor are not packed."""
    return weight.coding is Coding.WORDS and weight.zero is not None and weight.zero.dtype == "I32"


def _code_bytes(weight: Encoded, start: int, stop: int) -> tuple[int, int]:
    if weight.coding is Coding.GPTQ:
        return _word_bytes(weight, weight.cols, start, stop)
    return start * weight.row_bytes, stop * weight.row_bytes


def _word_bytes(weight: Encoded, cols: int, start: int, stop: int) -> tuple[int, int]:
    """The bytes of rows [start, stop) of ``cols`` numbers that are packed along the rows, in whole words."""
    return start * weight.bits // 32 * 4 * cols, -(-stop * weight.bits // 32) * 4 * cols


def _scale_cut(weight: Encoded, ref: Ref, start: int, stop: int) -> Span:
    """The bytes of what has a row for each row of the scale."""
    size = ref.nbytes // weight.grid[0]
    first, last = scale_rows(weight, start, stop)
    return _cut(ref, first * size, last * size)


def _cut(ref: Ref, start: int, stop: int) -> Span:
    return Span(ref.file, ref.start + start, ref.start + stop)
