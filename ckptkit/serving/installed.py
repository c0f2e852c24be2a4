"""Which version of an engine is installed, asked of the interpreter or program that would start it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache

from ..errors import fail

_SECONDS = 120  # importing an engine on a cold disk takes most of a minute
_ASK = """
import sys
from importlib.metadata import PackageNotFoundError, version
for name in sys.argv[1:]:
    try:
        sys.stdout.write(version(name))
        sys.exit()
    except PackageNotFoundError:
        pass
sys.exit(1)
"""


def of_python(python: str | None, *distributions: str, option: str = "--engine-python") -> str:
    """The version of the first of ``distributions`` that ``python`` has, None for this interpreter.

    Nothing is imported. ``option`` names another interpreter. Raises UserError (``engine.missing``).
    """
    said = _run(python or sys.executable, "-c", _ASK, *distributions)
    if said is None or said.returncode:
        where = python or sys.executable
        hint = f"{where} -m pip install {distributions[0]}, or {option} of an environment that has it"
        raise fail("engine.missing", f"{where} has no {distributions[0]}", hint=hint)
    return said.stdout.strip()


def of_program(program: Sequence[str], pattern: str) -> str:
    """What ``program --version`` says, by ``pattern``'s first group; its first line where the pattern does not fit.

    Raises UserError (``engine.missing``) where there is no such program.
    """
    said = _run(*program, "--version")
    if said is None:
        message = f"{program[0]} is not there, or does not say its version"
        raise fail("engine.missing", message, hint="--engine-cmd with the path of the program")
    text = said.stdout + said.stderr
    found = re.search(pattern, text)
    return found[1] if found else text.strip().partition("\n")[0][:80]


@cache
def _run(*command: str) -> subprocess.CompletedProcess[str] | None:
    """The command, ended; None where it cannot be run or does not end. It is run once: every cell asks the same."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
