"""llama.cpp's ``llama-server``: GGUF files, asked through its own ``/completion``, which takes and gives token ids.

Of tokens that a draft had right it does not know the logprob, and tells 0 for it, with no candidates beside it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import fail
from . import installed
from .client import Failed, get, post
from .engine import NONE, Answer, Engine, Launch, Method, Rule, Server, Speculation, words
from .replies import counted, leads, nats, understood
from .speculative import drafted

METHODS = {
    NONE: "none",
    "mtp": "draft-mtp",
    "eagle3": "draft-eagle3",
    "dflash": "draft-dflash",
    "dspark": "draft-dspark",
    "ngram": "ngram-simple",
    "draft": "draft-simple",
}
# More than logits differ by, and far less than a float32 loses a logit in.
_FORCED = 1e4


def command(launch: Launch) -> list[str]:
    """The words that start a server. Weights stay as they are stored: repacked ones crashed where that was tried.

    Raises UserError: ``usage.arguments`` where CKPT is no GGUF file and holds none, or several; ``serve.unsupported``
    for speculation that llama-server does not have.
    """
    own = [
        "-m", str(gguf_file(launch.checkpoint)), "--host", "127.0.0.1", "--port", str(launch.port),
        "--seed", "0", "--metrics", "--no-repack",
    ]  # fmt: skip
    program = launch.program or ("llama-server",)
    return words([*program, *own, *_speculation(launch.method), *launch.arguments, *launch.method.arguments])


def gguf_file(checkpoint: Path) -> Path:
    """The file itself, or the one in the folder; of a model in parts the first."""
    if not checkpoint.is_dir():
        return checkpoint
    found = sorted(checkpoint.glob("*.gguf"))
    firsts = [file for file in found if not re.search(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", file.name)]
    if len(firsts) != 1:
        message = f"{checkpoint} holds {len(firsts)} models as GGUF; llama-server serves one"
        raise fail("usage.arguments", message, hint="give the .gguf file as CKPT")
    return firsts[0]


def _speculation(method: Method) -> list[str]:
    """A draft alone is silently not used: it needs its ``--spec-type``."""
    if method.name == NONE:
        return []
    if method.name not in METHODS:
        raise fail("serve.unsupported", f"llama-server has no speculative method {method.name}")
    if method.topk not in (None, 1):
        raise fail("serve.unsupported", f"llama-server drafts chains: {method.name} with topk={method.topk} is a tree")
    flags = ["--spec-type", METHODS[method.name]]
    if method.draft is not None:
        flags += ["--spec-draft-model", str(gguf_file(method.draft))]
    count = drafted(method)
    if count is not None:
        size = "--spec-ngram-simple-size-m" if method.name == "ngram" else "--spec-draft-n-max"
        flags += [size, str(count)]
    return flags


def version(launch: Launch) -> str:
    """The number of the build; of one that has none, the version."""
    return installed.of_program(launch.program or ("llama-server",), r"(?:version: |build )([1-9]\d*)\b(?!\.)")


def ready(server: Server) -> bool:
    """503 while the model loads, then 200."""
    try:
        get(server, "/health", timeout=10)
    except Failed:
        return False
    return True


def complete(server: Server, ids: Sequence[int], count: int) -> Answer:
    """``count`` greedy tokens, fewer where the text ends: told to ignore that, llama-server never says the token.

    Only :func:`counters` tell what was speculated: an answer does not count its steps.
    """
    body = _body(ids, count) | {"cache_prompt": False}
    began = time.monotonic()
    answer = post(server, "/completion", body)
    seconds = time.monotonic() - began
    with understood("/completion"):
        tokens = tuple(answer["tokens"])
        told = answer.get("completion_probabilities") or []
        if len(told) != len(tokens) or not all(place["top_logprobs"] for place in told):
            return Answer(answer["content"], tokens, None, seconds)
        logprobs = nats(place["logprob"] for place in told)
        gaps = leads([top["logprob"] for top in place["top_logprobs"]] for place in told)
        return Answer(answer["content"], tokens, logprobs, seconds, gaps=gaps)


def _body(ids: Sequence[int], count: int) -> dict[str, Any]:
    return {
        "prompt": list(ids), "n_predict": count, "temperature": 0, "seed": 0, "n_probs": 2, "return_tokens": True,
    }  # fmt: skip


def score(server: Server, ids: Sequence[int]) -> tuple[float, ...]:
    """Logprobs of ``ids[1:]``, one request for each: a bias makes the server choose the token, and what it tells of
    the chosen one is what the model gave it before the bias."""
    found = []
    for at in range(1, len(ids)):
        answer = post(server, "/completion", _body(ids[:at], 1) | {"logit_bias": [[ids[at], _FORCED]]})
        with understood("/completion"):
            place = answer["completion_probabilities"][0]
            if place["id"] != ids[at]:
                raise ValueError(f"token {place['id']} where {ids[at]} was forced")
            found.append(place["logprob"])
    return nats(found)


def counters(server: Server) -> Speculation | None:
    """What was drafted and accepted since the start; None without speculation, whose counters stay at nought."""
    count = counted(get(server, "/metrics"))
    return count if count and count.drafted else None


ENGINE = Engine(
    name="llama-server",
    label="llama-server",
    lint="llama.cpp",
    methods=METHODS,
    version=version,
    command=command,
    ready=ready,
    complete=complete,
    score=score,
    counters=counters,
    rules=tuple(
        Rule(id, re.compile(pattern))
        for id, pattern in (
            ("engine.port", r"couldn't bind HTTP server socket"),
            ("engine.memory", r"(?:failed|unable) to allocate "),
            ("serve.missing-tensors", r"missing tensor '(?P<tensor>[^']+)'"),
            ("serve.unknown-tensors", r"wrong number of tensors; expected \d+, got \d+"),
            ("serve.corrupt", r"failed to read magic|not within the file bounds|corrupted or incomplete"),
            ("serve.corrupt", r"tensor '(?P<tensor>[^']+)' has (?:wrong shape|invalid ggml type)"),
            ("serve.unsupported", r"unknown model architecture: |error loading model (?:hyperparameters|vocabulary): "),
            ("serve.start", r"error loading model: |failed to load model, "),
        )
    ),
    grace=5.0,
)
