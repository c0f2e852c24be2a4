"""Small checkpoints for tests: real safetensors files written by the safetensors package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = Mapping[str, torch.Tensor]


def checkpoint(folder: Path, shards: Tensors | list[Tensors], config: Mapping[str, Any] | None = None) -> Path:
    """Write one shard (``model.safetensors``) or several with an index, and config.json; give the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = shards if isinstance(shards, list) else [shards]
    names = [f"model-{i + 1:05}-of-{len(parts):05}.safetensors" for i in range(len(parts))]
    if len(parts) == 1:
        names = ["model.safetensors"]
    for name, tensors in zip(names, parts, strict=True):
        save_file(dict(tensors), folder / name, metadata={"format": "pt"})
    if len(parts) > 1:
        weight_map = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
        total = sum(t.nbytes for part in parts for t in part.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def llama(
    layers: int = 2, hidden: int = 128, inter: int = 256, vocab: int = 512, seed: int = 0, **extra: Any
) -> dict[str, torch.Tensor]:
    """The tensors of a small Llama with random bf16 weights; ``extra`` adds or (None) removes tensors."""
    generator = torch.Generator().manual_seed(seed)

    def weight(rows: int, cols: int) -> torch.Tensor:
        return (torch.randn(rows, cols, generator=generator) * 0.02).to(torch.bfloat16)

    tensors = {"model.embed_tokens.weight": weight(vocab, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors[f"{prefix}self_attn.{name}.weight"] = weight(hidden, hidden)
        tensors[prefix + "mlp.gate_proj.weight"] = weight(inter, hidden)
        tensors[prefix + "mlp.up_proj.weight"] = weight(inter, hidden)
        tensors[prefix + "mlp.down_proj.weight"] = weight(hidden, inter)
        tensors[prefix + "post_attention_layernorm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    tensors["lm_head.weight"] = weight(vocab, hidden)
    for name, value in extra.items():
        tensors.pop(name.replace("__", "."), None)
        if value is not None:
            tensors[name.replace("__", ".")] = value
    return tensors


def llama_config(
    layers: int = 2, hidden: int = 128, inter: int = 256, vocab: int = 512, **extra: Any
) -> dict[str, Any]:
    """A config.json that transformers loads as the model of :func:`llama`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": hidden // 4,
        "vocab_size": vocab,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **extra,
    }
