"""Each adapter against a program that passes for its engine and misbehaves: started, watched, asked, stopped."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptkit.serving import llama_server, process, sglang, transformers, vllm
from ckptkit.serving.cell import api_findings, log_findings
from ckptkit.serving.client import Failed
from ckptkit.serving.engine import Engine, Launch, Server

HERE = Path(__file__).parent
ENGINES = [transformers.ENGINE, sglang.ENGINE, vllm.ENGINE, llama_server.ENGINE]
LOGS = {
    "transformers": "sglang_truncated.log",  # a traceback of the same library
    "sglang": "sglang_no_target.log",
    "vllm": "vllm_missing.log",
    "llama-server": "llama_server_truncated.log",
}
CAUSES = {
    "transformers": "serve.corrupt",
    "sglang": "serve.unsupported",
    "vllm": "serve.missing-tensors",
    "llama-server": "serve.corrupt",
}
# Lines as engines write them, by engine and by what they mean; each rule must be met by one.
LINES = {
    "transformers": [
        ("serve.missing-tensors", "worker: missing model.layers.7.mlp.down_proj.weight"),
        ("serve.missing-tensors", "worker: mismatched lm_head.weight"),
        ("serve.unknown-tensors", "worker: unexpected lm_head.weight_packed"),
        ("serve.unsupported", "ValueError: Transformers does not recognize this architecture."),
    ],
    "sglang": [
        ("engine.memory", "RuntimeError: Loaded weights leave no GPU memory for the KV cache"),
        ("engine.memory", "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static"),
        ("engine.memory", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"),
        ("serve.corrupt", "safetensors_rust.SafetensorError: Error while deserializing header"),
        ("engine.port", "ValueError: port 30000 of 127.0.0.1 is not available"),
        ("serve.unsupported", "ValueError: Unable to find matching target for a.b in the compressed-tensors config."),
        ("serve.unsupported", "ValueError: Unknown speculative algorithm name: DSPARK"),
        ("serve.unsupported", "ValueError: Model architectures ['XForCausalLM'] are not supported for now."),
        ("serve.unknown-tensors", "KeyError: 'model.layers.0.mlp.down_proj.weight_scale'"),
        ("serve.unsupported", "NotImplementedError: w8a16 is not supported"),
        ("serve.unsupported", "KeyError: 'lm_head.weight_packed'"),
        ("serve.head-dropped", "Parameter lm_head.weight_packed not found in params_dict"),
        ("serve.unknown-tensors", "Parameter model.layers.0.x not found in params_dict"),
    ],
    "vllm": [
        ("serve.missing-tensors", "ValueError: Following weights were not initialized from checkpoint: {'a.b'}"),
        ("serve.unknown-tensors", "ValueError: There is no module or parameter named 'lm_head.x' in Qwen3ForCausalLM"),
        ("serve.unsupported", " CPUWNA16 cannot implement due to: Quant type (uint8b128) not supported by CPUWNA16"),
        ("serve.unsupported", " MarlinLinearKernel cannot implement due to: compute capability"),
        ("serve.unsupported", "  Value error, Model architectures ['X'] are not supported"),
        ("engine.memory", "ValueError: No available memory for the cache blocks."),
        ("engine.memory", "ValueError: Free memory on device is less than desired GPU memory utilization"),
        ("engine.device", "RuntimeError: Failed to infer device type"),
        ("engine.missing", "RuntimeError: operator torchvision::nms does not exist"),
        ("serve.unsupported", "Model architectures ['XForCausalLM'] are not supported for now."),
        ("serve.unknown-tensors", "KeyError: 'model.layers.0.mlp.down_proj.weight_scale'"),
        ("serve.unsupported", "NotImplementedError: w8a16 is not supported"),
    ],
    "llama-server": [
        ("engine.port", "start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 1"),
        ("engine.memory", "ggml_aligned_malloc: failed to allocate 99.0 MB"),
        ("serve.missing-tensors", "llama_model_load: error loading model: missing tensor 'blk.0.attn_q.weight'"),
        ("serve.unknown-tensors", "llama_model_load: error loading model: done_getting_tensors: wrong number of tensors; expected 9, got 8"),
        ("serve.corrupt", "gguf_init_from_file_ptr: failed to read magic"),
        ("serve.corrupt", "check_tensor_dims: tensor 'a.weight' has wrong shape; expected 1, got 2"),
        ("serve.unsupported", "llama_model_load: error loading model: unknown model architecture: 'x'"),
        ("serve.start", "llama_model_load: error loading model: something else"),
    ],
}  # fmt: skip

each_engine = pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)


@contextmanager
def started(engine: Engine, mode: str, folder: Path, *more: str) -> Iterator[tuple[process.Running, Server]]:
    """The pretender in ``mode`` in place of the engine, which has a second to end."""
    port = process.free_port()
    program = (sys.executable, str(HERE / "pretender.py"), mode, *more)
    launch = Launch(folder / "model.gguf", port, folder, program=program)
    if engine.name == "transformers":
        launch = launch._replace(python=as_interpreter(program, folder))
    with process.serving(engine.command(launch), folder / "log", 1.0) as running:
        yield running, Server(f"http://127.0.0.1:{port}", engine.model(launch), 1.0)


def as_interpreter(program: Sequence[str], folder: Path) -> str:
    """A program in place of the interpreter that would run ckptkit's own server."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nexec {shlex.join(program)} "$@"\n', "utf-8")
    path.chmod(0o755)
    return str(path)


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
@pytest.mark.parametrize(("mode", "ids"), [("good", []), ("streams and stalls", ["serve.api"])])
def test_streams(engine: Engine, mode: str, ids: list[str], tmp_path: Path) -> None:
    with started(engine, mode, tmp_path) as (running, server):
        process.wait_ready(running, engine, server, 20.0)
        found = api_findings(server._replace(model="model"), has_chat=True)
        assert [finding.id for finding in found] == ids


@each_engine
def test_known_lines_of_its_log(engine: Engine) -> None:
    met = set()
    for id, line in LINES[engine.name]:
        rule = next(rule for rule in engine.rules if rule.pattern.search(line))
        met.add(rule)
        log = f"INFO loading\n{line}\nINFO going down\n"
        found = process.classify(engine.rules, log, 1) if rule.fatal else log_findings(engine, log)[0]
        assert found.id == id, line
    assert met == set(engine.rules)


@each_engine
def test_one_that_ignores_being_stopped_is_killed(engine: Engine, tmp_path: Path) -> None:
    with started(engine, "ignores SIGTERM", tmp_path) as (running, server):
        process.wait_ready(running, engine, server, 20.0)
        ended = process.stop(running)
    assert ended.killed
    assert is_free(server)
