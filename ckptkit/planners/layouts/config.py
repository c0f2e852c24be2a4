"""config.json of a layout: what engines may believe, and how to get the source's config back.

A result that some engine reads declares it. Any other must not be taken for the model it was: engines warn of names
that they do not know and go on, so ``model_type`` and ``architectures`` become ones that none of them has. Either way
``ckptkit_layout`` holds what was there before, and going back restores it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...errors import Finding

KEY = "ckptkit_layout"
NO_MODEL = "ckptkit_layout"
NO_METHOD = "ckptkit-"  # what the quant_method begins with that such a result declares
NO_ARCHITECTURE = "CkptkitLayout"
_SHOWN = ("model_type", "architectures", "auto_map")

Config = Mapping[str, Any]


class Change(NamedTuple):
    """A layout change: the layouts before and after, what to note for the way back, and what engines may believe.

    ``back`` is the --layout that undoes it; ``declared`` the quantization table, if there is one that engines read.
    """

    origin: str
    made: str
    back: str
    facts: Config
    declared: Config | None
    loadable: bool


def original(config: Config) -> dict[str, Any]:
    """The config as it was before any layout change."""
    current = dict(config)
    while isinstance(noted := current.get(KEY), Mapping) and isinstance(noted.get("was"), Mapping):
        current = _restored(current, noted["was"])
    return current


def noted(config: Config) -> Config:
    """What the last layout change left for the way back: ``from``, ``to`` and the facts; empty if there was none."""
    found = config.get(KEY)
    return found if isinstance(found, Mapping) else {}


def changed(config: Config, change: Change) -> tuple[dict[str, Any], list[Finding]]:
    """The config after ``change``, and a warning where no engine loads the result (``unpack.exchange``)."""
    if noted(config).get("from") == change.made:
        return _restored(config, noted(config)["was"]), []
    new = original(config)
    findings: list[Finding] = []
    if change.declared is not None:
        new["quantization_config"] = dict(change.declared)
    elif not change.loadable:
        new["quantization_config"] = {"quant_method": NO_METHOD + change.made.partition(" ")[0]}
    if not change.loadable:
        new |= {"model_type": NO_MODEL, "architectures": [NO_ARCHITECTURE]}
        new.pop("auto_map", None)
        message = f"no engine loads this model in the layout {change.made}: it is for exchange, and config.json says so"
        hint = f"ckptkit unpack OUT BACK --layout {change.back} gives back what it was made from"
        findings.append(Finding("unpack.exchange", message, severity="warning", file="config.json", hint=hint))
    was = {key: [config[key]] if key in config else [] for key in _differing(config, new)} | {
        KEY: [config[KEY]] if KEY in config else []
    }
    new[KEY] = {"from": change.origin, "to": change.made, **change.facts, "was": was}
    return new, findings


def _differing(before: Config, after: Config) -> Sequence[str]:
    keys = (before.keys() | after.keys()) - {KEY}
    return sorted(key for key in keys if key not in before or key not in after or before[key] != after[key])


def _restored(config: Config, was: Config) -> dict[str, Any]:
    """``config`` with each key of ``was`` as it was: a list of its value, empty where it was not there."""
    current = {key: value for key, value in config.items() if was.get(key, [value])}
    current |= {key: value[0] for key, value in was.items() if value}
    return current
