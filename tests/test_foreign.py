"""Files that are no safetensors, made by the programs that make them."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from make import checkpoint, llama, llama_config

from ckptkit.cli import main
from ckptkit.errors import FOUND, SOURCE
from ckptkit.files.foreign import foreign

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 4967215360\n" % (b"0" * 64)
WRITERS: dict[str, Callable[[Path], object]] = {
    "lfs": lambda path: path.write_bytes(LFS),
    "html": lambda path: path.write_bytes(b"\n<!DOCTYPE html><title>401</title>"),
    "marked": lambda path: path.write_bytes(b"\xef\xbb\xbf<html></html>"),
    "torch": lambda path: torch.save({"a": torch.ones(2)}, path),
    "pickle": lambda path: path.write_bytes(pickle.dumps({"a": [1] * 9})),
    "gzip": lambda path: path.write_bytes(gzip.compress(b"a" * 99)),
    "gguf": lambda path: path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(56)),
    "zeros": lambda path: path.write_bytes(bytes(4096)),
}


def faults(capsys: pytest.CaptureFixture[str], *arguments: object, code: int) -> dict[str, str]:
    """The ids that a command line finds, with their hints; its exit code being as expected."""
    assert main([*map(str, arguments), "--json"]) == code
    return {finding["id"]: finding["hint"] for finding in json.loads(capsys.readouterr().out)["findings"]}


@pytest.mark.parametrize("writer", WRITERS)
def test_every_command_says_what_stands_in_place_of_a_shard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], writer: str
) -> None:
    WRITERS[writer](checkpoint(tmp_path, llama(), llama_config()) / "model.safetensors")
    out = tmp_path.with_name(f"{tmp_path.name}-out")
    told = foreign((tmp_path / "model.safetensors").read_bytes()[:64], "model.safetensors")
    assert told is not None
    for command in (["inspect", tmp_path], ["diff", tmp_path, tmp_path], ["reshard", tmp_path, out]):
        assert faults(capsys, *command, code=SOURCE) == {"layout.header": told.hint}
    assert faults(capsys, "verify", tmp_path, "--select", "layout", code=FOUND) == {"layout.header": told.hint}


@pytest.mark.parametrize(
    ("name", "id"), [("config.json", "config.parse"), ("model.safetensors.index.json", "index.parse")]
)
def test_a_pointer_in_place_of_a_small_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, id: str
) -> None:
    (checkpoint(tmp_path, llama(), llama_config()) / name).write_bytes(LFS)
    assert faults(capsys, "inspect", tmp_path, code=SOURCE) == {id: f"git lfs pull --include {name}"}


@pytest.mark.parametrize("beginning", [b"", b"{}", b'{"a": 1}', (64).to_bytes(8, "little"), "é".encode()])
def test_what_looks_like_nothing_else(beginning: bytes) -> None:
    assert foreign(beginning, "x") is None
