"""Defects of the files: headers and the bytes they promise, the index, what lies beside the shards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from corrupt import edit
from corrupt.defects import defect
from corrupt.edit import INDEX, Damage, file

SHARD = "model-00001-of-00002.safetensors"
OTHER = "model-00002-of-00002.safetensors"
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4096\n"


def raw(change: Callable[[bytes], bytes], name: str = SHARD) -> Damage:
    """Rewrite a file's bytes."""

    def damage(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return damage


def entry(tensor: str, change: Callable[[dict[str, Any]], object]) -> Damage:
    """Edit a tensor's entry in the header of the first shard."""
    return edit.edit_header(lambda table: change(table[tensor]))


def shifted(tensor: str, by: int) -> Damage:
    """Move a tensor's place in the header without moving its bytes."""
    return entry(tensor, lambda found: found.update(data_offsets=[at + by for at in found["data_offsets"]]))


def twice(tensor: str) -> Damage:
    """A header that names a tensor a second time, as JSON readers let pass."""

    def change(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        found = json.loads(data[8 : 8 + length])
        again = json.dumps({tensor: found[tensor]})[1:]
        text = data[8 : 8 + length].rstrip()[:-1] + b"," + again.encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    return raw(change)


def hole(data: bytes) -> bytes:
    """Eight bytes before the last tensor that belong to none."""
    length = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + length])
    last = max((value for name, value in table.items() if name != "__metadata__"), key=lambda v: v["data_offsets"])
    start, stop = last["data_offsets"]
    last["data_offsets"] = [start + 8, stop + 8]
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    body = data[8 + length :]
    return len(text).to_bytes(8, "little") + text + body[:start] + bytes(8) + body[start:]


def copied(tensor: str, shard: str) -> Damage:
    """Put a tensor into another shard as well; the index knows nothing of it."""

    def damage(folder: Path) -> None:
        found = load_file(edit.holder(folder, tensor))[tensor]
        held = load_file(folder / shard) | {tensor: found}
        save_file(held, folder / shard, metadata={"format": "pt"})
        edit.index(lambda table: table["metadata"].pop("total_size"))(folder)

    return damage


def renamed(old: str, new: str) -> Damage:
    """Rename a shard, in the index too."""

    def damage(folder: Path) -> None:
        (folder / old).rename(folder / new)
        table = json.loads((folder / INDEX).read_text())
        table["weight_map"] = {name: new if at == old else at for name, at in table["weight_map"].items()}
        (folder / INDEX).write_text(json.dumps(table))

    return damage


def both(*damages: Damage) -> Damage:
    """One damage after the other."""
    return lambda folder: [damage(folder) for damage in damages]


def stray(name: str) -> Damage:
    return lambda folder: save_file({"old.weight": torch.ones(4)}, folder / name)


def stale_index(folder: Path) -> None:
    """The source's index beside quantized shards."""
    shutil.copy(folder.with_name(f"{folder.name}-source") / INDEX, folder / INDEX)


def placed(tensor: str, shard: str) -> Damage:
    return edit.index(lambda table: table["weight_map"].update({tensor: shard}))


CONTAINER = [
    defect("header length of 1 EB", "dense", raw(lambda data: b"\xff" * 7 + b"\x0f" + data[8:]), "layout.header"),
    defect("header that is no JSON", "dense", raw(lambda data: data[:8] + b"x" + data[9:]), "layout.header"),
    defect("header of a dtype nobody has", "dense", entry(NORM_0 := "model.layers.0.input_layernorm.weight",
           lambda found: found.update(dtype="BF17")), "layout.header"),
    defect("shape that takes other bytes", "dense", entry(NORM_0, lambda found: found.update(shape=[64])), "layout.header"),
    defect("web page for a shard", "dense", file(SHARD, b"<!DOCTYPE html><html>Not found</html>"), "layout.header"),
    defect("LFS pointer for a shard", "dense", file(SHARD, LFS), "layout.header"),
    defect("empty shard", "dense", file(OTHER, b""), "layout.truncated"),
    defect("tensor named twice", "dense", twice(NORM_0), "layout.duplicate-key"),
    defect("truncated shard", "dense", raw(lambda data: data[:-41]), "layout.truncated"),
    defect("truncated single file", "single", raw(lambda data: data[:-1], "model.safetensors"), "layout.truncated"),
    defect("bytes after the last tensor", "dense", raw(lambda data: data + b"\n"), "layout.trailing"),
    defect("hole between tensors", "dense", raw(hole), "layout.gap"),
    defect("tensors that share bytes", "dense", shifted(NORM_0, -256), "layout.overlap"),
    defect("data off its alignment", "dense", edit.edit_header(lambda table: None, pad=False), "layout.unaligned"),
]  # fmt: skip

INDEXES = [
    defect("no index", "dense", file(INDEX, None), "index.missing"),
    defect("index that is no JSON", "dense", file(INDEX, b'{"weight_map": {'), "index.parse"),
    defect("index without a map", "dense", edit.index(lambda table: table.pop("weight_map")), "index.parse"),
    defect("index that leaves the folder", "dense", placed(HEAD, "../other.safetensors"), "index.path"),
    defect("two indexes of odd names", "dense", lambda folder: [
        (folder / INDEX).rename(folder / "a.safetensors.index.json"),
        shutil.copy(folder / "a.safetensors.index.json", folder / "b.safetensors.index.json")], "index.ambiguous"),
    defect("missing shard", "dense", file(OTHER, None), "index.missing-shard"),
    defect("index promises a lost tensor", "dense", edit.tensors(lambda held: held.pop(HEAD), HEAD, reindex=False),
           "index.missing-tensor index.total-size"),
    defect("tensor that the index leaves out", "dense", edit.index(lambda table: table["weight_map"].pop(HEAD)),
           "index.extra-tensor"),
    defect("tensor in another shard than said", "dense", placed(HEAD, SHARD), "index.missing-tensor index.extra-tensor"),
    defect("tensor in two shards", "dense", copied(NORM, SHARD), "index.duplicate"),
    defect("index of the source", "w4w8", stale_index, "index.missing-tensor index.extra-tensor index.total-size"),
    defect("stale single file beside shards", "dense", stray("model.safetensors"), "index.stray-shard"),
    defect("safetensors file of nothing", "dense", stray("consolidated.safetensors"), "index.stray-shard"),
    defect("total_size of 0", "dense", edit.index(lambda table: table["metadata"].update(total_size=0)),
           "index.total-size"),
    defect("shards of 3, of which there are 2", "dense", renamed(SHARD, "model-00001-of-00003.safetensors"),
           "index.shard-count"),
    defect("one of two shards, no index", "dense", both(file(INDEX, None), file(OTHER, None)),
           "index.shard-count"),
]  # fmt: skip

REMOTE = {"AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM"}


def template(text: str) -> Damage:
    return edit.json_file("tokenizer_config.json", lambda table: table.update(chat_template=text))


SIDECARS = [
    defect("empty tokenizer", "dense", file("tokenizer.json", b""), "files.empty"),
    defect("LFS pointer for a tokenizer", "dense", file("tokenizer.json", LFS), "files.empty"),
    defect("no tokenizer", "dense", both(file("tokenizer.json", None), file("tokenizer_config.json", None)),
           "files.tokenizer"),
    defect("tokenizer that is no JSON", "dense", file("tokenizer.json", b"{"), "files.tokenizer"),
    defect("settings without their tokenizer", "dense", file("tokenizer.json", None), "files.tokenizer"),
    defect("generation config that is no JSON", "dense", file("generation_config.json", b"[1"), "files.generation"),
    defect("remote code that is not there", "dense", edit.config(auto_map=REMOTE), "files.remote-code"),
    defect("remote code that imports what is not there", "dense",
           both(edit.config(auto_map=REMOTE), file("modeling_tiny.py", b"from .configuration_tiny import Config\n")),
           "files.remote-code"),
    defect("chat template with a loop left open", "dense", template("{% for m in messages %}"), "files.chat-template"),
    defect("chat template file that is not there", "dense", template("chat_template.jinja"), "files.chat-template"),
    defect("tokenizer with more tokens than rows", "dense", edit.json_file("tokenizer.json", lambda table:
           table["added_tokens"].append({"id": 512, "content": "<tool>"})), "vocab.rows"),
]  # fmt: skip
