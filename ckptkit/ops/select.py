"""Which operation makes the tensors of a scheme. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import fail

# The fields of compressed-tensors' QuantizationArgs that decide the bytes made, and what they are when left out.
_FIELDS: dict[str, Any] = {
    "num_bits": 8, "type": "int", "symmetric": True, "strategy": None, "group_size": None, "block_structure": None,
    "scale_dtype": None, "zp_dtype": None,
}  # fmt: skip
_SOURCES = ("BF16", "F16", "F32", "F64")


def select(
    scheme_weights: Mapping[str, Any], format: str, source_dtype: str, arithmetic: str
) -> tuple[str, dict[str, Any]]:
    """The operation that quantizes weights of ``source_dtype`` by a scheme, and the arguments it has for that scheme.

    ``scheme_weights`` is a JSON-able mapping of QuantizationArgs' fields, the strategy given; ``format`` the
    compressed-tensors format. ``arithmetic`` is ``compat`` or ``float32``, the latter for integer schemes.
    Raises UserError (``recipe.scheme``) for a dtype that cannot be quantized.
    """
    if source_dtype not in _SOURCES:
        message = f"weights of dtype {source_dtype} cannot be quantized: {', '.join(_SOURCES)} can"
        raise fail("recipe.scheme", message, hint="ignore these modules, or convert them to BF16 first")
    q = {name: scheme_weights.get(name, default) for name, default in _FIELDS.items()}
    id = (source_dtype != "F64" and _native(q, format)) or "ct_generic@1"
    if q["strategy"] == "channel":
        q["group_size"] = None  # -1 says the same
    if q["symmetric"]:
        q["zp_dtype"] = None
    elif q["zp_dtype"] is None:
        q["zp_dtype"] = "torch.int8" if q["type"] == "int" else "torch.float8_e4m3fn"
    args = {"format": format, "weights": {name: value for name, value in q.items() if value is not None}}
    if arithmetic == "float32" and q["type"] == "int":
        args["arithmetic"] = arithmetic
    return id, args


def _native(q: Mapping[str, Any], format: str) -> str | None:
    """The operation whose kernel is the project's own, if there is one for the scheme."""
    kind = (q["type"], q["num_bits"], q["strategy"], q["scale_dtype"], format)
    if not q["symmetric"]:
        return None
    match kind:
        case ("int", 4 | 8, "channel" | "group", None, "pack-quantized"):
            return "pack_int@1"
        case ("int", _, "channel" | "group", None, "int-quantized" | "naive-quantized"):
            return "int8@1"
        case ("float", 8, "channel", None, "float-quantized" | "naive-quantized"):
            return "fp8_channel@1"
        case ("float", 8, "block", None, "float-quantized" | "naive-quantized"):
            return "fp8_block@1"
        case ("float", 8, "group", "torch.uint8", "mxfp8-quantized"):
            return "mxfp8@1"
        case ("float", 4, "tensor_group", "torch.float8_e4m3fn", "nvfp4-pack-quantized"):
            return "nvfp4@1"
        case ("float", 4, "group", "torch.uint8", "mxfp4-pack-quantized"):
            return "mxfp4@1"
    return None
