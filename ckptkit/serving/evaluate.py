"""Evaluations of a served checkpoint: ``--eval gsm8k:FILE``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from ..errors import Finding, fail
from . import client, gsm8k
from .cell import Also, Cell
from .engine import Server


def evaluation(text: str, least: float | None) -> Callable[[Server, Cell], Also]:
    """What ``--eval`` names, read and ready to be asked; ``least`` is ``--min-score``.

    Raises UserError (``usage.eval``).
    """
    name, _, path = text.partition(":")
    if name != "gsm8k" or not path:
        raise fail("usage.eval", f"--eval {text}: no such evaluation", hint="--eval gsm8k:test.jsonl")
    return partial(_gsm8k, gsm8k.load(Path(path)), least)


def _gsm8k(tasks: list[gsm8k.Task], least: float | None, server: Server, cell: Cell) -> Also:
    score = gsm8k.run(tasks, partial(_reply, server), (client.Failed,))
    if score.value is None or score.interval is None:
        return Also((Finding("serve.score", f"gsm8k was not measured: {score.failure}"),), None, "not measured")
    low, high = score.interval
    data = {"score": score.value, "n": score.n, "low": low, "high": high}
    found = Finding("serve.score", f"gsm8k: {score.value:.3f} of {score.n}, less than {least}", data=data)
    is_low = least is not None and score.value < least
    return Also((found,) if is_low else (), score.value, f"{score.value:.3f} ({low:.3f}-{high:.3f}, n={score.n})")


def _reply(server: Server, message: str) -> str:
    """The text of a chat's answer. Raises client.Failed."""
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": message}],
        "max_tokens": gsm8k.MAX_TOKENS,
        "temperature": 0,
    }
    try:
        return str(client.post(server, "/v1/chat/completions", body)["choices"][0]["message"]["content"] or "")
    except (LookupError, TypeError) as error:
        raise client.Failed(f"/v1/chat/completions: an answer of another shape: {error}", 200) from None
