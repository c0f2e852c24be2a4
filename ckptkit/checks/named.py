"""Which modules a checkpoint has: whether an entry of a config's list can mean one of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from ..families.fused import FUSED
from ..inspecting.survey import Survey
from ..naming.names import split, uniform
from ..naming.patterns import nearest
from ..plan import Ref
from ..stored import WEIGHTS, split_name
from .groups import spellings
from .weights import Place, place_of


@dataclass(frozen=True)
class Modules:
    """The modules of a checkpoint and the parents of modules, from the first tensor of each of the survey's cells.

    ``more`` are modules that there are without tensors: a tied head.
    """

    survey: Survey
    tensors: Mapping[str, Ref]
    more: tuple[str, ...] = ()

    @cached_property
    def firsts(self) -> frozenset[str]:
        """Names of which each stands for all of its template and layer."""
        found = set(self.more)
        for cell in self.survey.cells.values():
            module = split_name(cell.first.name)[0] or cell.first.name
            if module.endswith("experts"):  # stacked: the tensor itself is what a config names
                found.add(cell.first.name)
            while module and module not in found:
                found.add(module)
                module = module.rpartition(".")[0]
        return frozenset(found)

    @cached_property
    def _spelled(self) -> tuple[frozenset[str], frozenset[str]]:
        """All spellings of the first name of each template, and of all first names."""
        by_template = {split(name)[0]: name for name in self.firsts}
        each = frozenset(spelling for name in by_template.values() for spelling in spellings(name))
        return each, frozenset(spelling for name in self.firsts for spelling in spellings(name))

    def has(self, name: str) -> bool:
        """Whether there is a module, or a parent of modules, of that name, in one of its spellings.

        The name of a layer that engines fuse counts where its first part is there.
        """
        parent, dot, last = name.rpartition(".")
        parts = [f"{parent}{dot}{fused.members[0]}" for fused in FUSED if fused.layer == last]
        return any(self._has(spelling) for known in (name, *parts) for spelling in spellings(known))

    def _has(self, name: str) -> bool:
        if name in self.firsts or any(f"{name}.{part}" in self.tensors for part in WEIGHTS):
            return True
        return place_of(name) in self._parents and any(tensor.startswith(f"{name}.") for tensor in self.tensors)

    @cached_property
    def _parents(self) -> frozenset[Place]:
        """Places of modules that hold others."""
        return frozenset(place_of(name.rpartition(".")[0]) for name in self.firsts)

    def matched(self, regex: str) -> bool:
        """Whether ``regex`` matches the beginning of a module's name in one of its spellings."""
        match = re.compile(regex).match
        by_template, firsts = self._spelled
        if any(map(match, by_template)):
            return True
        return not uniform(f"re:{regex}") and (any(map(match, firsts)) or any(map(match, self._all())))

    def _all(self) -> Iterator[str]:
        return (split_name(name)[0] or name for name in self.tensors)

    def nearest(self, name: str) -> str | None:
        """The module that was probably meant by ``name``."""
        return nearest(name, self.firsts)
