"""What a tensor is, told by its name, its rank and what the config says about layers.

Only a rank-2 ``.weight`` can be a Linear's. Of those, embeddings, position embeddings, norms and convolutions are
something else whatever their shape; heads, routers and the layers that draft tokens are Linear-like, but a recipe
that says ``Linear`` does not mean them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple

from ..naming.names import to_template
from .config import config_value, model_types


class Kind(StrEnum):
    """The kinds of tensors. ``MTP``: a layer that predicts further tokens; ``DRAFT``: a DSpark, EAGLE, Medusa… part."""

    LINEAR = "linear"
    EMBEDDING = "embedding"
    POSITION = "position"
    NORM = "norm"
    CONV = "conv"
    HEAD = "head"
    ROUTER = "router"
    MTP = "mtp"
    DRAFT = "draft"
    EXPERTS = "experts"  # all experts of a layer stacked in one tensor: weights, biases, packed codes and their scales
    OTHER = "other"


# Kinds that only a rank-2 ``.weight`` can have: what a quantizer may treat as a Linear's weight.
LINEAR_LIKE = frozenset({Kind.LINEAR, Kind.HEAD, Kind.ROUTER, Kind.MTP, Kind.DRAFT})

# Models whose "linear" layers are transformers' Conv1D: the weight is [in, out], so no Linear scheme fits it.
_CONV1D_MODELS = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp"})
_CONV1D = re.compile(r"\.(?:c_attn|q_attn|c_proj|c_fc)$")

_NUMBERED = re.compile(r"(?:\.(?:#|shard_\d+))+$")

# On the last part of the module's path that is no number.
_POSITION = re.compile(r"pos(?:ition(?:s|al)?)?_?emb|embed_pos|^wpe$|^relative_(?:attention|position)_bias")
_EMBEDDING = re.compile(
    r"^embed_tokens|^(?!patch).*(?:^|_)(?:embed|embd|embedding)s?$|^(?:wte|embed_in|tokens_embed|shared)$"
)
_NORM = re.compile(r"norm|^ln(?:_|\d|$)|_ln$")
_CONV = re.compile(r"(?:^|_)conv(?:[123]d)?\d*$")

# On the module's whole path.
_HEAD = re.compile(
    r"(?:^|\.)(?:lm_heads?|shared_head|generator_lm_head|codec_head)(?:\.|$)"
    r"|(?:^|\.)(?:embed_out|output_layer|unembed)$|(?:^|\.)mtp\.#\.head$"
    r"|^(?:head|output|output_projection|proj_out|decoder|score|classifier|lm_loss|pred_layer\.proj)$"
)
_ROUTER = re.compile(r"(?:^|\.)(?:shared_experts?_)?gate$|(?:^|[._])router(?:\.|$)|\.gate\.wg$")
_STACKED = re.compile(r"(?:^|\.)experts\.(?!#)")
_STACKED_WEIGHT = re.compile(r"(?:^|\.)(?:moe|block_sparse_moe)\.\w+\.weight$")
_MTP = re.compile(r"(?:^|\.)(?:mtp|nextn)(?:_\w+)?\.")
_DRAFT = re.compile(
    r"(?:^|\.)(?:dspark|eagle3?|medusa_heads?|draft_model|speculator|markov_head|confidence_head|main_proj|main_norm)\."
)
# A layer of the language model: its index tells whether it is one of the model's own.
_TEXT_LAYER = re.compile(r"(?:(?:thinker|language_model|text_model|llm|model|transformer)\.)*layers\.(\d{1,9})\.")

Classify = Callable[[str, Sequence[int]], Kind]


def module_of(tensor_name: str) -> str:
    """The module a weight belongs to; a bare parameter (a 3-D expert tensor, say) keeps its name."""
    return tensor_name.removesuffix(".weight")


def classify(name: str, shape: Sequence[int], config: Mapping[str, Any] | None) -> Kind:
    """The kind of the tensor ``name``. For many tensors of one checkpoint take :func:`classifier`."""
    return classifier(config)(name, shape)


def classifier(config: Mapping[str, Any] | None) -> Classify:
    """``classify`` for one checkpoint: (tensor name, shape) -> kind. A name's form is looked at once per process.

    The tensor's own nature comes before where it lies: a norm or an embedding in an MTP layer is a norm or an
    embedding, a head there is MTP. :func:`draft_part` tells where a tensor lies.
    """
    traits = _traits(config)

    def kind_of(name: str, shape: Sequence[int]) -> Kind:
        form = to_template(name)
        kind = _by_form(form, len(shape), traits.conv1d)
        return (_part(name, form, traits) or kind) if kind in LINEAR_LIKE else kind

    return kind_of


def draft_part(config: Mapping[str, Any] | None) -> Callable[[str], Kind | None]:
    """A function from tensor name to ``Kind.MTP`` or ``Kind.DRAFT`` for whatever lies in such a part, else None.

    Layers past ``num_hidden_layers`` are MTP (DeepSeek-V3, GLM-4.5: no prefix tells them). The prefix ``mtp.`` holds
    DSpark stages where the config has ``dspark_target_layer_ids``, and NextN layers elsewhere.
    """
    traits = _traits(config)
    return lambda name: _part(name, to_template(name), traits)


def is_transposed(tensor_name: str, config: Mapping[str, Any] | None) -> bool:
    """Whether the weight is that of transformers' Conv1D, which keeps it as [in, out] (GPT-2)."""
    return _traits(config).conv1d and _CONV1D.search(module_of(tensor_name)) is not None


class _Traits(NamedTuple):
    """What only a config says: layers of its own (0: unknown), what ``mtp.`` holds, whether weights are [in, out]."""

    layers: int
    mtp: Kind
    conv1d: bool


def _traits(config: Mapping[str, Any] | None) -> _Traits:
    layers = config_value(config, "num_hidden_layers")
    mtp = Kind.DRAFT if config_value(config, "dspark_target_layer_ids") else Kind.MTP
    conv1d = not _CONV1D_MODELS.isdisjoint(model_types(config))
    return _Traits(layers if type(layers) is int else 0, mtp, conv1d)


def _part(name: str, form: str, traits: _Traits) -> Kind | None:
    prefixed = _by_prefix(form)
    if prefixed is not None:
        return traits.mtp if prefixed is Kind.MTP else prefixed
    layer = _TEXT_LAYER.match(name) if traits.layers else None
    return Kind.MTP if layer and int(layer[1]) >= traits.layers else None


@lru_cache(maxsize=1 << 16)
def _by_prefix(form: str) -> Kind | None:
    if _DRAFT.search(form):
        return Kind.DRAFT
    return Kind.MTP if _MTP.search(form) else None


@lru_cache(maxsize=1 << 16)
def _by_form(form: str, rank: int, conv1d: bool) -> Kind:
    """The kind of a tensor whose name is ``form``, with ``#`` for every index."""
    is_weight = form.endswith(".weight")
    module = form.removesuffix(".weight").removesuffix(".bias")
    last = _NUMBERED.sub("", module).rpartition(".")[2]
    if rank >= 2 and (_STACKED.search(form) or (rank == 3 and _STACKED_WEIGHT.search(form))):
        return Kind.EXPERTS
    if _NORM.search(last):
        return Kind.NORM
    if _POSITION.search(last):
        return Kind.POSITION
    if is_weight and rank == 2 and _HEAD.search(module.removesuffix(".rows")):  # rows in an order of their own
        return Kind.HEAD
    if _EMBEDDING.search(last):
        return Kind.EMBEDDING
    if is_weight and rank < 2:
        return Kind.NORM
    if _CONV.search(last) or (is_weight and rank > 2) or (conv1d and _CONV1D.search(module)):
        return Kind.CONV
    if not (is_weight and rank == 2):
        return Kind.OTHER
    return Kind.ROUTER if _ROUTER.search(module) else Kind.LINEAR
