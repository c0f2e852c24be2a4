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


# Where schedulers say which worker of how many this is: the variables, and from which number in which steps they count.
_SCHEDULERS = (
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_STEP"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("JOB_COMPLETION_INDEX", "JOB_COMPLETIONS"),
    ("RANK", "WORLD_SIZE"),
)


def part_here(environment: Mapping[str, str]) -> Part | None:
    """The part that falls to this worker by its scheduler's variables; None where none says so, or one makes no sense.

    Slurm's arrays and tasks, indexed jobs of Kubernetes (which say the index; ``JOB_COMPLETIONS`` is for the job's
    manifest to set), and torchrun. Where one runs within another, the first that says one of several counts: a single
    task of Slurm's may start torchrun's many.
    """
    found = []
    for index, count, *counting in _SCHEDULERS:
        if index in environment and count in environment:
            part = _part_by(environment, index, count, *counting)
            if part is None:
                return None
            found.append(part)
    return next((part for part in found if part.of > 1), found[0] if found else None)


def _part_by(environment: Mapping[str, str], index: str, count: str, first: str = "", step: str = "") -> Part | None:
    texts = environment[index], environment[count], environment.get(first, "0"), environment.get(step, "1")
    if not all(text.isdecimal() for text in texts):
        return None
    here, of, start, by = map(int, texts)
    number, rest = divmod(here - start, max(1, by))
    return Part(number + 1, of) if 0 <= number < of and not rest else None
