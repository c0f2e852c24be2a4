"""Layers that predict further tokens (MTP, NextN): which are there, of which family, and what belongs to them. No I/O.

A family is told by its tensors and by the model that the config names: engines load the same tensors of another model
otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from ..families import Kind, draft_part
from ..families.config import config_value, model_types, text_configs
from .mtp_families import Config, Family, Layers, families
from .mtp_tensors import likeness, unknown

_STAGE = re.compile(r"(?:^|\.)mtp\.\d+\.main_proj\.")
_DSPARK = re.compile(r"(?:^|\.)dspark\.")


def has_stages(names: Iterable[str]) -> bool:
    """Whether what lies under ``mtp.`` is a DSpark draft, which shares nothing with MTP layers but the prefix."""
    return any(_STAGE.search(name) for name in names)


def has_dspark(names: Iterable[str]) -> bool:
    """Whether there is a DSpark draft under a prefix of its own."""
    return any(_DSPARK.search(name) for name in names)


def like_mtp(names: Iterable[str], config: Config) -> list[str]:
    """The tensors whose names are like those of layers that predict further tokens, whatever the family."""
    part_of = draft_part(config)
    return [name for name in names if part_of(name) is Kind.MTP]


def own_layers(config: Config) -> int | None:
    """How many layers the model itself has; None where the config does not say."""
    depth = config_value(config, "num_hidden_layers")
    return depth if type(depth) is int else None


def find(tensors: Mapping[str, Any], config: Config) -> Layers | None:
    """The layers that predict further tokens among ``tensors``; None where no family has any there.

    Tensors that no other layers have must be there. Of families that have any a model's that the config names comes
    first, wherever they lie, then one that is bound to no model, then the one that most tensors speak for. Tensors with
    names alike that the table does not know belong to the layers too.
    """
    stated = {*model_types(config), *_architectures(config)}
    near = _near(tensors, config, stated)
    ranked = []
    for found in (found for family in families() if (found := _layers(family, near, config, stated))):
        models, like = found.family.models, likeness(found, config)
        if like:
            ranked.append((not stated.isdisjoint(models), not models, like, found))
    if not ranked:
        return None
    found = max(ranked, key=lambda item: item[:3])[-1]
    mine = set(found.names)
    others = [name for name in like_mtp(tensors, config) if name not in mine]
    found = found._replace(copies=tuple(_copies(found)))
    return found._replace(
        names=(*found.names, *others),
        unknown=(*unknown(found, config), *others),
        reads=tuple(name for name in found.family.reads if name in tensors),
    )


def first_past(names: Iterable[str]) -> tuple[str, int] | None:
    """The first layer of those that may lie behind the model's own, by a tensor that only such have: its name, the number.

    It tells where the model's own layers end, whatever the config says.
    """
    kinds = [family for family in families() if family.is_past and not family.models]
    ends = tuple(f".{name}" for family in kinds for name in family.special)
    numbered = _numbered({at for family in kinds for at in family.at})
    found = [(name, int(layer[1])) for name in names if name.endswith(ends) and (layer := numbered.match(name))]
    return min(found, key=lambda item: item[1], default=None)


def _architectures(config: Config) -> Iterator[str]:
    for _, found in text_configs(config):
        stated = found.get("architectures")
        yield from (item for item in (stated if isinstance(stated, list) else ()) if isinstance(item, str))


def _near(names: Iterable[str], config: Config, stated: AbstractSet[str]) -> list[str]:
    """The names that may belong to some family: not those of the model's own layers, nor what stands outside layers."""
    depth = own_layers(config)
    every = [(family, at) for family in families() for at in family.beginnings(stated)]
    fixed = tuple({at + whole for family, at in every for whole in family.whole})
    numbered = _numbered({at for family, at in every if family.is_past})
    return [
        name
        for name in names
        if name.startswith(fixed) or ((found := numbered.match(name)) and depth is not None and int(found[1]) >= depth)
    ]


def _numbered(beginnings: Iterable[str]) -> re.Pattern[str]:
    return re.compile(rf"(?:{'|'.join(sorted(map(re.escape, beginnings)))})layers\.(\d{{1,9}})\.")


def _layers(family: Family, near: Sequence[str], config: Config, stated: AbstractSet[str]) -> Layers | None:
    """The family's layers, below the beginning that most names have."""
    by_root = [(at, _numbers(family, at, near, config)) for at in family.beginnings(stated)]
    at, numbers = max(by_root, key=lambda item: len(item[1]))
    whole = tuple(at + beginning for beginning in family.whole)
    names = tuple(name for name in near if name in numbers or (whole and name.startswith(whole)))
    return Layers(family, at, tuple(sorted(set(numbers.values()))), names) if names else None


def _numbers(family: Family, at: str, near: Iterable[str], config: Config) -> dict[str, int]:
    """The names that lie in layers, each with its layer's number."""
    depth = own_layers(config) if family.is_past else 0
    before, _, after = family.layers.partition("{n}" if family.is_past else "{i}")
    pattern = re.compile(rf"{re.escape(at + before)}(\d{{1,9}}){re.escape(after)}")
    numbered = {name: int(found[1]) for name in near if (found := pattern.match(name))}
    return {name: number for name, number in numbered.items() if depth is not None and number >= depth}


def _copies(found: Layers) -> Iterator[str]:
    layers = [found.family.path(found.at, number) for number in found.numbers]
    wanted = {at + name for at in (found.at, *layers) for name in found.family.copies}
    return (name for name in found.names if name in wanted)
