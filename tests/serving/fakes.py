"""The fake engine as an Engine, and the recording that it agrees with."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ckptkit.serving import client, transformers
from ckptkit.serving.cell import Cell
from ckptkit.serving.engine import Answer, Engine, Launch, Method, Rule, Server, Speculation
from ckptkit.serving.recording import Item, Recording

from .fake_engine import LEAD, LOGPROB, VOCABULARY

PROGRAM = Path(__file__).with_name("fake_engine.py")


def complete(server: Server, prompt: object, max_tokens: int) -> Answer:
    body = {"prompt": list(prompt), "max_tokens": max_tokens}  # type: ignore[call-overload]
    try:
        choice = client.post(server, "/v1/completions", body)["choices"][0]
    except KeyError as error:
        raise client.Failed(str(error)) from None
    values = [float("nan") if value is None else value for value in choice["logprobs"]]
    counted = Speculation(*choice["counted"], 40) if "counted" in choice else None
    return Answer(choice["text"], tuple(choice["token_ids"]), tuple(values), 0.01, counted, tuple(choice["gaps"]))


def engine(mode: str, *lines: str, grace: float = 2.0, scores: bool = True) -> Engine:
    """The fake engine in a mode; ``lines`` stand in its log first."""

    def command(launch: Launch) -> list[str]:
        return [sys.executable, str(PROGRAM), mode, str(launch.port), *lines]

    return transformers.ENGINE._replace(
        name="fake",
        label="fake",
        version=lambda launch: "1.0",
        command=command,
        model=lambda launch: "fake",
        complete=complete,
        score=transformers.score if scores else lambda server, ids: None,
        methods={"none": "none", "ngram": "ngram"},
        rules=(
            Rule("serve.head-dropped", re.compile(r"Parameter (?P<tensor>lm_head\S+) not found"), fatal=False),
            Rule("serve.unsupported", re.compile(r"Failed to find a kernel")),
        ),
        grace=grace,
    )


def cell(mode: str, *lines: str, method: str = "none", scores: bool = True, grace: float = 2.0) -> Cell:
    found = engine(mode, *lines, grace=grace, scores=scores)
    return Cell("model", Path("model"), None, found, Method(method))


def recording(tokens: int = 8) -> Recording:
    """What the fake engine says of two prompts, with every lead the same."""
    return Recording(
        {"vocabulary": VOCABULARY, "source": "", "tokenizer": ""}, (item("a", 3, tokens), item("b", 20, tokens))
    )


def item(name: str, last: int, count: int) -> Item:
    prompt = (1, 2, last)
    tokens = tuple((last + at) % VOCABULARY for at in range(1, count + 1))
    ids = prompt + tokens
    top = tuple(((id, LOGPROB), (0, LOGPROB - LEAD)) for id in ids[1:])
    return Item(name, prompt, tokens, (LOGPROB,) * (len(ids) - 1), top, name, " ".join(map(str, tokens)))
