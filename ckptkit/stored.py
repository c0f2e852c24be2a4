"""How a module is quantized: what the tensors on disk show, and what a compressed-tensors config declares.

Both are said in the same words (``int4 group 128``, ``fp8 block 128x128``, ``nvfp4``), so that they can be compared by
eye. Tensor names by format: compressed-tensors (``weight_packed``, ``weight_scale``, …), DeepSeek (``weight_scale_inv``,
``scale``), ModelOpt (``weight_scale_2``), GPTQ and AWQ (``qweight``, ``qzeros``, ``scales``), gpt-oss (``*_blocks``,
``*_scales``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from .header import FLOATS

# The last part of a name: of the tensor that holds a module's weights, and of those that only say how to read it.
WEIGHTS = frozenset({"weight", "weight_packed", "qweight", "blocks"})
SCALES = ("weight_scale", "weight_scale_inv", "scale", "scales")
COMPANIONS = frozenset(
    {*SCALES, "weight_zero_point", "weight_global_scale", "weight_shape", "weight_g_idx", "weight_scale_2"}
    | {"input_scale", "input_global_scale", "qzeros", "g_idx"}
)
_FP8 = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})


class Tensor(Protocol):
    """What is looked at of a tensor."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class Stored(NamedTuple):
    """A weight's format in words, the parameters that one stored element holds, and whether a scale is missing."""

    label: str
    per_element: int
    quantized: bool
    lacks_scale: bool = False


def split_name(name: str) -> tuple[str, str]:
    """A tensor's name as (module, last part): ``("lm_head", "weight_packed")``, ``("…experts.up_proj", "blocks")``."""
    module, _, last = name.rpartition(".")
    for ending in ("blocks", "scales"):
        if last.endswith(f"_{ending}"):
            return f"{module}.{last.removesuffix(f'_{ending}')}", ending
    return module, last


def stored_format(last: str, weight: Tensor, companions: Mapping[str, Tensor], bits: int | None) -> Stored:
    """The format of a weight, named ``last``, with the companions beside it; ``bits`` is what the config declares."""
    scale = next((companions[name] for name in SCALES if name in companions), None)
    if last == "weight" and weight.dtype in FLOATS:
        return Stored(weight.dtype, 1, False)
    kind, per_element = _kind(last, weight, scale, companions, bits)
    if kind in {"nvfp4", "mxfp4"}:
        return Stored(kind, per_element, True, scale is None)
    unpack_rows = last == "qweight"  # GPTQ packs along the input dimension, which comes first there
    cells = "" if per_element == 0 or unpack_rows or scale is None else f" {_cells(weight.shape, per_element, scale.shape)}"
    return Stored(f"{kind}{cells}", max(per_element, 1), True, scale is None)


def _kind(
    last: str, weight: Tensor, scale: Tensor | None, companions: Mapping[str, Tensor], bits: int | None
) -> tuple[str, int]:
    """The numbers' kind, and how many are in one element (0: cannot be told)."""
    if last == "blocks" or (weight.dtype in {"U8", "I8"} and scale is not None and scale.dtype in {"F8_E8M0", "U8"}):
        return "mxfp4", 2
    if weight.dtype == "U8" and scale is not None and scale.dtype in _FP8:
        return "nvfp4", 2
    if weight.dtype in _FP8:
        return "fp8", 1
    if last == "qweight":
        return f"{'gptq' if 'g_idx' in companions else 'awq or gptq'} {bits or '?'}-bit", 32 // bits if bits else 0
    if last == "weight_packed":
        return (f"int{bits}", 32 // bits) if bits else ("packed int", 0)
    return weight.dtype, 1


def _cells(weight: Sequence[int], per_element: int, scale: Sequence[int]) -> str:
    """Which part of a weight shares one scale, told by the two shapes."""
    if math.prod(scale) == 1:
        return "tensor"
    rows, columns = (weight[-2], weight[-1] * per_element) if len(weight) > 1 else (1, weight[-1] * per_element)
    scale_rows, scale_columns = (scale[-2], scale[-1]) if len(scale) > 1 else (scale[-1], 1)
    if scale_rows == rows:
        return "channel" if scale_columns == 1 else f"group {columns // scale_columns}"
    return f"block {_block(rows, scale_rows)}x{_block(columns, scale_columns)}"


def _block(size: int, count: int) -> int:
    """The block length, a power of two, that ``count`` blocks cover ``size`` with; the last may be cut short."""
    return 1 << (math.ceil(size / max(count, 1)) - 1).bit_length()


# --- what a config declares --------------------------------------------------------------------------------


def declared_label(weights: Mapping[str, Any]) -> str:
    """The ``weights`` of a compressed-tensors group in words."""
    bits, strategy = weights.get("num_bits"), weights.get("strategy")
    if weights.get("type") == "float" and bits == 4:
        return "nvfp4" if strategy == "tensor_group" else "mxfp4"
    kind = f"fp{bits}" if weights.get("type") == "float" else f"int{bits}"
    block = weights.get("block_structure")
    size = "x".join(map(str, block)) if strategy == "block" and isinstance(block, list) else weights.get("group_size")
    cells = f"{strategy} {size}" if strategy in {"group", "block"} and size else f"{strategy}"
    return f"{kind} {cells}" + ("" if weights.get("symmetric", True) else " asymmetric")
