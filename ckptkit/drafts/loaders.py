"""What an engine's loader makes of the names in a DSpark draft: the parameters it fills, and those it leaves empty.

Engines check little: SGLang passes over a name that it doesn't know with a warning, and a parameter that no tensor
fills keeps whatever was in memory. Their rules are data, one file an engine in ``data/``: names that are dropped,
renames, parts that are fused into one parameter, and the parameters that a model of given stages and experts has.
A *slot* is a parameter, or one part of a fused one, written ``parameter[part]``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import yaml

from .tables import Config, Form, draft_experts, form_of, is_v41

TABLES = ("sglang_v4", "vllm_v4")
Substitution = tuple[re.Pattern[str], str]


class Rename(NamedTuple):
    """For a rest of a name that ``name`` finds: the substitutions, and what it becomes (None: the tensor is dropped)."""

    name: re.Pattern[str]
    when: frozenset[str]
    replace: tuple[Substitution, ...]
    becomes: str | None


class Fused(NamedTuple):
    """A substitution on the renamed name; ``when`` it holds, as in :class:`Group`."""

    when: frozenset[str]
    replace: Substitution


class Group(NamedTuple):
    """Slots of ``every``, the ``first`` or the ``last`` stage, of drafts that have all the traits in ``when``."""

    at: str
    when: frozenset[str]
    optional: bool
    names: tuple[str, ...]


class Loader(NamedTuple):
    """The rules of one engine. ``unknown`` says what the engine does about a name that fills nothing."""

    engine: str
    versions: str
    unknown: str
    dropped: tuple[re.Pattern[str], ...]
    stage: re.Pattern[str]
    renames: tuple[Rename, ...]
    fused: tuple[Fused, ...]
    parameters: tuple[Group, ...]


class Draft(NamedTuple):
    """What decides the parameters that an engine builds: stages, routed experts of each, how they are stored."""

    stages: int
    experts: int
    form: Form
    v41: bool = False

    @property
    def traits(self) -> frozenset[str]:
        found = {"v41" if self.v41 else "v4", f"{self.form.experts}-experts", f"{self.form.linears}-linears"}
        return frozenset(found if self.form.experts == "bf16" else {*found, "scaled-experts"})


class Loaded(NamedTuple):
    """The outcome: ``slots`` maps each filled one to its tensor; the draft is complete if the three last are empty.

    ``dropped``: tensors passed over on purpose; ``unexpected``: tensors with the slot they'd fill if the model had it;
    ``missing``: required slots that stay uninitialized; ``twice``: slots with all the tensors that are copied there.
    """

    slots: dict[str, str]
    dropped: list[str]
    unexpected: dict[str, str]
    missing: list[str]
    twice: dict[str, list[str]]


def draft_of(config: Config, stages: int, form: Form | None = None) -> Draft:
    """The draft that ``config`` describes; ``form`` where it is stored otherwise than the config declares.

    Raises UserError (``config.draft-field``, ``config.expert-dtype``).
    """
    return Draft(stages, draft_experts(config), form or form_of(config), is_v41(config))


@cache
def loader(table: str) -> Loader:
    """One of :data:`TABLES`."""
    text = files(__package__).joinpath("data", f"{table}.yaml").read_text(encoding="utf-8")
    found: Mapping[str, Any] = yaml.safe_load(text)
    return Loader(
        found["engine"],
        found["versions"],
        found["unknown"],
        tuple(map(re.compile, found["dropped"])),
        re.compile(found["stage"]),
        tuple(
            Rename(
                re.compile(rule["name"]),
                _when(rule),
                tuple(map(_substitution, rule.get("replace", ()))),
                rule["becomes"],
            )
            for rule in found["renames"]
        ),
        tuple(Fused(_when(rule), _substitution(rule["replace"])) for rule in found["fused"]),
        tuple(
            Group(group["at"], _when(group), group.get("optional", False), tuple(group["names"]))
            for group in found["parameters"]
        ),
    )


def renamed(rules: Loader, name: str, traits: frozenset[str]) -> str | None:
    """The engine's own name of the tensor ``name`` before fusing; None where the engine passes it over in silence.

    ``traits``: those of the :class:`Draft`, of which some engines have another class for each version of the model.
    """
    found = rules.stage.match(name)
    if found is None or any(pattern.search(name) for pattern in rules.dropped):
        return None
    stage, rest = found.groups()
    rule = next(rule for rule in rules.renames if rule.when <= traits and rule.name.search(rest))
    for pattern, replacement in rule.replace:
        rest = pattern.sub(replacement, rest)
    return None if rule.becomes is None else rule.becomes.format(stage=stage, rest=rest)


def load(rules: Loader, names: Iterable[str], draft: Draft) -> Loaded:
    """What becomes of a draft's tensor ``names``."""
    required, optional = (set(_slots(rules, draft, optional)) for optional in (False, True))
    traits = draft.traits
    fused = [rule.replace for rule in rules.fused if rule.when <= traits]
    found = Loaded({}, [], {}, [], {})
    for name in names:
        slot = renamed(rules, name, traits)
        if slot is None:
            found.dropped.append(name)
            continue
        for pattern, replacement in fused:
            slot = pattern.sub(replacement, slot)
        if slot not in required and slot not in optional:
            found.unexpected[name] = slot
        elif slot in found.slots:
            found.twice.setdefault(slot, [found.slots[slot]]).append(name)
        else:
            found.slots[slot] = name
    found.missing.extend(sorted(required - found.slots.keys()))
    return found


def _slots(rules: Loader, draft: Draft, optional: bool) -> Iterator[str]:
    """The slots of the model that the engine builds for ``draft``."""
    stages = {"every": range(draft.stages), "first": range(1), "last": range(draft.stages - 1, draft.stages)}
    for group in rules.parameters:
        if group.optional is not optional or not group.when <= draft.traits:
            continue
        for name in group.names:
            for stage in stages[group.at]:
                for expert in range(draft.experts if "{expert}" in name else 1):
                    yield name.format(stage=stage, expert=expert)


def _when(rule: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(rule.get("when", ()))


def _substitution(pair: Iterable[str]) -> Substitution:
    pattern, replacement = pair
    return re.compile(pattern), replacement
