"""Module names in bulk: templates, and matching many names against many patterns.

A name's template has ``#`` for each path part that is a number: ``model.layers.#.mlp.experts.#.up_proj``. A
checkpoint of 230,000 tensors has a few dozen templates, and most patterns cannot tell two names of one template
apart, so they are tried once per template.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from .patterns import REGEX, pattern

Indices = tuple[str, ...]

_INDEX = re.compile(r"(?<![^.])[0-9]+(?![^.])")

# What may stand in a regex that matches either all names of a template or none: it sees no digit and counts none.
_BLIND = re.compile(r"(?:\.[*+]\??|\\d\+|\\\.|\\-|\(\?:|\)\?|[A-Za-z_()|^$:-])*")


@lru_cache(maxsize=1 << 18)
def split(name: str) -> tuple[str, Indices]:
    """A name as (template, indices): ``("model.layers.#.mlp", ("3",))``."""
    indices = tuple(_INDEX.findall(name))
    return (_INDEX.sub("#", name), indices) if indices else (name, ())


def uniform(text: str) -> bool:
    """True if the pattern is sure to match all names of a template or none of them."""
    if text.startswith(REGEX):
        return _BLIND.fullmatch(text.removeprefix(REGEX)) is not None
    return not re.search(r"[\d?\[]", text)


class Matcher:
    """Which of several patterns match a name. Raises UserError (``recipe.pattern``) for one that is no pattern."""

    def __init__(self, texts: Iterable[str]):
        patterns = [pattern(text) for text in texts]
        self._ordered = [item.text for item in patterns]
        self._uniform = [item for item in patterns if uniform(item.text)]
        self._each = [item for item in patterns if not uniform(item.text)]
        self._by_template = lru_cache(maxsize=None)(self._match_uniform)

    def all(self, name: str) -> tuple[str, ...]:
        """The texts of all patterns that match ``name``, in the order they were given."""
        found = self._by_template(split(name)[0])
        each = [item.text for item in self._each if item.matches(name)]
        return tuple(sorted((*found, *each), key=self._ordered.index)) if each else found

    def _match_uniform(self, template: str) -> tuple[str, ...]:
        name = template.replace("#", "0")
        return tuple(item.text for item in self._uniform if item.matches(name))
