"""SmolLM2 with a head of its own, what ckptkit makes of it, and ways in which that can be broken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors, dict[str, Any]], None]


def changed(source: Path, out: Path, change: Change) -> Path:
    """A copy of a one-file checkpoint with its tensors and its config changed, and no manifest."""
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors", "ckptkit.json"))
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text("utf-8"))
    change(tensors, config)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=1), "utf-8")
    return out


def untie(tensors: Tensors, config: dict[str, Any]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    config["tie_word_embeddings"] = False


# --- broken ------------------------------------------------------------------------------------------------


def swap_nibbles(tensors: Tensors, config: dict[str, Any]) -> None:
    """The two four-bit numbers of every byte of the body, the wrong way round."""
    for name, words in tensors.items():
        if name.startswith("model.layers.") and name.endswith(".weight_packed"):
            data = words.view(torch.uint8)
            tensors[name] = ((data << 4) | (data >> 4)).view(torch.int32)


def head_scales_of_one(tensors: Tensors, config: dict[str, Any]) -> None:
    tensors["lm_head.weight_scale"] = torch.ones_like(tensors["lm_head.weight_scale"])


def without_a_layer(tensors: Tensors, config: dict[str, Any]) -> None:
    for name in [name for name in tensors if name.startswith("model.layers.7.")]:
        del tensors[name]


def permuted_head(tensors: Tensors, config: dict[str, Any]) -> None:
    """The head's rows in another order, under the names that they had."""
    rows = tensors["lm_head.weight_packed"].shape[0]
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    for name in ("lm_head.weight_packed", "lm_head.weight_scale"):
        tensors[name] = tensors[name][order].contiguous()


def tied_on(tensors: Tensors, config: dict[str, Any]) -> None:
    config["tie_word_embeddings"] = True


# Of which result each is made, and what serving must find.
BROKEN: Mapping[str, tuple[str, Change, set[str]]] = {
    "swapped-nibbles": ("w4", swap_nibbles, {"serve.tolerance"}),
    "head-scales-of-one": ("w8", head_scales_of_one, {"serve.tolerance"}),
    "without-a-layer": ("w8", without_a_layer, {"serve.missing-tensors", "serve.tolerance"}),
    "permuted-head": ("w8", permuted_head, {"serve.tolerance"}),
    "tied-on": ("w8", tied_on, {"serve.start"}),
}
