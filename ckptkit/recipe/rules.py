"""What may stand in a recipe: plain data in, problems out. And what ``--set`` may change of it.

Nothing here knows of files or lines: a problem names the key it is about, :mod:`.recipe` knows where that was written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ..errors import UserError
from ..naming.patterns import CLASS_TARGETS, looks_like_class, nearest, pattern
from .schemes import FIELDS, PARTS, resolve
from .yaml_lines import Key

# What a recipe decides beside its groups: the allowed values, the default first.
POLICIES = {
    "tie": ("error", "untie"),
    "existing": ("error", "merge", "replace"),
    "nonfinite": ("error", "keep"),
    "arithmetic": ("compat", "float32"),
}


class Problem(NamedTuple):
    """What is wrong at a key, be there a value or not."""

    key: Key
    message: str
    hint: str | None = None
    id: str = "recipe.invalid"


def problems(recipe: Mapping[str, Any]) -> Iterator[Problem]:
    """Everything wrong with a recipe's data: unknown and missing keys, types, choices, patterns, schemes."""
    yield from _check((), recipe, _RECIPE, ("schema", "groups"))
    groups, ignore = recipe.get("groups"), recipe.get("ignore")
    for name, group in groups.items() if isinstance(groups, dict) else ():
        yield from _group_problems(("groups", name), group, recipe.get("arithmetic"))
    for index, item in enumerate(ignore if isinstance(ignore, list) else ()):
        yield from _ignore_problems(("ignore", index), item)


def overrides(group: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a group that override fields of its scheme's weights."""
    return {key: value for key, value in group.items() if key in FIELDS}


# --- values ------------------------------------------------------------------------------------------------

# What is wrong with a value, or None.
_Check = Callable[[Any], str | None]


def _show(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _text(value: Any) -> str | None:
    if isinstance(value, bool):
        return f"must be text, not {_show(value)}; YAML takes yes, no, on and off for booleans: quote them"
    return None if isinstance(value, str) and value else f"must be text, not {_show(value)}"


def _optional_text(value: Any) -> str | None:
    return None if value is None else _text(value)


def _filled(kind: type, what: str) -> _Check:
    return lambda value: None if isinstance(value, kind) and value else f"must be {what}, not {_show(value)}"


def _one_of(*choices: object) -> _Check:
    known = " or ".join(json.dumps(choice).strip('"') for choice in choices)
    exact = [(type(choice), choice) for choice in choices]  # True == 1, and neither is meant for the other
    return lambda value: None if (type(value), value) in exact else f"must be {known}, not {_show(value)}"


def _checked_later(value: Any) -> None:
    return None


_RECIPE: dict[str, _Check] = {
    "schema": _one_of(1),
    "name": _text,
    "source": _optional_text,
    "output": _optional_text,
    "groups": _filled(dict, "a mapping of names to groups"),
    "ignore": lambda value: None if isinstance(value, list) else f"must be a list, not {_show(value)}",
    **{key: _one_of(*choices) for key, choices in POLICIES.items()},
}
_GROUP: dict[str, _Check] = {
    "targets": _filled(list, "a list of patterns"),
    "scheme": _checked_later,
    "experts": _one_of("rows", "columns", None),
    **dict.fromkeys(sorted(FIELDS), _checked_later),
}
_IGNORE: dict[str, _Check] = {"pattern": _checked_later, "optional": _one_of(True, False)}


def _check(
    key: Key, table: Mapping[str, Any], checks: Mapping[str, _Check], required: Iterable[str]
) -> Iterator[Problem]:
    for name, value in table.items():
        if name not in checks:
            yield Problem((*key, name), "unknown key", _meant(name, checks))
        elif why := checks[name](value):
            yield Problem((*key, name), why)
    yield from (Problem((*key, name), "is missing") for name in required if name not in table)


def _meant(name: str, known: Collection[str]) -> str:
    close = nearest(name, known)
    return f"did you mean {close}?" if close else f"known: {', '.join(known)}"


def _group_problems(key: Key, group: Any, arithmetic: Any) -> Iterator[Problem]:
    if not isinstance(group, dict):
        yield Problem(key, f"must be a mapping, not {_show(group)}", "like {targets: [Linear], scheme: W4A16}")
        return
    yield from _check(key, group, _GROUP, ("targets", "scheme"))
    targets = group.get("targets")
    for index, target in enumerate(targets if isinstance(targets, list) else ()):
        if not (isinstance(target, str) and target in CLASS_TARGETS):
            yield from _pattern_problems((*key, "targets", index), target)
    if "scheme" in group:
        yield from _scheme_problems(key, group, arithmetic)


def _scheme_problems(key: Key, group: Mapping[str, Any], arithmetic: Any) -> Iterator[Problem]:
    try:
        scheme = resolve(group["scheme"], overrides(group))
    except UserError as error:
        for found in error.findings:
            yield Problem((*key, *found.data["key"].split(".")), found.message, found.hint, found.id)
    else:
        if arithmetic == "float32" and scheme.weights.type != "int":
            message = f"arithmetic float32 is for integer schemes; this is {scheme.describe()}"
            yield Problem((*key, "scheme"), message, "arithmetic: compat", "recipe.scheme")


def _ignore_problems(key: Key, item: Any) -> Iterator[Problem]:
    if not isinstance(item, dict):
        yield from _pattern_problems(key, item)
        return
    yield from _check(key, item, _IGNORE, ("pattern",))
    if "pattern" in item:
        yield from _pattern_problems((*key, "pattern"), item["pattern"])


def _pattern_problems(key: Key, text: Any) -> Iterator[Problem]:
    if why := _text(text):
        yield Problem(key, why)
        return
    if text in CLASS_TARGETS or looks_like_class(text):
        message = f"{text!r} names a class, and patterns match the names of modules"
        hint = f"{' and '.join(CLASS_TARGETS)} is the only class, and a target only"
        yield Problem(key, message, hint, "recipe.pattern")
        return
    try:
        pattern(text)
    except UserError as error:
        yield from (Problem(key, found.message, found.hint, found.id) for found in error.findings)


# --- overrides ---------------------------------------------------------------------------------------------


def put(recipe: dict[str, Any], key: tuple[str, ...], value: Any) -> Problem | None:
    """Set the value at ``key``, in place; or say why that key cannot be set.

    Keys must be known; a group may be new if ``value`` is a mapping; nothing is set inside a list.
    """
    table: Any = recipe
    for depth, part in enumerate(key):
        above = ".".join(key[:depth])
        if not isinstance(table, dict):
            what = "a list, which is replaced whole" if isinstance(table, list) else "not a mapping"
            return Problem(key, f"{above} is {what}", f"--set {above}=VALUE")
        known = _known(key[:depth], table)
        new_group = key[:-1] == ("groups",) and isinstance(value, dict)
        if part not in known and not (new_group and depth == 1):
            return Problem(key, f"{above or 'a recipe'} has no key {part!r}", _meant(part, known))
        if depth < len(key) - 1:
            table = table.get(part)
    table[key[-1]] = value
    return None


def _known(key: tuple[str, ...], table: Mapping[str, Any]) -> Collection[str]:
    """The keys that may stand in the mapping at ``key``."""
    match key:
        case ():
            return _RECIPE
        case ("groups",):
            return table
        case ("groups", _):
            return _GROUP
        case ("groups", _, "scheme"):
            return PARTS
        case ("groups", _, "scheme", _):
            return FIELDS
    return ()


__all__ = ["POLICIES", "Problem", "overrides", "problems", "put"]
