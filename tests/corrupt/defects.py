"""Small broken checkpoints: a good one, what is done to it, and exactly the checks that must find it."""

from __future__ import annotations

from typing import NamedTuple

from ckptkit.checks import Level
from corrupt.edit import Damage


class Defect(NamedTuple):
    """``ids``: the ids of all findings at ``level``, errors and warnings, no more and no fewer."""

    name: str
    good: str
    damage: Damage
    ids: frozenset[str]
    level: Level = Level.STATIC


def defect(name: str, good: str, damage: Damage, ids: str, level: Level = Level.STATIC) -> Defect:
    return Defect(name, good, damage, frozenset(ids.split()), level)
