"""What comes out: bytes, headers, modes, links, the manifest."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lab
import numpy as np
import pytest
import xxhash
from lab import Meter, run, shard_name
from safetensors import safe_open

from ckptkit.execute import Options, execute, links
from ckptkit.files.header import Entry
from ckptkit.files.source import open_source
from ckptkit.manifest import read_manifest
from ckptkit.plan import Plan, Ref, Shard, copy_step


@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("chunk_bytes", [64, 1000, 1 << 20])
def test_tensors_are_those_of_the_plan(source: Path, out: Path, jobs: int, chunk_bytes: int) -> None:
    run(source, out, jobs=jobs, chunk_bytes=chunk_bytes)
    assert lab.same_tensors(lab.tensors_of(out), lab.expected(source))


def test_result_has_the_planned_files_and_nothing_else(source: Path, out: Path) -> None:
    run(source, out)
    names = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    sidecars = {"assets/notes.txt", "config.json", "model.safetensors.index.json", "ckptkit.json"}
    assert names == {*map(shard_name, range(lab.SHARDS)), *sidecars}
    assert sorted(path.name for path in out.parent.iterdir()) == ["out", "source"]
    assert json.loads((out / "config.json").read_text()) == {"model_type": "flipped"}
    assert (out / "assets/notes.txt").read_bytes() == (source / "assets/notes.txt").read_bytes()


@pytest.mark.parametrize("link", ["auto", "copy", "hard", "symlink", "reflink"])
def test_modes_and_metadata_are_the_source_shards(source: Path, out: Path, link: str) -> None:
    run(source, out, link=link)
    for i in range(lab.SHARDS):
        assert (out / shard_name(i)).stat().st_mode == (source / shard_name(i)).stat().st_mode
        with safe_open(out / shard_name(i), "numpy") as file:
            assert file.metadata() == {"format": "pt", "part": str(i)}
    assert (out / "assets/notes.txt").stat().st_mode & 0o777 == 0o755


def test_every_tensor_is_aligned(source: Path, out: Path) -> None:
    run(source, out)
    with open_source(str(out)) as made:
        entries: list[Entry] = [e for i in (0, 2) for e in lab.header_of(made, shard_name(i)).entries]
    size = {"I64": 8, "F32": 4, "F16": 2, "U8": 1}
    assert all(entry.start % size[entry.dtype] == 0 for entry in entries)


def test_progress_adds_up(source: Path, out: Path) -> None:
    meter = Meter()
    result = run(source, out, meter, link="copy")
    assert meter.finished
    assert meter.shards == [*map(shard_name, range(lab.SHARDS))]
    assert meter.total_shards == result.shards == lab.SHARDS
    assert meter.bytes == meter.total_bytes == result.bytes_written
    assert result.bytes_written == sum((out / shard_name(i)).stat().st_size for i in range(lab.SHARDS))
    assert (result.bytes_linked, result.resumed, result.path) == (0, 0, out)


# --- links -----------------------------------------------------------------------------------------------------------


def test_hard_links_share_the_inode_of_untouched_shards_only(source: Path, out: Path) -> None:
    result = run(source, out, link="hard")
    shared = [os.path.samefile(out / shard_name(i), source / shard_name(i)) for i in range(lab.SHARDS)]
    assert shared == [False, True, False, True]
    assert not os.path.samefile(out / "assets/notes.txt", source / "assets/notes.txt")
    assert result.links == {"written": 2, "hard": 2}
    assert result.bytes_linked == sum((source / shard_name(i)).stat().st_size for i in (1, 3))


def test_symlinks_point_to_the_source(source: Path, out: Path) -> None:
    run(source, out, link="symlink")
    assert [(out / shard_name(i)).is_symlink() for i in range(lab.SHARDS)] == [False, True, False, True]
    assert (out / shard_name(3)).resolve() == source / shard_name(3)


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP])
@pytest.mark.parametrize(("link", "call"), [("hard", "link"), ("symlink", "symlink")])
def test_a_link_that_cannot_be_made_becomes_a_copy(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, number: int, link: str, call: str
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, refuse)
    result = run(source, out, link=link)
    assert result.links == {"written": 2, "copy": 2}
    assert result.bytes_copied == sum((source / shard_name(i)).stat().st_size for i in (1, 3))
    assert lab.same_tensors(lab.tensors_of(out), lab.expected(source))
    manifest = json.loads((out / "ckptkit.json").read_text())
    assert [shard["link"] for shard in manifest["shards"]] == ["copy", "written", "copy", "written"]


@pytest.mark.parametrize("works", [True, False])
def test_auto_shares_extents_where_it_can(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    def clone(file: Path, descriptor: int) -> None:
        if not works:
            raise OSError(errno.EOPNOTSUPP, "no")
        os.pwrite(descriptor, file.read_bytes(), 0)

    monkeypatch.setattr(links, "_clone", clone)
    meter = Meter()
    result = run(source, out, meter)
    assert result.links == {"written": 2, "reflink" if works else "copy": 2}
    assert meter.bytes == meter.total_bytes
    assert lab.same_tensors(lab.tensors_of(out), lab.expected(source))


@pytest.mark.parametrize("link", ["copy", "hard", "symlink"])
def test_a_source_of_symlinks_as_in_a_hub_cache(tmp_path: Path, source: Path, out: Path, link: str) -> None:
    snapshot, blobs = tmp_path / "cache/snapshots/abc", tmp_path / "cache/blobs"
    blobs.mkdir(parents=True)
    for number, path in enumerate(sorted(path for path in source.rglob("*") if path.is_file())):
        name = snapshot / path.relative_to(source)
        name.parent.mkdir(parents=True, exist_ok=True)
        (blobs / f"{number:040x}").write_bytes(path.read_bytes())
        name.symlink_to(os.path.relpath(blobs / f"{number:040x}", name.parent))
    before = lab.snapshot(blobs)
    run(snapshot, out, link=link)
    assert lab.same_tensors(lab.tensors_of(out), lab.expected(source))
    assert lab.snapshot(blobs) == before
    assert not (out / "assets/notes.txt").is_symlink()
    if link == "hard":
        assert os.path.samefile(out / shard_name(1), snapshot / shard_name(1))
        assert not (out / shard_name(1)).is_symlink()


# --- digests and the manifest ----------------------------------------------------------------------------------------


def test_manifest_holds_the_digest_of_each_tensor_whose_bytes_were_written(source: Path, out: Path) -> None:
    run(source, out, link="copy")
    manifest = json.loads((out / "ckptkit.json").read_text())
    found = {name: digest for shard in manifest["shards"] for name, digest in shard["tensors"].items()}
    assert found == {name: xxhash.xxh3_128_hexdigest(array.tobytes()) for name, array in lab.expected(source).items()}
    assert manifest["note"] == "by a test"
    assert {shard["name"]: shard["size"] for shard in manifest["shards"]} == {
        shard_name(i): (out / shard_name(i)).stat().st_size for i in range(lab.SHARDS)
    }
    notes = (source / "assets/notes.txt").read_bytes()
    assert manifest["sidecars"]["assets/notes.txt"] == {"size": len(notes), "xxh3": xxhash.xxh3_128_hexdigest(notes)}


def test_linked_shards_carry_only_digests_that_are_known_and_still_true(source: Path, out: Path) -> None:
    run(source, out, link="copy")
    first = json.loads((out / "ckptkit.json").read_text())
    again = out.with_name("again")
    (out / shard_name(3)).touch()
    run(out, again, flipped=(), link="hard")
    with open_source(str(again)) as made:
        manifest = read_manifest(made)
    assert manifest is not None
    known = {shard["name"]: shard["tensors"] for shard in manifest["shards"]}
    assert known == {shard["name"]: shard["tensors"] for shard in first["shards"]} | {shard_name(3): None}


def test_sha256_of_every_file(source: Path, out: Path) -> None:
    run(source, out, hash="sha256", link="hard")
    lines = (out / "SHA256SUMS").read_text().splitlines()
    sums = dict(reversed(line.split("  ")) for line in lines)
    files = [path for path in out.rglob("*") if path.is_file() and path.name not in {"SHA256SUMS", "ckptkit.json"}]
    assert sums == {path.relative_to(out).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_equal_runs_give_equal_files(source: Path, out: Path) -> None:
    run(source, out, jobs=1, chunk_bytes=64)
    run(source, out.with_name("again"), jobs=4, chunk_bytes=4096)
    assert lab.contents(out) == lab.contents(out.with_name("again"))


# --- plans of other forms ---------------------------------------------------------------------------------------------


def test_copies_between_files_under_other_names_and_parts_of_tensors(source: Path, out: Path) -> None:
    with open_source(str(source)) as opened:
        entries = {e.name: (file, e) for file in map(shard_name, range(4)) for e in lab.header_of(opened, file).entries}

        def ref(name: str) -> Ref:
            file, entry = entries[name]
            return Ref(file, *entry.spec, entry.start, entry.stop)

        whole = ref("layer3.weight")
        half = whole._replace(shape=(48, 64), start=whole.start + 48 * 64, span=(48 * 64, 96 * 64))
        steps = (
            copy_step(ref("layer1.bias"), "x", "b"),
            copy_step(ref("layer2.bias"), "x", "a"),
            copy_step(half, "x", "halves.0"),
            copy_step(half._replace(start=whole.start, stop=half.start, span=(0, 48 * 64)), "x", "halves.1"),
        )
        plan = Plan("mix", (Shard("all.safetensors", None, None, steps),))
        execute(plan, opened, out, Options(chunk_bytes=100), Meter(), {})
    want = {name: array for i in range(4) for name, array in lab.load_file(source / shard_name(i)).items()}
    found = lab.load_file(out / "all.safetensors")
    assert found.keys() == {"a", "b", "halves.0", "halves.1"}
    np.testing.assert_array_equal(found["a"], want["layer2.bias"])
    np.testing.assert_array_equal(found["b"], want["layer1.bias"])
    np.testing.assert_array_equal(found["halves.0"], want["layer3.weight"][48:])
    np.testing.assert_array_equal(found["halves.1"], want["layer3.weight"][:48])


def test_a_plan_of_copies_imports_no_torch(source: Path, out: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys, lab; from pathlib import Path; "
        f"lab.run(Path({str(source)!r}), Path({str(out)!r}), flipped=()); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=True)


@pytest.mark.parametrize(
    "spoil",
    [lambda chunks: chunks[1:], lambda chunks: chunks[:-1], lambda chunks: chunks[::-1], lambda chunks: chunks * 2],
)
def test_an_operation_that_fills_no_whole_tensor_is_a_bug_and_nothing_is_published(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[list[Any]], list[Any]]
) -> None:
    broken = dataclasses.replace(lab.OPERATION, chunks=lambda *args: iter(spoil([*lab.OPERATION.chunks(*args)])))
    monkeypatch.setattr("ckptkit.execute.tasks.operation", lambda id: broken)
    with pytest.raises(RuntimeError):
        run(source, out)
    assert not out.exists()


def test_few_files_stay_open(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/proc/self/fd").exists():
        pytest.skip("open files are counted in /proc")
    monkeypatch.setattr("ckptkit.files.source.KEPT_OPEN", 1)
    before = len(os.listdir("/proc/self/fd"))
    most = 0

    class Counting(Meter):
        def shard(self, name: str) -> None:
            nonlocal most
            most = max(most, len(os.listdir("/proc/self/fd")))

    run(source, out, Counting(), link="copy")
    assert most <= before + 2  # the lock, and one file of the source
    assert len(os.listdir("/proc/self/fd")) == before
    assert lab.same_tensors(lab.tensors_of(out), lab.expected(source))
