"""Defects of config.json against the tensors, and of the tensors' names among themselves."""

from __future__ import annotations

from pathlib import Path

import torch

from corrupt import edit
from corrupt.broken_files import EMBEDDING, HEAD, NORM, both
from corrupt.defects import defect
from corrupt.edit import Damage, add, config, drop, file, put, rename, tensors
from corrupt.goods import bf16

LAYER = "model.layers.1."
Q, UP = f"{LAYER}self_attn.q_proj", f"{LAYER}mlp.up_proj"


def drop_all(prefix: str) -> Damage:
    """Drop every tensor whose name begins with ``prefix``, whatever the shard."""

    def damage(folder: Path) -> None:
        for path in edit.shards(folder):
            for name in [entry.name for entry in edit.header_of(path).entries if entry.name.startswith(prefix)]:
                drop(name)(folder)

    return damage


CONFIG = [
    defect("config that is no JSON", "dense", file("config.json", b"{'hidden_size': 128}"), "config.parse"),
    defect("no config", "dense", file("config.json", None), "config.missing"),
    defect("no config of quantized weights", "w4w8", file("config.json", None), "config.missing config.quant-undeclared"),
    defect("config without architectures", "dense", config(architectures=None), "config.arch"),
    defect("architectures that is a string", "dense", config(architectures="LlamaForCausalLM"), "config.arch"),
    defect("note of an unpack that was edited", "dense", config(ckptkit_layout={"names": 5}), "config.layout"),
    defect("dtype that nothing has", "dense", config(torch_dtype="float16"), "config.dtype"),
    defect("tied, with a head of its own", "dense", config(tie_word_embeddings=True), "config.tie"),
    defect("untied, without a head", "tied", config(tie_word_embeddings=False), "config.tie"),
    defect("tied, with a quantized head", "w8head", config(tie_word_embeddings=True), "config.tie"),
    defect("vocab_size of a resized tokenizer", "dense", config(vocab_size=520), "config.vocab"),
    defect("embedding cut short", "dense", put(EMBEDDING, lambda t: t[:500]), "config.vocab vocab.rows"),
    defect("head of fewer rows", "dense", put(HEAD, lambda t: t[:500]), "vocab.rows"),
    defect("quantized head of fewer rows", "w8head", both(*(put(f"lm_head.weight_{part}", lambda t: t[:500])
           for part in ("packed", "scale"))), "vocab.rows"),
    defect("one layer more than stored", "dense", config(num_hidden_layers=3), "config.layers"),
    defect("one layer fewer than stored", "dense", config(num_hidden_layers=1), "config.layers"),
    defect("a layer lost", "dense", drop_all(LAYER), "config.layers"),
    defect("hidden_size of another model", "dense", config(hidden_size=256, head_dim=None), "shapes.config"),
    defect("intermediate_size of another model", "w4w8", config(intermediate_size=512), "shapes.config"),
    defect("projection cut short", "dense", put(f"{UP}.weight", lambda t: t[:200]), "shapes.config"),
    defect("one expert of another shape", "moe", put("model.layers.0.mlp.experts.2.up_proj.weight", lambda t: t[:60]),
           "shapes.layer"),
]  # fmt: skip

NAMES = [
    defect("layer without q_proj", "dense", drop(f"{Q}.weight"), "names.incomplete-layer"),
    defect("layer without up_proj", "w4w8", both(*(drop(f"{UP}.weight_{part}") for part in ("packed", "scale", "shape"))),
           "names.incomplete-layer"),
    defect("projection misspelt", "dense", rename(f"{Q}.weight", f"{LAYER}self_attn.q_prj.weight"),
           "names.incomplete-layer"),
    defect("expert lost", "moe", drop_all("model.layers.1.mlp.experts.3."), "names.incomplete-experts"),
    defect("expert without down_proj", "moe", drop("model.layers.0.mlp.experts.2.down_proj.weight"),
           "names.incomplete-experts"),
    defect("more experts declared than stored", "moe", config(num_experts=8), "names.incomplete-experts"),
    defect("no token embedding", "dense", drop(EMBEDDING), "names.incomplete-model"),
    defect("no last norm", "dense", drop(NORM), "names.incomplete-model"),
    defect("draft layers lost", "mtp", drop_all("model.mtp_layers."), "names.draft-missing"),
    defect("draft layers declared, none stored", "dense", config(num_nextn_predict_layers=1), "names.draft-missing"),
    defect("draft layer without its projection", "mtp", drop("model.mtp_layers.0.input_proj.weight"),
           "names.incomplete-layer"),
    defect("optimizer state left in", "dense", add(NORM, "optimizer.exp_avg.norm", torch.ones(128)), "names.orphan"),
    defect("adapter not merged", "dense", both(*(add(NORM, f"model.layers.{layer}.self_attn.q_proj.lora_A.weight", bf16(8, 128)) for layer in (0, 1))), "names.orphan"),
    defect("wrapper in the names", "dense", tensors(lambda held: held.update(
           {name.replace("layers.1.", "layers.1._orig_mod."): held.pop(name) for name in list(held)}), NORM),
           "names.orphan"),
]  # fmt: skip
