"""Object stores and web servers as sources: moto's S3 over HTTP, and Python's own file server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from make import checkpoint, llama, llama_config
from told import Told, teller

from ckptkit.errors import ACCESS, SOURCE, USAGE

RECIPE = ["--recipe", "lm_head-w8a16"]


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    return teller(capsys)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tensors = llama()
    names = list(tensors)
    parts = [{n: tensors[n] for n in names[:10]}, {n: tensors[n] for n in names[10:]}]
    return checkpoint(tmp_path / "model", parts, llama_config())


def ids(document: dict[str, Any]) -> set[str]:
    return {finding["id"] for finding in document["findings"]}


def files(folder: str) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in Path(folder).iterdir() if p.name != "ckptkit.json"}


# --- S3 ----------------------------------------------------------------------------------------------------


@pytest.fixture
def bucket(endpoint: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The checkpoint at ``s3://models/deep/model``, beside another whose name begins like its own."""
    s3fs = pytest.importorskip("s3fs")
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()
    system = s3fs.S3FileSystem()
    system.mkdir("models")
    for path in model.iterdir():
        system.pipe(f"models/deep/model/{path.name}", path.read_bytes())
    system.pipe("models/deep/model-2/config.json", b"{}")
    yield system
    system.rm("models", recursive=True)
    s3fs.S3FileSystem.clear_instance_cache()


SRC = "s3://models/deep/model"


def test_a_checkpoint_in_a_bucket(bucket: Any, model: Path, told: Told) -> None:
    assert told("inspect", SRC)["total"] == told("inspect", model)["total"]
    assert told("inspect", f"{SRC}/model-00001-of-00002.safetensors")["shards"] == 1
    told("verify", f"{SRC}/")
    told("diff", SRC, model, "--level", "values")
    told("quantize", model, "local", *RECIPE)
    made = told("quantize", SRC, "out", *RECIPE, "--link", "hard")
    assert files("out") == files("local")
    assert made["fetched"]["bytes"] > 0
    text = Path("out/ckptkit.json").read_text()
    assert '"etag"' in text
    assert '"verified": true' not in text
    assert "a-secret" not in text
    told("quantize", SRC, "out", *RECIPE, "--resume")


def test_an_object_that_is_replaced_meanwhile(
    bucket: Any, model: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptkit.execute import run

    finish = run.check_written

    def replaced(*args: Any) -> Any:
        bucket.pipe("models/deep/model/model-00001-of-00002.safetensors", b"something else")
        return finish(*args)

    monkeypatch.setattr(run, "check_written", replaced)
    assert ids(told("quantize", SRC, "out", *RECIPE, code=SOURCE)) == {"source.changed"}
    assert not Path("out").exists()


def test_what_a_store_refuses(bucket: Any, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ids(told("inspect", "s3://models/nothing", code=SOURCE)) == {"source.missing"}
    assert ids(told("inspect", "s3://nowhere/model", code=SOURCE)) == {"source.missing"}
    assert ids(told("inspect", "s3://key:secret@models/deep", code=USAGE)) == {"usage.source"}
    assert ids(told("inspect", "https://host/model?signature=1", code=USAGE)) == {"usage.source"}
    assert ids(told("inspect", "nosuch://host/model", code=USAGE)) == {"usage.source"}
    assert ids(told("inspect", "file:///model", code=USAGE)) == {"usage.source"}
    assert ids(told("inspect", "ftp://127.0.0.1:9/model", code=ACCESS)) == {"access.unreachable"}
    assert told("inspect", SRC.replace("s3", "S3"))["shards"] == 2
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    type(bucket).clear_instance_cache()
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    assert ids(told("inspect", SRC, code=ACCESS)) == {"access.unreachable"}
    monkeypatch.undo()


# --- the web -----------------------------------------------------------------------------------------------


@pytest.fixture
def web(model: Path) -> Iterator[str]:
    """A server that lists its folders and knows no ranges."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None: ...

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None: ...

    server = Server(("127.0.0.1", 0), partial(Quiet, directory=str(model.parent)))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/model"
    server.shutdown()
    server.server_close()


def test_a_web_server_without_ranges_is_refused_where_it_matters(web: str, told: Told) -> None:
    """Its answers begin at the file's beginning: good for headers, not for a tensor somewhere in the file."""
    pytest.importorskip("aiohttp")
    assert told("inspect", web)["shards"] == 2
    assert ids(told("quantize", web, "out", *RECIPE, code=SOURCE)) == {"source.range"}
    assert ids(told("inspect", f"{web}/nothing", code=SOURCE)) == {"source.missing"}


def test_another_server_on_the_hubs_machine_is_not_the_hub(
    web: str, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("aiohttp")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert told("inspect", web)["shards"] == 2
