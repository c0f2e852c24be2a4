"""Module names as a few regexes: what a written ``quantization_config`` says instead of thousands of names.

An index (:mod:`ckptkit.names`) is written ``\\d+`` when all of the checkpoint's are meant, else as an alternation, so that a pattern never reaches a
module of the checkpoint that was not meant.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from ..names import Indices, split

ANY = r"\d+"
PREFIX = r"re:^(?:.*\.)?"


def templates(names: Iterable[str]) -> dict[str, set[Indices]]:
    """Names gathered by template."""
    found: dict[str, set[Indices]] = defaultdict(set)
    for name in names:
        template, indices = split(name)
        found[template].add(indices)
    return found


def patterns(chosen: Iterable[str], among: Mapping[str, set[Indices]]) -> list[str]:
    """Sorted ``re:`` patterns that match exactly ``chosen`` among the names gathered in ``among``.

    Each also matches its names behind any dotted prefix, as engines put one before a text model's modules.
    """
    found = []
    for template, indices in templates(chosen).items():
        for form in _forms(indices, among[template]):
            found.append(PREFIX + _write(template, form) + "$")
    return sorted(found)


def template_of(pattern: str) -> str | None:
    """The one template whose names a pattern written here, or an exact name, can match; None for other patterns."""
    if not pattern.startswith("re:"):
        return split(pattern)[0]
    if not (pattern.startswith(PREFIX) and pattern.endswith("$")):
        return None
    parts = pattern[len(PREFIX) : -1].split(r"\.")
    return ".".join("#" if _is_index(part) else re.sub(r"\\(.)", r"\1", part) for part in parts)


def _is_index(part: str) -> bool:
    return part == ANY or part.isdecimal() or part.startswith("(?:")


def _write(template: str, form: Indices) -> str:
    texts = iter(form)
    return r"\.".join(next(texts) if part == "#" else re.escape(part) for part in template.split("."))


def _forms(chosen: set[Indices], among: set[Indices]) -> list[Indices]:
    """Index patterns, one text per position, that together match exactly ``chosen`` among ``among``."""
    depth = len(next(iter(chosen)))
    if chosen == among:
        return [(ANY,) * depth]
    if depth == 1:
        return [(_alternation(index for (index,) in chosen),)]
    tails, all_tails = _by_first(chosen), _by_first(among)
    alike: dict[tuple[frozenset[Indices], frozenset[Indices]], list[str]] = defaultdict(list)
    for first, tail in tails.items():
        alike[frozenset(tail), frozenset(all_tails[first])].append(first)
    forms = []
    for (tail, all_tail), firsts in alike.items():
        head = ANY if len(firsts) == len(all_tails) else _alternation(firsts)
        forms += [(head, *rest) for rest in _forms(set(tail), set(all_tail))]
    return forms


def _by_first(indices: set[Indices]) -> dict[str, set[Indices]]:
    found: dict[str, set[Indices]] = defaultdict(set)
    for first, *rest in indices:
        found[first].add(tuple(rest))
    return found


def _alternation(indices: Iterable[str]) -> str:
    ordered = sorted(indices, key=int)
    return ordered[0] if len(ordered) == 1 else f"(?:{'|'.join(ordered)})"
