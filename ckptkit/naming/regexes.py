"""Regexes that others write, in recipes, options and configs: refused where matching a name could take for ever.

Python tries every way to match, and nothing can stop it. Where a repeated part can itself match the same text in several
ways, ``(a+)+$`` or ``(.|.)*z`` say, their number doubles with every character. Such a part has alternatives that match
the same, or no character in a fixed place that its varying places cannot match too: ``(\\w+\\.)*`` has the dot, and is no
danger.

Where parts that vary stand one after another, ``.*.*.*.*x`` say, the borders between them can lie anywhere. Their ways
are counted for a name of so many characters (:func:`_ways`): what stands fixed between two of them keeps them apart if
they cannot match it, and else makes borders rarer the more characters it takes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib import import_module
from itertools import combinations, product
from math import comb
from typing import Any

_parse = import_module("re._parser").parse  # how re itself reads a regex

# Characters by their codes; the last stands for all that are not ASCII.
_OTHER = 128
_ALL = frozenset(range(_OTHER + 1))
_CATEGORIES = {
    f"CATEGORY_{name}": frozenset(code for code in _ALL if re.match(escape, chr(code)))
    for name, escape in {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}.items()
}
_LOOKS = {"ASSERT", "ASSERT_NOT"}
_REPEATS = {"MAX_REPEAT", "MIN_REPEAT"}
_MANY = 10  # repeats from here on count as endless
_LENGTH = 256  # characters of a name for which ways to match are counted
_POWER = 40  # as much as a power of 2 needs to be too many
_MOST = 10_000_000  # ways that may be tried: about a second

_Item = tuple[Any, Any]


@lru_cache(maxsize=4096)
def compiled(text: str) -> re.Pattern[str]:
    """``re.compile``, which raises re.error (OverflowError, RecursionError) too where matching could take for ever."""
    found = re.compile(text)
    if any(_is_ambiguous(body) for body in _repeated(_parse(text))):
        raise re.error("matching it can take exponential time: a repeated part can match one text in several ways")
    if _cost(_parse(text)) > _MOST:
        raise re.error("matching it can take too long: too many parts of any length can match the same text")
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
    return any(_has_twins(*item) for item in items) or (
        bool(varying) and not any(characters and characters.isdisjoint(loose) for characters in fixed)
    )


def _has_twins(kind: Any, value: Any) -> bool:
    """Whether two alternatives, or alternatives within them, can match the same text: places alike one by one."""
    if str(kind) != "BRANCH":
        return False
    branches = [list(_flat(branch)) for branch in value[1]]
    if any(_has_twins(*item) for branch in branches for item in branch):
        return True
    places = [[_characters(*item) for item in branch if str(item[0]) != "AT"] for branch in branches]
    return any(
        len(one) == len(other) and not any(a.isdisjoint(b) for a, b in zip(one, other, strict=True))
        for one, other in combinations(places, 2)
    )


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


# --- ways to match ---------------------------------------------------------------------------------------------


def _cost(sequence: Sequence[_Item]) -> float:
    """The ways to match a sequence; or anything in it, and what looks ahead or behind from wherever it comes to lie."""
    items = list(_opened(sequence))
    found = _ways(items)
    for at, (kind, value) in enumerate(items):
        places = _ways(items[:at]) if str(kind) in _LOOKS else 1.0
        found = max([found, *(places * _cost(part) for part in _parts(kind, value))])
    return found


def _opened(items: Sequence[_Item]) -> Iterator[_Item]:
    """Groups opened."""
    for kind, value in items:
        if str(kind) == "SUBPATTERN":
            yield from _opened(value[-1])
        else:
            yield kind, value


def _ways(sequence: Sequence[_Item]) -> float:
    """In how many ways a text can be divided among the items of a sequence, at most; the worst text is looked for."""
    items = list(_opened(sequence))
    options = [_options(*item) for item in items]
    endless = {_characters(*item) for item in items if _is_endless(*item)}
    alphabets = {a & b for a, b in product(endless, repeat=2)} - {frozenset()} or {_ALL}
    return max(_ways_within(items, options, alphabet) for alphabet in alphabets)


def _ways_within(items: Sequence[_Item], options: Sequence[float], alphabet: frozenset[int]) -> float:
    """The most that a run of items has that can all match text of ``alphabet``."""
    most, loops, between, others = 1.0, 0, set[int](), 1.0
    for (kind, value), own in zip(items, options, strict=True):
        characters = _characters(kind, value)
        if _is_endless(kind, value) and characters >= alphabet:
            loops += 1
        elif characters and characters.isdisjoint(alphabet) and not _may_be_empty(kind, value):
            loops, between, others = 0, set[int](), 1.0
        elif str(kind) == "LITERAL":
            between.add(value)
        others = min(others * own, float(_MOST + 1))
        most = max(most, others * comb(_LENGTH // max(1, len(between)), loops))
    return most


def _options(kind: Any, value: Any) -> float:
    """The ways of an item apart from where an endless one ends."""
    if str(kind) == "BRANCH" and _varies(kind, value):
        return sum(map(_ways, value[1]))
    if str(kind) in _REPEATS and not _is_endless(kind, value):
        body = min(_ways(value[2]), _MOST + 1) if _is_ambiguous(value[2]) else 1.0
        return float(min(1 + value[1] - value[0], _LENGTH) * body ** min(value[1], _POWER))
    return 1.0


def _is_endless(kind: Any, value: Any) -> bool:
    return str(kind) in _REPEATS and value[1] >= _MANY and value[0] < value[1]


def _may_be_empty(kind: Any, value: Any) -> bool:
    if str(kind) == "BRANCH":
        return any(all(_may_be_empty(*item) for item in _flat(branch)) for branch in value[1])
    return (str(kind) in _REPEATS and value[0] == 0) or str(kind) in _LOOKS or str(kind) == "AT"


# --- characters ------------------------------------------------------------------------------------------------


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
