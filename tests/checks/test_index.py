"""The index against the files: both ways, and what is grave of it."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from make import checkpoint, llama, llama_config
from quantized_parts import found
from safetensors.torch import load_file

from ckptkit.checks import Subject, config, container, index, names
from ckptkit.cli import main
from ckptkit.errors import OK
from ckptkit.files.checkpoint import INDEX, scan
from ckptkit.files.source import DANGLING, open_source

HEAD, NORM = "lm_head.weight", "model.norm.weight"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small Llama in two shards; the head and the last norm lie in the second."""
    tensors = llama()
    held = list(tensors)
    return checkpoint(
        tmp_path / "model", [{n: tensors[n] for n in half} for half in (held[:9], held[9:])], llama_config()
    )


def edit(folder: Path, change: Edit) -> None:
    table = json.loads((folder / INDEX).read_text())
    change(table)
    (folder / INDEX).write_text(json.dumps(table))


def ids(folder: Path) -> list[tuple[str, str]]:
    return sorted((finding.id, finding.severity) for finding in found(folder, index))


def test_a_good_one(model: Path) -> None:
    assert ids(model) == []


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda t: t["metadata"].pop("total_size"), []),
        (lambda t: t.pop("metadata"), []),
        (lambda t: t["metadata"].update(total_size=0), [("index.total-size", "warning")]),
        (lambda t: t["metadata"].update(total_size="many"), [("index.total-size", "warning")]),
        (lambda t: t["weight_map"].pop(HEAD), [("index.extra-tensor", "error")]),
        (lambda t: t["weight_map"].update({"model.lost.weight": FIRST}), [("index.missing-tensor", "error")]),
        (lambda t: t["weight_map"].update({"a": "model-00003-of-00003.safetensors"}),
         [("index.missing-shard", "error"), ("index.shard-count", "warning")]),
        (lambda t: t["weight_map"].update({NORM: FIRST}), [("index.extra-tensor", "error"), ("index.missing-tensor", "error")]),
    ],
)  # fmt: skip
def test_the_index(model: Path, change: Edit, wanted: list[tuple[str, str]]) -> None:
    edit(model, change)
    assert ids(model) == wanted


@pytest.mark.parametrize(("name", "severity"), [("model.safetensors", "error"), ("old.safetensors", "warning")])
def test_a_lone_file_that_transformers_prefers_is_an_error(model: Path, name: str, severity: str) -> None:
    checkpoint(model.parent / "old", {"a": torch.zeros(1)})
    os.rename(model.parent / "old" / "model.safetensors", model / name)
    assert ids(model) == [("index.stray-shard", severity)]


def test_a_shard_that_the_index_leaves_out_is_an_error(model: Path) -> None:
    edit(model, lambda table: table.update(weight_map={k: v for k, v in table["weight_map"].items() if v == FIRST}))
    assert ("index.stray-shard", "error") in ids(model)


def test_a_file_beside_a_single_one_is_a_warning(tmp_path: Path) -> None:
    checkpoint(tmp_path, llama())
    checkpoint(tmp_path / "old", {"a": torch.zeros(1)})
    os.rename(tmp_path / "old" / "model.safetensors", tmp_path / "another.safetensors")
    assert ids(tmp_path) == [("index.stray-shard", "warning")]


def test_numbers_in_names_are_all_there_is_without_an_index(model: Path) -> None:
    (model / INDEX).unlink()
    (model / SECOND).unlink()
    assert ids(model) == [("index.shard-count", "error")]


def test_a_total_cannot_be_checked_where_a_shard_is_missing(model: Path) -> None:
    (model / SECOND).unlink()
    with open_source(str(model)) as source:
        checkpoint, faults = scan(source)
    probe = next(probe for probe in index.PROBES if probe.ids == ("index.total-size",))
    assert "index.missing-shard" in str(probe.unfit(Subject(checkpoint, tuple(faults))))


def test_the_wrong_index_of_many_layers_is_one_finding(tmp_path: Path) -> None:
    parts = [{f"layers.{number}.up_proj.weight": torch.zeros(2)} for number in range(9)]
    folder = checkpoint(tmp_path, parts)
    edit(folder, lambda t: t.update(weight_map={f"{n}_packed": file for n, file in t["weight_map"].items()}))
    counts = {finding.id: finding.data["count"] for finding in found(folder, index)}
    assert counts == {"index.extra-tensor": 9, "index.missing-tensor": 9}


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda t: t["weight_map"].pop("model.layers.1.mlp.up_proj.weight"), {"index.extra-tensor"}),
        (lambda t: t["weight_map"].update({"model.layers.1.mlp.up_proj.weight": FIRST}),
         {"index.extra-tensor", "index.missing-tensor"}),
    ],
)  # fmt: skip
def test_what_the_index_misplaces_is_not_said_to_be_lost_too(model: Path, change: Edit, wanted: set[str]) -> None:
    edit(model, change)
    assert {finding.id for finding in found(model, container, index, config, names)} == wanted


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t["weight_map"].pop(HEAD),
        lambda t: t["weight_map"].update({NORM: FIRST}),
        lambda t: t["weight_map"].update({NORM: "../other.safetensors"}),
        lambda t: t["weight_map"].clear(),
        lambda t: t.pop("weight_map"),
        None,
    ],
)
def test_the_hint_mends_it(model: Path, change: Edit | None) -> None:
    """It is a command that can be given as it stands, and its result has all tensors and no fault."""
    before = {name for path in model.glob("*.safetensors") for name in load_file(path)}
    if change is None:
        (model / INDEX).unlink()
    else:
        edit(model, change)
    hints = {finding.hint for finding in found(model, index)}
    (command,) = {str(hint).partition(" writes")[0] for hint in hints}
    program, *arguments = shlex.split(command)
    assert program == "ckptkit"
    assert main([*arguments, "-q", "--no-progress"]) == OK
    mended = Path(arguments[-1])
    assert {name for path in mended.glob("*.safetensors") for name in load_file(path)} == before
    assert ids(mended) == []


def test_a_shard_that_is_a_symlink_to_nowhere(model: Path) -> None:
    (model / SECOND).unlink()
    (model / SECOND).symlink_to("/nowhere")
    (finding,) = [item for item in found(model, index) if item.id == "index.missing-shard"]
    assert finding.file == SECOND
    assert DANGLING in finding.message
