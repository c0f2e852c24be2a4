"""A Hub on the loopback for the process that runs the tests; its cache is a folder of the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session
from told import Told, teller

from ckptkit.remote import ranges

from .hub_server import Hub, Repo, hub

Serve = Callable[..., Hub]


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    return teller(capsys)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "hf" / "hub"


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path) -> Iterator[Serve]:
    """Start a server of ``org/model`` (a folder, or a Repo), and make it the Hub of this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ranges, "WAIT", 0.001)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with ExitStack() as stack:

        def start(repo: Path | Repo) -> Hub:
            server = stack.enter_context(hub({"org/model": repo}))
            monkeypatch.setattr(constants, "ENDPOINT", server.url)
            template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
            monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
            return server

        yield start
    close_session()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """The address of an S3 server in this process."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()
