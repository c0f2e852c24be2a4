"""Lists of module names in declarations of quantization, for a part of a checkpoint whose modules may be called otherwise.

What an entry says of modules that are there stays said; what it says of others is left out: under new names it could
mean modules that it never meant.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..consumers import LINEAR_CLASS
from ..declarations import LISTS
from ..errors import UserError
from ..naming.names import uniform
from ..naming.patterns import REGEX, pattern

Names = Mapping[str, str]
Entries = Callable[[str], list[str]]


def restated(table: Mapping[str, Any], modules: Names) -> dict[str, Any]:
    """``table`` with its lists true of ``modules``, which maps the old name of every module that is there to the new one."""
    entries = _entries_of(modules)
    made = dict(table)
    for key in LISTS:
        if isinstance(listed := table.get(key), list):
            made[key] = _each(listed, entries)
    if isinstance(groups := table.get("config_groups"), Mapping):
        made["config_groups"] = {name: _group(group, entries) for name, group in groups.items()}
    if isinstance(layers := table.get("quantized_layers"), Mapping):  # ModelOpt's mixed precision
        made["quantized_layers"] = {modules[name]: of for name, of in layers.items() if name in modules}
    if isinstance(rules := table.get("dynamic"), Mapping):  # GPTQModel's
        made["dynamic"] = {text: of for rule, of in rules.items() for text in _rule(rule, entries)}
    return made


def listed(table: Mapping[str, Any], modules: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Entries of the lists of dense modules that name any of ``modules``, or what it lies in, each with the first.

    SGLang and transformers take both for listed, vLLM only the name itself.
    """
    named = list(modules)
    for key in LISTS:
        entries = table.get(key)
        for entry in entries if isinstance(entries, list) else ():
            found = next((module for module in named if f"{module}.".startswith(f"{entry}.")), None)
            if found:
                yield entry, found


def _each(listed: Sequence[Any], entries: Entries) -> list[Any]:
    return list(dict.fromkeys(text for entry in listed for text in (entries(entry) if isinstance(entry, str) else ())))


def _group(group: Any, entries: Entries) -> Any:
    targets = group.get("targets") if isinstance(group, Mapping) else None
    return {**group, "targets": _each(targets, entries)} if isinstance(targets, list) else group


def _rule(rule: str, entries: Entries) -> list[str]:
    """A rule is a regex, behind a sign if it leaves modules out or takes them in."""
    sign = rule[:2] if rule[:2] in ("-:", "+:") else ""
    made = entries(REGEX + rule.removeprefix(sign))
    return [sign + (text.removeprefix(REGEX) if text.startswith(REGEX) else f"^{re.escape(text)}$") for text in made]


def _entries_of(modules: Names) -> Entries:
    """A function from an entry to those that say the same of ``modules``.

    One that sees no number means the same as before, and one that is no pattern never meant any. One that names a module,
    or what modules lie in, is renamed; another that sees numbers gives way to the names it means, if these have changed.
    """
    is_renamed = any(old != new for old, new in modules.items())

    def entries(entry: str) -> list[str]:
        if entry == LINEAR_CLASS or uniform(entry):
            return [entry]
        try:
            found = pattern(entry)
        except UserError:
            return [entry]
        meant = [module for module in modules if found.matches(module) or module.startswith(f"{entry}.")]
        if not meant or not is_renamed:
            return [entry] if meant else []
        if meant[0].startswith(entry):
            return [modules[meant[0]][: len(modules[meant[0]]) - len(meant[0]) + len(entry)]]
        return [modules[module] for module in meant]

    return entries
