"""Results published in an object store (moto's S3 over HTTP): the manifest last, carried on with, refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from make import checkpoint, llama, llama_config
from told import Told

from ckptkit.errors import ACCESS, OUTPUT, USAGE

RECIPE = ["--recipe", "lm_head-w8a16"]
PLACE = "s3://results/deep/model-w8"
FIRST, SECOND = (f"model-{i:05}-of-00002.safetensors" for i in (1, 2))


@pytest.fixture
def bucket(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Told) -> Iterator[Any]:
    """An empty bucket ``results``, and a result in ``out``."""
    s3fs = pytest.importorskip("s3fs")
    monkeypatch.chdir(tmp_path)
    for name, value in (("ENDPOINT_URL", endpoint), ("ACCESS_KEY_ID", "a-key"), ("SECRET_ACCESS_KEY", "a-secret")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()
    system = s3fs.S3FileSystem(use_listings_cache=False)
    system.mkdir("results")
    tensors = llama()
    names = list(tensors)
    checkpoint(Path("model"), [{n: tensors[n] for n in part} for part in (names[:10], names[10:])], llama_config())
    told("quantize", "model", "out", *RECIPE)
    yield system
    system.rm("results", recursive=True)
    s3fs.S3FileSystem.clear_instance_cache()


def ids(document: dict[str, Any]) -> set[str]:
    return {finding["id"] for finding in document["findings"]}


def there(system: Any) -> dict[str, bytes]:
    found = system.find(PLACE)
    return {path.removeprefix("results/deep/model-w8/"): system.cat_file(path) for path in found}


def local(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def without_card(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: content for name, content in files.items() if name != "README.md"}


class Puts:
    """What is put into a store, in order; the put whose name ends in ``failing`` raises ``error``."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, system: Any, failing: str = "-", error: Exception | None = None
    ):
        self.names: list[str] = []
        type(system).clear_instance_cache()
        for method, at in (("put_file", 1), ("pipe_file", 0)):
            monkeypatch.setattr(
                type(system), method, self._recording(getattr(type(system), method), at, failing, error)
            )

    def _recording(self, method: Any, at: int, failing: str, error: Exception | None) -> Any:
        def call(system: Any, *args: Any, **rest: Any) -> Any:
            name = args[at].rpartition("/")[2]
            self.names.append(name)
            if name.endswith(failing):
                raise error or ConnectionError
            return method(system, *args, **rest)

        return call


def test_the_manifest_comes_last(bucket: Any, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    puts = Puts(monkeypatch, bucket)
    assert told("push", "out", PLACE)["output"] == PLACE
    assert puts.names[-1] == "ckptkit.json"
    assert without_card(there(bucket)) == local("out")
    assert b"How this was made" in there(bucket)["README.md"]
    assert b"a-secret" not in b"".join(there(bucket).values())
    told("verify", PLACE, "--level", "data")
    puts.names.clear()
    assert told("push", "out", f"{PLACE}/")["bytes"] == 0
    assert not puts.names


@pytest.mark.parametrize("failing", [FIRST, SECOND, "config.json", "ckptkit.json"])
def test_a_cut_push_is_no_result_and_is_carried_on_with(bucket: Any, told: Told, failing: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        Puts(patch, bucket, failing)
        assert ids(told("push", "out", PLACE, code=ACCESS)) == {"access.unreachable"}
    arrived = there(bucket)
    assert "ckptkit.json" not in arrived
    assert ids(told("reshard", "model", "other")) == set()
    assert ids(told("push", "other", PLACE, code=OUTPUT)) == {"output.exists"}
    with pytest.MonkeyPatch.context() as patch:
        puts = Puts(patch, bucket)
        told("push", "out", PLACE)
    listed = json.loads(arrived[".ckptkit.push.json"])["files"]
    assert not set(puts.names) & listed.keys()
    assert without_card(there(bucket)) == local("out")


def test_a_file_that_was_replaced_meanwhile_is_sent_again(bucket: Any, told: Told) -> None:
    with pytest.MonkeyPatch.context() as patch:
        Puts(patch, bucket, "ckptkit.json")
        told("push", "out", PLACE, code=ACCESS)
    bucket.clear_instance_cache()
    bucket.pipe_file(f"{PLACE}/{FIRST}", bytes(len(there(bucket)[FIRST])))
    told("push", "out", PLACE)
    assert without_card(there(bucket)) == local("out")


def test_what_is_there_is_replaced_only_on_request(bucket: Any, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    told("push", "out", PLACE)
    bucket.pipe_file(f"{PLACE}/notes.txt", b"mine")
    bucket.pipe_file(f"{PLACE}/deeper/model.safetensors", b"another's")
    told("reshard", "model", "single", "--max-shard-size", "1GB")
    before = there(bucket)
    assert ids(told("push", "single", PLACE, code=OUTPUT)) == {"output.exists"}
    assert there(bucket) == before
    pushed = told("push", "single", PLACE, "--overwrite")
    assert {FIRST, SECOND} <= set(pushed["removed"])
    mine = {"notes.txt": b"mine", "deeper/model.safetensors": b"another's"}
    assert without_card(there(bucket)) == local("single") | mine
    for name in list(there(bucket)):
        bucket.rm_file(f"{PLACE}/{name}")
    bucket.pipe_file(f"{PLACE}/model.safetensors", b"another's")
    assert ids(told("push", "out", PLACE, code=OUTPUT)) == {"output.exists"}


def test_a_store_that_keeps_less_than_was_sent(bucket: Any, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    put = type(bucket).put_file

    def short(system: Any, path: str, place: str, **rest: Any) -> None:
        put(system, path, place, **rest)
        if place.endswith(SECOND):
            system.pipe_file(place, b"short")

    monkeypatch.setattr(type(bucket), "put_file", short)
    assert ids(told("push", "out", PLACE, code=OUTPUT)) == {"output.verify"}
    assert "ckptkit.json" not in there(bucket)


def test_what_a_store_refuses(bucket: Any, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ids(told("push", "out", "s3://no-such-bucket/model", code=OUTPUT)) == {"output.write"}
    assert ids(told("push", "out", "nosuch://host/model", code=USAGE)) == {"usage.source"}
    assert ids(told("push", "out", "s3://key:secret@results/model", code=USAGE)) == {"usage.source"}
    Puts(monkeypatch, bucket, FIRST, PermissionError())
    document = told("push", "out", PLACE, code=ACCESS)
    assert ids(document) == {"access.denied"}
    assert "aws configure" in document["findings"][0]["hint"]


def test_a_command_that_makes_files_pushes_them(bucket: Any, told: Told) -> None:
    document = told("quantize", "model", "made", *RECIPE, "--push", PLACE)
    assert document["pushed"]["output"] == PLACE
    assert without_card(there(bucket)) == local("made")
    assert ids(told("quantize", "model", "again", "--recipe", "fp8-dynamic", "--push", PLACE, code=OUTPUT)) == {
        "output.exists"
    }
    assert not Path("again").exists()
