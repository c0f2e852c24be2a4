"""JSON documents with other token ids: every field that is known to hold ids, and those of which nobody knows.

What a field holds is told by its key (``data/id_fields.yaml``). A number that is no token of the vocabulary, -1 for
"none" say, stays.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

if TYPE_CHECKING:
    import numpy as np

    Ids = np.ndarray[Any, np.dtype[np.int32]]

NewId = Callable[[int], int]


class Renumbered(NamedTuple):
    """A document with its new ids, and the paths (``text_config.stop``) of what may hold ids and was left alone."""

    content: Any
    unknown: tuple[str, ...]


def numbering(new_ids: Ids) -> NewId:
    """The function from a token's id to its new one, ``new_ids`` [n] by old id; other numbers are kept."""
    table = new_ids.tolist()
    return lambda id: table[id] if 0 <= id < len(table) else id


def renumbered(document: Any, new_id: NewId, sizes: Iterable[int]) -> Renumbered:
    """``document`` with every id that is known to be one replaced.

    A part with a ``vocab_size`` that is none of ``sizes`` has a vocabulary of its own: its ids are left alone, and told.
    """
    unknown: list[str] = []
    content = _walk(document, "", _Pass(new_id, frozenset(sizes), unknown, True))
    return Renumbered(content, tuple(unknown))


def holds_ids(key: str) -> bool:
    """Whether a field of that name holds token ids."""
    return _kind(key) == "ids"


class _Pass(NamedTuple):
    """What is done on the way through a document; ``ours`` is False within a part that has another vocabulary."""

    new_id: NewId
    sizes: frozenset[int]
    unknown: list[str]
    ours: bool


def _walk(value: Any, path: str, work: _Pass) -> Any:
    if isinstance(value, list):
        return [_walk(item, f"{path}[{index}]", work) for index, item in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    size = value.get("vocab_size")
    work = work._replace(ours=work.ours and (type(size) is not int or size in work.sizes))
    return {key: _field(str(key), item, value, f"{path}.{key}".lstrip("."), work) for key, item in value.items()}


def _field(key: str, item: Any, owner: Mapping[str, Any], path: str, work: _Pass) -> Any:
    kind = "ids" if key == "id" and "content" in owner else _kind(key)
    if kind == "nothing":
        return item
    if kind in _CHANGES and _has_numbers(item):
        fits, change = _CHANGES[kind]
        if work.ours and fits(item):
            return change(item, work.new_id)
        work.unknown.append(path)
        return item
    if kind is None and _may_be_ids(key, item):
        work.unknown.append(path)
        return item
    return _walk(item, path, work)


def _has_numbers(item: Any) -> bool:
    """Whether there are numbers in a value, in its lists and in a table's values."""
    if isinstance(item, Mapping):
        return any(map(_has_numbers, item.values()))
    return any(map(_has_numbers, item)) if isinstance(item, list) else type(item) in (int, float)


def _may_be_ids(key: str, item: Any) -> bool:
    """Whether a field of which nothing is known may hold ids: a list of whole numbers, or a number called an id."""
    if type(item) is int:
        return key.endswith(("_id", "_ids"))
    flat = _flat(item) if isinstance(item, list) else []
    return bool(flat) and all(type(number) is int for number in flat)


def _flat(items: list[Any]) -> list[Any]:
    return [found for item in items for found in (_flat(item) if isinstance(item, list) else [item])]


# --- what becomes of a field -------------------------------------------------------------------------------


def _ids(item: Any, new_id: NewId) -> Any:
    if isinstance(item, Mapping):
        return {key: _ids(value, new_id) for key, value in item.items()}
    if isinstance(item, list):
        return [_ids(value, new_id) for value in item]
    return new_id(item) if type(item) is int else item


def _placed(item: Any, new_id: NewId) -> Any:
    return [[pair[0], *_ids(pair[1:], new_id)] for pair in item]


def _biased(item: Any, new_id: NewId) -> Any:
    return [[_ids(ids, new_id), *rest] for ids, *rest in item]


def _are_lists(item: Any) -> bool:
    return isinstance(item, list) and all(isinstance(one, list) and one for one in item)


# By kind of field: whether a value is one of that kind, and what becomes of it.
_CHANGES: Mapping[str | None, tuple[Callable[[Any], bool], Callable[[Any, NewId], Any]]] = {
    "ids": (lambda item: True, _ids),
    "placed": (_are_lists, _placed),
    "biased": (_are_lists, _biased),
}


@cache
def _kind(key: str) -> str | None:
    """What the table says of a key: the name of its first list with a regex that fits."""
    return next((kind for kind, pattern in _patterns().items() if pattern.fullmatch(key)), None)


@cache
def _patterns() -> Mapping[str, re.Pattern[str]]:
    text = files(__package__).joinpath("data/id_fields.yaml").read_text("utf-8")
    return {
        kind: re.compile("|".join(f"(?:{one})" for one in regexes)) for kind, regexes in yaml.safe_load(text).items()
    }
