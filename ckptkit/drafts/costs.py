"""What the draft of a checkpoint costs, whatever its family and layout: which tensors are counted, and the figures.

The arithmetic is :mod:`ckptkit.drafts.accounting`'s; every figure comes with the formula that it came out of.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from ..errors import UserError, fail
from ..families import config_value, draft_part
from ..families.config import declared_drafts, model_types
from ..files.checkpoint import Checkpoint
from ..files.header import Spec
from .accounting import Figure, Part, Size, by_stage_and_part, serving, total, training
from .identify import Kind, identify
from .tables import Config, draft_experts, draft_experts_per_token, form_of

Key = TypeVar("Key")
Sizes = Mapping[tuple[int | None, Part], Size]

_BLOCK = (128, 128)
# An architecture or model type that is that of a draft by itself.
_DRAFT = re.compile(r"dspark|dflash|draft|eagle|nextn|mtp|speculator|medusa", re.IGNORECASE)
# What other families than DeepSeek's call the number of routed experts, and of those that a token is sent to.
_EXPERTS = ("num_experts", "num_local_experts", "moe_num_experts")
_PER_TOKEN = ("num_experts_per_tok", "moe_k", "moe_topk")


class Share(NamedTuple):
    """Of ``experts`` routed experts of a layer a token is sent to ``used``."""

    used: int = 1
    experts: int = 1


class Costs(NamedTuple):
    """A draft's sizes by stage and part, its kind in words, the share of routed experts in use, blocks of FP8 scales.

    ``target_bytes``: of all other tensors, None where there are none but copies of an embedding and a head.
    """

    kind: str
    sizes: Sizes
    share: Share
    block: tuple[int, int]
    target_bytes: int | None


def costs(checkpoint: Checkpoint) -> Costs:
    """The costs of the draft in ``checkpoint``, a target or a draft by itself.

    Raises UserError: ``draft.none``, ``draft.declared-only``, and ``config.draft-field`` where the config does not say how many experts are in use.
    """
    config = checkpoint.config or {}
    kind, specs, is_alone = _draft(checkpoint, config)
    if kind == Kind.DECLARED and not specs:
        keys = sorted(declared_drafts(config))
        message = f"{checkpoint.source.uri} only declares a draft ({', '.join(keys)}): it holds no tensor of one"
        hint = f"ckptkit inspect {checkpoint.source.uri} --group layer shows what it holds"
        raise fail("draft.declared-only", message, file="config.json", hint=hint, data={"keys": keys})
    if not specs:
        message = f"{checkpoint.source.uri} holds no draft that is known here"
        hint = f"ckptkit inspect {checkpoint.source.uri} --group layer shows what it holds"
        raise fail("draft.none", message, file=checkpoint.source.uri, hint=hint)
    share, block = _share(specs, config), _block(config)
    sizes = by_stage_and_part(specs, block, share.used / share.experts)
    everything = sum(ref.nbytes for ref in checkpoint.tensors.values())
    return Costs(kind, sizes, share, block, None if is_alone else everything - total(sizes.values()).stored)


def by_stage(sizes: Sizes) -> dict[int | None, Size]:
    return _grouped(sizes, lambda key: key[0])


def by_part(sizes: Sizes) -> dict[Part, Size]:
    return _grouped(sizes, lambda key: key[1])


def amounts(found: Costs) -> list[Figure]:
    """Parameters and bytes of the draft as a whole; the first two count parameters."""
    whole, parts = total(found.sizes.values()), by_part(found.sizes)
    routed = parts.get(Part.ROUTED, Size())
    block, others = f"{found.block[0]} × {found.block[1]}", whole.parameters - routed.parameters
    active = f"{others:,} + {found.share.used}/{found.share.experts} of {routed.parameters:,} routed"
    return [
        Figure("parameters", whole.parameters, "numbers of all tensors but scales; a byte of FP4 codes holds two"),
        Figure("active per token", whole.active, active if routed.tensors else "all of them"),
        Figure("as stored", whole.stored, "bytes of all tensors, scales included"),
        Figure("in FP4", whole.fp4, "routed experts 1/2 B + 1/32 B a parameter, all else as in FP8"),
        Figure("in FP8", whole.fp8, f"matrices 1 B a parameter + 1 B for each block of {block}, all else as in BF16"),
        Figure("in BF16", whole.bf16, "2 B a parameter; what is F32 stays 4 B"),
    ]


def memory(found: Costs, cards: int) -> list[Figure]:
    """Bytes of weights to serve it, alone and beside its target, and what fine-tuning takes on ``cards`` cards."""
    return [*serving(found.sizes, found.target_bytes), *training(found.sizes, cards)]


def _draft(checkpoint: Checkpoint, config: Config) -> tuple[str, list[Spec], bool]:
    """The draft's kind, its tensors, and whether it is by itself."""
    found = identify(checkpoint.tensors, config)
    if found.kind not in (Kind.NONE, Kind.DECLARED):
        specs = [Spec(name, ref.dtype, ref.shape) for name, ref in found.tensors.items()]
        return str(found.kind), specs, not found.others
    tensors = [ref.spec for ref in checkpoint.tensors.values()]
    stated = [*model_types(config), *map(str, config.get("architectures") or ())]
    named = next((text for text in stated if _DRAFT.search(text)), None)
    if named or isinstance(config.get("dflash_config"), Mapping):
        return named or "DSpark", tensors, True
    part_of = draft_part(config)
    drafting = [(spec, part) for spec in tensors if (part := part_of(spec.name))]
    return (str(drafting[0][1]) if drafting else str(found.kind)), [spec for spec, _ in drafting], False


def _share(specs: Iterable[Spec], config: Config) -> Share:
    if not any(".experts." in spec.name for spec in specs):
        return Share()
    try:
        return Share(draft_experts_per_token(config), draft_experts(config))
    except UserError:
        experts, used = (_first(config, keys) for keys in (_EXPERTS, _PER_TOKEN))
        if experts is None or used is None:
            raise
        return Share(used, experts)


def _first(config: Config, keys: Iterable[str]) -> int | None:
    values: Iterable[Any] = (config_value(config, key) for key in keys)
    return next((value for value in values if type(value) is int and value > 0), None)


def _block(config: Config) -> tuple[int, int]:
    try:
        return form_of(config).block
    except UserError:  # of experts in another form: what a figure is given for is not that one
        return _BLOCK


def _grouped(sizes: Sizes, key: Callable[[tuple[int | None, Part]], Key]) -> dict[Key, Size]:
    found: dict[Key, list[Size]] = {}
    for place, size in sizes.items():
        found.setdefault(key(place), []).append(size)
    return {group: total(of) for group, of in found.items()}
