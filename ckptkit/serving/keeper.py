"""Keep one server: a small program between ckptkit and an engine, so that nothing is left behind whatever happens.

    python -P keeper.py GRACE LOG PROGRAM ARGUMENT…

It starts the program in a process group of its own and says its process id in a line on stdout. As soon as its stdin
ends, which it does however ckptkit ends, it stops the group: SIGTERM, GRACE seconds, SIGKILL. A line ``keep`` before
that lets the program run on. At the end it says in a line of JSON how the program ended. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

POLL = 0.1
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: processes whose parents are gone become ours, and so can be found


def main(grace: str, log: str, *program: str) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    with open(log, "ab") as out:
        try:
            process = subprocess.Popen(
                program, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            out.write(f"{program[0]} cannot be started: {error.strerror}\n".encode())
            _say({"code": 127, "killed": False})
            return 0
    _say({"pid": process.pid})
    asked = _wait(process)
    if asked == b"keep\n":
        return 0
    killed = _stop(process, float(grace))
    _say({"code": process.wait(), "killed": killed})
    return 0


def _say(what: dict[str, object]) -> None:
    with contextlib.suppress(OSError):  # nobody is there any more to be told
        os.write(1, json.dumps(what).encode() + b"\n")


def _wait(process: subprocess.Popen[bytes]) -> bytes:
    """Until the program ends or stdin says something; what it said, nothing at its end."""
    while process.poll() is None:
        if select.select([0], [], [], POLL)[0]:
            return os.read(0, 64)
    return b""


def _stop(process: subprocess.Popen[bytes], grace: float) -> bool:
    """End the group and every process that came of it; True where the program had to be killed."""
    running = process.poll() is None
    if running:
        _signal(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
    killed = process.poll() is None
    _signal(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + grace
    while (left := _children()) and time.monotonic() < deadline:
        for child in left:
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    return killed


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _children() -> list[int]:
    """Processes of ours that are left; none where the system does not tell."""
    with contextlib.suppress(OSError):
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text("utf-8").split()]
    return []


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
