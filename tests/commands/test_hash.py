"""``ckptkit hash`` as a user runs it, with sha256sum and xxhash as the other readers."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from make import checkpoint, llama, llama_config

from ckptkit.cli import main

Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``hash`` with ``--json``; give the exit code and the document, which must agree."""

    def call(*arguments: object) -> tuple[int, dict[str, Any]]:
        code = main(["hash", *map(str, arguments), "--json", "--no-progress"])
        out, err = capsys.readouterr()
        document = json.loads(out)
        assert (document["exit_code"], document["ok"]) == (code, code == 0)
        assert "Traceback" not in err
        return code, document

    return call


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = llama()
    names = list(tensors)
    parts = [{name: tensors[name] for name in names[:9]}, {name: tensors[name] for name in names[9:]}]
    folder = checkpoint(tmp_path / "model", parts, llama_config())
    (folder / "sub").mkdir()
    (folder / "sub" / "notes \\ and\nmore.txt").write_text("x")
    (folder / "empty.json").write_text("")
    return folder


def ids(document: dict[str, Any]) -> list[tuple[str, str | None, str | None]]:
    return [(f["id"], f["file"], f["tensor"]) for f in document["findings"]]


def tensor_digests(path: Path) -> dict[str, str]:
    """By a reader of its own."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, base = json.loads(content[8 : 8 + length]), 8 + length
    header.pop("__metadata__", None)
    spans = {name: entry["data_offsets"] for name, entry in header.items()}
    return {name: xxhash.xxh3_128_hexdigest(content[base + a : base + b]) for name, (a, b) in spans.items()}


def spoil(path: Path, at: int = -5) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_sha256sum_reads_what_is_written(folder: Path, run: Run) -> None:
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}
    code, document = run(folder)
    assert (code, document["files"]) == (0, len(before))
    assert subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=folder).returncode == 0
    listed = (folder / "SHA256SUMS").read_text()
    assert len(listed.splitlines()) == len(before)
    assert all(path.read_bytes() == content for path, (_, content) in before.items())
    assert all(path.stat().st_mtime_ns == mtime for path, (mtime, _) in before.items())


def test_what_sha256sum_writes_is_read(folder: Path, run: Run, tmp_path: Path) -> None:
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    text = subprocess.run(
        ["sha256sum", *(f"./{name}" for name in names)], cwd=folder, capture_output=True, text=True
    ).stdout
    (tmp_path / "sums").write_text(text)
    code, document = run(folder, "--check", tmp_path / "sums")
    assert (code, document["checked"], document["unlisted"]) == (0, len(names), [])


def test_digests_of_tensors(folder: Path, run: Run) -> None:
    code, document = run(folder, "--per-tensor")
    assert (code, document["tensors"]) == (0, len(llama()))
    record = json.loads((folder / "ckptkit.digests.json").read_text())["shards"]
    assert {name: shard["tensors"] for name, shard in record.items()} == {
        path.name: tensor_digests(path) for path in folder.glob("*.safetensors")
    }


@pytest.mark.parametrize("record", ["SHA256SUMS", "ckptkit.digests.json"])
def test_check(folder: Path, run: Run, tmp_path: Path, record: str) -> None:
    run(folder, "--per-tensor")
    kept = tmp_path / "elsewhere"
    shutil.copy(folder / record, kept)
    assert run(folder, "--check", kept)[0] == 0
    shard = "model-00002-of-00002.safetensors"
    spoil(folder / shard)
    code, document = run(folder, "--check", kept)
    tensor = None if record == "SHA256SUMS" else "model.norm.weight"
    assert (code, ids(document)) == (1, [("data.digest", shard, tensor)])
    (folder / shard).unlink()
    (folder / "model.safetensors.index.json").unlink()
    code, document = run(folder, "--check", kept)
    assert code == 1
    assert ("data.digest", shard, None) in ids(document)


def test_a_header_that_changed(folder: Path, run: Run) -> None:
    run(folder, "--per-tensor")
    shard = folder / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes().replace(b'"format":"pt"', b'"format":"tf"'))
    code, document = run(folder, "--check", folder / "ckptkit.digests.json")
    assert (code, ids(document)) == (1, [("data.digest", shard.name, None)])


def test_what_is_not_listed_is_told(folder: Path, run: Run) -> None:
    run(folder, "--per-tensor")
    lines = (folder / "SHA256SUMS").read_text().splitlines()
    kept = [line for line in lines if "00001" not in line]
    (folder / "SHA256SUMS").write_text("\n".join(kept) + "\n")
    assert run(folder, "--check", folder / "SHA256SUMS")[1]["unlisted"] == ["model-00001-of-00002.safetensors"]


@pytest.mark.parametrize("option", ["--per-tensor", "--overwrite"])
def test_check_writes_nothing(folder: Path, run: Run, option: str) -> None:
    run(folder)
    code, document = run(folder, "--check", folder / "SHA256SUMS", option)
    assert (code, ids(document)[0][0]) == (2, "usage.arguments")


def test_a_record_is_replaced_only_on_request(folder: Path, run: Run) -> None:
    run(folder)
    spoil(folder / "model-00001-of-00002.safetensors")
    before = (folder / "SHA256SUMS").read_text()
    code, document = run(folder, "--per-tensor")
    assert (code, ids(document)) == (5, [("output.exists", "SHA256SUMS", None)])
    assert (folder / "SHA256SUMS").read_text() == before
    assert not (folder / "ckptkit.digests.json").exists()
    assert run(folder, "--overwrite")[0] == 0
    assert (folder / "SHA256SUMS").read_text() != before
    assert not list(folder.glob("*.partial"))


@pytest.mark.parametrize(
    ("content", "code", "id"),
    [
        (None, 2, "usage.check"),
        ("no digest here\n", 2, "usage.check"),
        ("{}", 3, "config.parse"),
        ('{"schema": 1, "shards": {"a": {}}}', 3, "config.parse"),
        ("{", 3, "config.parse"),
    ],
)
def test_records_that_cannot_be_read(
    folder: Path, run: Run, tmp_path: Path, content: str | None, code: int, id: str
) -> None:
    if content is not None:
        (tmp_path / "record").write_text(content)
    found, document = run(folder, "--check", tmp_path / "record")
    assert (found, ids(document)[0][0]) == (code, id)


def test_a_broken_checkpoint_has_no_tensors_to_record(folder: Path, run: Run) -> None:
    shard = folder / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    code, document = run(folder, "--per-tensor")
    assert (code, ids(document)[0][0]) == (3, "layout.truncated")
    assert run(folder)[0] == 0


def test_a_single_file_is_no_folder(folder: Path, run: Run) -> None:
    code, document = run(folder / "model-00001-of-00002.safetensors")
    assert (code, ids(document)[0][0]) == (2, "usage.arguments")


def test_records_are_not_taken_along(folder: Path, run: Run, tmp_path: Path) -> None:
    """Digests of the source say nothing of what is made of it."""
    run(folder, "--per-tensor")
    assert (
        main(["quantize", str(folder), str(tmp_path / "out"), "-r", "w4a16", "-q", "--no-progress", "--no-verify"]) == 0
    )
    assert not {"SHA256SUMS", "ckptkit.digests.json"} & {path.name for path in (tmp_path / "out").iterdir()}
