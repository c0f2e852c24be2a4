"""Whether compressed-tensors can parse a ``quantization_config``, and what it says of the KV cache.

Fields and values are those of compressed-tensors 0.19.0, told by the project's own models of its arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import Finding
from ..files.checkpoint import CONFIG
from ..inspecting.survey import Survey
from ..naming.regexes import compiled
from ..recipe.schemes import COMPRESSED_TENSORS_VERSION, PARTS, QuantArgs, presets

VERSION, KV = "config.quant-version", "config.quant-kv"

_FORMATS = frozenset({
    "dense", "sparse-bitmask", "sparse-24-bitmask", "int-quantized", "float-quantized", "naive-quantized",
    "pack-quantized", "marlin-24", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized",
})  # fmt: skip
_OF_WHOLE = ("mixed-precision", "fakequant")  # formats that no group has
_STATUSES = frozenset({"initialized", "calibration", "frozen", "compressed", "decompressed"})
_ARGUMENTS = ("weights", "input_activations", "output_activations")
# Fields that the library takes more of than a recipe may: looked at here, not by the project's model.
_WIDER = frozenset({"actorder", "scale_dtype", "zp_dtype", "observer", "observer_kwargs"})
_DTYPE = re.compile(
    r"(?:torch\.)?(?:u?int(?:8|16|32|64)|float(?:16|32|64)?|bfloat16|half|double"
    r"|float8_(?:e4m3fn|e5m2|e4m3fnuz|e5m2fnuz|e8m0fnu)|float4_e2m1fn_x2)"
)


def unparsable(table: Mapping[str, Any]) -> Iterator[Finding]:
    """Everything in the table that compressed-tensors refuses."""
    groups = table.get("config_groups")
    if not isinstance(groups, Mapping):
        yield _refused("config_groups", "is no object that maps names to groups", table)
        return
    for name, group in groups.items():
        for key, why in _group(name, group):
            yield _refused(f"config_groups.{name}{key}", why, table)
    ignore = table.get("ignore")
    if not isinstance(ignore, list | None) or not all(isinstance(entry, str) for entry in ignore or ()):
        yield _refused("ignore", "is no list of names and patterns", table)
    for entry in ignore if isinstance(ignore, list) else ():
        yield from (_refused(key, why, table) for key, why in _pattern("ignore", entry))
    if table.get("format") not in (None, *_FORMATS, *_OF_WHOLE):
        yield _refused("format", f"is {table['format']!r}, no format there is", table)
    if table.get("quantization_status") not in (None, *_STATUSES):
        yield _refused("quantization_status", f"is {table['quantization_status']!r}, no status there is", table)
    if isinstance(table.get("kv_cache_scheme"), Mapping):
        for key, why in _arguments(table["kv_cache_scheme"]):
            yield _refused(f"kv_cache_scheme{key}", why, table)


def _refused(key: str, why: str, table: Mapping[str, Any]) -> Finding:
    message = f"config.json: quantization_config.{key} {why}"
    version = table.get("version")
    newer = isinstance(version, str) and _numbers(version) > _numbers(COMPRESSED_TENSORS_VERSION)
    hint = f"compressed-tensors {version} wrote it: readers need that version" if newer else f"correct {key}"
    severity = "warning" if newer else "error"
    return Finding(VERSION, message, file=CONFIG, hint=hint, severity=severity, data={"key": key})


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def _group(name: str, group: Any) -> Iterator[tuple[str, str]]:
    """What is wrong in a group: (dotted key within it, why)."""
    if isinstance(group, list):
        if name.upper() not in presets():
            yield "", "is a list of targets, and its name is no preset"
        return
    if not isinstance(group, Mapping):
        yield "", "is no object"
        return
    for key in group.keys() - PARTS - {"targets"}:
        yield f".{key}", "is no field of a scheme"
    targets = group.get("targets")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        yield ".targets", "is no list of names and patterns"
    for target in targets if isinstance(targets, list) else ():
        yield from _pattern(".targets", target)
    if group.get("format") not in (None, *_FORMATS):
        yield ".format", f"is {group['format']!r}, no format of a group"
    for part in _ARGUMENTS:
        if group.get(part) is not None:
            yield from ((f".{part}{key}", why) for key, why in _arguments(group[part]))


def _pattern(key: str, text: Any) -> Iterator[tuple[str, str]]:
    try:
        compiled(text.removeprefix("re:") if isinstance(text, str) and text.startswith("re:") else "")
    except (re.error, OverflowError, RecursionError) as error:
        yield key, f"has {text!r}, no usable regex: {error}"


def _arguments(given: Any) -> Iterator[tuple[str, str]]:
    """What is wrong in the arguments of a quantization."""
    from pydantic import ValidationError

    if not isinstance(given, Mapping):
        yield "", "is no object"
        return
    order = given.get("actorder")
    if order not in (None, False, "weight", "static"):
        yield ".actorder", f"is {order!r}, which compressed-tensors {COMPRESSED_TENSORS_VERSION} no longer takes"
    for key in ("scale_dtype", "zp_dtype"):
        dtype = given.get(key)
        if dtype is not None and not (isinstance(dtype, str) and _DTYPE.fullmatch(dtype)):
            yield f".{key}", f"is {dtype!r}, no dtype of torch"
    try:
        QuantArgs.model_validate({key: value for key, value in given.items() if key not in _WIDER})
    except ValidationError as error:
        for problem in error.errors():
            path = "".join(f".{part}" for part in problem["loc"] if isinstance(part, str) and part in given)
            yield (
                path,
                "is no field there is" if problem["type"] == "extra_forbidden" else f"is refused: {problem['msg']}",
            )


# --- KV cache ----------------------------------------------------------------------------------------------

_KV_SCALES = re.compile(r"\.(?:[kv]_scale|kv_scale|[kv]_proj\.output_scale|[kv]_cache\.scale)$")


def kv_cache(table: Mapping[str, Any], survey: Survey) -> Iterator[Finding]:
    """Where the declared KV cache and the scales on disk disagree, or vLLM takes no such cache."""
    scheme = table.get("kv_cache_scheme")
    stored = next((cell.first for cell in survey.cells.values() if _KV_SCALES.search(cell.first.name)), None)
    if not isinstance(scheme, Mapping):
        if stored is not None:
            message = f"{stored.name} scales the KV cache, and config.json declares no kv_cache_scheme"
            hint = "declare kv_cache_scheme, or drop these scales"
            yield Finding(KV, message, file=stored.file, tensor=stored.name, hint=hint, severity="warning")
        return
    if stored is None and not scheme.get("dynamic", False):
        message = "config.json declares a KV cache with stored scales, and there are none: engines take 1.0"
        yield Finding(KV, message, file=CONFIG, hint="take kv_cache_scheme out, or calibrate again", severity="warning")
    takes = (scheme.get("type"), scheme.get("num_bits"), scheme.get("symmetric", True)) == ("float", 8, True)
    if not takes or scheme.get("strategy", "tensor") not in ("tensor", "attn_head"):
        message = (
            "config.json declares a KV cache that vLLM refuses: it takes symmetric 8-bit floats, one scale a tensor"
        )
        yield Finding(KV, message, file=CONFIG, hint="take kv_cache_scheme out, or calibrate again", severity="warning")
