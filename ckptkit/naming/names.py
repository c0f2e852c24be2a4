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

# How a written pattern begins, and how it says any index.
PREFIX = r"re:^(?:.*\.)?"
ANY = r"\d+"
# Parts of a path that only wrap the text model: engines add, drop and reorder them.
WRAPPERS = frozenset({"model", "language_model", "text_model", "llm", "thinker", "transformer"})

# A whole part of digits. The digit comes first, what stands before it is looked at then: so the engine skips to digits.
_INDEX = re.compile(r"[0-9](?<![^.].)[0-9]*(?![^.])")

# What may stand in a regex that matches either all names of a template or none: it sees no digit and counts none.
_BLIND = re.compile(r"(?:\.[*+]\??|\\d\+|\\\.|\\-|\(\?:|\)\?|[A-Za-z_()|^$:-])*")


def to_template(name: str) -> str:
    """The template of a name: ``model.layers.#.mlp``."""
    return _INDEX.sub("#", name)


def split(name: str) -> tuple[str, Indices]:
    """A name as (template, indices): ``("model.layers.#.mlp", ("3",))``."""
    return to_template(name), tuple(_INDEX.findall(name))


def layered(name: str) -> tuple[str, str]:
    """A name's template and its first index, the layer's in most names; "" where it has none."""
    template = to_template(name)
    start = template.find("#")
    if start < 0:
        return template, ""
    stop = name.find(".", start)
    return template, name[start:stop] if stop >= 0 else name[start:]


def unwrapped(name: str) -> str:
    """A name or template without the leading parts that only wrap the text model."""
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in WRAPPERS:
        del parts[0]
    return ".".join(parts)


def template_of(text: str) -> str | None:
    """The template whose names, behind any prefix, a pattern of :mod:`.planners.generalise` or an exact name can match.

    None for other patterns.
    """
    if not text.startswith(REGEX):
        return to_template(text)
    if not (text.startswith(PREFIX) and text.endswith("$")):
        return None
    parts = text[len(PREFIX) : -1].split(r"\.")
    return ".".join("#" if _is_index(part) else re.sub(r"\\(.)", r"\1", _first(part)) for part in parts)


def _is_index(part: str) -> bool:
    return part == ANY or _first(part).isdecimal()


def _first(part: str) -> str:
    """The first of the alternatives that a part of a written pattern has: of indices, or of names for one layer."""
    return part.removeprefix("(?:").partition("|")[0] if part.startswith("(?:") else part


def uniform(text: str) -> bool:
    """True if the pattern is sure to match all names of a template or none of them."""
    if text.startswith(REGEX):
        return _BLIND.fullmatch(text.removeprefix(REGEX)) is not None
    return not re.search(r"[\d?\[]", text)


class Matcher:
    """Which of several patterns match a name. Raises UserError (``recipe.pattern``) for one that is no pattern."""

    def __init__(self, texts: Iterable[str]):
        patterns = [pattern(text) for text in dict.fromkeys(texts)]
        self._rank = {item.text: rank for rank, item in enumerate(patterns)}
        self._uniform = [item for item in patterns if uniform(item.text)]
        self._exact = {item.text for item in patterns if item.is_exact and not uniform(item.text)}
        self._each = [item for item in patterns if not item.is_exact and not uniform(item.text)]
        self._by_template = lru_cache(maxsize=None)(self._match_uniform)

    @property
    def is_uniform(self) -> bool:
        """True if names of one template are sure to match the same patterns."""
        return not self._each and not self._exact

    def all(self, name: str) -> tuple[str, ...]:
        """The texts of all patterns that match ``name``, each once, in the order they were given."""
        found = self._by_template(to_template(name))
        more = [item.text for item in self._each if item.matches(name)] if self._each else []
        if name in self._exact:
            more.append(name)
        return tuple(sorted((*found, *more), key=self._rank.__getitem__)) if more else found

    def _match_uniform(self, template: str) -> tuple[str, ...]:
        name = template.replace("#", "0")
        return tuple(item.text for item in self._uniform if item.matches(name))
