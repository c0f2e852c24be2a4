"""The tensors that layers which predict further tokens must have, and those they lack. No I/O.

Engines hardly look: SGLang leaves a parameter that no tensor fills as it is, and a draft that guesses badly only makes
a server slow.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..families.config import config_value
from ..stored import WEIGHTS, split_name
from .mtp_families import Config, Entries, Layers, expert_keys, part, value_of

# A table of as many names as a config may claim would not end.
_MOST_EXPERTS = 1 << 14
_EXPERT = re.compile(r"\.experts\.(\d{1,9})\.")


class _Held:
    """Names that are there. A weight is there in whatever form it is stored."""

    def __init__(self, names: Iterable[str]):
        self.names = set(names)
        split = map(split_name, self.names)
        self._weights = {module for module, last in split if last in WEIGHTS}

    def has(self, name: str) -> bool:
        return name in self.names or name.removesuffix(".weight") in self._weights


class _Place(NamedTuple):
    """Where entries of the table are read for: below ``at``, in a layer if there is one, among the layers' tensors."""

    at: str
    layer: int | None
    found: Layers
    held: _Held
    config: Config

    def below(self, path: str) -> _Place:
        return self._replace(at=self.at + path)


def missing(found: Layers, config: Config) -> list[str]:
    """The tensors that the table asks for and that are not there, in the form that most of is there."""
    held = _Held(found.names)
    return [name for name in dict.fromkeys(_all(found, held, config)) if not held.has(name)]


def unknown(found: Layers, config: Config) -> list[str]:
    """The layers' tensors that lie neither in a layer nor where the table has any."""
    layers = tuple(found.family.path(found.at, number) for number in found.numbers)
    known = {*_all(found, _Held(found.names), config), *found.copies}
    modules = {split_name(name)[0] for name in known}
    outside = (name for name in found.names if not name.startswith(layers))
    return [name for name in outside if name not in known and split_name(name)[0] not in modules]


def likeness(found: Layers, config: Config) -> float:
    """The share of the tensors by which the family is told that are there, from 0 to 1."""
    family = found.family
    place = _Place(found.at, None, found, _Held(found.names), config)
    told = _expand(family.once, place)
    for layer in found.numbers[:1]:
        told += _expand((*family.special, *family.first), _in_layer(place, layer))
    for layer in found.numbers[-1:]:
        told += _expand(family.last, _in_layer(place, layer))
    return sum(map(place.held.has, told)) / len(told) if told else 0.0


def _all(found: Layers, held: _Held, config: Config) -> Iterator[str]:
    """Every name that the table asks for."""
    family, place = found.family, _Place(found.at, None, found, held, config)
    yield from _expand(family.once, place)
    for layer in found.numbers:
        entries = [*family.special, *family.block]
        entries += family.first if layer == found.numbers[0] else ()
        entries += family.last if layer == found.numbers[-1] else ()
        yield from _expand(entries, _in_layer(place, layer))


def _in_layer(place: _Place, layer: int) -> _Place:
    return place._replace(at=place.found.family.path(place.found.at, layer), layer=layer)


def _expand(entries: Entries, place: _Place) -> list[str]:
    """The full names that entries stand for; of several forms the one that the most of is there, and the first."""
    names: list[str] = []
    for entry in entries:
        if isinstance(entry, str):
            names += _named(entry, place)
        elif "any" in entry:
            forms = [_expand(form, place) for form in entry["any"]]
            shares = [sum(map(place.held.has, form)) / len(form) for form in forms]
            names += forms[shares.index(max(shares))]
        elif value_of(place.config, entry["when"]):
            names += _expand(entry["names"], place)
    return names


def _named(entry: str, place: _Place) -> list[str]:
    path, is_part, name = entry.partition("@")
    if is_part:
        return _expand(part(name), place.below(path))
    if "{expert}" in entry:
        return [place.at + entry.format(expert=expert) for expert in range(_experts(place))]
    if "{" in entry:
        return [place.found.at + entry.format(n=place.layer, i=place.layer)]
    return [place.at + entry]


def _experts(place: _Place) -> int:
    """Routed experts of a layer: as many as the config says, or else as are there."""
    stated = (config_value(place.config, key) for key in expert_keys())
    declared = next((count for count in stated if type(count) is int and 0 < count <= _MOST_EXPERTS), None)
    numbers = (found[1] for found in map(_EXPERT.search, place.held.names) if found)
    return declared or 1 + max(map(int, numbers), default=0)
