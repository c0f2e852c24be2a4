"""Recorded digests: what is compared, what is named, and what is not run."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
from make import checkpoint, llama, llama_config

from ckptkit.checks import Sample

from .subjects import findings, flip, hashed, ids, outcome, quantize, results

Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = llama()
    names = list(tensors)
    parts = [{name: tensors[name] for name in names[:9]}, {name: tensors[name] for name in names[9:]}]
    folder = checkpoint(tmp_path_factory.mktemp("digests") / "model", parts, llama_config())
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "model"))


def test_a_shard_without_a_record_is_not_run(folder: Path) -> None:
    assert results(outcome(folder))["data.digest"] == "skip"
    hashed(folder, "--per-tensor")
    (folder / "SHA256SUMS").unlink()
    assert results(outcome(folder))["data.digest"] == "ok"
    record = json.loads((folder / "ckptkit.digests.json").read_text())
    del record["shards"]["model-00002-of-00002.safetensors"]
    (folder / "ckptkit.digests.json").write_text(json.dumps(record))
    found = outcome(folder)
    assert results(found)["data.digest"] == "skip"
    assert "model-00002-of-00002.safetensors" in next(r.reason or "" for r in found.results if r.id == "data.digest")
    flip(folder, Q, 100, 3)
    assert results(outcome(folder))["data.digest"] == "fail"


@pytest.mark.parametrize("options", [[], ["--per-tensor"]], ids=["files", "tensors"])
def test_one_flipped_bit_is_one_finding(folder: Path, options: list[str]) -> None:
    hashed(folder, *options)
    assert ids(folder) == []
    chance = random.Random(3)
    for name, tensor in chance.sample(sorted(llama().items()), 12):
        at, bit = chance.randrange(tensor.nbytes), chance.randrange(8)
        flip(folder, name, at, bit)
        found = findings(folder)
        assert [finding.id for finding in found] == ["data.digest"]
        if options:
            assert found[0].tensor == name
        flip(folder, name, at, bit)
    assert ids(folder) == []


def test_a_flip_that_makes_an_inf_is_one_finding_that_names_the_tensor(folder: Path) -> None:
    hashed(folder)
    flip(folder, "model.norm.weight", 1, 6)  # 1.0 in bfloat16 is 3f80, Inf is 7f80
    found = findings(folder)
    assert [(finding.id, finding.tensor) for finding in found] == [("data.digest", "model.norm.weight")]
    assert found[0].data["values"] == ["data.inf"]


@pytest.mark.parametrize("options", [[], ["--hash", "sha256"]], ids=["xxh3", "sha256"])
def test_what_quantize_recorded(folder: Path, tmp_path: Path, options: list[str]) -> None:
    out = quantize(folder, tmp_path / "out", "w4a16", *options)
    found = outcome(out)
    assert found.findings == []
    assert results(found)["data.digest"] == "ok"
    flip(out, "model.layers.1.mlp.up_proj.weight_scale", 5, 1)
    found = outcome(out)
    assert [(f.id, f.tensor) for f in found.findings] == [("data.digest", "model.layers.1.mlp.up_proj.weight_scale")]


def test_a_linked_shard_that_nobody_has_read_is_not_run(folder: Path, tmp_path: Path) -> None:
    recipe = "groups:\n  head: {targets: ['re:.*lm_head$'], scheme: W8A16}\n"
    out = quantize(folder, tmp_path / "out", recipe, "--link", "hard")
    assert results(outcome(out))["data.digest"] == "skip"


def test_the_name_of_a_blob_in_a_hub_cache(folder: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "a"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        blob = blobs / hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.move(path, blob)
        (snapshot / path.name).symlink_to(blob)
    assert results(outcome(snapshot))["data.digest"] == "ok"
    broken = blobs / (snapshot / "model-00001-of-00002.safetensors").readlink().name
    content = bytearray(broken.read_bytes())
    content[-1] ^= 1
    broken.write_bytes(content)
    assert [(f.id, f.file) for f in findings(snapshot)] == [("data.digest", "model-00001-of-00002.safetensors")]


def test_the_etag_of_a_download(folder: Path) -> None:
    kept = folder / ".cache/huggingface/download"
    kept.mkdir(parents=True)
    for path in folder.glob("*.safetensors"):
        etag = hashlib.sha256(path.read_bytes()).hexdigest()
        (kept / f"{path.name}.metadata").write_text(f"{'a' * 40}\n{etag}\n1700000000.0\n")
    assert results(outcome(folder))["data.digest"] == "ok"
    flip(folder, Q, 7, 0)
    assert ids(folder) == ["data.digest"]


def test_a_header_that_changed_without_its_tensors(folder: Path) -> None:
    hashed(folder, "--per-tensor")
    path = folder / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"format":"pt"', b'"format":"np"'))
    found = findings(folder)
    assert [(f.id, f.file, f.tensor) for f in found] == [("data.digest", path.name, None)]


def test_a_file_beside_the_shards_is_a_warning(folder: Path) -> None:
    hashed(folder)
    (folder / "tokenizer.json").write_text('{"model": {}}')
    (folder / "config.json").unlink()
    found = findings(folder)
    assert {(f.id, f.severity, f.file) for f in found} == {
        ("data.digest", "warning", "tokenizer.json"),
        ("data.digest", "warning", "config.json"),
    }


@pytest.mark.parametrize("options", [[], ["--per-tensor"]], ids=["files", "tensors"])
def test_the_parts_of_a_sample_are_everything_once(folder: Path, options: list[str]) -> None:
    hashed(folder, *options)
    parts = [outcome(folder, sample=Sample(part, 5)) for part in range(1, 6)]
    whole = sum(next(r.checked for r in part.results if r.id == "data.nan") for part in parts)
    if options:
        assert whole == len(llama())
    damaged = ["model.norm.weight", "lm_head.weight", Q] if options else [Q]
    for name in damaged:
        flip(folder, name, 1, 1)
    hit = Counter(f.tensor or f.file for n in range(1, 6) for f in findings(folder, sample=Sample(n, 5)))
    assert set(hit.values()) == {1}
    assert len(hit) == len(damaged)


def test_many_tensors_of_one_kind_are_told_as_one(tmp_path: Path) -> None:
    folder = hashed(checkpoint(tmp_path / "deep", llama(layers=5), llama_config(layers=5)), "--per-tensor")
    for layer in range(5):
        flip(folder, f"model.layers.{layer}.self_attn.q_proj.weight", 8, 2)
    (found,) = findings(folder)
    assert (found.id, found.data["count"]) == ("data.digest", 5)
