"""Checkpoints with a broken index: what is put together from their headers, and what no new index repairs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from make import checkpoint
from safetensors.torch import save_file

from ckptkit.errors import SOURCE, UserError
from ckptkit.files.checkpoint import INDEX, Checkpoint, open_checkpoint
from ckptkit.files.mending import open_mended
from ckptkit.files.numbering import is_whole, numbered
from ckptkit.files.source import open_source

FIRST, SECOND, THIRD = (f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3))
PLACES = {"a": FIRST, "b": FIRST, "c": SECOND, "d": THIRD}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = {name: torch.full((2, 2), float(number)) for number, name in enumerate(PLACES)}
    return checkpoint(tmp_path / "model", [{n: tensors[n] for n in part} for part in ("ab", "c", "d")], {})


def edit(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    table = json.loads((folder / INDEX).read_text())
    change(table["weight_map"])
    (folder / INDEX).write_text(json.dumps(table))


def mended(folder: Path) -> Checkpoint:
    with open_source(str(folder)) as source:
        return open_mended(source)


def refused(folder: Path) -> set[str]:
    with pytest.raises(UserError) as caught:
        mended(folder)
    assert caught.value.exit_code == SOURCE
    return {finding.id for finding in caught.value.findings}


def test_a_sound_checkpoint_stays_as_it_is(folder: Path) -> None:
    found = mended(folder)
    with open_source(str(folder)) as source:
        same = open_checkpoint(source)
    assert (found.shards, found.tensors, found.index, found.stray) == (same.shards, same.tensors, same.index, ())
    assert not found.warnings


BROKEN: dict[str, tuple[Callable[[Path], Any], set[str]]] = {
    "a tensor in another shard than the index says": (
        lambda f: edit(f, lambda places: places.update(b=SECOND)), {"index.missing-tensor", "index.extra-tensor"}),
    "a tensor that the index does not list": (lambda f: edit(f, lambda places: places.pop("b")), {"index.extra-tensor"}),
    "a tensor that is nowhere": (
        lambda f: edit(f, lambda places: places.update(gone=SECOND)), {"index.missing-tensor"}),
    "a shard that the index does not name": (lambda f: edit(f, lambda places: places.pop("d")), {"index.stray-shard"}),
    "a file by its old name": (
        lambda f: edit(f, lambda places: places.update(d="old.safetensors")), {"index.missing-shard", "index.stray-shard"}),
    "no index": (lambda f: (f / INDEX).unlink(), {"index.missing"}),
    "an index of nothing": (lambda f: edit(f, lambda places: places.clear()), {"index.parse"}),
    "an index that is no JSON": (lambda f: (f / INDEX).write_text('{"weight_map": {'), {"index.parse"}),
    "an index that leaves the folder": (
        lambda f: edit(f, lambda places: places.update(d="../d.safetensors")), {"index.path"}),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_every_tensor_is_found_where_it_lies(case: str, folder: Path) -> None:
    breaks, ids = BROKEN[case]
    breaks(folder)
    found = mended(folder)
    assert {name: ref.file for name, ref in found.tensors.items()} == PLACES
    assert list(found.shards) == [FIRST, SECOND, THIRD]
    assert {finding.id for finding in found.warnings} == ids
    assert {finding.severity for finding in found.warnings} == {"warning"}
    assert found.index is None or found.index.weight_map == PLACES


def test_other_files_stay_out(folder: Path) -> None:
    save_file({"d": torch.ones(1)}, folder / "consolidated.safetensors")
    save_file({"e": torch.ones(1)}, folder / "model-00001-of-00002.safetensors")
    found = mended(folder)
    assert set(found.tensors) == set(PLACES)
    assert found.stray == ("consolidated.safetensors", "model-00001-of-00002.safetensors")
    assert {finding.id for finding in found.warnings} == {"index.stray-shard"}


def test_of_two_tensors_of_one_name_the_index_says_which(folder: Path) -> None:
    save_file({"c": torch.ones(2, 2), "b": torch.zeros(3)}, folder / SECOND)
    found = mended(folder)
    assert (found.tensors["b"].file, found.tensors["b"].shape) == (FIRST, (2, 2))
    edit(folder, lambda places: places.update(b=SECOND))
    assert mended(folder).tensors["b"].shape == (3,)


def unindexed(folder: Path, *gone: str) -> None:
    for name in (INDEX, *gone):
        (folder / name).unlink()


HOPELESS: dict[str, tuple[Callable[[Path], Any], set[str]]] = {
    "a shard that is gone": (lambda f: (f / SECOND).unlink(), {"index.missing-shard"}),
    "no index, and a shard is gone": (lambda f: unindexed(f, SECOND), {"index.missing"}),
    "no index, and two sets": (
        lambda f: (unindexed(f), save_file({"e": torch.ones(1)}, f / "x-00001-of-00001.safetensors")), {"index.missing"}),
    "a broken index, and model.safetensors too": (
        lambda f: ((f / INDEX).write_text(""), save_file({"a": torch.ones(1)}, f / "model.safetensors")), {"index.parse"}),
    "twice, and the index does not list it": (
        lambda f: (save_file({"c": torch.ones(1), "b": torch.ones(1)}, f / SECOND), edit(f, lambda places: places.pop("b"))),
        {"index.duplicate"}),
    "a truncated shard": (lambda f: (f / SECOND).write_bytes((f / SECOND).read_bytes()[:-1]), {"layout.truncated"}),
    "a truncated shard that the index does not name": (
        lambda f: (edit(f, lambda places: places.pop("d")), (f / THIRD).write_bytes(b"")), {"layout.truncated"}),
    "a broken config": (lambda f: (f / "config.json").write_text("{"), {"config.parse"}),
}  # fmt: skip


@pytest.mark.parametrize("case", HOPELESS)
def test_what_a_new_index_does_not_repair(case: str, folder: Path) -> None:
    breaks, ids = HOPELESS[case]
    breaks(folder)
    assert ids <= refused(folder)


def test_numbers() -> None:
    assert numbered("sub/model-00002-of-00003.safetensors") == ("sub/model", 2, 3)
    assert numbered("model.safetensors") is None
    assert is_whole([SECOND, FIRST, THIRD])
    assert not is_whole([FIRST, SECOND])
    assert not is_whole([FIRST, FIRST, SECOND])
    assert not is_whole([FIRST, SECOND, "model-00003-of-00004.safetensors"])
    assert not is_whole(["model.safetensors"])
    assert not is_whole([])
