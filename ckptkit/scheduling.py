"""Which of several workers this is: as the command line says, or the scheduler's variables. No I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from .errors import fail

_PART = re.compile(r"(\d{1,6})/(\d{1,6})")


class Part(NamedTuple):
    """Part ``number`` of ``of``, counted from 1."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


def part_of(text: str) -> Part:
    """``i/n``. Raises UserError ``usage.part``."""
    found = _PART.fullmatch(text)
    if found and 1 <= int(found[1]) <= int(found[2]):
        return Part(int(found[1]), int(found[2]))
    raise fail("usage.part", f"--part {text}: no part i/n with i from 1 to n", hint="--part 1/8, --part auto")


# Where schedulers say which worker of how many this is: the variables, and from which number they count.
_SCHEDULERS = (
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN"),
    ("SLURM_PROCID", "SLURM_NTASKS", None),
    ("JOB_COMPLETION_INDEX", "JOB_COMPLETIONS", None),
    ("RANK", "WORLD_SIZE", None),
)


def part_here(environment: Mapping[str, str]) -> Part | None:
    """The part that falls to this worker by its scheduler's variables; None where no scheduler says one of several.

    Slurm's arrays and tasks, indexed jobs of Kubernetes (which say the index; ``JOB_COMPLETIONS`` is for the job's
    manifest to set), and torchrun.
    """
    for index, count, first in _SCHEDULERS:
        here, of = environment.get(index, ""), environment.get(count, "")
        start = environment.get(first, "0") if first else "0"
        if here.isdecimal() and of.isdecimal() and start.isdecimal() and int(here) - int(start) < int(of):
            return Part(int(here) - int(start) + 1, int(of))
    return None
