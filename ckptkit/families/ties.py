"""Tied embeddings: whether a config ties the head to the token embedding, where it says so, and which is which."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .config import Config, Path, config_value, model_types, text_configs

KEY = "tie_word_embeddings"

# Models that tie where their config does not say: ``model_type`` at the top level. From the config classes of
# transformers 5.17 (causal and image-text-to-text models). Composite models whose two levels have different defaults
# (Mistral 3, InternVL, Kimi-K2.5…) are not here: their checkpoints store a head of its own.
TIED_BY_DEFAULT = frozenset({
    "aya_vision", "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "biogpt", "blenderbot",
    "blenderbot-small", "blip", "bloom", "camembert", "cohere", "cohere2", "cohere2_moe", "cohere2_vision",
    "cohere_compass_text", "cpmant", "ctrl", "data2vec-text", "diffusion_gemma", "electra", "ernie", "ernie4_5",
    "ernie4_5_moe", "ernie4_5_vl_moe", "falcon", "falcon_mamba", "florence2", "gemma", "gemma2", "gemma3",
    "gemma3_text", "gemma3n", "gemma3n_text", "gemma4", "gemma4_assistant", "gemma4_text", "gemma4_unified",
    "gemma4_unified_assistant", "gemma4_unified_text", "got_ocr2", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo",
    "gpt_neox_japanese", "granite_swa", "hunyuan_vl", "jetmoe", "kosmos-2", "kosmos-2.5", "lfm2", "lfm2_moe",
    "lfm2_vl", "mamba", "marian", "mbart", "megatron-bert", "minicpm3", "modernbert-decoder", "mpt", "mvp",
    "openai-gpt", "opt", "paddleocr_vl", "paligemma", "pegasus", "plbart", "pp_chart2table", "prophetnet",
    "recurrent_gemma", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "shieldgemma2", "smollm3",
    "starcoder2", "t5gemma2", "trocr", "udop", "vaultgemma", "whisper", "xglm", "xlm", "xlm-roberta",
    "xlm-roberta-xl", "xlnet", "xmod", "youtu", "zamba", "zamba2", "zaya",
})  # fmt: skip

# Embedding -> head, both module names. The prefix is that of the language model within a composite one; anything
# else before the embedding (a vision or audio tower, an MTP layer) makes it one that feeds no head.
_PREFIX = r"((?:(?:thinker|language_model|text_model|llm)\.)*)"
_PAIRS = tuple(
    (re.compile(f"{_PREFIX}(?:{embedding})"), head)
    for embedding, head in (
        (r"model\.(?:(?:language_model|text_model|decoder)\.)?embed_tokens", r"\1lm_head"),
        (r"embed_tokens|(?:transformer\.)?(?:wte|word_embeddings|tokens_embed)", r"\1lm_head"),
        (r"backbone\.(?:embeddings?|embed_tokens)", r"\1lm_head"),
        (r"(?:model\.)?tok_embeddings", r"\1output"),
        (r"transformer\.embedding\.word_embeddings", r"\1transformer.output_layer"),
        (r"(?:gpt_neox|gpt_neox_japanese)\.embed_in", r"\1embed_out"),
        (r"embed|rwkv\.embeddings", r"\1head"),
    )
)
_LAST = frozenset({
    "embed_tokens", "wte", "word_embeddings", "tokens_embed", "embeddings", "embedding", "tok_embeddings", "embed_in",
    "embed",
})  # fmt: skip


def is_tied(config: Config | None) -> bool:
    """Whether the config ties head and embedding: it says so at the top level or in a text config.

    Where it says nothing, the default of its model type counts. Without a config nothing is tied.
    """
    stated = [found[KEY] for _, found in text_configs(config or {}) if found.get(KEY) is not None]
    return any(stated) if stated else model_types(config)[0] in TIED_BY_DEFAULT


def tie_locations(config: Config) -> list[Path]:
    """Paths of ``tie_word_embeddings`` to set for a change that every reader sees.

    These are the top level and every text config, whether the key stands there now or not: transformers 5 and SGLang
    read the top level, transformers 4 and vLLM the text config, each with its own default where the key is absent.
    """
    return [(*path, KEY) for path, _ in text_configs(config)]


def head_of(embedding: str) -> str | None:
    """The module name of the head that the token embedding ``embedding`` feeds when tied; None if it feeds none."""
    for pattern, head in _PAIRS:
        found = pattern.fullmatch(embedding)
        if found:
            return found.expand(head)
    return None


def embedding_of(names: Iterable[str], config: Config | None = None) -> str | None:
    """The module name of the token embedding among tensor ``names``: the outermost one that can feed a head.

    None for an encoder-decoder: its embedding is tied to more than a head, and the head's name differs by model.
    """
    if config_value(config, "is_encoder_decoder"):
        return None
    modules = (name.removesuffix(".weight") for name in names if name.endswith(".weight"))
    candidates = [module for module in modules if module.rpartition(".")[2] in _LAST and head_of(module)]
    return min(candidates, key=lambda module: (module.count("."), module), default=None)
