"""FP4 with power-of-two scales as FP8 with one scale for a block of 128 x 128: which formats hold it, and how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..declarations import CT, FP8, Declaration, Packing
from ..errors import fail
from ..ops import operation
from ..plan import Step
from .stored_weights import Weight

BLOCK = (128, 128)
_EXPONENTS = frozenset({"U8", "F8_E8M0"})


class Container(NamedTuple):
    """How a format holds it: the method that declares it, the dtype of the scale, the block that must be declared."""

    method: str
    scale_dtype: str
    block: tuple[int, int] | None = None


# By the names of FP4's codes and scale. A compressed-tensors group is declared anew; DeepSeek's block is the model's.
_CONTAINERS = {
    ("weight", "scale"): Container(FP8, "F8_E8M0", BLOCK),
    ("weight_packed", "weight_scale"): Container(CT, "F32"),
}
_WHY_NOT = {
    ("blocks", "scales"): "gpt-oss' experts are one stack of transposed matrices, which no engine reads as block FP8"
}


def may_be_fp4(weight: Weight) -> bool:
    """Whether this is FP4 with power-of-two scales, or lacks the scale that would tell."""
    name = scale_of(weight)
    exponents = name is None or weight.parts[name].dtype in _EXPONENTS
    return weight.last is not None and exponents and weight.ref.dtype in {"I8", "U8", "F4"}


def scale_of(weight: Weight) -> str | None:
    """Which part is the scale."""
    return next((part for part in ("scale", "scales", "weight_scale") if part in weight.parts), None)


def check_container(weight: Weight, packing: Packing, stated: Sequence[Declaration]) -> None:
    """Raise UserError (``dequantize.container``) where no format holds this weight as block FP8."""
    key = str(weight.last), str(scale_of(weight))
    container = _CONTAINERS.get(key)
    if container is None or len(weight.ref.shape) != 2:
        why = _WHY_NOT.get(key, "its own format has no such form")
    elif not stated or stated[0].method != container.method:
        why = f"no config declares {container.method}"
    elif container.block is not None and packing.block != container.block:
        why = "config.json does not say that blocks are [128, 128]"
    else:
        return
    ref = weight.ref
    message = f"{ref.name} cannot be held as block FP8: {why}"
    raise fail("dequantize.container", message, file=ref.file, tensor=ref.name, hint="--dtype bf16 makes it dense")


def recast(weight: Weight, inexact: str, rule: str) -> Step:
    """The step that makes ``<module>.weight`` in F8_E4M3, and its scale under the name that FP4's has."""
    scale = str(scale_of(weight))
    container = _CONTAINERS[str(weight.last), scale]
    inputs = (weight.ref, weight.parts[scale])
    names = [f"{weight.module}.weight", weight.parts[scale].name]
    args = {"names": names, "scale_dtype": container.scale_dtype, "inexact": inexact}
    outputs = operation("fp4_to_fp8_block@1").specs([ref.spec for ref in inputs], args)
    return Step("fp4_to_fp8_block@1", inputs, tuple(outputs), rule, args)
