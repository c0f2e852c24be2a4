"""Evaluations of a served checkpoint: ``--eval gsm8k:FILE``, ``--eval tasks``, ``--eval lm-eval:TASK``.

``tasks`` are :data:`TASKS`, a few dozen numbers to copy and to count on from, made by ``scripts/generate_tasks.py``:
what a model of any size can do, and one with a broken head cannot.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ..errors import Finding, fail
from . import client, external, gsm8k
from .cell import Also, Ran
from .engine import Server
from .replies import understood

TASKS = Path(__file__).with_name("data") / "tasks.jsonl"
TASK_TOKENS = 8  # of an answer: a model that is not told where to end goes on with a question of its own
SGLANG = "sglang"


class Evaluation(NamedTuple):
    """What is asked for: ``--eval``, ``--min-score``, ``--eval-runner``, ``--journal``; the engine's own interpreter."""

    text: str
    least: float | None = None
    runner: str | None = None
    journal: Path | None = None
    python: str | None = None


class Questions(NamedTuple):
    """Questions that are asked here: how many tokens an answer has, and how its number is read.

    ``is_chat``: as a user's message, which small models answer worse than they continue a text.
    """

    name: str
    tasks: Sequence[gsm8k.Task]
    max_tokens: int
    read: Callable[[str], Decimal | None]
    is_chat: bool


def evaluation(asked: Evaluation) -> Callable[[Server, Ran], Also]:
    """What ``--eval`` names, read and ready to be asked.

    Raises UserError: ``usage.eval``, ``output.write`` for a journal's folder, and ``engine.missing`` where a program that
    is to run it is not installed.
    """
    name, _, rest = asked.text.partition(":")
    if name == "lm-eval" and rest:
        return partial(_by_lm_eval, asked, rest, external.python_of("lm_eval", asked.runner))
    found = partial(_by_questions, asked, _questions(asked.text), _other(asked, name, rest))
    if asked.journal:
        _make(asked.journal)
    return found


def _questions(text: str) -> Questions:
    name, _, path = text.partition(":")
    if name == "gsm8k" and path:
        return Questions(name, gsm8k.load(Path(path)), gsm8k.MAX_TOKENS, gsm8k.number, is_chat=True)
    if text == "tasks":
        return Questions(name, gsm8k.load(TASKS), TASK_TOKENS, _first_number, is_chat=False)
    hint = "--eval gsm8k:test.jsonl, --eval tasks, --eval lm-eval:TASK"
    raise fail("usage.eval", f"--eval {text}: no such evaluation", hint=hint)


def _other(asked: Evaluation, name: str, path: str) -> Callable[[Server, Ran], external.Measured] | None:
    """What runs the same questions beside, if that is asked for."""
    if asked.runner is None:
        return None
    if asked.runner != SGLANG or name != "gsm8k":
        hint = "--eval-runner sglang is for gsm8k, an interpreter for lm-eval"
        raise fail("usage.eval", f"--eval-runner {asked.runner} does not run {name}", hint=hint)
    return partial(external.sglang_gsm8k, external.python_of("sglang", asked.python), Path(path))


def _first_number(text: str) -> Decimal | None:
    found = re.search(r"-?\d+", text)
    return Decimal(found[0]) if found else None


# --- questions that are asked here -----------------------------------------------------------------------------


def _by_questions(
    asked: Evaluation,
    questions: Questions,
    other: Callable[[Server, Ran], external.Measured] | None,
    server: Server,
    ran: Ran,
) -> Also:
    score = gsm8k.run(
        questions.tasks,
        partial(_reply, server, questions),
        (client.Failed,),
        read=questions.read,
        journal=_journal(asked.journal, ran, questions.name),
        about=_about(ran, server, questions.max_tokens),
    )
    if score.value is None or score.interval is None:
        return _unmeasured(questions.name, score.failure or "there are no questions")
    low, high = score.interval
    told = f"{score.value:.3f} ({low:.3f}-{high:.3f}, n={score.n})"
    found = [*_too_low(questions.name, score.value, score.n, asked.least)]
    if other:
        theirs = other(server, ran)
        told += f"; its own {theirs.told}"
        found += _unlike(theirs, low, high)
    return Also(tuple(found), score.value, told)


def _reply(server: Server, questions: Questions, message: str) -> str:
    """The text of an answer. Raises client.Failed."""
    body = {"model": server.model, "max_tokens": questions.max_tokens, "temperature": 0}
    path = "/v1/chat/completions" if questions.is_chat else "/v1/completions"
    asked = {"messages": [{"role": "user", "content": message}]} if questions.is_chat else {"prompt": message}
    with understood(path):
        choice = client.post(server, path, body | asked)["choices"][0]
        return str((choice["message"]["content"] if questions.is_chat else choice["text"]) or "")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise fail("output.write", f"{folder} cannot be made: {error.strerror}", file=str(folder)) from None


def _journal(folder: Path | None, ran: Ran, name: str) -> Path | None:
    """Where a cell's replies are kept."""
    if folder is None:
        return None
    cell = ran.cell
    return folder / f"{cell.label}-{cell.engine.name}-{cell.method.name}-{name}.jsonl".replace("/", "_")


def _about(ran: Ran, server: Server, max_tokens: int) -> str:
    """What replies are of: the engine, how it was started, and the files that it was started on."""
    port = server.url.rpartition(":")[2]
    command = [word for word in ran.command if word != port] or [server.url]
    places = [ran.cell.path, *([ran.cell.method.draft] if ran.cell.method.draft else [])]
    return json.dumps([ran.version, command, [_identity(place) for place in places], max_tokens])


def _identity(place: Path) -> list[tuple[str, int, int]]:
    files = sorted(place.iterdir()) if place.is_dir() else [place] if place.is_file() else []
    stats = [(file.name, file.stat()) for file in files]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


# --- by other programs -----------------------------------------------------------------------------------------


def _by_lm_eval(asked: Evaluation, task: str, python: str, server: Server, ran: Ran) -> Also:
    found = external.lm_eval(python, task, server, ran)
    if found.value is None:
        return _unmeasured("lm-eval", found.told)
    return Also(tuple(_too_low(task, found.value, found.n, asked.least)), found.value, found.told)


# --- what scores mean ------------------------------------------------------------------------------------------


def _unmeasured(name: str, failure: str) -> Also:
    return Also((Finding("serve.score", f"{name} was not measured: {failure}"),), None, "not measured")


def _too_low(name: str, value: float, n: int | None, least: float | None) -> Iterator[Finding]:
    if least is not None and value < least:
        message = f"{name}: {value:.3f} of {n}, less than {least}"
        yield Finding("serve.score", message, data={"score": value, "n": n, "least": least})


def _unlike(theirs: external.Measured, low: float, high: float) -> Iterator[Finding]:
    """A warning where another program's score is not what was measured here."""
    if theirs.value is None or not low <= theirs.value <= high:
        message = f"the engine's own gsm8k says {theirs.told}, and {low:.3f} to {high:.3f} was measured"
        yield Finding("serve.score", message, severity="warning", data={"score": theirs.value})
