"""Temporary folders of which nothing is left, also where ckptkit is killed: a checkpoint in float32 takes gigabytes."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

SWEEPER = Path(__file__).with_name("sweeper.py")


@contextlib.contextmanager
def temporary(purpose: str) -> Iterator[tuple[Path, Callable[[], object]]]:
    """A folder for as long as the block runs, and what to call so that it stays."""
    folder = Path(tempfile.mkdtemp(prefix=f"ckptkit-{purpose}-"))
    program = [sys.executable, "-P", str(SWEEPER), str(folder)]
    sweeper = subprocess.Popen(program, stdin=subprocess.PIPE, start_new_session=True)
    assert sweeper.stdin is not None
    try:
        yield folder, partial(sweeper.stdin.write, b"keep")
    finally:
        sweeper.stdin.close()
        sweeper.wait()
