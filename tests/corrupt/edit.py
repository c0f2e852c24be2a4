"""Damage, by hand: change tensors, index, config or bytes of a checkpoint as a bad tool or a bad disk would."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ckptkit.files.header import Header, read_header

INDEX = "model.safetensors.index.json"
Damage = Callable[[Path], object]


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def holder(folder: Path, tensor: str) -> Path:
    """The shard that holds ``tensor``."""
    for path in shards(folder):
        with safe_open(path, "pt") as file:
            if tensor in file.keys():  # noqa: SIM118
                return path
    raise KeyError(tensor)


def tensors(change: Callable[[dict[str, torch.Tensor]], object], tensor: str, reindex: bool = True) -> Damage:
    """Rewrite the shard that holds ``tensor`` after ``change``; the index follows unless told otherwise."""

    def damage(folder: Path) -> None:
        path = holder(folder, tensor)
        held = load_file(path)
        before = set(held)
        change(held)
        save_file(held, path, metadata={"format": "pt"})
        if reindex and (folder / INDEX).exists():
            _reindex(folder, path.name, before, held)

    return damage


def _reindex(folder: Path, shard: str, before: set[str], held: dict[str, torch.Tensor]) -> None:
    table = json.loads((folder / INDEX).read_text())
    weight_map = {name: file for name, file in table["weight_map"].items() if name not in before}
    table["weight_map"] = weight_map | dict.fromkeys(held, shard)
    table["metadata"]["total_size"] = sum(t.nbytes for path in shards(folder) for t in load_file(path).values())
    (folder / INDEX).write_text(json.dumps(table))


def put(tensor: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    """Replace one tensor."""
    return tensors(lambda held: held.update({tensor: change(held[tensor]).contiguous()}), tensor)


def drop(tensor: str) -> Damage:
    return tensors(lambda held: held.pop(tensor), tensor)


def rename(tensor: str, new: str) -> Damage:
    return tensors(lambda held: held.update({new: held.pop(tensor)}), tensor)


def add(beside: str, new: str, value: torch.Tensor) -> Damage:
    return tensors(lambda held: held.update({new: value}), beside)


def json_file(name: str, change: Callable[[dict[str, Any]], object]) -> Damage:
    """Edit a JSON file in place."""

    def damage(folder: Path) -> None:
        table = json.loads((folder / name).read_text())
        change(table)
        (folder / name).write_text(json.dumps(table, indent=2))

    return damage


def config(**changes: Any) -> Damage:
    """Set (or, for None, remove) keys of config.json."""

    def change(table: dict[str, Any]) -> None:
        for key, value in changes.items():
            table.pop(key, None)
            if value is not None:
                table[key] = value

    return json_file("config.json", change)


def quantization(change: Callable[[dict[str, Any]], object]) -> Damage:
    return json_file("config.json", lambda table: change(table["quantization_config"]))


def index(change: Callable[[dict[str, Any]], object]) -> Damage:
    return json_file(INDEX, change)


def file(name: str, content: bytes | None) -> Damage:
    """Write a file, or remove it."""
    return lambda folder: (folder / name).unlink() if content is None else (folder / name).write_bytes(content)


def header_of(path: Path) -> Header:
    data = path.read_bytes()
    return read_header(lambda start, stop: data[start:stop], len(data), path.name)


def edit_header(change: Callable[[dict[str, Any]], object], pad: bool = True) -> Damage:
    """Rewrite the first shard's header as JSON, the data as it is."""

    def damage(folder: Path) -> None:
        path = shards(folder)[0]
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        table = json.loads(data[8 : 8 + length])
        change(table)
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8) if pad else b" " * (1 + -len(text) % 8)
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    return damage


def flip(tensor: str, at: int = 0, bit: int = 0) -> Damage:
    """Flip one bit of a tensor's data."""

    def damage(folder: Path) -> None:
        path = holder(folder, tensor)
        entry = next(entry for entry in header_of(path).entries if entry.name == tensor)
        data = bytearray(path.read_bytes())
        data[entry.start + at] ^= 1 << bit
        path.write_bytes(data)

    return damage
