"""What the config declares of a weight, held against what its tensors show: where they differ, neither is believed."""

from __future__ import annotations

from ..declarations import Packing
from ..decode import Coding, Encoded
from ..errors import fail

_INTEGERS = frozenset({Coding.WORDS, Coding.INT8})
_ALONG_ROWS = frozenset({Coding.GPTQ, Coding.AWQ})


def check_declared(weight: Encoded, packing: Packing) -> None:
    """Raise UserError (``decode.format``) where ``packing`` says something else of ``weight`` than its tensors do."""
    why = _order(weight, packing) or _numbers(weight, packing) or _sharing(weight, packing)
    if why:
        hint = "correct quantization_config, or take the tensors from the source of the checkpoint"
        ref = weight.codes
        raise fail("decode.format", f"{ref.name}: {why}", file=ref.file, tensor=ref.name, hint=hint)


def _order(weight: Encoded, packing: Packing) -> str | None:
    """Act-order without the tensor that says it. AWQ knows none, and of a single group nothing is to be said."""
    groups = weight.grid[0 if weight.coding in _ALONG_ROWS else 1]
    if packing.ordered and weight.coding is not Coding.AWQ and weight.order is None and groups > 1:
        name = "g_idx" if weight.coding is Coding.GPTQ else "weight_g_idx"
        return f"config.json declares act-order, and there is no {name} to say which group an input is of"
    return None


def _numbers(weight: Encoded, packing: Packing) -> str | None:
    """Integers where floats are declared: bytes and words do not show by themselves what they hold."""
    if packing.numbers != "float" or weight.coding not in _INTEGERS:
        return None
    return (
        f"config.json declares floats{f' of {packing.bits} bits' * bool(packing.bits)}; it holds {weight.codes.dtype}"
    )


def _sharing(weight: Encoded, packing: Packing) -> str | None:
    """Scales for other parts of a weight than are declared; not of formats that fix what shares a scale."""
    scale, declared = weight.scale, _declared_scales(weight, packing)
    if scale is None or declared is None or not weight.rows or not _is_open(weight, packing, scale.dtype):
        return None
    stored = weight.grid if weight.coding in _ALONG_ROWS else _scales(weight, weight.height, weight.width)
    if stored == declared:
        return None
    shape = f"{scale.name} is {list(scale.shape)}"
    return f"{shape}, and config.json declares {_in_words(packing)}, which are {declared[0]} x {declared[1]} scales"


def _is_open(weight: Encoded, packing: Packing, scale: str) -> bool:
    """Whether what shares a scale is for the config to say, and the config speaks of numbers like these."""
    if weight.coding is Coding.FP8:
        return packing.bits in {None, 8} and packing.numbers != "int" and scale != "U8"
    return weight.coding in _INTEGERS | _ALONG_ROWS


def _declared_scales(weight: Encoded, packing: Packing) -> tuple[int, int] | None:
    """How many scales a matrix of the weight has, down and across, by what is declared."""
    down, across = weight.stack, weight.cols
    if weight.coding in _ALONG_ROWS:
        size = packing.block[1] if packing.block and packing.strategy == "group" else down
        return (-(-down // size), across) if packing.strategy in {"group", "channel"} else None
    match packing.strategy:
        case "tensor":
            return 1, 1
        case "channel":
            return _scales(weight, 1, across)
        case "group" | "block" if packing.block:
            return _scales(weight, *packing.block)
    return None


def _scales(weight: Encoded, height: int, width: int) -> tuple[int, int]:
    return -(-weight.stack // max(height, 1)), -(-weight.cols // max(width, 1))


def _in_words(packing: Packing) -> str:
    if packing.strategy == "group" and packing.block:
        return f"groups of {packing.block[1]}"
    if packing.strategy == "block" and packing.block:
        return f"blocks of {packing.block[0]} x {packing.block[1]}"
    return f"a scale for each {packing.strategy}"
