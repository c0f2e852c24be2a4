"""Where a predicate of the engine lint holds, and what predicates share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from ..families import Kind
from ..inspecting.survey import Module
from . import Subject


class Hit(NamedTuple):
    """Where a predicate holds: what is so, for ``number`` things alike, in which file and tensor."""

    text: str
    file: str | None = "config.json"
    tensor: str | None = None
    number: int = 1

    @property
    def about(self) -> str:
        return self.tensor or self.text


def modules(subject: Subject, *kinds: Kind) -> Iterator[Module]:
    """The modules of one of ``kinds``."""
    return (module for module in subject.survey.modules if module.kind in kinds)


def at(module: Module, text: str) -> Hit:
    """A hit on the weight of ``module``."""
    ref = module.weight.first
    return Hit(text, ref.file, ref.name, module.weight.number)


def fits(name: str, globs: Sequence[str]) -> bool:
    """Whether a glob fits ``name`` and none of those after a ``!`` does. Where all have a ``!``, anything else fits."""
    wanted = [glob for glob in globs if not glob.startswith("!")]
    unwanted = [glob[1:] for glob in globs if glob.startswith("!")]
    return (not wanted or any(fnmatchcase(name, glob) for glob in wanted)) and not any(
        fnmatchcase(name, glob) for glob in unwanted
    )
