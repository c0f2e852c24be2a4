"""How a weight is stored, told from headers and from what the config declares."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from ..errors import UserError, fail
from ..files.header import DTYPE_BITS, FLOATS
from ..plan import Ref
from ..stored import FP4, NF4, SCALES, WEIGHTS
from .layout import Coding, Encoded, dense, matrix, zero_is_packed_along_rows

_FP8 = frozenset({"F8_E4M3", "F8_E5M2"})
_EXPONENTS = frozenset({"U8", "F8_E8M0"})
_FOREIGN = frozenset({NF4, FP4, "absmax", "SCB"})
_GPTQ_BITS = (2, 3, 4, 8)
_E2M1 = frozenset({Coding.FP4, Coding.CODES})
_ONE_OF = "one of these is looked for: {}"
_INDICES = frozenset({"I32", "I64"})
_ZEROS = FLOATS | _FP8 | {"I8"}  # of zero points that are not packed
_STACKS = frozenset({"blocks", "codes"})  # of gpt-oss: the codes of 32 columns are a dimension of their own


def encoded(
    last: str,
    parts: Mapping[str, Ref],
    bits: int | None = None,
    block: Sequence[int] | None = None,
    cols: int = 0,
    gptq: Literal["v1", "v2"] | None = None,
    unscaled: bool = False,
) -> Encoded:
    """How the weight ``parts[last]`` is stored; ``parts`` are the tensors of its module by the last part of their names.

    ``bits`` and ``block`` are what the config declares of a weight packed into words, and of blocks [out, in] (of
    groups: [1, size]); without ``block`` the least power of two that fits is taken. ``cols`` is the number of columns
    where it is known (``weight_shape``): the last word of a row need not be full. ``gptq`` is needed for GPTQ alone: v1
    stores zero points less one (AutoGPTQ; ``checkpoint_format`` "gptq"), v2 as they are ("gptq_v2"; auto-round's own
    packing). ``unscaled``: FP8 without a scale is as it is. Raises UserError: ``names.weight-without-scale``,
    ``decode.format``.
    """
    weight = parts[last]
    if last in WEIGHTS and weight.dtype in FLOATS:
        return dense(weight)
    if not _FOREIGN.isdisjoint(parts):
        raise _unknown(weight, "bitsandbytes weights are not decoded")
    scale = next((parts[name] for name in SCALES if name in parts), None)
    coding, width = _coding(last, weight, scale, bits)
    if scale is None:
        return _unscaled(weight, coding, unscaled)
    _check_dtype(weight, coding, scale)
    if last == "qweight":
        return _words_of_gptq(weight, scale, parts, width, block, gptq)
    if last in _STACKS:  # of a row one after the other
        weight = weight._replace(shape=(*weight.shape[:-2], math.prod(weight.shape[-2:])))
    shape = weight.shape
    rows, stored = matrix(shape)
    found = Encoded(
        coding, width, rows, cols or stored * DTYPE_BITS[weight.dtype] // width, weight, scale,
        zero=parts.get("weight_zero_point"), overall=_overall(weight, scale, parts), order=parts.get("weight_g_idx"),
        divides="weight_global_scale" in parts, stack=shape[-2] if len(shape) > 1 else rows,
        transposed=last in _STACKS,
    )  # fmt: skip
    return _checked(_with_blocks(found, scale, shape[:-2], block))


def _unscaled(weight: Ref, coding: Coding, is_meant: bool) -> Encoded:
    """FP8 as it is, where that is meant; nothing else means anything without a scale."""
    if coding is not Coding.FP8 or not is_meant:
        raise _without_scale(
            weight, f"{weight.dtype} and has no scale beside it", _ONE_OF.format(", ".join(SCALES[:4]))
        )
    return dense(weight)._replace(coding=coding, stack=math.prod(weight.shape[-2:-1]), height=1, width=weight.shape[-1])


def _coding(last: str, weight: Ref, scale: Ref | None, bits: int | None) -> tuple[Coding, int]:
    """What the numbers are, and their bits; those of a ``qweight`` are in words, of which kind the scales will tell."""
    if last in {"weight_codes", "codes"} and weight.dtype == "U8":
        return Coding.CODES, 8
    if weight.dtype in _FP8:
        return Coding.FP8, 8
    two_in_a_byte = scale is not None and scale.dtype in _EXPONENTS | _FP8
    if weight.dtype in {"F4", "U8"} or (weight.dtype == "I8" and (two_in_a_byte or last == "blocks")):
        return Coding.FP4, 4
    if weight.dtype == "I8":
        return Coding.INT8, 8
    if weight.dtype == "I32" and last in {"weight_packed", "qweight"}:
        known = range(1, 9) if last == "weight_packed" else _GPTQ_BITS
        if bits is None or bits not in known:
            said = "does not say how many bits its numbers have" if bits is None else f"gives its numbers {bits} bits"
            raise _unknown(weight, f"config.json {said}")
        return Coding.WORDS, bits
    raise _unknown(weight, f"{weight.dtype} is not a known form of a weight")


def _check_dtype(weight: Ref, coding: Coding, scale: Ref) -> None:
    """Raise ``decode.format`` for a scale that is no scale of such numbers: an integer, E4M3 for another format's."""
    known = FLOATS | (_EXPONENTS if coding is Coding.FP8 else frozenset())
    known = _EXPONENTS | _FP8 if coding in _E2M1 else known
    if scale.dtype not in known:
        raise _unknown(weight, f"{scale.name} is {scale.dtype}; scales of such {weight.dtype} are {_listed(known)}")


def _overall(weight: Ref, scale: Ref, parts: Mapping[str, Ref]) -> Ref | None:
    """The scale of the scales, without which those of NVFP4 mean nothing."""
    found = parts.get("weight_global_scale") or parts.get("weight_scale_2")
    if found is None and scale.dtype in _FP8:
        raise _without_scale(
            weight, "NVFP4 and has no scale for its scales", _ONE_OF.format("weight_global_scale, weight_scale_2")
        )
    return found


# --- blocks ------------------------------------------------------------------------------------------------


def _with_blocks(found: Encoded, scale: Ref, lead: tuple[int, ...], block: Sequence[int] | None) -> Encoded:
    """``found`` with the blocks that the scale's shape and the config tell. ``lead``: the dimensions of the stack."""
    if not found.rows or not found.cols:
        return found._replace(height=1, width=1)
    if math.prod(scale.shape) == 1 and found.coding not in _E2M1:
        return found._replace(height=max(found.rows, 1), width=found.cols)
    shape = _squeezed(scale.shape, len(lead) + 2)
    if shape in (lead, (*lead, 1)):
        shape = (*lead, 1, 1)
    elif shape == (*lead, found.stack):
        shape = (*shape, 1)
    fits = len(shape) == len(lead) + 2 and shape[:-2] == lead
    size = _block_size(found, scale, shape[-2:], block) if fits else None
    if size is None:
        raise _misfit(scale, found, f"; config.json declares blocks of {block[0]} x {block[1]}" if block else "")
    height, width, inferred = size
    return found._replace(height=height, width=width, inferred=inferred, grid=matrix(shape))


def _block_size(
    found: Encoded, scale: Ref, counts: tuple[int, ...], block: Sequence[int] | None
) -> tuple[int, int, bool] | None:
    """Height and width of a block, and whether they were inferred; ``counts`` blocks cover a matrix. None: none do."""
    sizes = (found.stack, found.cols)
    by_row = counts[0] == sizes[0]
    fixed = _fixed_group(found.coding, scale.dtype)
    if 0 in counts:
        return None
    if fixed and (by_row or found.coding in _E2M1):
        return (1, fixed, False) if by_row and counts[1] * fixed == sizes[1] else None
    if block and _counts(sizes, block) == counts:
        return block[0], block[1], False
    if by_row and (found.order is not None or sizes[1] % counts[1] == 0):
        return 1, _ceil(sizes[1], counts[1]), False
    if counts == (1, 1):
        return *sizes, False
    height, width = map(_power_of_two, sizes, counts)
    is_open = any(1 < count < size for count, size in zip(counts, sizes, strict=True))
    return (height, width, is_open) if block is None and _counts(sizes, (height, width)) == counts else None


def _fixed_group(coding: Coding, scale: str) -> int | None:
    """Columns of a row that share a scale, where the format fixes them: 16 in NVFP4, 32 in MX."""
    if coding in _E2M1 and scale in _FP8:
        return 16
    return 32 if scale == "U8" or (coding in _E2M1 and scale in _EXPONENTS) else None


def _counts(sizes: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    """How many blocks cover a matrix, those at its edges cut short."""
    return tuple(map(_ceil, sizes, block))


def _checked(found: Encoded) -> Encoded:
    """``found``, if scale of scales, zero points and order fit it."""
    if not found.rows or not found.cols:
        return found
    _check_kinds(found)
    if found.overall is not None and math.prod(found.overall.shape) not in {1, found.rows // max(found.stack, 1)}:
        raise _unknown(found.overall, "a scale of scales has one number, or one for each matrix of a stack")
    if found.zero is not None and not _zero_fits(found, found.zero):
        raise _misfit(found.zero, found)
    if found.order is not None and found.order.shape != (found.cols,):
        raise _misfit(found.order, found)
    return found


def _check_kinds(found: Encoded) -> None:
    """Raise ``decode.format`` for companions of a dtype that such a thing does not have."""
    packed = zero_is_packed_along_rows(found)
    for ref, known in ((found.overall, FLOATS), (found.order, _INDICES), (None if packed else found.zero, _ZEROS)):
        if ref is not None and ref.dtype not in known:
            raise _unknown(found.codes, f"{ref.name} is {ref.dtype}, and not {_listed(known)}")


def _zero_fits(found: Encoded, zero: Ref) -> bool:
    """Whether there is one for each scale; those packed along the rows begin a word in each matrix of a stack."""
    if not zero_is_packed_along_rows(found):
        return math.prod(zero.shape) == math.prod(found.grid)
    whole = found.stack == found.rows or found.stack * found.bits % 32 == 0
    words = _ceil(found.rows * found.bits, 32)
    return whole and found.height == 1 and matrix(zero.shape) == (words, found.grid[1])


def _squeezed(shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """A scale's shape without the ones that ModelOpt puts between the blocks: [R/128, 1, C/128, 1]."""
    return shape[::2] if len(shape) == 2 * rank and set(shape[1::2]) == {1} else shape


def _power_of_two(size: int, count: int) -> int:
    """The least power of two of which ``count`` cover ``size``, if any power does."""
    return 1 << (_ceil(size, count) - 1).bit_length()


def _ceil(size: int, by: int) -> int:
    return -(-size // by)


# --- GPTQ and AWQ ------------------------------------------------------------------------------------------


def _words_of_gptq(
    weight: Ref, scale: Ref, parts: Mapping[str, Ref], bits: int, block: Sequence[int] | None, gptq: str | None
) -> Encoded:
    """GPTQ packs along the inputs, the rows: ``qweight`` [K bits/32, N]; AWQ along the outputs: [K, N bits/32].

    Scales are [groups, N], zero points [groups, N bits/32] in both.
    """
    zero, order = parts.get("qzeros"), parts.get("g_idx")
    if len(weight.shape) != 2 or len(scale.shape) != 2 or zero is None:
        raise _unknown(weight, "it has no qzeros, or is no matrix")
    if zero.dtype != "I32":
        raise _unknown(weight, f"{zero.name} is {zero.dtype}, and zero points are packed into I32")
    (groups, cols), words = scale.shape, weight.shape
    if cols == words[1]:
        coding, rows = Coding.GPTQ, words[0] * 32 // bits
        fits = rows * bits == 32 * words[0]
    else:
        coding, rows, order = Coding.AWQ, words[0], None
        fits = bits == 4 and cols == 8 * words[1]
    if not fits or zero.shape != (groups, _ceil(cols * bits, 32)) or not rows or not groups:
        shapes = f"scales {list(scale.shape)} and qzeros {list(zero.shape)}"
        raise _unknown(weight, f"{shapes} do not fit {list(words)} with {bits} bits, as GPTQ and AWQ's GEMM store them")
    if coding is Coding.GPTQ and gptq is None:
        raise _unknown(weight, "config.json does not say whether its zero points are stored less one")
    if order is not None and (order.shape != (rows,) or order.dtype not in _INDICES):
        raise _unknown(weight, f"{order.name} is {order.dtype} {list(order.shape)}: a group for each of {rows} inputs")
    declared = block is not None and _ceil(rows, block[1]) == groups
    divides = rows % groups == 0
    height = block[1] if block and declared else rows // groups if divides else _power_of_two(rows, groups)
    if order is None and _ceil(rows, height) != groups:
        raise _unknown(weight, f"its {groups} groups do not cover {rows} inputs")
    return Encoded(
        coding, bits, rows, cols, weight, scale, zero=zero, order=order, stack=rows, height=height, width=1,
        grid=(groups, cols), inferred=not (order or declared or divides),
        zero_bias=int(coding is Coding.GPTQ and gptq == "v1"), transposed=True,
    )  # fmt: skip


def _misfit(ref: Ref, weight: Encoded, more: str = "") -> UserError:
    unpacked = [*weight.codes.shape[:-1], weight.cols]
    message = f"{ref.name} {list(ref.shape)} does not fit {weight.name}, which holds {unpacked}{more}"
    return fail("decode.format", message, file=ref.file, tensor=ref.name)


def _listed(dtypes: Iterable[str]) -> str:
    return ", ".join(sorted(dtypes))


def _unknown(weight: Ref, why: str) -> UserError:
    return fail("decode.format", f"{weight.name} cannot be decoded: {why}", file=weight.file, tensor=weight.name)


def _without_scale(weight: Ref, what: str, hint: str) -> UserError:
    message = f"{weight.name} is {what}"
    return fail("names.weight-without-scale", message, file=weight.file, tensor=weight.name, hint=hint)
