"""Whole processes measured by the kernel: wall seconds, CPU seconds (user + system), peak resident memory."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple


class Usage(NamedTuple):
    """One run: wall and CPU seconds, peak RSS in MB (10^6 bytes)."""

    wall: float
    cpu: float
    rss: float


def run(command: Sequence[str]) -> Usage:
    """Run ``command`` to its end; what it prints is shown only if it fails."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}:\n{output.decode(errors='replace')[-3000:]}")
    scale = 1 if sys.platform == "darwin" else 1024
    return Usage(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * scale / 1e6)


def apart(function: Callable[..., None], *arguments: object) -> None:
    """Call ``function`` in a process of its own.

    A child's peak memory begins at what its parent had when it was started, so a measuring process must stay small.
    """
    process = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    process.start()
    process.join()
    if process.exitcode != 0:
        sys.exit(f"{function.__name__} ended with {process.exitcode}")


def median(runs: Iterable[Usage]) -> Usage:
    return Usage(*(statistics.median(values) for values in zip(*runs, strict=True)))


def clean(*folders: Path) -> None:
    """Remove what a run made, and let the disk settle so that the next run does not pay for it."""
    import shutil

    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    os.sync()
