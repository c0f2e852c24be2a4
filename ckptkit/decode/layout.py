"""How a weight is stored, told from headers: what its numbers are, which of them share a scale, where the bytes lie."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from ..errors import fail
from ..header import FLOATS
from ..plan import Ref
from ..stored import FP4, NF4, SCALES, WEIGHTS

_FP8 = frozenset({"F8_E4M3", "F8_E5M2"})
_EXPONENTS = frozenset({"U8", "F8_E8M0"})
_FOREIGN = frozenset({NF4, FP4, "absmax", "SCB"})


class Coding(StrEnum):
    """What the stored numbers are."""

    DENSE = "dense"  # floats, no scale
    WORDS = "words"  # integers of 1 to 8 bits in 32-bit words, offset to be unsigned
    INT8 = "int8"
    FP8 = "fp8"
    FP4 = "fp4"  # E2M1, two in a byte


class Span(NamedTuple):
    """Bytes [start, stop) of a file."""

    file: str
    start: int
    stop: int


class Encoded(NamedTuple):
    """A weight as stored. Leading dimensions are flattened: it is a matrix [rows, cols], unpacked.

    ``bits`` are those of a number. A block of ``height`` x ``width`` shares a scale; blocks are counted anew in each of
    the matrices of ``stack`` rows that a stacked tensor is made of. ``grid`` is the scale's shape [rows, cols].
    ``overall`` multiplies all scales, or divides them if ``divides``. ``order``: the scale's column for each column.
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

    @property
    def name(self) -> str:
        return self.codes.name

    @property
    def row_bytes(self) -> int:
        """Bytes of the codes of a row."""
        return self.codes.nbytes // self.rows if self.rows else 0

    @property
    def parts(self) -> dict[str, Ref]:
        """The tensors that are read to decode it, by role."""
        roles = ("codes", "scale", "zero", "overall", "order")
        return {role: ref for role in roles if (ref := getattr(self, role)) is not None}


def dense(ref: Ref) -> Encoded:
    """A tensor of floats as it is; a vector is one row."""
    rows, cols = _matrix(ref.shape)
    return Encoded(Coding.DENSE, 8 * ref.nbytes // max(rows * cols, 1), rows, cols, ref)


def encoded(
    last: str, parts: Mapping[str, Ref], bits: int | None = None, block: Sequence[int] | None = None, cols: int = 0
) -> Encoded:
    """How the weight ``parts[last]`` is stored; ``parts`` are the tensors of its module by the last part of their names.

    ``bits`` and ``block`` are what the config declares of a weight packed into words, and of blocks; without ``block``
    the least power of two that fits is taken. ``cols`` is the number of columns where it is known (``weight_shape``):
    the last word of a row need not be full. Raises UserError: ``names.weight-without-scale``, ``decode.format``.
    """
    weight = parts[last]
    if last in WEIGHTS and weight.dtype in FLOATS:
        return dense(weight)
    scale = next((parts[name] for name in SCALES if name in parts), None)
    coding, bits = _coding(last, weight, scale, parts, bits)
    if scale is None:
        message = f"{weight.name} is {weight.dtype} and has no scale beside it"
        hint = f"one of these is looked for: {', '.join(SCALES[:3])}"
        raise fail("names.weight-without-scale", message, file=weight.file, tensor=weight.name, hint=hint)
    overall = parts.get("weight_global_scale") or parts.get("weight_scale_2")
    if overall is not None and math.prod(overall.shape) != 1:
        raise _unknown(overall, "a scale of scales has one number")
    shape = weight.shape[:-1] if last == "blocks" else weight.shape
    rows, width = _matrix(shape)
    width = weight.nbytes * 8 // bits // rows if rows else width
    found = Encoded(
        coding, bits, rows, cols or width, weight, scale,
        zero=parts.get("weight_zero_point"), overall=overall, order=parts.get("weight_g_idx"),
        divides="weight_global_scale" in parts, stack=shape[-2] if len(shape) > 1 else rows,
    )  # fmt: skip
    return _with_scale(found, scale, block)


def _coding(
    last: str, weight: Ref, scale: Ref | None, parts: Mapping[str, Ref], bits: int | None
) -> tuple[Coding, int]:
    exponents = scale is not None and scale.dtype in _EXPONENTS
    if last == "qweight" or not _FOREIGN.isdisjoint(parts):
        raise _unknown(weight, "GPTQ, AWQ and bitsandbytes weights are not decoded")
    if weight.dtype in _FP8:
        return Coding.FP8, 8
    if weight.dtype == "F4" or (weight.dtype in {"U8", "I8"} and (exponents or (scale and scale.dtype in _FP8))):
        return Coding.FP4, 4
    if weight.dtype == "I8":
        return Coding.INT8, 8
    if weight.dtype == "I32" and last == "weight_packed":
        if bits is None or not 1 <= bits <= 8:
            raise _unknown(weight, "config.json does not say how many bits its numbers have")
        return Coding.WORDS, bits
    raise _unknown(weight, f"{weight.dtype} is not a known form of a weight")


def _unknown(weight: Ref, why: str) -> Exception:
    return fail("decode.format", f"{weight.name} cannot be decoded: {why}", file=weight.file, tensor=weight.name)


def _with_scale(found: Encoded, scale: Ref, block: Sequence[int] | None) -> Encoded:
    """``found`` with the blocks that the scale's shape and the config tell."""
    count, stack = math.prod(scale.shape), found.stack
    stacks = found.rows // stack if stack else 1
    if count == 1:
        return found._replace(height=max(found.rows, 1), width=found.cols)
    rows, cols = _matrix(_squeezed(scale.shape, len(found.codes.shape)))
    if rows == 1 and len(scale.shape) == 1 and cols == found.rows:
        rows, cols = cols, 1
    per_stack = rows // stacks
    if per_stack == stack:
        height, width = 1, math.ceil(found.cols / cols)
    else:
        inferred = _power_of_two(stack, per_stack), _power_of_two(found.cols, cols)
        height, width = (int(size) for size in block) if block and len(block) == 2 else inferred
    if found.order is None and (per_stack * height < stack or cols * width < found.cols):
        message = f"{scale.name} {list(scale.shape)} does not cover {found.name} [{found.rows}, {found.cols}]"
        raise fail("decode.format", message, file=scale.file, tensor=scale.name)
    return found._replace(height=height, width=width, grid=(rows, cols))


def _squeezed(shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """A scale's shape without the ones that ModelOpt puts between the blocks: [R/128, 1, C/128, 1]."""
    return shape[::2] if len(shape) == 2 * rank and set(shape[1::2]) == {1} else shape


def _power_of_two(size: int, count: int) -> int:
    """The block length, a power of two, of which ``count`` cover ``size``: the only one that fits."""
    return 1 << (math.ceil(size / max(count, 1)) - 1).bit_length()


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    return math.prod(shape[:-1]), (shape[-1] if shape else 1)


# --- bytes -------------------------------------------------------------------------------------------------


def scale_rows(weight: Encoded, start: int, stop: int) -> tuple[int, int]:
    """The rows of the scale that rows [start, stop) of the weight need."""
    if weight.grid[0] == 1:
        return 0, 1
    return scale_row(weight, start), scale_row(weight, stop - 1) + 1


def scale_row(weight: Encoded, row: int) -> int:
    per_stack = weight.grid[0] * weight.stack // weight.rows
    return row // weight.stack * per_stack + row % weight.stack // weight.height


def spans(weight: Encoded, start: int, stop: int) -> dict[str, Span]:
    """The bytes that rows [start, stop) need, by role. ``start`` < ``stop``."""
    found = {"codes": _cut(weight.codes, start * weight.row_bytes, stop * weight.row_bytes)}
    if weight.scale is not None:
        size = weight.scale.nbytes // weight.grid[0]
        first, last = scale_rows(weight, start, stop)
        found["scale"] = _cut(weight.scale, first * size, last * size)
    if weight.zero is not None:
        found["zero"] = _cut(weight.zero, *_zero_bytes(weight, weight.zero, start, stop))
    for role in ("overall", "order"):
        ref = weight.parts.get(role)
        if ref is not None:
            found[role] = _cut(ref, 0, ref.nbytes)
    return found


def is_packed(zero: Ref) -> bool:
    """Zero points are packed like the codes, along the rows; those of a whole tensor are not."""
    return zero.dtype == "I32"


def _zero_bytes(weight: Encoded, zero: Ref, start: int, stop: int) -> tuple[int, int]:
    if not is_packed(zero):
        size = zero.nbytes // weight.grid[0]
        first, last = scale_rows(weight, start, stop)
        return first * size, last * size
    size = 4 * weight.grid[1]
    return start * weight.bits // 32 * size, -(-stop * weight.bits // 32) * size


def _cut(ref: Ref, start: int, stop: int) -> Span:
    return Span(ref.file, ref.start + start, ref.start + stop)
