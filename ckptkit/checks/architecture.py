"""What a config says of the sizes of a language model's weights, as far as that holds for every family that has them.

Names are templates without the parts that only wrap the text model. Families whose attention is latent, or whose
embedding is narrower than the hidden state, say so in their config and are not judged there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..families import config_value
from ..families.config import model_types
from ..naming.names import unwrapped

# Modules that take the hidden state as their input, and those that give it.
_READ = frozenset({
    "embed_tokens", "lm_head", "embed", "head",
    "layers.#.self_attn.q_proj", "layers.#.self_attn.k_proj", "layers.#.self_attn.v_proj",
    "layers.#.self_attn.qkv_proj", "layers.#.self_attn.q_a_proj", "layers.#.self_attn.kv_a_proj_with_mqa",
    "layers.#.attn.wq_a", "layers.#.attn.wkv",
    "layers.#.mlp.gate_proj", "layers.#.mlp.up_proj", "layers.#.mlp.gate_up_proj",
    "layers.#.mlp.experts.#.gate_proj", "layers.#.mlp.experts.#.up_proj",
    "layers.#.block_sparse_moe.experts.#.w1", "layers.#.block_sparse_moe.experts.#.w3",
    "layers.#.ffn.experts.#.w1", "layers.#.ffn.experts.#.w3",
})  # fmt: skip
_WRITE = frozenset({
    "layers.#.self_attn.o_proj", "layers.#.attn.wo_b", "layers.#.mlp.down_proj", "layers.#.mlp.experts.#.down_proj",
    "layers.#.block_sparse_moe.experts.#.w2", "layers.#.ffn.experts.#.w2",
})  # fmt: skip
_NORMS = frozenset({"norm", "layers.#.input_layernorm", "layers.#.post_attention_layernorm"})
_EMBEDDINGS = frozenset({"embed_tokens", "lm_head"})
# Modules of which a side is several times a size.
_MULTIPLES = {
    "layers.#.self_attn.q_proj": ("outputs", "head_dim"),
    "layers.#.self_attn.k_proj": ("outputs", "head_dim"),
    "layers.#.self_attn.v_proj": ("outputs", "v_head_dim"),
    "layers.#.self_attn.o_proj": ("inputs", "v_head_dim"),
    "layers.#.mlp.gate_proj": ("outputs", "intermediate_size"),
    "layers.#.mlp.up_proj": ("outputs", "intermediate_size"),
    "layers.#.mlp.down_proj": ("inputs", "intermediate_size"),
}
MATRICES = _READ | _WRITE
KNOWN = MATRICES | _NORMS
# Families in which every layer is alike and the sizes are exactly these.
_PLAIN = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2"})
_HEADS = {
    "q_proj": "num_attention_heads", "k_proj": "num_key_value_heads", "v_proj": "num_key_value_heads",
    "o_proj": "num_attention_heads",
}  # fmt: skip
# Keys of configs for which a size is not what it seems.
_NARROW = ("embedding_size", "word_embed_proj_dim")
_LATENT = ("kv_lora_rank", "qk_nope_head_dim")
_WHOLE_MODELS = ("ForCausalLM", "ForConditionalGeneration")


class Size(NamedTuple):
    """A side of a weight and what it must be: ``outputs``, ``inputs`` or ``length``; several times it if ``multiple``."""

    side: str
    key: str
    size: int
    multiple: bool = False


def unjudged(config: Mapping[str, Any]) -> str | None:
    """Why the sizes in ``config`` are not those of a whole language model; None if they are."""
    if _size(config, "hidden_size") is None:
        return "config.json gives no hidden_size"
    names = config.get("architectures")
    whole = isinstance(names, list) and any(str(name).endswith(_WHOLE_MODELS) for name in names)
    return None if whole else "config.json names no architecture of a whole language model"


def sizes(template: str, config: Mapping[str, Any]) -> Iterator[Size]:
    """What the config says of the sides of the modules of ``template``."""
    known, hidden = unwrapped(template), _size(config, "hidden_size")
    if known not in KNOWN or hidden is None:
        return
    narrow = known in _EMBEDDINGS and _says(config, _NARROW)
    for names, side in ((_READ, "inputs"), (_WRITE, "outputs"), (_NORMS, "length")):
        if known in names and not narrow:
            yield Size(side, "hidden_size", hidden)
    if model_types(config)[0] in _PLAIN:
        yield from _exact(known, config)
        return
    side, key = _MULTIPLES.get(known, ("", ""))
    if key == "v_head_dim" and not _says(config, (key,)):
        key = "head_dim"
    unit = _size(config, key)
    if unit and not (key.endswith("head_dim") and _says(config, _LATENT)):
        yield Size(side, key, unit, multiple=True)


def _exact(known: str, config: Mapping[str, Any]) -> Iterator[Size]:
    """The sides of attention and MLP that are not the hidden size, in a plain family."""
    side, key = _MULTIPLES.get(known, ("", ""))
    heads = _HEADS.get(known.removeprefix("layers.#.self_attn."))
    intermediate = _size(config, "intermediate_size")
    if key == "intermediate_size" and intermediate:
        yield Size(side, key, intermediate)
    all_heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    number = _size(config, heads) or all_heads if heads else None
    length = _size(config, "head_dim") or (hidden // all_heads if hidden and all_heads else None)
    if heads and number and length:
        yield Size(side, f"{heads} x head_dim", number * length)


def inputs_of(template: str, config: Mapping[str, Any]) -> int | None:
    """The number of inputs that the config gives the modules of ``template``."""
    if unjudged(config):
        return None
    return next(
        (size.size for size in sizes(template, config) if (size.side, size.key) == ("inputs", "hidden_size")), None
    )


def _size(config: Mapping[str, Any], key: str) -> int | None:
    value = config_value(config, key)
    return value if type(value) is int and value > 0 else None


def _says(config: Mapping[str, Any], keys: tuple[str, ...]) -> bool:
    return any(config_value(config, key) is not None for key in keys)
