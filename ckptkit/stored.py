"""How modules are quantized: what the tensors on disk show, and what a config declares.

Both are said in the same words (``int4 group 128``, ``fp8 block 128x128``, ``nvfp4``), so that they can be compared by
eye. Names of tensors by format: compressed-tensors (``weight_packed``, ``weight_scale``, …), DeepSeek
(``weight_scale_inv``, ``scale``), ModelOpt (``weight_scale_2``), GPTQ and AWQ (``qweight``, ``qzeros``, ``scales``),
gpt-oss (``*_blocks``, ``*_scales``), bitsandbytes (``weight.absmax``, ``SCB``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from .consumers import Declared, declared
from .errors import Finding
from .files.header import FLOATS
from .naming.regexes import compiled

# The last part of a name: of the tensor that holds a module's weights, and of those that only say how to read it.
WEIGHTS = frozenset({"weight", "weight_packed", "qweight", "blocks", "codes", "weight_codes"})
SCALES = ("weight_scale", "weight_scale_inv", "scale", "scales", "absmax", "SCB")
NF4, FP4 = "quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4"
COMPANIONS = frozenset(
    {*SCALES, "weight_zero_point", "weight_global_scale", "weight_shape", "weight_g_idx", "weight_scale_2"}
    | {"input_scale", "input_global_scale", "qzeros", "g_idx"}
    | {NF4, FP4, "quant_map", "nested_absmax", "nested_quant_map", "weight_format"}
)
# How the names of stacked experts' tensors end, and which part each of them is.
_STACKED = {
    "_blocks": "blocks",
    "_codes": "codes",
    "_scales": "scales",
    "_weight_scale_2": "weight_scale_2",
    "_weight_scale": "weight_scale",
    "_scale_inv": "weight_scale_inv",
    "_input_scale": "input_scale",
    "_packed": "weight_packed",
    "_scale": "weight_scale",
}
_SHARING_KNOWN = frozenset({"nvfp4", "mxfp4", "nf4", "fp4"})
_FP8 = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})


def split_name(name: str) -> tuple[str, str]:
    """A tensor's name as (module, last part): ``("lm_head", "weight_packed")``, ``("…experts.up_proj", "blocks")``."""
    module, below_weight, last = name.partition(".weight.")
    if below_weight:
        return module, last
    module, _, last = name.rpartition(".")
    if module.endswith("experts"):
        for ending, part in _STACKED.items():
            if last.endswith(ending):
                return f"{module}.{last.removesuffix(ending)}", part
    return module, last


# --- on disk -----------------------------------------------------------------------------------------------


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
    lacks_scale: bool


def stored_format(
    last: str,
    weight: Tensor,
    companions: Mapping[str, Tensor],
    bits: int | None,
    block: tuple[int, int] | None = None,
) -> Stored:
    """The format of a weight, named ``last``, with the companions beside it.

    ``bits`` and ``block`` (rows and columns that share a scale) are what the config declares. Codes packed into I32 do
    not show the bits: without them they count as one each. A block counts where the scale's shape fits it: the shape
    alone does not tell a group of 128 columns from all of 128.
    """
    if last == "weight" and weight.dtype in FLOATS:
        return Stored(weight.dtype, 1, False, False)
    scale = next((companions[name] for name in SCALES if name in companions), None)
    kind, per_element = _kind(last, weight, scale, companions, bits)
    label = kind
    if scale is not None and per_element and last != "qweight" and kind not in _SHARING_KNOWN:
        label += f" {_sharing(weight.shape, per_element, scale.shape, block)}"
    return Stored(label, per_element or 1, True, scale is None)


def _kind(
    last: str, weight: Tensor, scale: Tensor | None, companions: Mapping[str, Tensor], bits: int | None
) -> tuple[str, int]:
    """What the numbers are, and how many are in one element (0: cannot be told)."""
    scale_of_bytes = scale.dtype if scale is not None and weight.dtype in {"U8", "I8", "F4"} else None
    of_fp4 = 1 if weight.dtype == "F4" or last in {"weight_codes", "codes"} else 2
    if NF4 in companions or FP4 in companions:
        return "nf4" if NF4 in companions else "fp4", 2
    if last == "blocks" or scale_of_bytes in {"F8_E8M0", "U8"}:
        return "mxfp4", of_fp4
    if scale_of_bytes in _FP8:
        return "nvfp4", of_fp4
    if weight.dtype in _FP8:
        return "fp8", 1
    if last == "qweight":
        along_outputs = scale is not None and scale.shape[-1:] != weight.shape[-1:]
        return f"{'awq' if along_outputs else 'gptq'} {bits or '?'} bits", 32 // bits if bits else 0
    if last == "weight_packed":
        return (f"int{bits}", 32 // bits) if bits else ("packed integers", 0)
    return {"I8": "int8"}.get(weight.dtype, weight.dtype), 1


def _sharing(weight: Sequence[int], per_element: int, scale: Sequence[int], block: tuple[int, int] | None) -> str:
    """Which part of a weight shares one scale, told by the two shapes, and by the block where they fit it."""
    rows, columns = (*weight[-2:-1], 1)[0], weight[-1] * per_element if weight else 1
    if block and tuple(scale[-2:]) == (math.ceil(rows / block[0]), math.ceil(columns / block[1])):
        return f"group {block[1]}" if block[0] == 1 else f"block {block[0]}x{block[1]}"
    if math.prod(scale) == 1 or not weight:
        return "tensor"
    scale_rows, scale_columns = (scale[-2], scale[-1]) if len(scale) > 1 else (scale[-1], 1)
    if scale_rows == rows:
        return "channel" if scale_columns == 1 else f"group {columns // max(scale_columns, 1)}"
    return f"block {_block(rows, scale_rows)}x{_block(columns, scale_columns)}"


def _block(size: int, count: int) -> int:
    """The block length, a power of two, that ``count`` blocks cover ``size`` with; the last may be cut short."""
    return 1 << (math.ceil(size / max(count, 1)) - 1).bit_length()


# --- declared ----------------------------------------------------------------------------------------------


class Quantization(NamedTuple):
    """A config's quantization table: method and format, and for compressed-tensors what decides a module's group."""

    method: str
    format: str | None
    table: Mapping[str, Any]
    declared: Declared | None

    def weights(self, group: str | None) -> Mapping[str, Any]:
        """The weights' arguments in a compressed-tensors group."""
        groups = self.table.get("config_groups")
        found = groups.get(group) if isinstance(groups, Mapping) else None
        weights = found.get("weights") if isinstance(found, Mapping) else None
        return weights if isinstance(weights, Mapping) else {}

    def bits(self, group: str | None) -> int | None:
        """Bits of a packed weight: of its group, or of the whole checkpoint for methods that know no groups."""
        bits = self.weights(group).get("num_bits") or self.table.get("bits") or self.table.get("w_bit")
        return bits if type(bits) is int and 0 < bits <= 32 else None

    def block(self, group: str | None) -> tuple[int, int] | None:
        """Rows and columns of a weight that share a scale: of its group, or of the whole checkpoint."""
        weights = self.weights(group)
        match weights.get("block_structure") or self.table.get("weight_block_size") or [1, weights.get("group_size")]:
            case [int(rows), int(columns)] if rows > 0 and columns > 0:
                return rows, columns
        return None

    def label(self, group: str | None) -> str | None:
        """A group's scheme in words."""
        weights = self.weights(group)
        if not weights:
            return None
        bits, strategy, size = weights.get("num_bits"), str(weights.get("strategy")), weights.get("group_size")
        floating = weights.get("type") == "float"
        if floating and bits == 4:
            return "nvfp4" if strategy == "tensor_group" else "mxfp4"
        if strategy == "block" and isinstance(weights.get("block_structure"), list):
            size = "x".join(map(str, weights["block_structure"]))
        words = [f"{'fp' if floating else 'int'}{bits}", strategy]
        words += [str(size)] if size and strategy in {"group", "block"} else []
        return " ".join(words if weights.get("symmetric", True) else [*words, "asymmetric"])


class Declaration(NamedTuple):
    """A config's quantization table, and where in the config it stands."""

    path: tuple[str, ...]
    table: Mapping[str, Any]

    @property
    def method(self) -> str:
        return str(self.table.get("quant_method") or self.table.get("quant_algo") or "unknown")


def declaration(config: Mapping[str, Any]) -> Declaration | None:
    """The quantization table of a config, at its top or in its text_config, if there is one."""
    return next(tables(config), None)


def tables(config: Mapping[str, Any]) -> Iterator[Declaration]:
    """All quantization tables of a config, that at its top first."""
    text = config.get("text_config")
    for path, holder in (((), config), (("text_config",), text if isinstance(text, Mapping) else {})):
        for key in ("quantization_config", "compression_config"):
            table = holder.get(key)
            if isinstance(table, Mapping) and table:
                yield Declaration((*path, key), table)


def declared_quantization(config: Mapping[str, Any]) -> tuple[Quantization | None, list[Finding]]:
    """What a config declares, and what in it cannot be read (``config.quant``)."""
    found = declaration(config)
    return (None, []) if found is None else _quantization(found.method, found.table)


def _quantization(method: str, table: Mapping[str, Any]) -> tuple[Quantization, list[Finding]]:
    format = table.get("format") if isinstance(table.get("format"), str) else None
    found, findings = None, []
    if "config_groups" in table:
        try:
            found = declared(table)
            for pattern in (*(target for _, target in found.targets), *found.ignore):
                compiled(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
        except (AttributeError, TypeError, OverflowError, RecursionError, re.error) as error:
            found, message = None, f"config.json: the quantization groups cannot be read: {error}"
            findings = [Finding("config.quant", message, file="config.json", severity="warning")]
    return Quantization(method, format, table, found), findings
