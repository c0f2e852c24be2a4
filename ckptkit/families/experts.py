"""Experts of a layer stacked in one tensor, and how to take a single expert's projection out of it.

Two layouts are in use. *rows*, as Linears have it: ``gate_up_proj`` [E, 2·inter, hidden], ``down_proj``
[E, hidden, inter] (Qwen3.5-MoE, Gemma 4). *columns*, transposed: ``gate_up_proj`` [E, hidden, 2·inter], ``down_proj``
[E, inter, hidden] (Llama 4, Qwen3-VL-MoE, gpt-oss). Of a ``gate_up_proj`` the first half is the gate and the second
half up, but in gpt-oss they alternate. Biases are [E, 2·inter] and [E, hidden] in both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Literal, NamedTuple

from ..errors import UserError, fail
from .config import Config, config_value, model_types

# Models whose gate and up alternate along the last axis instead of lying one after the other.
INTERLEAVED = frozenset({"gpt_oss"})

# Which layouts of float experts transformers loads, by patterns of model types; others it fills with random numbers.
# Models whose stacked parameters are made of experts one by one: they load both.
MERGED = (
    "afmoe", "axk[12]", "cohere2_moe", "deepseek_v[234]", "deepseek_v32", "deepseek_ocr2", "dots1", "ernie4_5_*moe",
    "exaone_moe", "flex_olmo", "glm4*_moe*", "glm5_next", "glm_moe_dsa", "hunyuan_v1_moe", "hy_v3", "jamba", "kimi_k25",
    "kimi_linear", "laguna", "lfm2_moe", "longcat_flash", "mellum", "mimo_v2_flash", "minimax", "minimax_m2",
    "minimax_m3_vl", "mixtral", "nemotron_h", "olmoe", "phimoe", "qwen[23]_moe", "qwen3_5_moe*", "qwen3_next",
    "qwen3_omni_moe*", "qwen4_exp_text", "solar_open",
)  # fmt: skip
# Models that load them stacked and in no other way; and those that do, but for compressed-tensors checkpoints.
STACKED = ("gpt_oss", "gemma4*", "mistral4", "qwen3_vl_moe*")
STACKED_DENSE = ("llama4*",)

_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")

_PARTS = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "gate_proj": ("gate_proj",),
    "up_proj": ("up_proj",),
    "down_proj": ("down_proj",),
}
_STACKED = re.compile(r"((?:.*\.)?experts)\.(gate_up_proj|gate_proj|up_proj|down_proj)(?:(_bias)|\.weight)?")


@dataclass(frozen=True, slots=True)
class Columns:
    """Every ``step``-th column from ``start`` on, ``count`` of them."""

    start: int
    step: int
    count: int


class Piece(NamedTuple):
    """One projection of one expert within a stacked tensor: weight [out, in] or bias [out].

    ``span`` are the elements [a, b) of the flattened tensor it lies in, contiguous, seen as ``view``. Without
    ``columns`` the span as it lies is the piece. With them it is ``view[..., columns]``, for a weight transposed:
    ``view[:, start::step][:, :count].T``.
    """

    module: str
    kind: Literal["weight", "bias"]
    expert: int
    span: tuple[int, int]
    view: tuple[int, ...]
    shape: tuple[int, ...]
    columns: Columns | None = None


def is_of(config: Config | None, *patterns: str) -> bool:
    """Whether a model type of the config, its own or the language model's, fits one of ``patterns``."""
    return any(fnmatchcase(name, pattern) for name in model_types(config) for pattern in patterns)


def declared_experts(config: Config | None) -> set[int]:
    """The numbers of experts of a layer that the config states."""
    stated = (config_value(config, key) for key in _COUNTS)
    return {count for count in stated if type(count) is int and count > 1}


def is_expert_tensor(name: str, shape: Sequence[int]) -> bool:
    """Whether this is a weight of all experts of a layer, stacked: rank 3, first dimension the expert."""
    found = _STACKED.fullmatch(name) if len(shape) == 3 else None
    return found is not None and found[3] is None


def expert_projections(name: str, shape: Sequence[int], layout: str, config: Config | None) -> list[Piece]:
    """The pieces of a stacked weight or bias, by expert, gate before up. Empty if ``name`` is no such tensor.

    ``layout`` is ``rows`` or ``columns``. Raises UserError (``plan.experts-3d``) where ``shape`` cannot be of that
    layout: gate and up do not halve it, or the side that should be the config's ``hidden_size`` is not, but the other
    side is.
    """
    found = _STACKED.fullmatch(name)
    if found is None or len(shape) != (2 if found[3] else 3):
        return []
    prefix, stacked, bias = found.groups()
    parts = _PARTS[stacked]
    alternate = len(parts) > 1 and not INTERLEAVED.isdisjoint(model_types(config))
    outputs = shape[1] if layout == "rows" else shape[-1]
    if outputs % len(parts) or (alternate and layout == "rows"):
        raise _misfit(name, shape, layout)
    if not bias:
        _check_hidden(name, shape, stacked, layout, config)
    count = outputs // len(parts)
    columns = [Columns(i, 2, count) if alternate else Columns(i * count, 1, count) for i in range(len(parts))]
    return [
        _piece(f"{prefix}.{expert}.{part}", expert, shape, chosen, layout)
        for expert in range(shape[0])
        for part, chosen in zip(parts, columns, strict=True)
    ]


def _piece(module: str, expert: int, shape: Sequence[int], chosen: Columns, layout: str) -> Piece:
    """The piece of ``expert`` that makes the ``chosen`` output features."""
    size = prod(shape[1:])
    first = expert * size
    whole, count = (first, first + size), chosen.count
    if len(shape) == 3 and layout == "columns":
        return Piece(module, "weight", expert, whole, tuple(shape[1:]), (count, shape[1]), chosen)
    if chosen.step > 1:
        return Piece(module, "bias", expert, whole, tuple(shape[1:]), (count,), chosen)
    row = prod(shape[2:])
    span = (first + chosen.start * row, first + (chosen.start + count) * row)
    part = (count, *shape[2:])
    return Piece(module, "weight" if len(shape) == 3 else "bias", expert, span, part, part)


def _check_hidden(name: str, shape: Sequence[int], stacked: str, layout: str, config: Config | None) -> None:
    hidden = config_value(config, "hidden_size")
    axis = 1 if (layout == "columns") != (stacked == "down_proj") else 2
    if shape[axis] != hidden and shape[3 - axis] == hidden:
        raise _misfit(name, shape, layout)


def _misfit(name: str, shape: Sequence[int], layout: str) -> UserError:
    other = "rows" if layout == "columns" else "columns"
    message = f"{name} {list(shape)} does not lie as 'experts: {layout}' says"
    return fail("plan.experts-3d", message, tensor=name, hint=f"set 'experts: {other}' in the group that reaches it")
