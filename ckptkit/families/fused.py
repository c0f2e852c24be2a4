"""Modules that engines load into one layer, and so must agree: under one scheme, some also under one global scale.

The layer names are vLLM's (``packed_modules_mapping`` of its models); SGLang fuses the same modules. For
names that vLLM changes before it fuses (``w1``, ``wq``) they are made up.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Fused(NamedTuple):
    """A layer of an engine and the checkpoint's modules it is made of, in the engine's order.

    ``one_global_scale``: under NVFP4 the modules share one global scale. ``below``: only in a parent of that name.
    """

    layer: str
    members: tuple[str, ...]
    one_global_scale: bool
    below: str | None = None


FUSED = (
    Fused("qkv_proj", ("q_proj", "k_proj", "v_proj"), True),
    Fused("gate_up_proj", ("gate_proj", "up_proj"), True),
    Fused("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa"), True),  # DeepSeek-V2 and -V3, Kimi, GLM
    Fused("fused_wkv_wgate", ("wkv", "wgate"), False, below="compressor"),  # DeepSeek-V4
    Fused("fused_wqa_wkva", ("wq_a", "wkv_a_with_mqa"), True, below="attention"),  # Mistral's own files
    Fused("fused_wqa_wkv", ("wq_a", "wkv"), True),  # DeepSeek-V4
    Fused("in_proj_qkvz", ("in_proj_qkv", "in_proj_z"), False),  # Qwen3.5's linear attention
    Fused("in_proj_ba", ("in_proj_b", "in_proj_a"), False),
    Fused("wqkv", ("wq", "wk", "wv"), True),  # Mistral's own files
    Fused("w13", ("w1", "w3"), True),  # Mixtral, DeepSeek-V4, Mistral's own files
)

_BY_MEMBER = {member: tuple(f for f in FUSED if member in f.members) for fused in FUSED for member in fused.members}
_EXPERT = re.compile(r"((?:.*\.)?experts)\.\d+\.\w+")


def fused_set(module: str) -> tuple[str, tuple[str, ...]] | None:
    """The fused layer that ``module`` goes into, as its own full name, and all its members' full names; or None.

    Not every member need be in a checkpoint: DeepSeek-V2-Lite has a ``q_proj`` without ``k_proj`` beside it.
    """
    fused, prefix = _find(module)
    if fused is None:
        return None
    return prefix + fused.layer, tuple(prefix + member for member in fused.members)


def shares_global_scale(module: str) -> bool:
    """Whether ``module`` has one NVFP4 global scale with the rest of its fused set."""
    fused, _ = _find(module)
    return fused is not None and fused.one_global_scale


def experts_of(module: str) -> str | None:
    """The path of the routed experts that ``module`` is a projection of, or None.

    vLLM makes one FusedMoE of it and demands one scheme for all its experts and projections.
    """
    found = _EXPERT.fullmatch(module)
    return found[1] if found else None


def _find(module: str) -> tuple[Fused | None, str]:
    parent, dot, last = module.rpartition(".")
    for fused in _BY_MEMBER.get(last, ()):
        if fused.below is None or parent.rpartition(".")[2] == fused.below:
            return fused, parent + dot
    return None, ""
