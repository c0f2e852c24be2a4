"""How the layouts of a DeepSeek-V4 DSpark draft name its tensors: serving, specforge, hf.

``serving`` are the official names, ``mtp.<stage>.…``; ``specforge`` has the same. ``hf`` are names in the manner of
transformers' modules: stages are ``layers.<stage>``, the routed experts of one lie in two stacks, what is of no stage
stands at the top. A tensor of a stack is a part of it, so everything else here and elsewhere speaks of serving names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ..files.header import nbytes
from ..plan import Ref

# In a stage: modules, whose ``.weight`` and the like follow, and whole names.
_MODULES = {
    "attn.wq_a": "self_attn.q_a_proj",
    "attn.wq_b": "self_attn.q_b_proj",
    "attn.wkv": "self_attn.kv_proj",
    "attn.wo_a": "self_attn.o_a_proj",
    "attn.wo_b": "self_attn.o_b_proj",
    "attn.q_norm": "self_attn.q_a_norm",
    "attn.kv_norm": "self_attn.kv_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn.shared_experts.w1": "mlp.shared_experts.gate_proj",
    "ffn.shared_experts.w2": "mlp.shared_experts.down_proj",
    "ffn.shared_experts.w3": "mlp.shared_experts.up_proj",
}
_IN_STAGE = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in _MODULES.items()} | {
    "attn.attn_sink": "self_attn.sinks",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    **{f"hc_{at}_{what}": f"{at}_hc.{what}" for at in ("attn", "ffn") for what in ("fn", "base", "scale")},
}
# Of the first stage, and of the last.
_FIRST = {"main_proj.weight": "fc.weight", "main_norm.weight": "hidden_norm.weight"}
_LAST = {
    "norm.weight": "norm.weight",
    **{f"hc_head_{what}": f"fold_module.hc_{what}" for what in ("fn", "base", "scale")},
    "markov_head.markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_head.markov_w2.weight",
    "confidence_head.proj.weight": "confidence_head.proj.weight",
    "confidence_head.proj.bias": "confidence_head.proj.bias",
}
# The target's, where a draft carries copies.
SHARED = {"embed.weight": "embed_tokens.weight", "head.weight": "lm_head.weight"}

# Which stack an expert's matrix is in, and where among those of its expert.
_STACKS = {"w1": ("gate_up_proj", 0), "w3": ("gate_up_proj", 1), "w2": ("down_proj", 0)}
_MEMBERS = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}

_EXPERT = re.compile(r"ffn\.experts\.(\d{1,9})\.(w[123])\.weight")
_STACK = re.compile(r"layers\.(\d{1,4})\.mlp\.experts\.(gate_up_proj|down_proj)(?:\.weight)?")
_LAYER = re.compile(r"layers\.(\d{1,4})\.(.+)")
_STAGE = re.compile(r"mtp\.(\d{1,4})\.(.+)")

_FROM_STAGE = {theirs: ours for ours, theirs in _IN_STAGE.items()}
_FROM_TOP = {
    theirs: (end, ours) for end, table in (("first", _FIRST), ("last", _LAST)) for ours, theirs in table.items()
}
_FROM_SHARED = {theirs: ours for ours, theirs in SHARED.items()}


class Place(NamedTuple):
    """Where a tensor lies in the hf layout. ``order`` sorts those of a stack (expert, member); None: it lies alone."""

    name: str
    order: tuple[int, int] | None = None


def split_stage(name: str) -> tuple[int, str] | None:
    """A serving name as (stage, rest); None for what is none."""
    found = _STAGE.fullmatch(name)
    return (int(found[1]), found[2]) if found else None


def to_hf(name: str) -> Place | None:
    """The place of the tensor that ``name`` is in the serving layout; None where the hf layout has none for it."""
    if name in SHARED:
        return Place(SHARED[name])
    parts = split_stage(name)
    if parts is None:
        return None
    stage, rest = parts
    expert = _EXPERT.fullmatch(rest)
    if expert:
        stack, member = _STACKS[expert[2]]
        return Place(f"layers.{stage}.mlp.experts.{stack}", (int(expert[1]), member))
    if rest in _IN_STAGE:
        return Place(f"layers.{stage}.{_IN_STAGE[rest]}")
    top = _FIRST.get(rest) or _LAST.get(rest)
    return Place(top) if top else None


def looks_like_hf(names: Mapping[str, Ref]) -> bool:
    """Whether these are a V4 draft's tensors in the hf layout: by mixers and low-rank attention, which no other has."""
    told = {"attn_hc.fn", "ffn_hc.fn", "self_attn.q_a_proj.weight", "self_attn.o_a_proj.weight"}
    return any((found := _LAYER.fullmatch(name)) and found[2] in told for name in names)


def from_hf(tensors: Mapping[str, Ref]) -> dict[str, Ref]:
    """The tensors of the hf layout by serving names, those of a stack as parts of it; unknown ones keep their names."""
    stages = [int(found[1]) for name in tensors if (found := _LAYER.fullmatch(name))]
    ends = {"first": 0, "last": max(stages, default=0)}
    return dict(item for name, ref in tensors.items() for item in _from_hf(name, ref, ends))


def _from_hf(name: str, ref: Ref, ends: Mapping[str, int]) -> Iterator[tuple[str, Ref]]:
    stack, layer = _STACK.fullmatch(name), _LAYER.fullmatch(name)
    if stack and len(ref.shape) == 3:
        yield from _unstacked(f"mtp.{stack[1]}.ffn.experts", _MEMBERS[stack[2]], ref)
    elif layer and layer[2] in _FROM_STAGE:
        yield f"mtp.{layer[1]}.{_FROM_STAGE[layer[2]]}", ref
    elif name in _FROM_TOP:
        end, ours = _FROM_TOP[name]
        yield f"mtp.{ends[end]}.{ours}", ref
    else:
        yield _FROM_SHARED.get(name, name), ref


def _unstacked(at: str, members: tuple[str, ...], stack: Ref) -> Iterator[tuple[str, Ref]]:
    """The matrices of a stack [experts, rows of all members, columns]; rows that cannot be shared out stay with the first."""
    experts, rows, columns = stack.shape
    shape = (rows // len(members), columns)
    size = math.prod(shape)
    for expert in range(experts):
        for number, member in enumerate(members):
            first = (expert * len(members) + number) * size
            start = stack.start + nbytes(stack.dtype, (first,))
            stop = start + nbytes(stack.dtype, shape)
            part = Ref(stack.file, stack.name, stack.dtype, shape, start, stop, (first, first + size))
            yield f"{at}.{expert}.{member}.weight", part
