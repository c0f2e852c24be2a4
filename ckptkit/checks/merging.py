"""How transformers loads compressed-tensors checkpoints, as predicates of the engine lint.

A mixture's experts are two stacked parameters in most of its models, made of per-expert weights at load. Under
compressed-tensors each is decompressed first, from a weight, a scale and a shape, by the scheme of one group; what else
belongs to a weight is left out, and dense experts are not looked for. Names are changed by regexes before modules are
looked up, targets are not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any

from ..consumers import Declared, by_compressed_tensors
from ..families import Kind, experts_of
from ..families.config import model_types
from ..files.header import FLOATS
from ..inspecting.survey import Module
from ..stored import Quantization
from . import Subject
from .hits import Hit, at, fits, modules

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
_EXPONENTS = frozenset({"U8", "F8_E8M0"})
_GROUPED = ("group", "tensor_group")
_LEFT_OUT = ("weight_global_scale", "weight_g_idx")


def models(subject: Subject, any_of: Sequence[str]) -> Sequence[Hit]:
    """A ``model_type`` of the config, its own or the language model's, fits."""
    return [Hit(f"the model is {name}") for name in model_types(subject.config) if name and fits(name, any_of)][:1]


# --- experts -----------------------------------------------------------------------------------------------


def merged_experts(subject: Subject, misread: str) -> Sequence[Hit]:
    """Experts with weights of their own that are not read as they are meant when they are merged.

    ``misread``: ``dense``; ``form`` (no weight and scale that can be multiplied, or zero points beside them);
    ``scale`` (a second scale or an order of columns is left out); ``group`` (read by another group's scheme).
    """
    found = subject.quantization
    if found is None:
        return []
    said = ((module, _MISREAD[misread](module, found)) for module in modules(subject, Kind.LINEAR))
    return [at(module, f"{module.weight.first.name} {text}") for module, text in said if text and _is_expert(module)]


def _is_expert(module: Module) -> bool:
    return experts_of(module.name) is not None


def _dense(module: Module, _: Quantization) -> str | None:
    return None if module.stored.quantized else "is a dense expert's"


def _form(module: Module, _: Quantization) -> str | None:
    if not module.stored.quantized:
        return None
    if "weight_zero_point" in module.companions:
        return "has zero points"
    stored = f"is stored as {module.stored.label}"
    if module.stored.label.startswith("fp8"):
        return None if _multiplies(module) else stored
    return None if module.weight.key[1] == "weight_packed" else f"{stored}, unpacked"


def _multiplies(module: Module) -> bool:
    """Whether an FP8 weight times its scale as it is stored is the weight; a weight without a scale is not judged."""
    if "weight_scale" not in module.companions:
        return True
    scale, whole = module.companions["weight_scale"].first, module.weight.first.shape
    if scale.dtype not in FLOATS:
        return False
    if prod(scale.shape) == 1:
        return True
    return len(scale.shape) == len(whole) and all(
        side in (1, full) for side, full in zip(scale.shape, whole, strict=True)
    )


def _scale(module: Module, _: Quantization) -> str | None:
    beside = next((part for part in _LEFT_OUT if part in module.companions), None)
    return f"has a {beside}" if beside else None


def _group(module: Module, found: Quantization) -> str | None:
    read_by = _experts_group(found.declared)
    if not module.stored.quantized or module.group is None or read_by is None:
        return None
    same = _reads(found.weights(read_by), found.weights(module.group))
    return None if same else f"is of {module.group}, and the scheme of experts is taken from {read_by}"


def _experts_group(declared: Declared | None) -> str | None:
    """The group whose scheme all experts are read by: the first with a regex that has ``experts`` in it.

    Without one it is the first with a name or a class among its targets, else the first.
    """
    targets = declared.targets if declared else ()
    tests: tuple[Callable[[str], bool], ...] = (
        lambda target: target.startswith("re:") and "experts" in target,
        lambda target: not target.startswith("re:"),
        lambda target: True,
    )
    found = (group for test in tests for group, target in targets if test(target))
    return next(found, None)


def _reads(scheme: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Whether a weight quantized by ``own`` can be decompressed by ``scheme``: one scale a row fits any group size."""
    if any(scheme.get(key) != own.get(key) for key in ("type", "num_bits")):
        return False
    return own.get("strategy") not in _GROUPED or scheme.get("group_size") == own.get("group_size")


_MISREAD: Mapping[str, Callable[[Module, Quantization], str | None]] = MappingProxyType(
    {"dense": _dense, "form": _form, "scale": _scale, "group": _group}
)


# --- dtypes ------------------------------------------------------------------------------------------------


def bfloat16_only(subject: Subject, any_of: Sequence[str]) -> Sequence[Hit]:
    """Weights that are always decompressed to bfloat16 (FP4, and FP8 with exponents for scales) in another model.

    Experts are converted when they are stacked, which those of the models ``any_of`` are.
    """
    dtype = _dtype(subject)
    if dtype in {None, "bfloat16"}:
        return []
    converted: Callable[[Module], bool] = _is_expert if models(subject, any_of) else lambda module: False
    return [
        at(module, f"{module.name} is {module.stored.label}, and the model is {dtype}")
        for module in modules(subject, Kind.LINEAR, Kind.HEAD)
        if _is_bfloat16_only(module) and not converted(module)
    ]


def _is_bfloat16_only(module: Module) -> bool:
    scale = module.companions.get("weight_scale")
    exponents = scale is not None and scale.first.dtype in _EXPONENTS
    return exponents or module.stored.label.startswith(("nvfp4", "mxfp4"))


def _dtype(subject: Subject) -> str | None:
    """The dtype that a model is built in: the config's, else that of the first float weight of the first file."""
    stated = subject.config.get("dtype") or subject.config.get("torch_dtype")
    if isinstance(stated, str):
        return stated.removeprefix("torch.")
    first = min(((ref.file, ref.name, ref.dtype) for ref in subject.survey.tensors if ref.dtype in _DTYPES), default=())
    return _DTYPES[first[2]] if first else None


# --- names -------------------------------------------------------------------------------------------------


def renamed(subject: Subject, by: Sequence[Mapping[str, Any]]) -> Sequence[Hit]:
    """Linears that targets and ignores reach otherwise under the name that transformers gives them.

    ``by``: for ``models``, the ``names``: (regex, replacement), applied in turn to the name of the weight.
    """
    declared = subject.quantization.declared if subject.quantization else None
    rules = next((entry["names"] for entry in by if models(subject, entry["models"])), None)
    if declared is None or rules is None:
        return []
    hits = []
    for module in modules(subject, Kind.LINEAR, Kind.HEAD):
        name = _named(f"{module.name}.weight", rules).removesuffix(".weight")
        if not _is_expert(module) and by_compressed_tensors(declared, name) != module.group:
            hits.append(at(module, f"{module.name} becomes {name}, which is not reached as it was"))
    return hits


def _named(name: str, rules: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name
