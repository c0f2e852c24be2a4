"""What a draft costs: parameters and bytes by part, active parameters for a token, memory to serve and to train it.

Sizes follow from names, dtypes and shapes alone. A parameter is a number of the model: a byte of FP4 codes holds two,
a quantization scale none. Figures are of weights; KV cache and activations depend on the load and are not in them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from math import ceil, prod
from typing import NamedTuple

from ..files.header import Spec
from .tables import FP4_GROUP, Config, draft_experts, draft_experts_per_token


class Part(StrEnum):
    """What a tensor of a draft is for."""

    ROUTED = "routed experts"
    SHARED = "shared experts"
    ROUTER = "router"
    ATTENTION = "attention"
    MLP = "mlp"
    MIXING = "hyper-connections"
    PROJECTION = "projection"
    MARKOV = "markov head"
    CONFIDENCE = "confidence head"
    NORM = "norms"
    VOCABULARY = "embedding and head"
    OTHER = "other"


# In this order: a router lies among experts, a norm within attention. Names of all layouts and draft families.
_PARTS = tuple(
    (part, re.compile(pattern))
    for part, pattern in (
        (Part.MIXING, r"(?:^|\.)(?:hc_(?:attn|ffn|head)_|(?:attn|ffn)_hc\.|fold_module\.|hc_head\.)"),
        (Part.MARKOV, r"(?:^|\.)markov_head\."),
        (Part.CONFIDENCE, r"(?:^|\.)confidence_head\."),
        (Part.NORM, r"norm\w*\.(?:weight|bias)$"),
        (Part.SHARED, r"\.shared_experts?\."),
        (Part.ROUTED, r"\.experts\."),
        (Part.ROUTER, r"\.(?:gate|router)\.\w+$"),
        (Part.ATTENTION, r"\.(?:self_)?attn\."),
        (Part.PROJECTION, r"(?:^|\.)(?:main_proj|[eh]_proj|eh_proj|fc)\.\w+$"),
        (Part.VOCABULARY, r"(?:^|\.)(?:embed|embed_tokens|head|lm_head)\.weight$"),
        (Part.MLP, r"\.(?:mlp|ffn)\."),
    )
)
# Parts whose matrices have an FP8 form; only routed experts have an FP4 one.
_QUANTIZED = frozenset({Part.ROUTED, Part.SHARED, Part.ATTENTION, Part.PROJECTION, Part.MLP})
_SCALE = re.compile(r"(?<!hc)(?<!hc_attn)(?<!hc_ffn)(?<!hc_head)[._](?:weight_)?scale(?:_inv|_2|s)?$")
_STAGE = re.compile(r"(?:^|\.)(?:mtp|layers|stages|mtp_block)\.(\d{1,9})\.")
_PACKED = frozenset({"I8", "U8"})


class Size(NamedTuple):
    """Sizes of some tensors: ``stored`` bytes as they are, and bytes in each form; ``active`` parameters a token uses."""

    tensors: int = 0
    parameters: int = 0
    active: int = 0
    stored: int = 0
    fp4: int = 0
    fp8: int = 0
    bf16: int = 0


class Figure(NamedTuple):
    """An amount of memory in bytes, and how it comes out."""

    what: str
    bytes: int
    formula: str


def part_of(name: str) -> Part:
    """What the tensor ``name`` is for, in any layout; quantization scales belong to their weight's part."""
    return next((part for part, pattern in _PARTS if pattern.search(_weight_of(name))), Part.OTHER)


def stage_of(name: str) -> int | None:
    """The stage or layer that ``name`` lies in; None for tensors of the whole draft (layouts other than serving)."""
    found = _STAGE.search(name)
    return int(found[1]) if found else None


def size_of(spec: Spec, block: tuple[int, int] = (128, 128), share: float = 1.0) -> Size:
    """The sizes of one tensor. ``block``: rows and columns of an FP8 scale; ``share``: of routed experts, in use."""
    part = part_of(spec.name)
    if is_scale(spec.name):
        return Size(tensors=1, stored=spec.nbytes)
    packed = spec.dtype in _PACKED and part is Part.ROUTED
    count = prod(spec.shape) * (2 if packed else 1)
    plain = spec.nbytes if spec.dtype in ("F32", "I64", "I32") else 2 * count
    fp8 = fp4 = plain
    if part in _QUANTIZED and len(spec.shape) > 1:
        columns = spec.shape[-1] * (2 if packed else 1)
        matrices = prod(spec.shape[:-2])
        fp8 = count + matrices * ceil(spec.shape[-2] / block[0]) * ceil(columns / block[1])
        fp4 = count // 2 + count // FP4_GROUP if part is Part.ROUTED else fp8
        plain = 2 * count
    active = round(count * share) if part is Part.ROUTED else count
    return Size(1, count, active, spec.nbytes, fp4, fp8, plain)


def active_share(config: Config) -> float:
    """The share of a stage's routed experts that a token is sent to. Raises UserError (``config.draft-field``)."""
    return draft_experts_per_token(config) / draft_experts(config)


def is_scale(name: str) -> bool:
    """Whether ``name`` is a quantization scale. The ``_scale`` of hyper-connections is a parameter."""
    return _SCALE.search(name) is not None


def total(sizes: Iterable[Size]) -> Size:
    columns = list(zip(*sizes, strict=True))
    return Size(*map(sum, columns)) if columns else Size()


def by_stage_and_part(
    specs: Iterable[Spec], block: tuple[int, int] = (128, 128), share: float = 1.0
) -> dict[tuple[int | None, Part], Size]:
    """The sizes of a draft's tensors, by (stage, part). For the draft as a whole take :func:`total` of the values.

    ``share``: of :func:`active_share`, 6/256 in V4-Flash.
    """
    found: dict[tuple[int | None, Part], list[Size]] = {}
    for spec in specs:
        found.setdefault((stage_of(spec.name), part_of(spec.name)), []).append(size_of(spec, block, share))
    return {key: total(sizes) for key, sizes in found.items()}


def serving(sizes: Mapping[tuple[int | None, Part], Size], target_bytes: int | None) -> list[Figure]:
    """Weights on one GPU: the draft as stored, and beside a target of ``target_bytes``; embedding and head are its."""
    draft = total(sizes.values()).stored
    alone = Figure("draft alone", draft, "bytes of its tensors as stored")
    if target_bytes is None:
        return [alone]
    beside = f"{target_bytes:,} B target + {draft:,} B draft as stored"
    return [alone, Figure("beside the target", target_bytes + draft, beside)]


def training(sizes: Mapping[tuple[int | None, Part], Size], cards: int) -> list[Figure]:
    """Weights, gradients and optimizer of a fine-tuning run with Adam, on one card and on each of ``cards``.

    16 bytes a parameter: BF16 weight 2, BF16 gradient 2, FP32 master 4, FP32 moments 4 + 4.
    """
    count = total(sizes.values()).parameters
    routed = total(size for (_, part), size in sizes.items() if part is Part.ROUTED).parameters
    stages = {stage for stage, _ in sizes}
    largest = max((total(s for key, s in sizes.items() if key[0] == stage).parameters for stage in stages), default=0)
    each = 16 * (count - routed) + ceil(16 * routed / cards)
    return [
        Figure("one card", 16 * count, f"16 B × {count:,} parameters"),
        Figure(f"FSDP, each of {cards} cards", ceil(16 * count / cards), f"16 B × {count:,} / {cards}"),
        Figure("FSDP, one stage gathered, besides", 4 * largest, f"4 B (weight and gradient) × {largest:,}"),
        Figure(
            f"expert-parallel, each of {cards} cards",
            each,
            f"16 B × ({count - routed:,} replicated + {routed:,} routed / {cards})",
        ),
    ]


def _weight_of(name: str) -> str:
    return _SCALE.sub(".weight", name)
