"""Quantization schemes: the project's own models of compressed-tensors' arguments, and what of them can be made.

Fields, validation, presets and the choice of a format are those of compressed-tensors 0.19.0 (``QuantizationArgs``,
``QuantizationScheme``, ``PRESET_SCHEMES``, ``infer_module_format`` of a Linear); a test holds them equal. Refused on
top of that is what needs calibration data, what that library cannot write, and what it writes wrongly.

Imports neither torch nor compressed-tensors: dtypes are their names (``torch.int8``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from ..errors import Finding, UserError
from ..naming.patterns import nearest

COMPRESSED_TENSORS_VERSION = "0.19.0"

PACKED = "pack-quantized"
# Presets that need calibration data, and the nearest that does not.
_CALIBRATED = {"FP8": "FP8_DYNAMIC", "NVFP4": "NVFP4A16"}
# Observers that look at the weight alone, once.
_DATA_FREE = (None, "memoryless_minmax", "static_minmax", "minmax")
# The strategy and scale dtype without which these formats cannot hold what was computed.
_MICROSCALE = {
    "nvfp4-pack-quantized": ("tensor_group", "torch.float8_e4m3fn"),
    "mxfp4-pack-quantized": ("group", "torch.uint8"),
    "mxfp8-quantized": ("group", "torch.uint8"),
}
_NOTHING: Mapping[str, Any] = MappingProxyType({})


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _dtype(value: Any) -> Any:
    return f"torch.{value.removeprefix('torch.')}" if isinstance(value, str) else value


def _block(value: Any) -> Any:
    if isinstance(value, str) and re.fullmatch(r"\d+x\d+", value):
        return tuple(map(int, value.split("x")))
    return tuple(value) if isinstance(value, list) else value


Strategy = Literal["tensor", "channel", "group", "block", "token", "tensor_group", "attn_head"]
Dtype = Annotated[
    Literal["torch.uint8", "torch.int8", "torch.float8_e4m3fn", "torch.float16", "torch.bfloat16", "torch.float32"],
    BeforeValidator(_dtype),
]


class QuantArgs(BaseModel):
    """How one tensor of a module is quantized: compressed-tensors' ``QuantizationArgs``, field by field."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    num_bits: int = Field(8, ge=1, le=8)
    type: Annotated[Literal["int", "float"], BeforeValidator(_lower)] = "int"
    symmetric: bool = True
    group_size: int | None = Field(None, ge=-1)
    strategy: Strategy = Field(None, validate_default=True)
    block_structure: Annotated[tuple[PositiveInt, PositiveInt] | None, BeforeValidator(_block)] = None
    dynamic: Annotated[Literal[True, False, "local"], BeforeValidator(_lower)] = False
    actorder: None = None
    scale_dtype: Dtype | None = None
    zp_dtype: Dtype | None = Field(None, validate_default=True)
    observer: str | None = None
    observer_kwargs: dict[str, Any] = Field(default_factory=dict)

    @field_validator("strategy", mode="before")
    @classmethod
    def _infer_strategy(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None:
            return _lower(value)
        size = info.data.get("group_size")
        return "tensor" if size is None else "channel" if size == -1 else "group"

    @field_validator("actorder", mode="before")
    @classmethod
    def _no_actorder(cls, value: Any) -> None:
        if value not in (None, False):
            raise ValueError("orders columns by activations, which needs calibration data")

    @field_validator("zp_dtype", mode="after")
    @classmethod
    def _default_zero_point(cls, value: str | None, info: ValidationInfo) -> str | None:
        if info.data.get("symmetric", True):
            return None
        default = "torch.int8" if info.data.get("type") == "int" else "torch.float8_e4m3fn"
        if value not in (None, default):
            raise ValueError(f"must be {default}: nothing else can be packed or read back")
        return default

    @model_validator(mode="after")
    def _agree(self) -> QuantArgs:
        grouped = self.strategy in ("group", "tensor_group")
        if self.type == "float" and self.num_bits not in (4, 8):
            raise ValueError(f"there is no float of {self.num_bits} bits here: 4 or 8")
        if grouped and not (self.group_size and self.group_size > 0):
            raise ValueError(f"strategy {self.strategy} needs a positive group_size")
        if not grouped and self.group_size is not None and self.group_size >= 0:
            raise ValueError(f"strategy {self.strategy} takes no group_size")
        if (self.strategy == "block") != (self.block_structure is not None):
            raise ValueError("strategy block and block_structure need each other")
        if self.strategy == "token" and not self.dynamic:
            raise ValueError("strategy token is dynamic only")
        if self.dynamic and self.strategy not in ("token", "tensor", "tensor_group", "group"):
            raise ValueError(f"strategy {self.strategy} cannot be dynamic")
        if self.dynamic == "local" and self.strategy != "tensor_group":
            raise ValueError("dynamic: local is for strategy tensor_group")
        return self


FIELDS = frozenset(QuantArgs.model_fields)


class _Declared(BaseModel):
    """A scheme as written: compressed-tensors' ``QuantizationScheme`` without its targets."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    weights: QuantArgs
    input_activations: QuantArgs | None = None
    output_activations: QuantArgs | None = None
    format: str | None = None


PARTS = frozenset(_Declared.model_fields)


@dataclass(frozen=True, slots=True)
class Scheme:
    """What a group of modules becomes: how weights are quantized, what engines do to inputs, and the format's name."""

    weights: QuantArgs
    input_activations: QuantArgs | None
    format: str

    def describe(self) -> str:
        """A short form for people: ``W4A16 int4 group 128 symmetric``."""
        weights, inputs = self.weights, self.input_activations
        kind = self.format[:5] if self.format in _MICROSCALE else None
        words = [f"W{weights.num_bits}A{inputs.num_bits if inputs else 16}", _words(weights, kind)]
        if weights.type == "int":
            words.append("symmetric" if weights.symmetric else "asymmetric")
        return " ".join(words) + (f", inputs {_words(inputs)}" if inputs else "")


def _words(args: QuantArgs, kind: str | None = None) -> str:
    kind = kind or f"{'int' if args.type == 'int' else 'fp'}{args.num_bits}"
    if args.block_structure:
        return f"{kind} block {args.block_structure[0]}x{args.block_structure[1]}"
    return f"{kind} group {args.group_size}" if args.strategy.endswith("group") else f"{kind} {args.strategy}"


# --- from a recipe -----------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def presets() -> Mapping[str, Any]:
    """Every preset of compressed-tensors by name, as plain data, those that cannot be made here included."""
    return MappingProxyType(json.loads((files("ckptkit") / "data" / "presets.json").read_text("utf-8")))


def usable() -> tuple[str, ...]:
    """Names of the presets that can be made without data, sorted."""
    return tuple(sorted(name for name, parts in presets().items() if parts and name not in _CALIBRATED))


def resolve(scheme: Any, overrides: Mapping[str, Any] = _NOTHING) -> Scheme:
    """A scheme from a preset's name, in any case, or a mapping of its parts, with fields of ``weights`` overridden.

    ``strategy`` clears group_size and block_structure unless they are overridden too; ``group_size`` alone means
    strategy group, or channel for -1. Raises UserError with every problem found (``recipe.scheme``, or
    ``recipe.invalid`` for unknown keys); each finding's ``data["key"]`` is the dotted key it is about: a field of
    ``overrides``, or ``scheme…``.
    """
    parts = _preset(scheme) if isinstance(scheme, str) else scheme
    if not isinstance(parts, Mapping):
        raise UserError(_finding("scheme", f"must be a preset's name or a mapping, not {scheme!r}"))
    if overrides and isinstance(parts.get("weights"), Mapping):
        parts = {**parts, "weights": _overridden(parts["weights"], overrides)}
    try:
        declared = _Declared.model_validate(dict(parts))
    except ValidationError as error:
        raise UserError(_explain(problem, overrides) for problem in error.errors()) from None
    formats = _formats(declared.weights, declared.input_activations)
    refusals = [_finding(_key(path, overrides), why, hint) for path, why, hint in _refusals(declared, formats)]
    if refusals:
        raise UserError(refusals)
    weights = declared.weights
    if weights.observer == "minmax":  # the library writes the weight's observer by the name of what it does
        weights = weights.model_copy(update={"observer": "static_minmax"})
    return Scheme(weights, declared.input_activations, declared.format or formats[0])


def _preset(name: str) -> Mapping[str, Any]:
    known = name.upper()
    if known in usable():
        found: Mapping[str, Any] = presets()[known]
        return found
    if known in _CALIBRATED:
        instead = _CALIBRATED[known]
        why = f"{known} needs calibration data for its activations"
        raise UserError(_finding("scheme", why, f"{instead} is the nearest preset that needs none"))
    if known in presets():
        raise UserError(_finding("scheme", f"{known} quantizes nothing", "put the modules into ignore instead"))
    close = nearest(name, usable())
    hint = f"{f'did you mean {close}? ' if close else ''}known: {', '.join(usable())}"
    raise UserError(_finding("scheme", f"{name!r} is not a scheme", hint))


def _overridden(weights: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    cleared: tuple[str, ...] = ()
    if "strategy" in overrides:
        cleared = ("group_size", "block_structure")
    elif overrides.get("group_size") is not None:
        cleared = ("strategy", "block_structure")
    return {key: value for key, value in weights.items() if key not in cleared} | dict(overrides)


def _formats(weights: QuantArgs, inputs: QuantArgs | None) -> tuple[str, ...]:
    """The formats that can hold such weights, the one that compressed-tensors infers first."""
    if weights.type == "int":
        unpacked = ("int-quantized", "naive-quantized")
        return (PACKED, *unpacked) if inputs is None else ("int-quantized", PACKED, "naive-quantized")
    if weights.num_bits == 4:
        held = {16: ("nvfp4-pack-quantized",), 32: ("mxfp4-pack-quantized",)}
        return held.get(weights.group_size or 0, ())
    if weights.group_size == 32 and weights.scale_dtype == "torch.uint8":
        return ("mxfp8-quantized",)
    floats = ("float-quantized", "naive-quantized")
    return floats if inputs is not None else floats[::-1]


class _Refusal(NamedTuple):
    path: tuple[str, ...]
    why: str
    hint: str | None = None


def _refusals(declared: _Declared, formats: Sequence[str]) -> Iterator[_Refusal]:
    """What compressed-tensors accepts and cannot be made here."""
    weights, inputs = declared.weights, declared.input_activations
    for part, args in (("weights", weights), ("input_activations", inputs)):
        if args is not None and args.observer not in _DATA_FREE:
            known = ", ".join(filter(None, _DATA_FREE))
            yield _Refusal((part, "observer"), f"{args.observer!r} is not a data-free minmax observer: {known}")
        if args is not None and args.observer_kwargs:
            yield _Refusal((part, "observer_kwargs"), "minmax observers take no arguments")
    if weights.dynamic or weights.strategy == "attn_head":
        yield _Refusal(("weights",), "weights are quantized once: dynamic must be false, strategy not attn_head")
    if weights.type == "float" and not weights.symmetric:
        yield _Refusal(("weights", "symmetric"), "floats have no zero point: symmetric must be true")
    if inputs is not None and (inputs.dynamic is not True or inputs.strategy == "tensor_group"):
        why = "the scale of these activations needs calibration data; only dynamic: true needs none"
        yield _Refusal(("input_activations",), why, "leave input_activations out for weights only")
    if declared.output_activations is not None:
        yield _Refusal(("output_activations",), "outputs are not quantized by any engine", "leave it out")
    if not formats:
        yield _Refusal(("weights", "group_size"), "4-bit floats come in groups of 16 (NVFP4) or 32 (MXFP4)")
    else:
        yield from _format_refusals(declared, formats)


def _format_refusals(declared: _Declared, formats: Sequence[str]) -> Iterator[_Refusal]:
    weights, inferred = declared.weights, formats[0]
    if declared.format not in (None, *formats):
        yield _Refusal(("format",), f"{declared.format!r} cannot hold these weights", f"known: {', '.join(formats)}")
    strategy, scale_dtype = _MICROSCALE.get(inferred, (None, None))
    if strategy is None and weights.strategy == "tensor_group":
        yield _Refusal(("weights", "strategy"), "tensor_group is for 4-bit floats in groups of 16 (NVFP4)")
    elif strategy not in (None, weights.strategy):
        yield _Refusal(("weights", "strategy"), f"{inferred} needs strategy {strategy}, not {weights.strategy}")
    if weights.scale_dtype != scale_dtype:
        needs = f"{inferred} needs {scale_dtype}" if scale_dtype else f"{inferred} keeps scales in the weight's dtype"
        hint = f"scale_dtype: {scale_dtype or 'null'}"
        yield _Refusal(("weights", "scale_dtype"), f"{needs}, not {weights.scale_dtype}", hint)


def _explain(problem: ErrorDetails, overrides: Mapping[str, Any]) -> Finding:
    path = tuple(str(part) for part in problem["loc"])
    key = _key(path, overrides)
    last = path[-1]
    if problem["type"] == "extra_forbidden":
        if last.startswith("kv_cache"):
            return _finding(key, "quantizing the KV cache needs calibration data", "leave it out")
        close = nearest(last, PARTS if len(path) == 1 else FIELDS)
        hint = f"did you mean {close}?" if close else None
        return Finding("recipe.invalid", "unknown key", hint=hint, data={"key": key})
    if problem["type"] == "missing":
        return _finding(key, "is missing")
    if problem["type"] == "value_error":
        return _finding(key, str(problem["ctx"]["error"]))
    return _finding(key, f"{problem['msg'].replace('Input should', 'must')}, not {problem['input']!r}")


def _key(path: Sequence[str], overrides: Mapping[str, Any]) -> str:
    """The dotted key, relative to the group, of a path into the scheme: an override's own, or below ``scheme``."""
    if len(path) > 1 and path[0] == "weights" and path[1] in overrides:
        return path[1]
    return ".".join(("scheme", *path))


def _finding(key: str, message: str, hint: str | None = None) -> Finding:
    return Finding("recipe.scheme", message, hint=hint, data={"key": key})


# --- for a plan --------------------------------------------------------------------------------------------


def config_group(scheme: Scheme, targets: Sequence[str]) -> dict[str, Any]:
    """The JSON of a group in ``quantization_config``: what ``QuantizationScheme.model_dump`` gives."""
    inputs = scheme.input_activations
    return {
        "targets": list(targets),
        "weights": scheme.weights.model_dump(mode="json"),
        "input_activations": None if inputs is None else inputs.model_dump(mode="json"),
        "output_activations": None,
        "format": scheme.format,
    }


def problems(scheme: Scheme, shape: Sequence[int]) -> str | None:
    """Why a weight of that shape, [rows, columns], cannot be quantized; None if it can.

    Groups must fill rows. Packed rows must fill whole int32 words: the library pads a ragged row, but engines count
    columns times bits over 32. Blocks at the edges may be smaller; zero points packed down the rows are padded.
    """
    if len(shape) != 2:
        return f"shape {list(shape)} is not a matrix"
    columns, weights = shape[1], scheme.weights
    if not columns:
        return "it has no columns"
    if weights.strategy in ("group", "tensor_group") and weights.group_size and columns % weights.group_size:
        return f"its {columns:,} columns do not divide into groups of {weights.group_size}"
    if scheme.format == PACKED and columns * weights.num_bits % 32:
        return f"its {columns:,} columns of {weights.num_bits} bits do not fill whole int32 words"
    return None


__all__ = [
    "COMPRESSED_TENSORS_VERSION",
    "FIELDS",
    "PARTS",
    "QuantArgs",
    "Scheme",
    "config_group",
    "presets",
    "problems",
    "resolve",
    "usable",
]
