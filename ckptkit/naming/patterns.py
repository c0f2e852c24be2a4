"""Name patterns: one syntax for recipes (module names) and options (tensor names).

=============  ==================================================================================
``a.b.c``      that name exactly
``a.*.[bc]``   a glob over the whole name, case-sensitive; ``*`` crosses dots, ``?`` is one character
``re:REGEX``   a regex as compressed-tensors uses it: ``re.match``, anchored at the start, open at the end
=============  ==================================================================================
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache

from ..errors import fail
from .regexes import compiled

REGEX = "re:"
# The one class of module that a recipe's target can name instead of a pattern.
CLASS_TARGETS = frozenset({"Linear"})

_GLOB = re.compile(r"[*?[]")
_NUMBER = re.compile(r"\d+")
_COMPARED = 1000


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern that :func:`pattern` has checked; ``text`` is how it was written."""

    text: str

    @property
    def is_exact(self) -> bool:
        return _compiled(self.text) is None

    def matches(self, name: str) -> bool:
        regex = _compiled(self.text)
        return name == self.text if regex is None else regex.match(name) is not None


def pattern(text: str) -> Pattern:
    """The pattern that ``text`` spells. Raises UserError (``recipe.pattern``) if it is empty or no usable regex."""
    if not text.removeprefix(REGEX).strip():
        raise fail("recipe.pattern", f"pattern {text!r} is empty", hint="'*' matches every name")
    try:
        _compiled(text)
    except (re.error, OverflowError, RecursionError) as error:
        what = getattr(error, "msg", str(error))
        position = getattr(error, "pos", None)
        at = "" if position is None else f" at character {position + 1} of the regex"
        hint = r"characters that are meant literally have a backslash before them: '\.', '\('"
        raise fail("recipe.pattern", f"pattern {text!r} cannot be used as a regex: {what}{at}", hint=hint) from None
    return Pattern(text)


def looks_like_class(text: str) -> bool:
    """True for ``Embedding`` or ``Conv2d``: what people write for a class of modules, never a module's name."""
    return re.fullmatch(r"[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*", text) is not None


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate spelled most like ``name``, if any is near enough to be what was meant, and is not ``name`` itself.

    Candidates that differ only in case and numbers are compared as one first: a checkpoint has 230,000 names, of a
    few dozen shapes.
    """
    shapes: dict[str, list[str]] = {}
    for candidate in candidates:
        if candidate == name:
            continue
        shapes.setdefault(_shape(candidate), []).append(candidate)
    shape = difflib.get_close_matches(_shape(name), shapes, n=1)
    if not shape:
        return None
    return difflib.get_close_matches(name, shapes[shape[0]][:_COMPARED], n=1, cutoff=0)[0]


def meant(wanted: Pattern, names: Collection[str]) -> str | None:
    """The pattern of tensor names that one which matches none may stand for: a module's tensors, or a name like it."""
    text = wanted.text
    inside = rf"{text.removesuffix('$')}\." if text.startswith(REGEX) else f"{text}.*"
    if any(map(Pattern(inside).matches, names)):
        return inside
    return nearest(text, names) if wanted.is_exact else None


def _shape(name: str) -> str:
    return _NUMBER.sub("0", name.casefold())


@lru_cache(maxsize=4096)
def _compiled(text: str) -> re.Pattern[str] | None:
    """The regex behind a pattern; None for an exact name."""
    if text.startswith(REGEX):
        return compiled(text.removeprefix(REGEX))
    return re.compile(fnmatch.translate(text)) if _GLOB.search(text) else None


__all__ = ["CLASS_TARGETS", "REGEX", "Pattern", "looks_like_class", "meant", "nearest", "pattern"]
