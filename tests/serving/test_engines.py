"""Each adapter against a program that passes for its engine and misbehaves: started, watched, asked, stopped."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptkit.serving import llama_server, process, sglang, vllm
from ckptkit.serving.client import Failed
from ckptkit.serving.engine import Engine, Launch, Server

HERE = Path(__file__).parent
ENGINES = [sglang.ENGINE, vllm.ENGINE, llama_server.ENGINE]
LOGS = {"sglang": "sglang_no_target.log", "vllm": "vllm_missing.log", "llama-server": "llama_server_truncated.log"}
CAUSES = {"sglang": "serve.unsupported", "vllm": "serve.missing-tensors", "llama-server": "serve.corrupt"}

each_engine = pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)


@contextmanager
def started(engine: Engine, mode: str, folder: Path, *more: str) -> Iterator[tuple[process.Running, Server]]:
    """The pretender in ``mode`` in place of the engine, which has a second to end."""
    port = process.free_port()
    program = (sys.executable, str(HERE / "pretender.py"), mode, *more)
    launch = Launch(folder / "model.gguf", port, folder, program=program)
    with process.serving(engine.command(launch), folder / "log", 1.0) as running:
        yield running, Server(f"http://127.0.0.1:{port}", engine.model(launch), 1.0)


def is_free(server: Server) -> bool:
    port = int(server.url.rpartition(":")[2])
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return probe.connect_ex(("127.0.0.1", port)) != 0


@each_engine
def test_one_that_starts_slowly_is_waited_for_and_asked(engine: Engine, tmp_path: Path) -> None:
    with started(engine, "slow", tmp_path) as (running, server):
        assert process.wait_ready(running, engine, server, 20.0) > 0.5
        answer = engine.complete(server, [5, 6], 3)
        ended = process.stop(running)
    assert (answer.text, answer.tokens, answer.logprobs) == ("text", (7, 8, 9), (-0.5, -0.5, -0.5))
    assert not ended.killed
    assert is_free(server)


@each_engine
def test_one_that_never_answers_hangs(engine: Engine, tmp_path: Path) -> None:
    with started(engine, "never", tmp_path) as (running, server):
        with pytest.raises(process.NotReady) as raised:
            process.wait_ready(running, engine, server, 0.3)
        pid = running.pid
    assert raised.value.finding.id == "serve.hang"
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@each_engine
def test_one_that_dies_at_once_is_told_by_its_log(engine: Engine, tmp_path: Path) -> None:
    log = str(HERE / "recorded" / LOGS[engine.name])
    with started(engine, "dies", tmp_path, log) as (running, server), pytest.raises(process.NotReady) as raised:
        process.wait_ready(running, engine, server, 20.0)
    assert raised.value.finding.id == CAUSES[engine.name]


@each_engine
@pytest.mark.parametrize("mode", ["dies when asked", "stalls", "answers no JSON", "answers no UTF-8", "answers little"])
def test_one_that_answers_nothing_usable_is_a_failure(engine: Engine, mode: str, tmp_path: Path) -> None:
    with started(engine, mode, tmp_path) as (running, server):
        process.wait_ready(running, engine, server, 20.0)
        with pytest.raises(Failed):
            engine.complete(server, [5, 6], 3)


@each_engine
def test_one_that_ignores_being_stopped_is_killed(engine: Engine, tmp_path: Path) -> None:
    with started(engine, "ignores SIGTERM", tmp_path) as (running, server):
        process.wait_ready(running, engine, server, 20.0)
        ended = process.stop(running)
    assert ended.killed
    assert is_free(server)
