"""The quantized weights of a checkpoint: which tensors each is stored in, and how to read them. No I/O.

What is told by headers and declarations: :func:`quantized` gathers, :func:`read` says how one of them is to be decoded.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..declarations import Packing
from ..decode import Encoded, encoded
from ..errors import fail
from ..families import Kind, classifier, experts_of
from ..files.checkpoint import Checkpoint
from ..files.header import FLOATS
from ..plan import Ref
from ..stored import COMPANIONS, SCALES, WEIGHTS, split_name
from .contradictions import check_declared

# Parts that say nothing of a weight, but how activations and the attention's cache are quantized.
OF_ACTIVATIONS = re.compile(
    r"(?:input|output|act|activation|prob|prob_output|[qkv]|[kv]_cache|kv_cache)_(?:global_)?(?:scale|zero_point|amax)"
)
# Parts of a module that mean nothing without its weight; a "scale" may be a parameter of anything.
_SURE = frozenset(part for part in COMPANIONS if not OF_ACTIVATIONS.fullmatch(part)) - {"scale", "scales", "g_idx"}
_EXPONENTS = frozenset({"F8_E8M0", "U8"})
# What a hint calls the option that means all weights but those that cannot be read.
ONLY_OTHERS = "--only PATTERN"
# Parts that say the same thing under the names of several formats.
ALTERNATIVES = (
    SCALES,
    ("weight_global_scale", "weight_scale_2"),
    ("weight_zero_point", "qzeros"),
    ("weight_g_idx", "g_idx"),
)
_LIKE_A_SCALE = re.compile(r".*(?:scale|amax).*", re.IGNORECASE)


class Weight(NamedTuple):
    """A quantized module: its tensors by the last parts of their names. ``last`` is the weight's, None if there is none.

    ``others`` are tensors of the module that look like scales, under names that no format has.
    """

    module: str
    last: str | None
    parts: Mapping[str, Ref]
    others: tuple[Ref, ...] = ()

    @property
    def ref(self) -> Ref:
        """The weight, or where there is none what is there without one."""
        if self.last is not None:
            return self.parts[self.last]
        return next(ref for part, ref in self.parts.items() if _is_sure(part, ref))

    @property
    def dense_name(self) -> str:
        """What the dense weight is called: stacked experts have no ``.weight``."""
        ref = self.ref
        return f"{self.module}.weight" if ref.name == f"{self.module}.{self.last}" else self.module

    @property
    def is_experts(self) -> bool:
        """Whether these are weights of routed experts, stacked or of one."""
        return experts_of(self.module) is not None or self.module.split(".")[-2:-1] == ["experts"]


def quantized(checkpoint: Checkpoint) -> list[Weight]:
    """Every module that is quantized on disk, and scales whose weight is missing, in the checkpoint's order."""
    modules: dict[str, dict[str, Ref]] = defaultdict(dict)
    others: dict[str, list[Ref]] = defaultdict(list)
    is_stack = _stacks(checkpoint)
    for name, ref in checkpoint.tensors.items():
        module, last = split_name(name)
        if last in WEIGHTS or last in COMPANIONS:
            modules[module][last] = ref
        elif is_stack(ref):
            modules[name]["weight"] = ref
        elif _LIKE_A_SCALE.fullmatch(last) and not OF_ACTIVATIONS.fullmatch(last):
            others[module].append(ref)
    return [
        Weight(module, last, parts, tuple(others.get(module, ())))
        for module, parts in modules.items()
        for last in _weights_of(parts)
    ]


def _stacks(checkpoint: Checkpoint) -> Callable[[Ref], bool]:
    """Whether a tensor without a usual name is stacked experts in a quantized dtype."""
    kind_of = classifier(checkpoint.config)
    return lambda ref: (
        ref.dtype not in FLOATS and not ref.name.endswith("bias") and kind_of(ref.name, ref.shape) is Kind.EXPERTS
    )


def _weights_of(parts: Mapping[str, Ref]) -> list[str | None]:
    """The parts that hold codes; [None] where only companions are left; empty for what is not quantized."""
    codes: list[str | None] = [last for last, ref in parts.items() if last in WEIGHTS and _is_codes(last, ref)]
    if codes or not any(_is_sure(last, ref) for last, ref in parts.items()):
        return codes
    return [None]


def _is_codes(last: str, ref: Ref) -> bool:
    return last != "weight" or ref.dtype not in FLOATS


def _is_sure(last: str, ref: Ref) -> bool:
    return last in _SURE or (last in {"scale", "scales"} and ref.dtype in _EXPONENTS)


# --- how to read one ---------------------------------------------------------------------------------------


def read(weight: Weight, packing: Packing, columns: int = 0, unscaled: bool = False) -> Encoded:
    """How ``weight`` is stored; ``columns`` is the number of its columns where ``weight_shape`` tells it.

    ``unscaled``: FP8 without a scale is as it is. Raises UserError, naming the tensor: ``decode.format``, ``names.weight-without-scale``,
    ``names.scale-without-weight``, ``names.unknown-scale``, ``config.quant-block``, ``dequantize.collision``.
    """
    if weight.last is None:
        raise _orphan(weight)
    _check_parts(weight, weight.last)
    if packing.unknown and weight.last == "qweight":
        message = f"{weight.ref.name} cannot be decoded: config.json declares {packing.unknown}"
        raise fail("decode.format", message, **_of(weight.ref))
    found = encoded(weight.last, weight.parts, packing.bits, packing.block, columns, packing.gptq, unscaled)
    ref = weight.ref
    if found.inferred:
        message = f"{ref.name} has blocks of a size that no config states"
        size = f"[{found.height}, {found.width}]"
        hint = f'"weight_block_size": {size} in quantization_config would fit the scale, if it is meant so'
        raise fail("config.quant-block", message, **_of(ref), hint=hint)
    if not packing.symmetric and weight.last == "weight_packed" and found.zero is None:
        message = f"{ref.name} is declared asymmetric, and has no weight_zero_point"
        raise fail("names.weight-without-scale", message, **_of(ref), hint="take it from the source of the checkpoint")
    check_declared(found, packing)
    return found


def _check_parts(weight: Weight, last: str) -> None:
    """Raise UserError where a module's tensors together do not say what its weight is."""
    ref = weight.ref
    if last in {"codes", "weight_codes"}:
        message = f"{ref.name} holds one code a byte, as ckptkit unpack --layout codes makes them"
        raise fail("decode.format", message, **_of(ref), hint="ckptkit unpack SRC OUT --layout packed goes back first")
    if weight.others:
        other = weight.others[0]
        message = f"{other.name} looks like a scale of {ref.name}, under a name that no format has"
        raise fail("names.unknown-scale", message, **_of(other), hint=f"{ONLY_OTHERS} leaves its weight as it is")
    if last != "weight" and "weight" in weight.parts:
        message = f"{ref.name} and {weight.parts['weight'].name} are both there: which one is the weight?"
        hint = f"ckptkit reshard SRC OUT --drop {weight.parts['weight'].name}"
        raise fail("dequantize.collision", message, **_of(ref), hint=hint)
    for names in ALTERNATIVES:
        beside = [weight.parts[name] for name in names if name in weight.parts]
        if len(beside) > 1:
            message = f"{beside[0].name} and {beside[1].name} are both there: which one is meant of {ref.name}?"
            hint = f"ckptkit reshard SRC OUT --drop {beside[1].name}"
            raise fail("dequantize.collision", message, **_of(beside[1]), hint=hint)


def _orphan(weight: Weight) -> Exception:
    ref = weight.ref
    dense = weight.parts.get("weight")
    beside = f"beside {dense.name}, which is {dense.dtype}" if dense else "without a weight"
    message = f"{ref.name} is a scale {beside}"
    hint = f"ckptkit reshard SRC OUT --drop {ref.name} leaves it out, if the weight is right without it"
    return fail("names.scale-without-weight", message, **_of(ref), hint=hint)


def _of(ref: Ref) -> dict[str, Any]:
    return {"file": ref.file, "tensor": ref.name}
