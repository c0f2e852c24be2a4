"""Files that are numbered as parts of one checkpoint: ``model-00001-of-00003.safetensors``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_NUMBERED = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")


class Numbered(NamedTuple):
    """The parts of such a name; ``stem`` may begin with folders."""

    stem: str
    number: int
    total: int

    @property
    def set(self) -> tuple[str, int]:
        """What the names of one checkpoint's shards have in common."""
        return self.stem, self.total


def numbered(file: str) -> Numbered | None:
    """The name taken apart; None where it has no number."""
    found = _NUMBERED.fullmatch(file)
    return Numbered(found[1], int(found[2]), int(found[3])) if found else None


def is_whole(files: Sequence[str]) -> bool:
    """True if ``files`` are the numbers 1 to N of one set of N."""
    first = numbered(files[0]) if files else None
    total = len(files)
    return first is not None and {*map(numbered, files)} == {Numbered(first.stem, n + 1, total) for n in range(total)}
