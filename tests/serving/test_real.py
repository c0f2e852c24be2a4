"""Adapters on the engines themselves, with SmolLM2: ``pytest -m engine``.

What is not there is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptkit.serving import llama_server, process, vllm
from ckptkit.serving.engine import Answer, Engine, Launch, Server, Speculation, since
from ckptkit.serving.speculative import parse, resolved

from .places import LLAMA, SMOLLM2, VLLM, gguf

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SMALL = ("--max-model-len=1024", "--max-num-seqs=4", "--enforce-eager", "--dtype=float32")
# "The capital of France is" and "1 2 3 4 5 6", as SmolLM2's tokenizer has them.
PROMPTS = [(504, 3575, 282, 4649, 314), (33, 216, 34, 216, 35, 216, 36, 216, 37, 216, 38)]
COUNT = 24

needs_vllm = pytest.mark.skipif(not (VLLM.exists() and SMOLLM2.exists()), reason="no vLLM or no SmolLM2")
needs_llama = pytest.mark.skipif(not (LLAMA.exists() and gguf()), reason="no llama-server or no GGUF")


@contextmanager
def served(engine: Engine, method: str, folder: Path, arguments: Sequence[str]) -> Iterator[Server]:
    model = (gguf() if engine.name == "llama-server" else None) or SMOLLM2
    port = process.free_port()
    asked = resolved(parse(method), {"draft": model}, model)
    program = (str(LLAMA),) if engine.name == "llama-server" else ()
    launch = Launch(model, port, folder, str(VLLM), program, tuple(arguments), asked)
    server = Server(f"http://127.0.0.1:{port}", engine.model(launch), 300.0)
    command = ["env", "VLLM_CPU_KVCACHE_SPACE=1", *engine.command(launch)]
    with process.serving(command, folder / "log", engine.grace) as running:
        process.wait_ready(running, engine, server, 600.0)
        yield server


def answers(engine: Engine, server: Server) -> tuple[list[Answer], Speculation | None]:
    before = engine.counters(server)
    found = [engine.complete(server, prompt, COUNT) for prompt in PROMPTS]
    return found, since(before, engine.counters(server))


def agree(engine: Engine, server: Server, found: Sequence[Answer]) -> None:
    """What was generated has, given back as a text, the logprobs with which it was generated."""
    for prompt, answer in zip(PROMPTS, found, strict=True):
        assert answer.tokens is not None
        assert answer.logprobs is not None
        assert len(answer.tokens) == len(answer.logprobs) == COUNT
        scores = engine.score(server, [*prompt, *answer.tokens])
        assert scores is not None
        assert scores[len(prompt) - 1 :] == pytest.approx(answer.logprobs, abs=0.02)


@needs_vllm
def test_vllm_speculating_says_what_it_says_plain(tmp_path: Path) -> None:
    with served(vllm.ENGINE, "none", tmp_path, SMALL) as server:
        plain, counted = answers(vllm.ENGINE, server)
        agree(vllm.ENGINE, server, plain)
    assert counted is None
    assert "Paris" in plain[0].text
    assert plain[1].text.split()[:3] == ["7", "8", "9"]
    with served(vllm.ENGINE, "draft", tmp_path, SMALL) as server:
        drafted, counted = answers(vllm.ENGINE, server)
    assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain]
    assert counted is not None
    assert counted.accept_length is not None
    assert counted.accept_length > 3.5  # of 4, by a draft that is the model itself


@needs_llama
def test_llama_server_speculating_says_what_it_says_plain(tmp_path: Path) -> None:
    with served(llama_server.ENGINE, "none", tmp_path, ("-c", "1024", "-t", "2")) as server:
        plain, counted = answers(llama_server.ENGINE, server)
        agree(llama_server.ENGINE, server, plain)
    assert counted is None
    with served(llama_server.ENGINE, "draft", tmp_path, ("-c", "1024", "-t", "2")) as server:
        drafted, counted = answers(llama_server.ENGINE, server)
    assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain]
    assert all(answer.logprobs is None for answer in drafted)
    assert counted is not None
    assert counted.accept_length is not None
    assert counted.accept_length > 3.5
