"""How a declaration other than compressed-tensors' reads a weight: quantized and how, dense, or not said.

The rules are those of the engines that load such checkpoints: transformers 5.17's quantizers, vLLM 0.33's and SGLang
0.5.23's quantization configs. Where they leave a module to the model's own code, nothing is said.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple

from ..declarations import AWQ, FP8, GPTQ, MODELOPT, MXFP4
from ..families import Kind, config_value
from ..families.config import model_types
from ..naming.names import unwrapped
from ..naming.regexes import compiled
from ..vocab.marks import KEY
from .declarations import Declaration, Excluded, excluded, excluded_entries
from .expected import Expected, block_of
from .weights import Weight


class Reading(NamedTuple):
    """What a declaration says of a weight: quantized or not (None: nothing), why, and into what, if it says so.

    ``expected`` has one scheme for each way in which engines may read the declaration.
    """

    quantized: bool | None
    why: str = ""
    expected: tuple[Expected, ...] = ()


Reader = Callable[[Weight], Reading]

SILENT = Reading(None)

# Projections that every engine makes as quantizable layers, by the last parts of their names.
_PROJECTIONS = frozenset({
    "q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj",
})  # fmt: skip
_FP8_ONLY = Expected("FP8", frozenset({"fp8"}))
# What ModelOpt's algorithms store; those that are not here are not judged.
_ALGORITHMS = {
    "FP8": Expected("FP8 with one scale a tensor", frozenset({"fp8"}), strategy="tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": Expected("FP8 with one scale a row", frozenset({"fp8"}), strategy="channel"),
    "FP8_PB_WO": Expected(
        "FP8 with one scale a block of 128x128", frozenset({"fp8"}), strategy="block", block=(128, 128)
    ),
    "NVFP4": Expected("NVFP4", frozenset({"nvfp4"})),
    "NVFP4_AWQ": Expected("NVFP4", frozenset({"nvfp4"})),
    "W4A16_NVFP4": Expected("NVFP4", frozenset({"nvfp4"})),
    "MXFP8": Expected("MXFP8", frozenset({"mxfp8"})),
    "MXFP4": Expected("MXFP4", frozenset({"mxfp4"})),
}


def reader(declaration: Declaration, config: Mapping[str, Any], quantized: Collection[str]) -> Reader | None:
    """The reader for a declaration's method; None for methods that are not known here.

    ``quantized``: templates of which some modules are stored quantized.
    """
    listed = excluded(excluded_entries(declaration))
    table, file = declaration.table, declaration.file
    if declaration.method == MODELOPT:
        return lambda weight: _modelopt(weight, table, file, listed)
    if declaration.method == FP8:
        return lambda weight: _fp8(weight, table, file, listed, config)
    if declaration.method in (GPTQ, AWQ):
        return lambda weight: _gptq(weight, declaration, listed, quantized)
    if declaration.method == MXFP4:
        return lambda weight: _mxfp4(weight, file, listed)
    return None


def _listed(file: str, listed: Excluded, weight: Weight) -> Reading | None:
    """What the list of dense modules says, if it names the weight."""
    if listed.strictly(weight.name):
        return Reading(False, f"{file} lists it as left dense")
    return SILENT if not weight.quantized and listed.loosely(weight.name) else None


def _modelopt(weight: Weight, table: Mapping[str, Any], file: str, listed: Excluded) -> Reading:
    by_list = _listed(file, listed, weight)
    if by_list is not None:
        return by_list
    algorithm = str(table.get("quant_algo") or "").upper()
    layers = table.get("quantized_layers")
    if algorithm == "MIXED_PRECISION" and isinstance(layers, Mapping):
        found = next((layers[name] for name in (weight.name, unwrapped(weight.name)) if name in layers), None)
        if not isinstance(found, Mapping):
            return SILENT
        algorithm = str(found.get("quant_algo") or "").upper()
    elif weight.kind not in (Kind.LINEAR, Kind.HEAD) or re.search(r"visual|vision|vit_", weight.name):
        return SILENT
    known = _ALGORITHMS.get(algorithm)
    return Reading(True, f"{file} declares {algorithm}", (known,) if known else ())


def _fp8(weight: Weight, table: Mapping[str, Any], file: str, listed: Excluded, config: Mapping[str, Any]) -> Reading:
    """DeepSeek's block-scaled FP8 and that of one scale a tensor; DeepSeek-V4's experts may be FP4."""
    by_list = _listed(file, listed, weight)
    if by_list is not None:
        return by_list
    if ".experts." in weight.name and any(name.startswith("deepseek_v4") for name in model_types(config)):
        experts = config_value(config, "expert_dtype") or table.get("expert_dtype") or "fp4"
        if experts == "fp4":
            return Reading(True, f"{file} declares experts in FP4", (Expected("FP4", frozenset({"fp4"})),))
    block = block_of(table.get("weight_block_size"))
    if block is not None and _has_expanded(weight, config):
        block = (1, block[1])
    if block is not None:
        label = f"FP8 with one scale a block of {block[0]}x{block[1]}"
        expected = _FP8_ONLY._replace(label=label, strategy="block", block=block)
    else:
        expected = _FP8_ONLY._replace(label="FP8 with one scale a tensor", strategy="tensor")
    if weight.quantized:
        return Reading(True, f"{file} declares fp8", (expected,))
    return Reading(_is_projection(weight) or None, f"{file} declares fp8")


def _has_expanded(weight: Weight, config: Mapping[str, Any]) -> bool:
    """Whether this is a head in an order of its own, whose rows each got the scales of their block."""
    match config.get(KEY):
        case {"head": {"called": called, "expanded_blocks": int(rows)}}:
            return rows > 0 and weight.name == called
    return False


def _is_projection(weight: Weight) -> bool:
    return (
        weight.kind is Kind.LINEAR
        and unwrapped(weight.name).startswith("layers.")
        and weight.name.rpartition(".")[2] in _PROJECTIONS
    )


def _gptq(weight: Weight, declaration: Declaration, listed: Excluded, quantized: Collection[str]) -> Reading:
    """GPTQ and AWQ: what is not listed is quantized where its siblings are; a head only if ``lm_head`` says so."""
    table, file, method = declaration.table, declaration.file, declaration.method
    override = _override(table.get("dynamic"), weight.name)
    if override is False:
        return Reading(False, f"{file} excludes it by a dynamic rule")
    by_list = _listed(file, listed, weight)
    if by_list is not None:
        return by_list
    if weight.kind is Kind.HEAD:
        head = bool(table.get("lm_head"))
        return Reading(
            head, f"{file} says lm_head {str(head).lower()}", (_words(method, {**table, **(override or {})}),)
        )
    if weight.quantized:
        return Reading(True, f"{file} declares {method}", (_words(method, {**table, **(override or {})}),))
    missed = weight.kind is Kind.LINEAR and weight.template in quantized
    return Reading(True if missed else None, f"{file} declares {method}, and quantizes it in other layers")


def _override(rules: Any, name: str) -> Mapping[str, Any] | Literal[False] | None:
    """GPTQModel's ``dynamic`` rules: False where one excludes ``name``, the first that overrides, or None."""
    for text, values in rules.items() if isinstance(rules, Mapping) else ():
        try:
            matched = compiled(text.removeprefix("-:").removeprefix("+:")).match(name)
        except (re.error, AttributeError):
            continue
        if matched:
            return False if text.startswith("-:") else values if isinstance(values, Mapping) else None
    return None


def _words(method: str, table: Mapping[str, Any]) -> Expected:
    bits, size = table.get("bits", table.get("w_bit")), table.get("group_size", table.get("q_group_size"))
    bits = bits if type(bits) is int and 0 < bits <= 8 else None
    grouped = type(size) is int and size > 0
    strategy = ("group" if grouped else "channel") if size is not None else None
    label = f"{method.upper()} of {bits} bits" + (f" in groups of {size}" if grouped else "")
    return Expected(label, frozenset({method}), bits, strategy, size if grouped else None)


def _mxfp4(weight: Weight, file: str, listed: Excluded) -> Reading:
    """gpt-oss: experts only."""
    by_list = _listed(file, listed, weight)
    if by_list is not None:
        return by_list
    if weight.kind is not Kind.EXPERTS:
        return SILENT
    return Reading(True, f"{file} declares mxfp4", (Expected("MXFP4", frozenset({"blocks", "mxfp4"})),))
