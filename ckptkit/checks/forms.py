"""The forms in which quantized weights lie on disk, told by names and dtypes, and what their parts' shapes must be.

=============  =========================================  =======================================  ===================
form           weight [R, C]                              scale                                    written by
=============  =========================================  =======================================  ===================
packed         weight_packed I32 [R, C·bits/32]           weight_scale [R, C/group], [R, 1], [1]   compressed-tensors
int8           weight I8 [R, C]                           weight_scale, as above                   compressed-tensors
fp8            weight F8 [R, C]                           weight_scale, weight_scale_inv, scale:   compressed-tensors,
                                                          [1], [R, 1] or one a block, cut at edges DeepSeek, ModelOpt
mxfp8          weight F8 [R, C]                           weight_scale U8, F8_E8M0 [R, C/32]       compressed-tensors
nvfp4          weight_packed, weight U8 [R, C/2]          weight_scale F8_E4M3 [R, C/16], and F32  compressed-tensors,
                                                          weight_global_scale or weight_scale_2    ModelOpt
mxfp4          weight_packed, weight U8 [R, C/2]          weight_scale U8, F8_E8M0 [R, C/32]       compressed-tensors
fp4            weight I8 [R, C/2]                         scale F8_E8M0 [R, C/32]                  DeepSeek-V4
blocks         _blocks U8 [E, R, C/32, 16]                _scales U8 [E, R, C/32]                  gpt-oss
gptq           qweight I32 [C·bits/32, R]                 scales [groups, R]                       GPTQModel
awq            qweight I32 [C, R·bits/32]                 scales [groups, R]                       AutoAWQ (GEMM)
=============  =========================================  =======================================  ===================

Experts may be stacked: all shapes then begin with the number of experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..files.header import FLOATS
from ..plan import Ref
from ..stored import FP4, NF4
from .weights import FP8, Weight

E8M0 = frozenset({"U8", "F8_E8M0"})
_BITSANDBYTES = frozenset({NF4, FP4, "quant_map", "absmax", "SCB"})
_GPTQ_BITS = (2, 3, 4, 8)


class Form(NamedTuple):
    """One of the forms above.

    ``codes`` and ``scales``: dtypes of weight and scale. ``per_element``: values in an element of the weight, where
    the form fixes it. ``group``: columns that share a scale, where the form fixes it. ``second``: names of the scale
    of the scales, of which there must be one.
    """

    name: str
    codes: frozenset[str]
    scales: frozenset[str]
    per_element: int | None = 1
    group: int | None = None
    second: frozenset[str] = frozenset()


_I32, _U8, _I8 = frozenset({"I32"}), frozenset({"U8"}), frozenset({"I8"})
_GLOBAL = frozenset({"weight_global_scale", "weight_scale_2"})

PACKED = Form("packed", _I32, FLOATS, None)
INT8 = Form("int8", _I8, FLOATS)
FP8_FORM = Form("fp8", FP8, FLOATS | {"F8_E8M0"})
MXFP8 = Form("mxfp8", FP8, E8M0, 1, 32)
NVFP4 = Form("nvfp4", _U8 | {"F4"}, frozenset({"F8_E4M3"}), 2, 16, _GLOBAL)
MXFP4 = Form("mxfp4", _U8 | {"F4"}, E8M0, 2, 32)
DEEPSEEK_FP4 = Form("fp4", _I8, E8M0, 2, 32)
NVFP4_CODES = NVFP4._replace(name="nvfp4 codes", per_element=1)
MXFP4_CODES = MXFP4._replace(name="mxfp4 codes", per_element=1)
BLOCKS = Form("blocks", _U8, E8M0, 2, 32)
GPTQ = Form("gptq", _I32, FLOATS, None)
AWQ = Form("awq", _I32, FLOATS, None)


def form_of(weight: Weight) -> Form | None:
    """The form of a weight; None for a dense one and for formats that are not known here."""
    if not weight.quantized or weight.parts.keys() & _BITSANDBYTES or weight.part == "codes":
        return None
    if weight.part == "weight_codes":
        return NVFP4_CODES if weight.scale is not None and weight.scale.dtype == "F8_E4M3" else MXFP4_CODES
    dtype, scale = weight.ref.dtype, weight.scale
    scale_dtype = scale.dtype if scale is not None else ""
    if weight.part == "blocks":
        return BLOCKS
    if weight.part == "qweight":
        return _by_orientation(weight.ref.shape, scale.shape if scale is not None else ())
    if weight.part == "weight_packed" and (dtype == "I32" or "weight_shape" in weight.parts):
        return PACKED
    if dtype in FP8:
        return MXFP8 if scale is not None and _is_mxfp8(weight.ref, scale) else FP8_FORM
    if dtype == "I8" and weight.part == "weight":
        return DEEPSEEK_FP4 if scale_dtype == "F8_E8M0" else INT8
    if weight.parts.keys() & _GLOBAL or scale_dtype == "F8_E4M3":
        return NVFP4
    return MXFP4 if weight.part == "weight_packed" or scale_dtype in E8M0 else None


def _by_orientation(weight: Sequence[int], scales: Sequence[int]) -> Form | None:
    """GPTQ packs along the inputs, AWQ along the outputs; AWQ's older GEMV layout, [R, C/8], is not known here."""
    if len(weight) != 2 or len(scales) != 2 or scales[0] == weight[0]:
        return None
    return AWQ if scales[1] in (weight[1] * 8, weight[1] * 4) else GPTQ


def _is_mxfp8(weight: Ref, scale: Ref) -> bool:
    """A scale for each 32 columns of every row; in DeepSeek-V4's FP8 the same dtype scales blocks of 128 x 128."""
    if scale.dtype not in E8M0:
        return False
    return scale.dtype == "U8" or _spread(scale.shape, 32) == weight.shape


def _spread(scale: tuple[int, ...], group: int) -> tuple[int, ...]:
    """The shape of what ``scale`` scales, if one number is for ``group`` columns."""
    return (*scale[:-1], *(size * group for size in scale[-1:]))


# --- what the shapes say -----------------------------------------------------------------------------------


class Shown(NamedTuple):
    """How scales are shared, as the shapes show it.

    ``strategy``: ``tensor``, ``channel``, ``group`` or ``block``. ``rows`` and ``columns``: of the scale. ``zero``:
    whether zero points are stored.
    """

    strategy: str
    rows: int
    columns: int
    zero: bool


def shown(weight: Weight, form: Form) -> Shown | None:
    """How the scales of a weight are shared; None without a scale that could belong to it."""
    scale, shape = weight.scale, weight.ref.shape
    if scale is None or len(shape) < 2:
        return None
    zero = "weight_zero_point" in weight.parts or "qzeros" in weight.parts
    if form in (GPTQ, AWQ):
        groups, outputs = scale.shape
        return Shown("channel" if groups == 1 else "group", outputs, groups, zero)
    lead, sizes = shape[:-2], _squeezed(scale.shape, len(shape))
    sizes = sizes[len(lead) :] if sizes[: len(lead)] == lead else sizes
    rows = shape[-3] if form is BLOCKS else shape[-2]
    if math.prod(sizes) == 1 and rows > 1:
        return Shown("tensor", 1, 1, zero)
    scaled, columns = (*sizes, 1, 1)[:2] if len(sizes) < 3 else (0, 0)
    if scaled != rows:
        return Shown("block", scaled, columns, zero)
    return Shown("channel" if columns == 1 else "group", scaled, columns, zero)


def _squeezed(shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """A scale's shape without the ones that ModelOpt puts between the blocks: [R/128, 1, C/128, 1]."""
    return shape[::2] if len(shape) == 2 * rank and set(shape[1::2]) == {1} else shape


def matrix(weight: Weight, form: Form | None, bits: int | None = None) -> tuple[int, int] | None:
    """The dense weight's rows and columns, as far as the form, or ``bits`` for those that leave it open, tell them."""
    shape = weight.ref.shape
    if len(shape) < 2:
        return None
    if form in (GPTQ, AWQ):
        scale = weight.scale
        if scale is None:
            return None
        inputs = shape[0] * 32 // bits if bits and form is GPTQ else shape[0]
        return (scale.shape[1], inputs) if bits or form is AWQ else None
    if form is BLOCKS:
        return (shape[-3], shape[-2] * 32) if len(shape) > 2 else None
    if form is PACKED:
        return (shape[-2], shape[-1] * 32 // bits) if bits else None
    per_element = 1 if form is None or weight.ref.dtype == "F4" else form.per_element or 1
    return shape[-2], shape[-1] * per_element


def outputs(weight: Weight, form: Form | None) -> int | None:
    """The dense weight's rows; other than its columns, they show whatever the number of bits."""
    if form in (GPTQ, AWQ):
        return weight.scale.shape[1] if weight.scale is not None else None
    dense = matrix(weight, form, 8)
    return dense[0] if dense else None


# --- faults of shape ---------------------------------------------------------------------------------------


class Misfit(NamedTuple):
    """A part that does not fit its weight: which, its tensor, and what is wrong (a sentence's end)."""

    id: str
    ref: Ref
    text: str


def misfits(weight: Weight, form: Form) -> Iterator[Misfit]:
    """Parts of a quantized weight whose dtype or shape cannot belong to it."""
    yield from _dtypes(weight, form)
    if len(weight.ref.shape) < 2:
        yield Misfit("shapes.packed", weight.ref, f"is {_spec(weight.ref)}, which is no matrix")
    elif form in (GPTQ, AWQ):
        yield from _gptq(weight, form)
    elif form is BLOCKS:
        yield from _blocks(weight)
    else:
        yield from _scales(weight, form)
        yield from _companions(weight, form)


def _dtypes(weight: Weight, form: Form) -> Iterator[Misfit]:
    expected = {
        weight.part: form.codes,
        "weight_shape": frozenset({"I64", "I32"}),
        "weight_global_scale": frozenset({"F32"}),
        "weight_scale_2": frozenset({"F32"}),
        "qzeros": _I32,
        "g_idx": frozenset({"I32", "I64"}),
        "weight_g_idx": frozenset({"I32", "I64"}),
    }
    if form is PACKED:
        expected["weight_zero_point"] = _I32
    for part, ref in ((weight.part, weight.ref), *weight.parts.items()):
        dtypes = form.scales if ref == weight.scale else expected.get(part)
        if dtypes is not None and ref.dtype not in dtypes:
            wanted = " or ".join(sorted(dtypes))
            yield Misfit("shapes.dtype", ref, f"has {part} {_spec(ref)}; in {form.name} weights it is {wanted}")


def _scales(weight: Weight, form: Form) -> Iterator[Misfit]:
    scale, shape = weight.scale, weight.ref.shape
    if scale is None or math.prod(scale.shape) == 1:
        wrong = scale is not None and form.group is not None and math.prod(shape) * (form.per_element or 1) > form.group
    elif form.group is not None:
        columns = shape[-1] * (1 if weight.ref.dtype == "F4" else form.per_element or 1)
        wrong = _spread(scale.shape, form.group) != (*shape[:-1], columns)
    else:
        wrong = not _shares(shape, _squeezed(scale.shape, len(shape)), form)
    if wrong and scale is not None:
        text = f"is {_spec(weight.ref)} and its scale {list(scale.shape)}: not one for each {_unit(form)}"
        yield Misfit("shapes.scale", scale, text)


def _unit(form: Form) -> str:
    return f"{form.group} columns" if form.group else "tensor, row, group of columns or block"


def _shares(weight: tuple[int, ...], scale: tuple[int, ...], form: Form) -> bool:
    """Whether ``scale`` can be one a tensor, row, group or block of ``weight``; both may begin with experts."""
    lead, (rows, columns) = weight[:-2], weight[-2:]
    if scale[: len(lead)] != lead:
        return False
    sizes = scale[len(lead) :]
    if len(sizes) != 2:
        return sizes in ((), (1,), (rows,))
    if sizes[0] == rows or sizes == (1, 1):
        width = columns * 32 if form is PACKED else columns
        return sizes[1] > 0 and width % sizes[1] == 0
    if form is PACKED or not _covers(columns, sizes[1]):
        return False
    halves = rows % 2 == 0 and sizes[0] % 2 == 0  # gate and up in one, each with a block cut short
    return _covers(rows, sizes[0]) or (halves and _covers(rows // 2, sizes[0] // 2))


def _covers(size: int, count: int) -> bool:
    """Whether ``count`` blocks of a power of two cover ``size``, the last of them cut short perhaps."""
    if not 0 < count <= size:
        return False
    block = 1 << (-(-size // count) - 1).bit_length()
    return -(-size // block) == count


def _companions(weight: Weight, form: Form) -> Iterator[Misfit]:
    """Zero points, the scale of the scales, and the shape that compressed-tensors keeps beside packed codes."""
    parts, shape, scale = weight.parts, weight.ref.shape, weight.scale
    kept = parts.get("weight_shape")
    if kept is not None and kept.shape != (len(shape),):
        text = f"has a weight_shape of shape {list(kept.shape)}; it holds {len(shape)} sizes"
        yield Misfit("shapes.weight-shape", kept, text)
    elif kept is None and form is PACKED:
        yield Misfit("shapes.weight-shape", weight.ref, f"is {_spec(weight.ref)} and has no weight_shape beside it")
    zero = parts.get("weight_zero_point")
    if zero is not None and scale is not None and not _zero_fits(zero, shape, scale.shape, form):
        text = f"has zero points {list(zero.shape)} for scales {list(scale.shape)}"
        yield Misfit("shapes.zero-point", zero, text)
    for part in sorted(_GLOBAL & parts.keys()):
        if parts[part].shape not in ((), (1,), shape[:-2]):
            text = f"has {part} {list(parts[part].shape)}; it is a single number"
            yield Misfit("shapes.scale", parts[part], text)
    if form.second and not form.second & parts.keys():
        yield Misfit("shapes.scale", weight.ref, f"has no {' or '.join(sorted(form.second))}, which scales its scales")


def _zero_fits(zero: Ref, weight: tuple[int, ...], scale: tuple[int, ...], form: Form) -> bool:
    if form is not PACKED:
        return zero.shape == scale
    rows = weight[-2]
    packed = {-(-rows * bits // 32) for bits in range(1, 9)}
    return len(zero.shape) == len(weight) and zero.shape[-1:] == scale[-1:] and zero.shape[-2] in packed


def _gptq(weight: Weight, form: Form) -> Iterator[Misfit]:
    scales, zeros, order = weight.scale, weight.parts.get("qzeros"), weight.parts.get("g_idx")
    if scales is None:
        return
    groups, outputs = scales.shape
    words = weight.ref.shape[0 if form is GPTQ else 1]
    if form is GPTQ and outputs != weight.ref.shape[1]:
        text = f"is {_spec(weight.ref)} and its scales {list(scales.shape)}: not one for each output"
        yield Misfit("shapes.scale", scales, text)
    if zeros is not None:
        packed = {-(-outputs * bits // 32) for bits in _GPTQ_BITS} if form is GPTQ else {words}
        if len(zeros.shape) != 2 or zeros.shape[0] != groups or zeros.shape[1] not in packed:
            text = f"has qzeros {list(zeros.shape)} for scales {list(scales.shape)}"
            yield Misfit("shapes.zero-point", zeros, text)
    inputs = {words * 32 // bits for bits in _GPTQ_BITS} if form is GPTQ else {weight.ref.shape[0]}
    if order is not None and not (len(order.shape) == 1 and order.shape[0] in inputs):
        text = f"is {_spec(weight.ref)} and its g_idx {list(order.shape)}: not one for each input"
        yield Misfit("shapes.packed", order, text)
    inputs = set(order.shape) if order is not None and order.shape and order.shape[0] in inputs else inputs
    if not any(groups and -(-size // -(-size // groups)) == groups for size in inputs if size):
        text = f"is {_spec(weight.ref)} and its scales {list(scales.shape)}: not one for each group of inputs"
        yield Misfit("shapes.scale", scales, text)


def _blocks(weight: Weight) -> Iterator[Misfit]:
    shape, scale = weight.ref.shape, weight.scale
    if len(shape) < 3 or shape[-1] != 16:
        yield Misfit(
            "shapes.packed", weight.ref, f"is {_spec(weight.ref)}; blocks are 16 bytes, [experts, rows, blocks, 16]"
        )
    elif scale is not None and scale.shape != shape[:-1]:
        text = f"has blocks {list(shape)} and scales {list(scale.shape)}: not one for each block"
        yield Misfit("shapes.scale", scale, text)


def _spec(ref: Ref) -> str:
    return f"{ref.dtype} {list(ref.shape)}"
