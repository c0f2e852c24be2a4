"""Module names as a few regexes: what a written ``quantization_config`` says instead of thousands of names.

An index (:mod:`ckptkit.naming.names`) is written ``\\d+`` when all of the checkpoint's are meant, else as an alternation, so
that a pattern never reaches a module of the checkpoint that was not meant.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from ..naming.names import ANY, PREFIX, Indices, split, to_template, unwrapped

ByTemplate = Mapping[str, Collection[str]]


def by_template(names: Iterable[str]) -> dict[str, list[str]]:
    """Names gathered by template."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        found[to_template(name)].append(name)
    return found


def patterns(
    chosen: ByTemplate, among: ByTemplate, others: Collection[str] = (), also: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """Sorted ``re:`` patterns that match all of ``chosen``, which are some of ``among``, and no others of these.

    Engines put a prefix before a text model's modules, or take one away (``model.language_model.layers`` is
    ``language_model.model.layers`` in vLLM), so a path is written from behind such wrappers on, and matches behind
    any dotted prefix. Where that would reach one of the templates ``others``, the path is written whole. ``also`` are
    other last names, by template, that a pattern matches as well.
    """
    found = set()
    for template, names in chosen.items():
        short = unwrapped(template)
        clash = any(other == short or other.endswith(f".{short}") for other in others)
        for form in _forms_of(template, names, among[template]):
            found.add(PREFIX + _write(template if clash else short, form, also.get(template)) + "$")
    return sorted(found)


def _forms_of(template: str, chosen: Collection[str], among: Collection[str]) -> list[Indices]:
    if len(chosen) == len(among):
        return [(ANY,) * template.count("#")]
    return _forms({split(name)[1] for name in chosen}, {split(name)[1] for name in among})


def _write(template: str, form: Indices, also: str | None) -> str:
    texts = iter(form)
    *parts, last = (next(texts) if part == "#" else re.escape(part) for part in template.split("."))
    return r"\.".join([*parts, f"(?:{last}|{re.escape(also)})" if also else last])


def _forms(chosen: set[Indices], among: set[Indices]) -> list[Indices]:
    """Index patterns, one text per position, that together match exactly ``chosen`` among ``among``."""
    depth = len(next(iter(chosen)))
    if chosen == among:
        return [(ANY,) * depth]
    if depth == 1:
        return [(_alternation(index for (index,) in chosen),)]
    tails, all_tails = _by_first(chosen), _by_first(among)
    alike: dict[tuple[frozenset[Indices], frozenset[Indices]], list[str]] = defaultdict(list)
    for first in tails:
        alike[frozenset(tails[first]), frozenset(all_tails[first])].append(first)
    forms = []
    for (tail, of_all), firsts in alike.items():
        head = ANY if len(firsts) == len(all_tails) else _alternation(firsts)
        forms += [(head, *rest) for rest in _forms(set(tail), set(of_all))]
    return forms


def _by_first(indices: set[Indices]) -> dict[str, set[Indices]]:
    found: dict[str, set[Indices]] = defaultdict(set)
    for first, *rest in indices:
        found[first].add(tuple(rest))
    return found


def _alternation(indices: Iterable[str]) -> str:
    ordered = sorted(indices, key=int)
    return ordered[0] if len(ordered) == 1 else f"(?:{'|'.join(ordered)})"
