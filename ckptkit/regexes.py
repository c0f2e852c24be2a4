"""Regexes that others write, in recipes, options and configs: refused where matching a name could take for ever.

Python tries every way to match. Where a repeated part can itself match the same text in several ways, ``(a+)+$`` say,
their number doubles with every character, and nothing can stop it. Such a part has no character in a fixed place that
its varying places cannot match too: ``(\\w+\\.)*`` has the dot, and is no danger.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib import import_module
from itertools import combinations
from typing import Any

_parse = import_module("re._parser").parse  # how re itself reads a regex

# Characters by their codes; the last stands for all that are not ASCII.
_OTHER = 128
_ALL = frozenset(range(_OTHER + 1))
_CATEGORIES = {
    f"CATEGORY_{name}": frozenset(code for code in _ALL if re.match(escape, chr(code)))
    for name, escape in {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}.items()
}
_REPEATS = {"MAX_REPEAT", "MIN_REPEAT"}
_MANY = 10  # repeats from here on count as endless

_Item = tuple[Any, Any]


@lru_cache(maxsize=4096)
def compiled(text: str) -> re.Pattern[str]:
    """``re.compile``, which raises re.error (OverflowError, RecursionError) too where matching could take for ever."""
    found = re.compile(text)
    if any(_is_ambiguous(body) for body in _repeated(_parse(text))):
        raise re.error("matching it can take exponential time: a repeated part repeats something itself")
    return found


def _repeated(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    """What is repeated often, at any depth."""
    for kind, value in items:
        if str(kind) in _REPEATS and value[1] >= _MANY:
            yield value[2]
        for part in _parts(kind, value):
            yield from _repeated(part)


def _parts(kind: Any, value: Any) -> list[Sequence[_Item]]:
    """The sequences of items that an item is made of."""
    match str(kind):
        case "SUBPATTERN":
            return [value[-1]]
        case "BRANCH":
            return list(value[1])
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
            return [value[2]]
        case "ASSERT" | "ASSERT_NOT":
            return [value[1]]
        case "ATOMIC_GROUP":
            return [value]
        case "GROUPREF_EXISTS":
            return [part for part in value[1:] if part]
    return []


def _is_ambiguous(body: Sequence[_Item]) -> bool:
    """Whether repeating ``body`` may match one text in several ways: nothing fixed tells where it begins again."""
    items = list(_flat(body))
    varying = [item for item in items if _varies(*item)]
    loose = frozenset[int]().union(*(_characters(*item) for item in varying))
    fixed = (_characters(*item) for item in items if not _varies(*item))
    return bool(varying) and not any(characters and characters.isdisjoint(loose) for characters in fixed)


def _flat(items: Sequence[_Item]) -> Iterator[_Item]:
    """Groups opened, and anything that is there a fixed number of times."""
    for kind, value in items:
        if str(kind) == "SUBPATTERN" or (str(kind) in _REPEATS and value[0] == value[1] > 0):
            yield from _flat(value[-1])
        else:
            yield kind, value


def _varies(kind: Any, value: Any) -> bool:
    """Whether what an item matches is not always as long, or can be matched in several ways."""
    if str(kind) == "BRANCH":
        firsts = [_characters(*branch[0]) if branch else _ALL for branch in value[1]]
        apart = all(first.isdisjoint(other) for first, other in combinations(firsts, 2))
        return not apart or any(_varies(*item) for branch in value[1] for item in _flat(branch))
    return str(kind) in _REPEATS or str(kind) in {"GROUPREF", "GROUPREF_EXISTS"}


def _characters(kind: Any, value: Any) -> frozenset[int]:
    """All characters that an item may match; none for an anchor."""
    match str(kind):
        case "LITERAL":
            return _both_cases(value)
        case "NOT_LITERAL":
            return _ALL - _both_cases(value)
        case "ANY" | "GROUPREF":
            return _ALL
        case "RANGE":
            return frozenset[int]().union(
                *map(_both_cases, range(value[0], min(value[1], _OTHER) + 1)), {min(value[1], _OTHER)}
            )
        case "CATEGORY":
            name = str(value)
            return _ALL - _CATEGORIES[name.replace("_NOT", "")] if "_NOT" in name else _CATEGORIES[name]
        case "IN":
            negated = str(value[0][0]) == "NEGATE"
            found = frozenset[int]().union(*(_characters(*item) for item in value[negated:]))
            return _ALL - found if negated else found
    return frozenset[int]().union(*(_characters(*item) for part in _parts(kind, value) for item in part))


def _both_cases(code: int) -> frozenset[int]:
    return frozenset({code, ord(chr(code).swapcase())}) if code < _OTHER else frozenset({_OTHER})
