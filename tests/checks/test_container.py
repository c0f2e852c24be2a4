"""The safetensors files themselves: an error is what safetensors' own reader refuses, and a key that stands twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from make import checkpoint
from quantized_parts import found
from safetensors import SafetensorError, safe_open

from ckptkit.checks import container

Table = dict[str, Any]


def encode(table: Table | str, data: bytes, pad: bool = True) -> bytes:
    """A file by the format's description, not by the package's writer."""
    text = (table if isinstance(table, str) else json.dumps(table)).encode()
    text += b" " * (-len(text) % 8 if pad else 0)
    return len(text).to_bytes(8, "little") + text + data


def place(dtype: str, shape: list[int], start: int, stop: int) -> Table:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def two(first: Table, second: Table) -> Table:
    return {"a": first, "b": second}


A, B = place("F32", [4], 0, 16), place("F32", [4], 16, 32)
FILES: dict[str, tuple[bytes, str | None]] = {
    "good": (encode(two(A, B), bytes(32)), None),
    "good and empty": (encode({}, b""), None),
    "no JSON": (encode("{]", b""), "layout.header"),
    "unknown dtype": (encode({"a": place("F33", [4], 0, 16)}, bytes(16)), "layout.header"),
    "wrong size": (encode({"a": place("F32", [5], 0, 16)}, bytes(16)), "layout.header"),
    "cut off": (encode(two(A, B), bytes(31)), "layout.truncated"),
    "cut off in the header": (encode(two(A, B), b"")[:40], "layout.truncated"),
    "too long": (encode(two(A, B), bytes(33)), "layout.trailing"),
    "a hole": (encode(two(A, place("F32", [4], 20, 36)), bytes(36)), "layout.gap"),
    "shared bytes": (encode(two(A, place("F32", [4], 12, 28)), bytes(28)), "layout.overlap"),
}


@pytest.mark.parametrize("name", FILES)
def test_errors_are_what_the_reference_reader_refuses(name: str, tmp_path: Path) -> None:
    content, id = FILES[name]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    findings = found(tmp_path, container)
    assert [(f.id, f.severity, f.file) for f in findings] == ([(id, "error", path.name)] if id else [])
    try:
        with safe_open(path, "numpy"):
            refused = False
    except SafetensorError:
        refused = True
    assert refused == (id is not None)


def test_a_tensor_named_twice_is_an_error_though_the_reference_reader_may_take_it(tmp_path: Path) -> None:
    twice = json.dumps({"a": A})[:-1] + "," + json.dumps({"a": A})[1:]
    (tmp_path / "model.safetensors").write_bytes(encode(twice, bytes(16)))
    with safe_open(tmp_path / "model.safetensors", "numpy") as file:
        assert list(file.keys()) == ["a"]
    assert [(f.id, f.severity) for f in found(tmp_path, container)] == [("layout.duplicate-key", "error")]


@pytest.mark.parametrize(
    ("content", "tensors"),
    [
        (encode({"a": place("U8", [3], 0, 3), "b": place("F32", [4], 3, 19)}, bytes(19)), 1),
        (encode({"a": A}, bytes(16), pad=False), 1),
        (encode({"a": place("U8", [3], 0, 3)}, bytes(3), pad=False), 0),
    ],
)
def test_alignment_is_a_warning(content: bytes, tensors: int, tmp_path: Path) -> None:
    assert content[0] % 8 or tensors
    (tmp_path / "model.safetensors").write_bytes(content)
    (finding,) = found(tmp_path, container)
    assert (finding.id, finding.severity, finding.data["tensors"]) == ("layout.unaligned", "warning", tensors)


def test_what_torch_writes_is_aligned(tmp_path: Path) -> None:
    checkpoint(tmp_path, {"b": torch.zeros(3, dtype=torch.uint8), "a": torch.zeros(5), "c": torch.zeros(1).bfloat16()})
    assert found(tmp_path, container) == []


def shards(folder: Path, count: int, change: Callable[[bytes], bytes]) -> None:
    parts = [{f"layers.{number}.weight": torch.zeros(2)} for number in range(count)]
    checkpoint(folder, parts)
    for path in folder.glob("*.safetensors"):
        path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(("count", "told"), [(3, 3), (7, 1)])
def test_many_files_with_one_fault_are_one_finding(count: int, told: int, tmp_path: Path) -> None:
    shards(tmp_path, count, lambda content: content[:-1])
    findings = found(tmp_path, container)
    assert [finding.id for finding in findings] == ["layout.truncated"] * told
    if told == 1:
        assert findings[0].data["count"] == count
        assert len(findings[0].data["examples"]) == 5
