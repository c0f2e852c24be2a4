"""The table of model families that predict further tokens, as data: ``data/mtp_families.yaml`` says how it is written.

A family more is an entry there, and no code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import yaml

from ..families.config import config_value
from ..naming.names import unwrapped

Config = Mapping[str, Any]
Entries = Sequence[Any]
ENGINES = ("sglang", "vllm")
# What checkpoints put before the names of a text model, where it is a part of another.
_WRAPPED = ("", "model.", "language_model.", "model.language_model.", "language_model.model.")


class Family(NamedTuple):
    """An entry of the table; each field is explained there. ``models`` is empty for what no engine is known to load."""

    id: str
    name: str
    at: tuple[str, ...]
    layers: str
    models: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    once: Entries = ()
    special: Entries = ()
    block: Entries = ()
    first: Entries = ()
    last: Entries = ()
    copies: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()
    counted_by: tuple[str, ...] = ()
    steps: str | None = None
    sglang: str | None = None
    vllm: str | None = None
    one_layer: tuple[str, ...] = ()
    needs_vocabulary: tuple[str, ...] = ()
    shares: tuple[str, ...] = ()
    renumber: tuple[str, ...] = ()

    @property
    def is_past(self) -> bool:
        """Whether its layers are numbered on from the model's own."""
        return "{n}" in self.layers

    def beginnings(self, models: AbstractSet[str]) -> tuple[str, ...]:
        """What its names may begin with; in one of its ``models`` also what no engine knows, if other models have it."""
        if models.isdisjoint(self.models):
            return self.at
        return tuple(dict.fromkeys([*self.at, *(around + unwrapped(at) for at in self.at for around in _WRAPPED)]))

    def path(self, at: str, layer: int) -> str:
        """What all names of a layer begin with, in a checkpoint where the family's begin with ``at``."""
        return at + self.layers.format(n=layer, i=layer)


class Layers(NamedTuple):
    """The layers of a family in a checkpoint.

    ``at``: what their names begin with, which engines know if the family has it; ``numbers``: of the layers, ascending; ``names``: all tensors that belong to
    them, in the checkpoint's order. ``copies`` of these are the target's embedding and head once more; the table does
    not know ``unknown``. ``reads``: tensors of the target that have to come along.
    """

    family: Family
    at: str
    numbers: tuple[int, ...]
    names: tuple[str, ...]
    copies: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()


@cache
def families() -> tuple[Family, ...]:
    """The families, in the table's order."""
    return tuple(map(_family, _table()["families"]))


def _family(entry: Mapping[str, Any]) -> Family:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    return Family(**fields)


def part(name: str) -> Entries:
    """The entries that ``@name`` stands for."""
    entries: Entries = _table()["parts"][name]
    return entries


def expert_keys() -> Sequence[str]:
    """Keys under which configs say how many routed experts a layer has, in the order they count."""
    keys: Sequence[str] = _table()["experts"]
    return keys


@cache
def _table() -> dict[str, Any]:
    text = files(__package__).joinpath("data", "mtp_families.yaml").read_text(encoding="utf-8")
    table: dict[str, Any] = yaml.safe_load(text)
    return table


def value_of(config: Config, key: str) -> Any:
    """The value of a key of the model's config; dots lead into tables."""
    first, *rest = key.split(".")
    value = config_value(config, first)
    for name in rest:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def declared_layers(family: Family, config: Config) -> tuple[str, int] | None:
    """The key that says how many layers there are, and how many that makes; None where no key does."""
    for key in family.counted_by:
        count = value_of(config, key)
        if type(count) is int:
            return key, count * layers_of_a_step(family, config)
    return None


def layers_of_a_step(family: Family, config: Config) -> int:
    """How many layers it takes to predict one token more."""
    listed = value_of(config, family.steps) if family.steps else None
    return len(listed) if isinstance(listed, str | list) and listed else 1
