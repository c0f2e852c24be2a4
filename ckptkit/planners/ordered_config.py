"""What the small files of a checkpoint say once its head has an order of its own, so that nothing loads it unawares.

An engine that meets a renamed head, or an architecture that it does not know, goes on with a head of random numbers; what
stops it is said in :mod:`..vocab.marks`. What was there before is kept beside as it was, byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from ..consumers import matches
from ..declarations import DECLARATIONS, LISTS, declarations
from ..files.checkpoint import CONFIG, Checkpoint
from ..stored import tables
from ..vocab.marks import at_path, marked
from .documents import json_text

_DYNAMIC = re.compile(r"([+-]:)?(.*)", re.DOTALL)


def kept_as(name: str) -> str:
    """What the original of a JSON file is called beside the one that stands in its place."""
    return f"{name.removesuffix('.json')}.original.json"


def written(checkpoint: Checkpoint, facts: Mapping[str, Any], head: str, called: str) -> dict[str, str]:
    """The text of each file that declares something of the head, which is now ``called`` so; config.json among them."""
    config = dict(checkpoint.config or {})
    expanded = bool(facts.get("head", {}).get("expanded_blocks"))
    for path, table in tables(config):
        config = at_path(config, path, followed(table, head, called, expanded))
    texts = {CONFIG: json_text(marked(config, facts))}
    for found in declarations(checkpoint):
        if found.file in DECLARATIONS:
            document = at_path(found.document, found.path, followed(found.table, head, called, expanded))
            if document != found.document:
                texts[found.file] = json_text(document)
    return texts


def followed(table: Mapping[str, Any], head: str, called: str, expanded: bool = False) -> dict[str, Any]:
    """A quantization table that says of ``called`` what ``table`` says of ``head``, whatever it names it by.

    ``expanded``: of a head in blocks, each row has the scales of its block now.
    """
    made = dict(table)
    for key in LISTS:
        if isinstance(table.get(key), list):
            made[key] = _entries(table[key], head, called)
    if isinstance(groups := table.get("config_groups"), Mapping):
        made["config_groups"] = {name: _group(group, head, called) for name, group in groups.items()}
        if expanded:
            made["config_groups"] = dict(_expanded(made["config_groups"], called))
    if isinstance(layers := table.get("quantized_layers"), Mapping):  # ModelOpt's mixed precision
        made["quantized_layers"] = {called if name == head else name: of for name, of in layers.items()}
    if isinstance(rules := table.get("dynamic"), Mapping):  # GPTQModel's
        made["dynamic"] = {text: of for rule, of in rules.items() for text in _rule(str(rule), head, called)}
    return made


def _group(group: Any, head: str, called: str) -> Any:
    targets = group.get("targets") if isinstance(group, Mapping) else None
    return {**group, "targets": _entries(targets, head, called)} if isinstance(targets, list) else group


def _expanded(groups: Mapping[str, Any], called: str) -> Iterator[tuple[str, Any]]:
    """Groups of compressed-tensors of which one in blocks gives ``called`` to one of its own, in groups of columns."""
    for name, group in groups.items():
        weights: Mapping[str, Any] = (group.get("weights") if isinstance(group, Mapping) else None) or {}
        block = weights.get("block_structure")
        if not isinstance(block, list) or called not in group["targets"]:
            yield name, group
            continue
        others = [target for target in group["targets"] if target != called]
        if others:
            yield name, {**group, "targets": others}
        by_row = {**weights, "strategy": "group", "group_size": block[-1], "block_structure": None}
        yield (f"{name} of {called}" if others else name), {**group, "targets": [called], "weights": by_row}


def _entries(entries: Iterable[Any], head: str, called: str) -> list[Any]:
    """The list with the new name beside, or for an entry that is the old one in place of, what matches the old alone."""
    made: list[Any] = []
    for entry in entries:
        if entry != head:
            made.append(entry)
        if isinstance(entry, str) and _means(entry, head) and (entry == head or not _means(entry, called)):
            made.append(called)
    return list(dict.fromkeys(made)) if all(isinstance(entry, str) for entry in made) else made


def _means(entry: str, name: str) -> bool:
    return matches(name, entry) if entry.startswith("re:") else fnmatchcase(name, entry)


def _rule(rule: str, head: str, called: str) -> list[str]:
    found = _DYNAMIC.fullmatch(rule)
    sign, text = (found[1] or "", found[2]) if found else ("", rule)
    follows = matches(head, f"re:{text}") and not matches(called, f"re:{text}")
    return [rule, f"{sign}{re.escape(called)}"] if follows else [rule]
