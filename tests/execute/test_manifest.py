"""Reading a manifest: what is not one, or not of this version, is none; what it says of a changed file is not believed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lab
import pytest
from lab import run, shard_name

from ckptkit.files.source import open_source
from ckptkit.manifest import known_digests, read_manifest


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "{}", '{"schema": 2}', "[" * 100_000, "\x00"])
def test_what_is_no_manifest(source: Path, out: Path, text: str) -> None:
    run(source, out)
    (out / "ckptkit.json").write_text(text)
    with open_source(str(out)) as opened:
        assert read_manifest(opened) is None
    run(out, out.with_name("again"), flipped=(), link="hard")
    assert (out.with_name("again") / "ckptkit.json").exists()


def test_a_source_without_manifest(source: Path) -> None:
    with open_source(str(source)) as opened:
        assert read_manifest(opened) is None


@pytest.mark.parametrize(
    "record",
    [None, 7, {}, {"name": 1}, {"tensors": None}, {"tensors": []}, {"size": 1}, {"mtime_ns": 0}, {"name": "x"}],
)
def test_only_whole_and_true_records_are_believed(source: Path, record: Any) -> None:
    with open_source(str(source)) as opened:
        info = opened.files[shard_name(0)]
        true = {"name": shard_name(0), "size": info.size, "mtime_ns": info.mtime_ns, "tensors": {"a": "00"}}
        assert known_digests({"shards": [true]}, opened.files) == {shard_name(0): {"a": "00"}}
        changed = true | record if isinstance(record, dict) and record else record
        assert known_digests({"shards": [changed]}, opened.files) == {}
    assert known_digests({}, {}) == known_digests({"shards": 7}, {}) == {}


def test_a_manifest_says_what_the_result_was_made_of(source: Path, out: Path) -> None:
    run(source, out)
    manifest = json.loads((out / "ckptkit.json").read_text())
    with open_source(str(source)) as opened:
        plan = lab.make_plan(opened)
        read = {*map(shard_name, range(lab.SHARDS)), "assets/notes.txt", "model.safetensors.index.json"}
        assert manifest["source"] == {
            "uri": str(source),
            "files": {n: {"size": opened.files[n].size, "mtime_ns": opened.files[n].mtime_ns} for n in read},
        }
    assert (manifest["schema"], manifest["command"], manifest["plan"]) == (1, "flip", plan.digest)
    assert [shard["plan"] for shard in manifest["shards"]] == [
        shard.digest for shard in sorted(plan.shards, key=lambda shard: shard.name)
    ]
    assert manifest["settings"] == {"recipe": "by hand"}
    assert manifest["environment"]["backend"] == "native"
