"""Several sources as one: names, reads, and that a change in any of them is seen."""

from __future__ import annotations

from pathlib import Path

from make import checkpoint, llama

from ckptkit.files.checkpoint import joined, open_checkpoint
from ckptkit.files.source import open_source


def test_checkpoints_side_by_side(tmp_path: Path) -> None:
    folders = [checkpoint(tmp_path / name, llama(seed=seed)) for seed, name in enumerate(("first", "second"))]
    first, second = (open_checkpoint(open_source(str(folder))) for folder in folders)
    joint = joined(first, {"other": second})
    assert dict(joint.tensors) == dict(first.tensors)
    assert joint.others["other"].shards == {"other:model.safetensors": second.shards["model.safetensors"]}
    for name, ref in second.tensors.items():
        moved = joint.others["other"].tensors[name]
        assert moved == ref._replace(file="other:model.safetensors")
        data = folders[1].joinpath("model.safetensors").read_bytes()[ref.start : ref.stop]
        assert joint.source.read(moved.file, moved.start, moved.stop) == data
    assert joint.source.roots == folders


def test_what_changes_is_told_by_its_name(tmp_path: Path) -> None:
    folders = [checkpoint(tmp_path / name, llama()) for name in ("first", "second", "third")]
    first, *others = (open_checkpoint(open_source(str(folder))) for folder in folders)
    source = joined(first, {"a": others[0], "b": others[1]}).source
    recorded = {name: info.identity for name, info in source.files.items()}
    assert source.changed(recorded) == []
    (folders[1] / "model.safetensors").touch()
    assert source.changed(recorded) == ["a:model.safetensors"]
    (folders[2] / "model.safetensors").unlink()
    assert source.changed(recorded) == ["a:model.safetensors", "b:model.safetensors"]
