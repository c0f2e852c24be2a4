"""LoRA adapters that lie beside a checkpoint, and whether they have weights for modules whose rows are to be moved.

Names are matched as PEFT does: a list of them by their ends, a string as a regular expression of the whole name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from ..errors import Finding
from ..files.checkpoint import parse_json
from ..files.header import read_header
from ..files.source import Source

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def adapters_on(source: Source, modules: Collection[str]) -> Iterator[Finding]:
    """``vocab.adapter`` for each adapter with weights for one of ``modules``: they go by the old order of its rows."""
    for name in source.files:
        folder, _, file = name.rpartition("/")
        if file != _CONFIG:
            continue
        found = parse_json(source.text(name), name, "config.parse")
        table = found if isinstance(found, dict) else {}
        weights = list(_tensors(source, f"{folder}/{_WEIGHTS}".lstrip("/")))
        on = next((module for module in modules if _says(table, module) or _holds(weights, module)), None)
        if on:
            message = f"{name} is of an adapter on {on}, and its rows are those of tokens in their own order"
            hint = f"merge the adapter first, or move it out of SRC and leave {on} out of its modules"
            yield Finding("vocab.adapter", message, file=name, hint=hint)


def _says(table: Mapping[str, Any], module: str) -> bool:
    tokens = table.get("trainable_token_indices")
    if isinstance(tokens, list):  # of the input embedding, whatever it is called
        tokens = ["embed_tokens"] if tokens else []
    named = [table.get("target_modules"), table.get("modules_to_save"), tokens]
    return any(_means(value, module) for value in named if value)


def _means(value: Any, module: str) -> bool:
    if isinstance(value, str):
        return _matches(value, module)
    return isinstance(value, Iterable) and any(f".{module}".endswith(f".{item}") for item in value)


def _matches(rule: str, module: str) -> bool:
    """A rule that is no regular expression of Python's is taken to mean what it names."""
    try:
        return re.fullmatch(rule, module) is not None
    except re.error:
        return module.rpartition(".")[2] in rule


def _tensors(source: Source, name: str) -> Iterator[str]:
    if name in source.files:
        header = read_header(lambda start, stop: source.read(name, start, stop), source.files[name].size, name)
        yield from (entry.name for entry in header.entries)


def _holds(tensors: Iterable[str], module: str) -> bool:
    return any(f".{module}." in f".{tensor}" for tensor in tensors)
