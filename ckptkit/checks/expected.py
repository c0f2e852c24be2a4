"""What a declared scheme demands of a weight's tensors, and whether those on disk fit it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from .forms import AWQ, GPTQ, PACKED, Form, matrix, shown
from .weights import Weight

# The forms that hold a compressed-tensors format, and the kind of number in it.
_FORMATS = {
    "pack-quantized": "packed",
    "int-quantized": "int8",
    "float-quantized": "fp8",
    "nvfp4-pack-quantized": "nvfp4",
    "mxfp4-pack-quantized": "mxfp4",
    "mxfp8-quantized": "mxfp8",
}
_INTEGERS = frozenset({"packed", "int8"})
_BITS = {"fp8": 8, "mxfp8": 8, "nvfp4": 4, "mxfp4": 4}
_PARTS = {
    "packed": "weight_packed in I32",
    "int8": "weight in I8",
    "fp8": "weight in F8",
    "mxfp8": "weight in F8 with a scale in U8 for each 32 columns",
    "nvfp4": "codes in U8 with a scale in F8_E4M3 for each 16 columns",
    "mxfp4": "codes in U8 with a scale in U8 for each 32 columns",
    "fp4": "codes in I8 with a scale in F8_E8M0 for each 32 columns",
    "blocks": "_blocks and _scales",
    "gptq": "qweight packed along the inputs",
    "awq": "qweight packed along the outputs",
}
FORMAT, BITS = "config.quant-format", "config.quant-bits"


class Expected(NamedTuple):
    """A scheme as declared; None and an empty set: not said. ``zero``: whether there are zero points."""

    label: str
    forms: frozenset[str] = frozenset()
    bits: int | None = None
    strategy: str | None = None
    group: int | None = None
    block: tuple[int, int] | None = None
    zero: bool | None = None


class Disagreement(NamedTuple):
    """An id, and what is stored (a sentence's end)."""

    id: str
    text: str
    severity: str = "error"


def of_group(weights: Mapping[str, Any], format: Any, label: str) -> Expected:
    """The scheme of a compressed-tensors group, from the arguments of its weights and the name of its format."""
    size, block = weights.get("group_size"), weights.get("block_structure")
    size = size if type(size) is int and size > 0 else None
    strategy = weights.get("strategy")
    if not isinstance(strategy, str):
        strategy = "group" if size else "channel" if weights.get("group_size") == -1 else "tensor"
    bits = weights.get("num_bits", 8)
    return Expected(
        label=label,
        forms=_forms(weights, format if isinstance(format, str) else None),
        bits=bits if type(bits) is int and 0 < bits <= 8 else None,
        strategy=strategy.lower(),
        group=size,
        block=block_of(block),
        zero=not weights.get("symmetric", True),
    )


def block_of(value: Any) -> tuple[int, int] | None:
    """Rows and columns of a block, as lists or in words ("128x128"); None for anything else."""
    sizes = value.split("x") if isinstance(value, str) else value
    if not isinstance(sizes, list) or len(sizes) != 2:
        return None
    rows, columns = (int(size) if isinstance(size, str) and size.isdecimal() else size for size in sizes)
    return (rows, columns) if type(rows) is int and type(columns) is int and rows > 0 and columns > 0 else None


def _forms(weights: Mapping[str, Any], format: str | None) -> frozenset[str]:
    integers, bits = str(weights.get("type", "int")).lower() == "int", weights.get("num_bits", 8)
    if format == "naive-quantized":
        return frozenset({"int8"} if integers else {"fp8"})
    if format in _FORMATS and (_FORMATS[format] in _INTEGERS) == integers:
        return frozenset({_FORMATS[format]})
    if format not in (None, *_FORMATS, "mixed-precision", "dense", "fakequant"):  # formats of the past: not known here
        return frozenset()
    if integers:
        return _INTEGERS
    if bits == 8:
        return frozenset({"mxfp8"} if "uint8" in str(weights.get("scale_dtype")) else {"fp8"})
    return frozenset({"nvfp4" if weights.get("strategy") == "tensor_group" else "mxfp4"})


def disagreement(weight: Weight, form: Form | None, expected: Expected, inputs: int | None) -> Disagreement | None:
    """How the tensors of a quantized weight contradict the scheme; None where they fit it, or nothing can be told.

    ``inputs``: the dense weight's columns, where they are known: the width of codes packed into words does not show
    how many bits each has.
    """
    if expected.forms and (form is None or form.name not in expected.forms):
        wanted = " or ".join(_PARTS[name] for name in sorted(expected.forms))
        text = f"is stored as {_stored(weight)}, and {expected.label} needs {wanted}"
        return Disagreement(FORMAT, text)
    if form is None:
        return None
    if form is PACKED:
        fits = _packed_fits(weight, expected, inputs)
    elif form in (GPTQ, AWQ):
        fits = _gptq_fits(weight, form, expected, inputs)
    else:
        fits = _fixed_fits(form, expected) if form.group else _scale_fits(weight, form, expected)
        fits = fits and expected.bits in (None, _BITS.get(form.name, expected.bits))
    if not fits:
        return Disagreement(BITS, f"is stored as {_stored(weight)}, which is not {expected.label}")
    return _zero_points(weight, form, expected)


def _stored(weight: Weight) -> str:
    scale = weight.scale
    beside = f" with scales {list(scale.shape)}" if scale is not None else " without a scale"
    return f"{weight.part} {weight.ref.dtype} {list(weight.ref.shape)}{beside}"


def _fixed_fits(form: Form, expected: Expected) -> bool:
    """Whether the scheme is not said to share its scales in another way than the form has it."""
    return expected.group in (None, form.group) and expected.strategy in (None, "group", "tensor_group")


def _packed_fits(weight: Weight, expected: Expected, inputs: int | None) -> bool:
    bits, words, found = expected.bits, weight.ref.shape[-1], shown(weight, PACKED)
    if bits is None or found is None:
        return True
    if expected.strategy == "group" and expected.group:
        fits = found.strategy in ("group", "channel") and words == _words(found.columns * expected.group, bits)
    else:
        fits = found.strategy == expected.strategy or (found.columns == 1 and weight.ref.shape[-2] == 1)
    zero = weight.parts.get("weight_zero_point")
    if zero is not None and zero.shape[-2:-1] != (_words(weight.ref.shape[-2], bits),):
        return False
    return fits and (inputs is None or words == _words(inputs, bits))


def _words(values: int, bits: int) -> int:
    return -(-values * bits // 32)


def _gptq_fits(weight: Weight, form: Form, expected: Expected, inputs: int | None) -> bool:
    bits, scale, order = expected.bits, weight.scale, weight.parts.get("g_idx")
    dense = matrix(weight, form, bits) if bits else None
    if bits is None or scale is None or dense is None:
        return True
    outputs, columns = dense
    zeros = weight.parts.get("qzeros")
    known = {size for size in (inputs, *(order.shape[:1] if order is not None else ())) if size}
    groups = -(-columns // expected.group) if expected.group else 1
    return (
        not (known - {columns})
        and (form is GPTQ or not expected.group or columns % expected.group == 0)
        and (form is GPTQ or weight.ref.shape[1] == _words(outputs, bits))
        and (zeros is None or zeros.shape[-1] == _words(outputs, bits))
        and (expected.strategy is None or scale.shape[0] == groups)
    )


def _scale_fits(weight: Weight, form: Form, expected: Expected) -> bool:
    found, dense = shown(weight, form), matrix(weight, form)
    if found is None or dense is None or expected.strategy is None:
        return True
    rows, columns = dense
    if expected.block is not None:
        sizes = (_count(rows, expected.block[0]), _count(columns, expected.block[1]))
        halves = (2 * _count(rows // 2, expected.block[0]), sizes[1])
        return (found.rows, found.columns) in (sizes, halves) or (found.strategy == "tensor" and math.prod(sizes) == 1)
    if expected.strategy == "group" and expected.group:
        return found.rows == rows and found.columns == _count(columns, expected.group)
    return found.strategy == expected.strategy or rows == 1


def _count(size: int, block: int) -> int:
    return -(-size // block)


def _zero_points(weight: Weight, form: Form, expected: Expected) -> Disagreement | None:
    found = shown(weight, form)
    if found is None or expected.zero is None or form in (GPTQ, AWQ) or found.zero == expected.zero:
        return None
    if expected.zero:
        return Disagreement(BITS, f"has no zero points, and {expected.label} is asymmetric")
    return Disagreement(BITS, f"has zero points, which readers of {expected.label} do not look at", "warning")
