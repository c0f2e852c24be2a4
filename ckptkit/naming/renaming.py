"""Rules that give tensors other names: ``reshard --rename`` and ``diff --rename``.

==================  ====================================================================================
``OLD=NEW``         the first parts of a name: ``model.=`` takes a prefix away, ``=model.`` puts one before
                    every name, ``model.layers.1=model.layers.2`` leaves ``model.layers.10`` alone
``re:REGEX=NEW``    ``re.sub``: wherever the regex matches; ``\\1`` in NEW is what its first group matched
==================  ====================================================================================

Several rules work one after another, each on what those before it left. The last ``=`` parts the two sides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from ..errors import Finding, fail
from .patterns import REGEX, pattern


class Rename(NamedTuple):
    """A rule as it was written, and the function from a name to the name it gives."""

    text: str
    change: Callable[[str], str]


class Renamed(NamedTuple):
    """A new name, and the rules that changed the old one; empty where none did."""

    name: str
    rules: tuple[str, ...]


def rename_rule(text: str) -> Rename:
    """The rule that ``text`` spells. Raises UserError: ``usage.rename``, or ``recipe.pattern`` for a bad regex."""
    old, equals, new = text.rpartition("=")
    if not equals:
        raise fail("usage.rename", f"rename rule {text!r} has no '='", hint="OLD=NEW, or 're:REGEX=NEW'")
    if not old.startswith(REGEX):
        return Rename(text, partial(_replace_start, old, new))
    pattern(old)
    regex = re.compile(old.removeprefix(REGEX))
    try:
        regex.sub(new, "")
    except (re.error, IndexError) as error:
        hint = r"'\1' stands for the regex's first group, '\g<name>' for a named one"
        raise fail("usage.rename", f"rename rule {text!r}: {new!r} cannot be filled in: {error}", hint=hint) from None
    return Rename(text, partial(regex.sub, new))


def _replace_start(old: str, new: str, name: str) -> str:
    rest = name.removeprefix(old) if name.startswith(old) else None
    whole_parts = rest is not None and (not rest or not old or old.endswith(".") or rest.startswith("."))
    return new + rest if rest is not None and whole_parts else name


def rename(names: Iterable[str], rules: Sequence[Rename]) -> tuple[dict[str, Renamed], list[Finding]]:
    """What each of ``names`` is called in the end, and what is wrong with that.

    Findings: ``usage.pattern-unmatched`` for a rule that changes no name, ``plan.rename-collision`` where two names
    become one, ``usage.rename`` where a name becomes none that a tensor may have.
    """
    found = {name: _renamed(name, rules) for name in names}
    used = {text for renamed in found.values() for text in renamed.rules}
    findings = [_unmatched(rule.text) for rule in rules if rule.text not in used]
    return found, [*findings, *_misnamed(found), *_collisions(found)]


def _renamed(name: str, rules: Sequence[Rename]) -> Renamed:
    changed = []
    for text, change in rules:
        before, name = name, change(name)
        if name != before:
            changed.append(text)
    return Renamed(name, tuple(changed))


def _unmatched(text: str) -> Finding:
    hint = "OLD is whole parts of a name from its beginning; 're:REGEX=NEW' matches anywhere"
    return Finding("usage.pattern-unmatched", f"rename rule {text!r} changes no tensor's name", hint=hint)


def _misnamed(found: Mapping[str, Renamed]) -> Iterable[Finding]:
    for old, (new, rules) in found.items():
        if rules and new in {"", "__metadata__"}:
            message = f"{rules[-1]!r} would call {old} {new!r}, which no tensor can be called"
            yield Finding("usage.rename", message, tensor=old, hint="keep a part of the name")
            return


def _collisions(found: Mapping[str, Renamed]) -> Iterable[Finding]:
    first: dict[str, str] = {}
    clashes = [(first[new], old, new) for old, (new, _) in found.items() if first.setdefault(new, old) != old]
    if clashes:
        one, other, new = clashes[0]
        more = f", and {len(clashes) - 1:,} more" if len(clashes) > 1 else ""
        message = f"{one} and {other} would both be called {new}{more}"
        hint = "make the rule match one of them only, or rename the other too"
        yield Finding("plan.rename-collision", message, tensor=other, hint=hint, data={"collisions": len(clashes)})
