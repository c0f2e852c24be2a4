"""Where a ``config.json`` says what the language model is.

Text models say it at the top level, composite ones in a nested config; some say it in both places.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

Config = Mapping[str, Any]
Path = tuple[str, ...]

# Where the language model's own config may stand, in the order it is looked for. ``thinker_config`` is Qwen-Omni's.
TEXT_PATHS: tuple[Path, ...] = (
    (),
    ("text_config",),
    ("llm_config",),
    ("language_config",),
    ("thinker_config",),
    ("thinker_config", "text_config"),
)

# Keys by which configs declare layers that draft tokens: multi-token prediction, DSpark, EAGLE, Medusa and the like.
_DRAFT_KEY = re.compile(
    r"num_nextn_predict_layers|num_mtp_(?:modules|layers|heads)|n_mtp_layers|mtp_num_(?:hidden_)?layers"
    r"|mtp_local_layer_ids|mtp_config|mtp|(?:dspark|dflash|eagle|medusa|speculators)_\w+|num_medusa_heads"
)


def text_configs(config: Config) -> Iterator[tuple[Path, Config]]:
    """Every config of the language model that is there, the top level first, each with its path."""
    for path in TEXT_PATHS:
        found: Any = config
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        if isinstance(found, Mapping):
            yield path, found


def config_value(config: Config | None, key: str) -> Any:
    """The first value of ``key`` that is not null, the top level before nested text configs; else None."""
    for _, found in text_configs(config or {}):
        value = found.get(key)
        if value is not None:
            return value
    return None


def model_types(config: Config | None) -> list[str]:
    """``model_type`` of each of :func:`text_configs`, the top level's first; empty where none is stated."""
    stated = [found.get("model_type") for _, found in text_configs(config or {})]
    return [value if isinstance(value, str) else "" for value in stated]


def declared_drafts(config: Config | None) -> dict[str, Any]:
    """Draft layers that a config declares: dotted path of the key -> value. Zero, false and empty declare nothing.

    A declaration is no evidence: fine-tuned checkpoints often keep it and lose the tensors.
    """
    return {
        ".".join((*path, key)): value
        for path, found in text_configs(config or {})
        for key, value in found.items()
        if value and _DRAFT_KEY.fullmatch(key)
    }
