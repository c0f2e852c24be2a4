"""One cell of the matrix: one checkpoint on one engine, speculating one way. Started, asked everything, stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import Finding, UserError
from ..files.checkpoint import Checkpoint
from . import client, process
from .engine import Answer, Engine, Launch, Method, Server, Speculation, added, since
from .judge import against_plain, mismatches
from .recording import Recording
from .replies import understood

AT_ONCE = 4  # requests that are asked together
# Asked whole and streamed: with a chat template and without.
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "What is the capital of France?"}]})
TEXT = ("/v1/completions", {"prompt": "The capital of France is"})
API_TOKENS = 8
LINGERING = 3.0  # seconds that a dying engine may still be up
KERNELS_SHOWN = 8
LOG_SHOWN = 40  # last lines of a log that a report has
NAMED = 20  # tensors that findings name, of each id
Say = Callable[[str], None]


class Cell(NamedTuple):
    """What is to be served, and how. ``checkpoint`` is None for a file that only its engine reads, and for a URL."""

    label: str
    path: Path
    checkpoint: Checkpoint | None
    engine: Engine
    method: Method


class Also(NamedTuple):
    """What else was asked of a server: findings, and a score with how it is told."""

    findings: tuple[Finding, ...] = ()
    score: float | None = None
    told: str | None = None


class Setting(NamedTuple):
    """What holds for all cells: where servers come from, how long one may take to start and a request to be answered.

    ``also`` is asked of every server that answers: evaluations and programs of the user's.
    """

    scratch: Path
    python: str | None = None
    program: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    url: str | None = None
    timeout: float = 1200.0
    request: float = 300.0
    gap: float = 0.5
    also: Callable[[Server, Ran], Also] | None = None


class Ran(NamedTuple):
    """What became of a cell: figures of a server that answered, findings of one that did not."""

    cell: Cell
    version: str | None
    command: tuple[str, ...]
    log: Path | None
    findings: tuple[Finding, ...]
    answers: Mapping[str, Answer] = {}
    scores: Mapping[str, Sequence[float]] = {}
    speculation: Speculation | None = None
    windows: tuple[float, ...] = ()
    started: float | None = None
    kernels: tuple[str, ...] = ()
    url: str | None = None
    pid: int | None = None
    score: float | None = None
    told: str | None = None
    log_end: tuple[str, ...] = ()

    @property
    def serves(self) -> bool:
        return bool(self.answers)

    @property
    def tokens_per_second(self) -> float | None:
        """Decoded tokens over the time of the requests, prefill included."""
        counted = [(len(answer.tokens), answer.seconds) for answer in self.answers.values() if answer.tokens]
        seconds = sum(seconds for _, seconds in counted)
        return sum(tokens for tokens, _ in counted) / seconds if seconds else None


def run_cell(cell: Cell, setting: Setting, texts: Recording, max_tokens: int, say: Say, keep: bool = False) -> Ran:
    """Serve and ask. Whatever goes wrong with engine or checkpoint is a finding of the result.

    ``keep``: the server runs on afterwards.
    """
    if setting.url:
        return _elsewhere(cell, Server(setting.url.rstrip("/"), "", setting.request), setting, texts, max_tokens, say)
    port = process.free_port()
    log = setting.scratch / f"{cell.label}-{cell.method.name}-{port}.log".replace("/", "_")
    launch = Launch(cell.path, port, setting.scratch, setting.python, setting.program, setting.arguments, cell.method)
    try:
        version, command = cell.engine.version(launch), tuple(cell.engine.command(launch))
    except UserError as error:
        if any(finding.id.startswith("usage.") for finding in error.findings):
            raise
        return Ran(cell, None, (), None, error.findings)
    server = Server(f"http://127.0.0.1:{port}", cell.engine.model(launch), setting.request)
    ran = Ran(cell, version, command, log, (), url=server.url)
    with process.serving(command, log, cell.engine.grace) as running:
        ran = _served_by(ran, running, server, texts, max_tokens, setting, say)
        if keep and ran.serves:
            process.keep(running)
            return ran._replace(pid=running.pid)
        was_up = process.is_up(running)
        ended = process.stop(running)
    slow = [Finding("serve.stop", f"SIGTERM did not end it within {cell.engine.grace:g} s", severity="warning")]
    return ran._replace(findings=(*ran.findings, *(slow if was_up and ended.killed else [])))


def _elsewhere(cell: Cell, server: Server, setting: Setting, texts: Recording, max_tokens: int, say: Say) -> Ran:
    """Ask a server that was not started here."""
    ran = Ran(cell, None, (), None, (), url=server.url)
    try:
        server = server._replace(model=client.model_of(server))
    except client.Failed as error:
        return ran._replace(findings=(Finding("engine.unreachable", f"{server.url}{error}"),))
    return _asked(ran, server, None, texts, max_tokens, setting, say)


def _served_by(
    ran: Ran, running: process.Running, server: Server, texts: Recording, max_tokens: int, setting: Setting, say: Say
) -> Ran:
    """Wait for health and a token, then ask; afterwards what the log says."""
    engine = ran.cell.engine
    try:
        seconds = process.wait_ready(running, engine, server, setting.timeout, say)
        ran = _asked(ran._replace(started=seconds), server, running, texts, max_tokens, setting, say)
    except process.NotReady as error:
        ran = ran._replace(findings=(*ran.findings, error.finding))
    text = process.read_log(running.log)
    end = tuple(map(process.shown, text.splitlines()[-LOG_SHOWN:]))
    found = (*ran.findings, *log_findings(engine, text))
    return ran._replace(findings=found, kernels=_kernels(engine, text), log_end=end)


def log_findings(engine: Engine, log: str) -> list[Finding]:
    """What a server says that lives on, or lived until something else ended it; a line is what its first rule says."""
    found: dict[str, list[tuple[str, str | None]]] = {}
    told: set[str] = set()
    for rule, match, line in process.signs([rule for rule in engine.rules if not rule.fatal], log):
        if line not in told:
            found.setdefault(rule.id, []).append((process.shown(line), match.groupdict().get("tensor")))
        told.add(line)
    return [
        Finding(id, line, tensor=tensor, data={"lines": len(lines)})
        for id, lines in found.items()
        for line, tensor in dict.fromkeys(lines[:NAMED])
    ]


def _kernels(engine: Engine, log: str) -> tuple[str, ...]:
    """What it says of them, without the lines around: SGLang's arguments are a line of ten thousand characters."""
    found = engine.kernels.finditer(log) if engine.kernels else ()
    return tuple(dict.fromkeys(process.shown(match[0]) for match in found))[:KERNELS_SHOWN]


# --- requests ----------------------------------------------------------------------------------------------


def _asked(
    ran: Ran,
    server: Server,
    running: process.Running | None,
    texts: Recording,
    max_tokens: int,
    setting: Setting,
    say: Say,
) -> Ran:
    """All requests. One that fails ends them, with what the log says if it took the server with it."""
    engine, ids = ran.cell.engine, {item.name: item.prompt for item in texts.items}
    answers: dict[str, Answer] = {}
    try:
        say(f"{engine.label} decodes")
        first = texts.items[0]
        if running:
            process.wait_token(running, engine, server, first.prompt, setting.timeout, say)
        before, start = engine.counters(server), running.log.stat().st_size if running else 0
        for name, prompt in ids.items():
            answers[name] = engine.complete(server, prompt, max_tokens)
        counted = since(before, engine.counters(server)) or added([answer.speculation for answer in answers.values()])
        windows = engine.windows(process.read_log(running.log, start)) if running else ()
        ran = ran._replace(answers=answers, speculation=counted, windows=tuple(windows))
        say(f"{engine.label} scores")
        scores = {item.name: engine.score(server, item.ids) for item in texts.items}
        ran = ran._replace(scores={name: values for name, values in scores.items() if values is not None})
        found = [
            *api_findings(server, bool(texts.about.get("chat"))),
            *_together(engine, server, ids, answers, max_tokens, setting.gap),
        ]
        if setting.also:
            more = setting.also(server, ran)
            ran = ran._replace(score=more.score, told=more.told)
            found += more.findings
    except process.NotReady as error:
        found = [_crash(error.finding)]
    except client.Failed as error:
        found = [_broken(error, engine, running)]
    return ran._replace(findings=(*ran.findings, *found))


def _broken(error: client.Failed, engine: Engine, running: process.Running | None) -> Finding:
    """Why a request failed: an engine that dies of one may say 500 first, and why only in its log."""
    if running is None:
        return Finding("serve.request", str(error), data={"status": error.status})
    deadline = time.monotonic() + (LINGERING if error.status is None or error.status >= 500 else process.POLL)
    while process.is_up(running) and time.monotonic() < deadline:
        time.sleep(process.POLL)
    if process.is_up(running):
        cause = process.root_cause(process.read_log(running.log)) if error.status != 200 else None
        return Finding(
            "serve.request", f"{error}; its log: {cause}" if cause else str(error), data={"status": error.status}
        )
    return _crash(process.classify(engine.rules, process.read_log(running.log), process.stop(running).code))


def _crash(cause: Finding) -> Finding:
    """What ended a server that was healthy."""
    if cause.id in {"serve.start", "engine.crashed"}:
        return Finding("serve.crash", f"died on a request: {cause.message}", data=cause.data)
    return cause


def api_findings(server: Server, has_chat: bool) -> Iterator[Finding]:
    """``serve.api``: the model list, and a chat (without a chat template, a text) whole and streamed."""
    path, asked = CHAT if has_chat else TEXT
    body: dict[str, Any] = {"model": server.model, **asked, "max_tokens": API_TOKENS, "temperature": 0}
    try:
        with understood("/v1/models"):
            listed = [model["id"] for model in client.get_json(server, "/v1/models")["data"]]
        if server.model not in listed:
            yield Finding("serve.api", f"/v1/models lists {listed} and not {server.model}", severity="warning")
        with understood(path):
            text = _text(client.post(server, path, body)["choices"][0], "message")
            pieces = [
                _text(event["choices"][0], "delta") for event in client.stream(server, path, body) if event["choices"]
            ]
    except client.Failed as error:
        yield Finding("serve.api", str(error))
    else:
        if text != "".join(pieces):
            message = f"{path}: streamed it is {''.join(pieces)!r}, else {text!r}"
            yield Finding("serve.api", message, severity="warning")


def _text(choice: Mapping[str, Any], message: str) -> str:
    """The text of an answer, or of a piece of it; a chat's lies in its message."""
    return str((choice[message].get("content") if message in choice else choice["text"]) or "")


def _together(
    engine: Engine,
    server: Server,
    ids: Mapping[str, Sequence[int]],
    alone: Mapping[str, Answer],
    max_tokens: int,
    gap: float,
) -> Iterator[Finding]:
    """``serve.concurrent``: the same prompts asked at once, answered as alone but for near-ties."""
    asked = list(ids.items())[:AT_ONCE]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = pool.map(lambda item: engine.complete(server, item[1], max_tokens), asked)
        together = {name: answer for (name, _), answer in zip(asked, answers, strict=True)}
    for found in mismatches(against_plain(together, alone, None), gap):
        yield Finding("serve.concurrent", found.message.replace("without speculation", "alone"), data=found.data)
