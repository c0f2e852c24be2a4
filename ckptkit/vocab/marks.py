"""How config.json says that no engine may load a checkpoint whose head has an order of its own.

``model_type`` stops everything that looks for a class by it. A class that is named by the caller only warns of another
``model_type``, and would fill in a head of random numbers: a ``vocab_size`` of null stops that, since neither a config that
checks its fields nor an embedding takes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..families.config import text_configs

KEY = "vocab_order"
MODEL_TYPE, ARCHITECTURE = "ckptkit_vocab_order", "CkptkitVocabOrder"
REORDERED = "rows"  # what comes after the name of a head in such an order: lm_head.rows.weight
KEPT = "config.original.json"  # config.json as it was before
_SIZE = "vocab_size"
_NAMES = ("model_type", "architectures")


def marked(config: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` as nothing loads it, with ``facts`` of the order."""
    made = {key: value for key, value in config.items() if key != "auto_map"}
    for path, table in text_configs(config):
        made = at_path(made, path, {**(made if not path else table), _SIZE: None})
    return made | {"model_type": MODEL_TYPE, "architectures": [ARCHITECTURE], KEY: dict(facts)}


def unmarked(config: Mapping[str, Any], original: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` without the marks: what they took the place of is ``original``'s, the rest as it is."""
    made = dict(config)
    for name in (*_NAMES, KEY):
        made.pop(name, None)
    made |= {name: original[name] for name in _NAMES if name in original}
    before = dict(text_configs(original))
    for path, table in text_configs(made):
        plain = {key: value for key, value in table.items() if key != _SIZE}
        size = {_SIZE: before[path][_SIZE]} if _SIZE in before.get(path, {}) else {}
        made = at_path(made, path, plain | size)
    return made


def is_declared(config: Mapping[str, Any] | None) -> bool:
    """Whether a config says that its head has an order of its own."""
    return config is not None and (KEY in config or config.get("model_type") == MODEL_TYPE)


def at_path(document: Mapping[str, Any], path: Sequence[str], value: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``document`` in which ``value`` stands at ``path``."""
    if not path:
        return dict(value)
    return {**document, path[0]: at_path(document[path[0]], path[1:], value)}
