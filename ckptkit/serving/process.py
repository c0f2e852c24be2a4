"""A server's life: started through a keeper, watched until it answers, classified where it does not, stopped."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import Finding
from .engine import Engine, Rule, Server

KEEPER = Path(__file__).with_name("keeper.py")
POLL = 0.25  # seconds between two looks
SHOWN = 400  # characters of a line of a log

# Programs whose running means that kernels are being compiled.
COMPILERS = frozenset(
    [
        "nvcc",
        "cicc",
        "ptxas",
        "fatbinary",
        "cudafe++",
        "ninja",
        "cc1",
        "cc1plus",
        "c++",
        "g++",
        "gcc",
        "clang",
        "clang++",
        "ld",
        "hipcc",
        "triton-llvm",
    ]
)

# What any engine's log may say, after its own rules; ids of ``engine.…`` are not the checkpoint's fault.
COMMON = (
    Rule("engine.memory", re.compile(r"out of memory|OutOfMemoryError|Cannot allocate memory|std::bad_alloc", re.I)),
    Rule("engine.arguments", re.compile(
        r": error: (?:unrecognized arguments|argument |ambiguous option|the following arguments)|^error: invalid argument"
    )),
    Rule("engine.port", re.compile(r"[Aa]ddress already in use|EADDRINUSE")),
    Rule("engine.device", re.compile(r"No CUDA GPUs are available|no NVIDIA driver|Found no NVIDIA|no CUDA-capable device")),
    Rule("engine.missing", re.compile(r"cannot be started: |^\S*python\S*: No module named ")),
    Rule("serve.corrupt", re.compile(r"SafetensorError: |(?:incomplete metadata|HeaderTooLarge|InvalidHeader)")),
)  # fmt: skip
_NO_MODULE = Rule("engine.missing", re.compile(r"ModuleNotFoundError: "))
# Lines that say that something failed, never what.
_CONSEQUENCE = re.compile(
    r"Engine core initialization failed|[Rr]eceived sigquit|EngineDeadError|SystemExit|KeyboardInterrupt"
)
_EXCEPTION = re.compile(
    r"(?:^|[\s\])|:])(?P<line>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Failure)\b: .+)"
)
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class Running(NamedTuple):
    """A started server. ``pid`` is that of its process group, None where it could not be started at all."""

    keeper: subprocess.Popen[bytes]
    pid: int | None
    log: Path


class Ended(NamedTuple):
    """How a server ended: its exit status (negative: the signal), whether it had to be killed."""

    code: int
    killed: bool


class NotReady(Exception):
    """A server that does not answer; the finding says why."""

    def __init__(self, finding: Finding):
        super().__init__(finding.message)
        self.finding = finding


def free_port() -> int:
    """A port of the loopback that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start(command: Sequence[str], log: Path, grace: float) -> Running:
    """Start ``command`` in a process group of its own; its output goes to ``log``."""
    program = [sys.executable, "-P", str(KEEPER), str(grace), str(log), *command]
    keeper = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    return Running(keeper, _line(keeper).get("pid"), log)


def stop(running: Running) -> Ended:
    """Stop the server and everything that it started; what ended before is told the same way."""
    assert running.keeper.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        running.keeper.stdin.close()
    said = _line(running.keeper)
    running.keeper.wait()
    return Ended(said.get("code", 127), said.get("killed", False))


def keep(running: Running) -> None:
    """Let the server run on when ckptkit ends."""
    assert running.keeper.stdin is not None
    running.keeper.stdin.write(b"keep\n")
    running.keeper.stdin.flush()
    running.keeper.wait()


@contextlib.contextmanager
def serving(command: Sequence[str], log: Path, grace: float) -> Iterator[Running]:
    """A server for as long as the block runs, however it is left."""
    running = start(command, log, grace)
    try:
        yield running
    finally:
        if running.keeper.poll() is None:
            stop(running)


def run(command: Sequence[str], log: Path, grace: float) -> int:
    """The exit status of a program that ends by itself; nothing is left of it, however this is left."""
    with serving(command, log, grace) as running:
        while is_up(running):
            time.sleep(POLL)
        return stop(running).code


def is_up(running: Running) -> bool:
    return running.keeper.poll() is None and running.pid is not None


def _line(keeper: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert keeper.stdout is not None
    line = keeper.stdout.readline()
    found: dict[str, Any] = json.loads(line) if line else {}
    return found


# --- waiting -----------------------------------------------------------------------------------------------


def wait_ready(
    running: Running, engine: Engine, server: Server, timeout: float, say: Callable[[str], None] = lambda text: None
) -> float:
    """Wait until the server says that it is healthy; the seconds that took.

    ``say`` is told what goes on. Raises NotReady with the reason: what the log says of a server that ended, or of one
    that is not healthy after ``timeout`` seconds, whether it still compiles or hangs.
    """
    return _wait(running, engine, lambda: engine.ready(server), timeout, f"{engine.label} is starting", say)


def wait_token(
    running: Running, engine: Engine, server: Server, prompt: Sequence[int], timeout: float, say: Callable[[str], None]
) -> None:
    """Wait until a healthy server has decoded a token after ``prompt``: many engines compile on their first request.

    Raises NotReady as :func:`wait_ready` does, and client.Failed where the request is refused.
    """
    pool = ThreadPoolExecutor(1)
    patient = server._replace(timeout=2 * timeout)  # not the request's own end, but whether something compiles, decides
    asked = pool.submit(engine.complete, patient, prompt, 1)
    pool.shutdown(wait=False)
    _wait(running, engine, asked.done, timeout, f"{engine.label} decodes its first token", say)
    asked.result()


def _wait(
    running: Running,
    engine: Engine,
    is_done: Callable[[], bool],
    timeout: float,
    doing: str,
    say: Callable[[str], None],
) -> float:
    began = time.monotonic()
    while is_up(running):
        if is_done():
            return time.monotonic() - began
        waited = time.monotonic() - began
        compiling = compilers(running)
        if waited > timeout:
            raise NotReady(timed_out(running.log, waited, compiling))
        say(f"{engine.label} compiles kernels ({compiling[0]})" if compiling else doing)
        time.sleep(POLL)
    raise NotReady(classify(engine.rules, read_log(running.log), stop(running).code))


def timed_out(log: Path, seconds: float, compiling: Sequence[str]) -> Finding:
    """Not healthy in time: the machine's fault where a compiler still runs, else a hang."""
    last = last_line(read_log(log))
    data = {"log": str(log), "last_line": last}
    if compiling:
        message = f"not healthy after {seconds:.0f} s, and {compiling[0]} still compiles its kernels"
        return Finding("engine.timeout", message, data=data, hint="a longer --timeout; what is compiled is kept")
    message = f"not healthy after {seconds:.0f} s, and nothing compiles: the log ends with {last!r}"
    return Finding("serve.hang", message, data=data)


def compilers(running: Running) -> list[str]:
    """Compilers among the processes that came of a server, by name; none where the system does not tell.

    All of them are its keeper's descendants, also those in sessions of their own.
    """
    parents, names = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            name, _, rest = stat.read_text("utf-8", "replace").partition("(")[2].rpartition(")")
            parents[int(stat.parent.name)] = int(rest.split()[1])
            names[int(stat.parent.name)] = name
    return [name for pid, name in names.items() if name in COMPILERS and running.keeper.pid in _ancestors(pid, parents)]


def _ancestors(pid: int, parents: Mapping[int, int]) -> Iterator[int]:
    while pid in parents:
        pid = parents[pid]
        yield pid


# --- what a log says ---------------------------------------------------------------------------------------


def read_log(log: Path, start: int = 0) -> str:
    """The log from byte ``start`` on, without colours."""
    try:
        return _ANSI.sub("", log.read_bytes()[start:].decode("utf-8", "replace"))
    except OSError:
        return ""


def signs(rules: Sequence[Rule], log: str) -> list[tuple[Rule, re.Match[str], str]]:
    """The lines of a log that rules match: the rule, its match, the line; rules in their order."""
    lines = log.splitlines()
    return [(rule, found, line) for rule in rules for line in lines if (found := rule.pattern.search(line))]


def classify(rules: Sequence[Rule], log: str, code: int) -> Finding:
    """Why a server ended: what a rule finds in its log, or else how it ended and the exception that began it.

    Servers live with exceptions about names that are left over and modules that are not there: such a one is why it
    ended only where it is the last.
    """
    fatal = [rule for rule in rules if rule.fatal]
    for rule, found, line in signs([*fatal, *COMMON], log):
        if rule.id == "serve.unknown-tensors" and _EXCEPTION.search(line):
            continue
        return Finding(rule.id, shown(line), tensor=found.groupdict().get("tensor"), data={"code": code})
    cause = root_cause(log)
    if cause:
        known = signs([_NO_MODULE, *fatal], cause)
        id, tensor = (known[0][0].id, known[0][1].groupdict().get("tensor")) if known else ("serve.start", None)
        return Finding(id, f"ended with status {code}: {cause}", tensor=tensor, data={"code": code})
    if code == -signal.SIGKILL:
        return Finding("engine.killed", "killed from outside: its log names no error", data={"code": code})
    if code < 0:
        name = signal.Signals(-code).name
        return Finding("engine.crashed", f"ended by {name}; its log names no error", data={"code": code})
    message = f"ended with status {code}; its log ends with {last_line(log)!r}"
    return Finding("serve.start", message, data={"code": code})


def root_cause(log: str) -> str | None:
    """The exception that began it: the last that is no mere consequence, and the first of a chain of causes."""
    cause, chained = None, False
    for line in log.splitlines():
        chained = chained or "direct cause of the following exception" in line
        found = _EXCEPTION.search(line)
        if found and not _CONSEQUENCE.search(line):
            cause, chained = (cause if chained and cause else shown(found["line"])), False
    return cause


def last_line(log: str) -> str:
    """The last line that says something."""
    return shown(next((line for line in reversed(log.splitlines()) if line.strip()), "nothing"))


def shown(line: str) -> str:
    """A line as a message has it."""
    line = line.strip()
    return line if len(line) <= SHOWN else line[: SHOWN - 1] + "…"
