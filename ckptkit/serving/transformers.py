"""Transformers as an engine: it loads the checkpoint in a process of its own and decodes, behind :mod:`.worker`.

Its own server ignores requests for logprobs and takes no token ids, so it could not be judged. On a CPU it computes in
float32, so that what is left of a difference is not its rounding; another dtype: ``--engine-arg=--dtype=bfloat16``.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from . import client, installed
from .engine import NONE, Answer, Engine, Launch, Rule, Server, Speculation, words
from .replies import nats, understood

WORKER = Path(__file__).with_name("worker.py")
LOOKUP = 3  # the longest n-gram that is looked for in the text
DRAFTED = 3  # tokens in a row
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}


def version(launch: Launch) -> str:
    """Of the transformers that ``--engine-python`` has. Raises UserError ``engine.missing``."""
    installed.of_python(launch.python, "torch")
    return installed.of_python(launch.python, "transformers")


def command(launch: Launch) -> list[str]:
    return _command(
        launch.python, launch.checkpoint, launch.port, (*_drafting(launch), *launch.arguments, *launch.method.arguments)
    )


def reference_command(folder: Path, port: int, own_head: bool) -> list[str]:
    """The same program on a folder of floats, in float32: nothing may be missing, and a head that is stored counts."""
    arguments = ["--dtype", "float32", "--device", "cpu", "--complete", *(["--own-head"] if own_head else [])]
    return _command(None, folder, port, arguments)


def _command(python: str | None, folder: Path, port: int, arguments: Sequence[str]) -> list[str]:
    given = [word.partition("=")[0] for word in arguments]
    dtype = () if "--dtype" in given else ("--dtype", "float32")
    program = (python or sys.executable, "-P", WORKER, folder, "--port", str(port), *dtype, *arguments)
    return words(program, **_OFFLINE)


def _drafting(launch: Launch) -> list[str]:
    """The worker's flags. An n-gram's ``draft_tokens`` count the model's own, which is verified with them."""
    method = launch.method
    if method.name == NONE:
        return []
    if method.name == "ngram":
        return ["--lookup", str(LOOKUP), "--draft-tokens", str((method.draft_tokens or DRAFTED + 1) - 1)]
    return ["--assistant", str(method.draft), "--draft-tokens", str(method.steps or DRAFTED)]


def ready(server: Server) -> bool:
    try:
        return bool(client.get_json(server, "/health", 5.0)["status"] == "ok")
    except (client.Failed, KeyError, TypeError):
        return False


def complete(server: Server, prompt: Sequence[int], max_tokens: int) -> Answer:
    body = {"prompt": list(prompt), "max_tokens": max_tokens, "ignore_eos": True}
    began = time.monotonic()
    answer = client.post(server, "/v1/completions", body)
    seconds = time.monotonic() - began
    with understood("/v1/completions"):
        choice = answer["choices"][0]
        tokens, runs = tuple(choice["token_ids"]), choice.get("runs")
        counted = Speculation(runs, len(tokens) - runs) if runs else None
        logprobs, gaps = _numbers(choice.get("logprobs")), _numbers(choice.get("gaps"))
        return Answer(choice["text"], tokens, logprobs, seconds, counted, gaps)


def score(server: Server, ids: Sequence[int]) -> Sequence[float] | None:
    answer = client.post(server, "/score", {"ids": list(ids)})
    with understood("/score"):
        return _numbers(answer["logprobs"])


def _numbers(values: Sequence[float | None] | None) -> tuple[float, ...] | None:
    return None if values is None else nats(values)


ENGINE = Engine(
    name="transformers",
    label="transformers",
    lint="transformers",
    methods={NONE: NONE, "ngram": "prompt lookup", "draft": "assistant model"},
    version=version,
    command=command,
    ready=ready,
    complete=complete,
    score=score,
    rules=(
        Rule("serve.missing-tensors", re.compile(r"^worker: (?:missing|mismatched) (?P<tensor>\S+)"), fatal=False),
        Rule("serve.unknown-tensors", re.compile(r"^worker: unexpected (?P<tensor>\S+)"), fatal=False),
        Rule(
            "serve.unsupported", re.compile(r"ValueError: .*(?:does not recognize this architecture|Unknown quantiz)")
        ),
    ),
    grace=5.0,
)
