"""Where configs of dense DSpark drafts keep their fields, and how each is written as another. No I/O.

Fields have DeepSpec's names and meaning: taps count the target's layers from 0, ``block_size`` is the tokens drafted at
once. speculators counts taps from 1, and where the anchor is not sampled it counts the anchor as one of the block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeGuard

from ..errors import Finding
from ..families.config import config_value
from .identify import Layout
from .tables import Config


class Fields(NamedTuple):
    """What a config says of a draft; None where it says nothing."""

    target_layer_ids: list[int] | None = None
    mask_token_id: int | None = None
    block_size: int | None = None
    markov_rank: int | None = None
    markov_head_type: str | None = None
    enable_confidence_head: bool | None = None
    confidence_head_with_markov: bool | None = None
    num_target_layers: int | None = None
    sample_from_anchor: bool | None = None


# In SpecForge's config under ``dflash_config``; all else lies at the top.
_NESTED = (
    "target_layer_ids", "mask_token_id", "markov_rank", "markov_head_type", "enable_confidence_head",
    "confidence_head_with_markov",
)  # fmt: skip
_SPECULATORS = (
    "speculators_model_type", "speculators_version", "speculators_config", "transformer_layer_config",
    "aux_hidden_state_layer_ids", "draft_vocab_size", "has_no_defaults_at_init",
)  # fmt: skip
_NOISE = "dspark_noise_token_id"
_FLAGS = frozenset({"enable_confidence_head", "confidence_head_with_markov", "sample_from_anchor"})
_TEXTS = frozenset({"markov_head_type"})
# Needed by every layout: SGLang and vLLM stop without them.
_NEEDED = ("target_layer_ids", "mask_token_id", "block_size", "markov_rank", "markov_head_type")


def home_of(config: Config) -> Layout:
    """Which home the config is written for."""
    if "transformer_layer_config" in config or config.get("speculators_model_type") == "dspark":
        return Layout.HF
    return Layout.SPECFORGE if isinstance(config.get("dflash_config"), Mapping) else Layout.SERVING


def fields_of(config: Config) -> Fields:
    """The fields, whatever their home; what is not of its type counts as not said."""
    said = _said(config)
    return Fields(**{key: value for key, value in said.items() if _is_of_type(key, value)})


def _said(config: Config) -> dict[str, Any]:
    """What stands where a field is looked for; a draft within a target has them as ``dspark_*`` too."""
    own = config_value(config, "dflash_config")
    own = own if isinstance(own, Mapping) else {}
    names = {key: (key, f"dspark_{key}") for key in Fields._fields} | {"mask_token_id": ("mask_token_id", _NOISE)}
    found = {key: own.get(key) for key in names}
    for key, places in names.items():
        values = [found[key], *(config_value(config, place) for place in places)]
        found[key] = next((value for value in values if value is not None), None)
    if home_of(config) is Layout.HF:
        taps, block = config.get("aux_hidden_state_layer_ids"), found["block_size"]
        found["target_layer_ids"] = [tap - 1 for tap in taps] if _are_numbers(taps) else taps
        if found["sample_from_anchor"] is False and type(block) is int:
            found["block_size"] = block - 1
    return found


def _is_of_type(key: str, value: Any) -> bool:
    if value is None:
        return True
    if key == "target_layer_ids":
        return _are_numbers(value) and bool(value)
    if key in _TEXTS:
        return isinstance(value, str)
    return isinstance(value, bool) if key in _FLAGS else type(value) is int


def _are_numbers(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int for item in value)


def lacking(config: Config, fields: Fields) -> list[Finding]:
    """``draft.config`` for each field that no layout does without, that makes no sense, or that cannot be guessed."""
    found = []
    for key, value in _said(config).items():
        if not _is_of_type(key, value):
            found.append(_about(key, f"config.json: {key} is {value!r}"))
        elif value is None and key in _NEEDED:
            found.append(_about(key, f"config.json does not say {key}"))
    if home_of(config) is Layout.HF and fields.sample_from_anchor is None:
        message = "config.json does not say sample_from_anchor: speculators takes it for true, vLLM for false"
        hint = 'add "sample_from_anchor": true, if the draft was trained so'
        found.append(_about("sample_from_anchor", message, hint))
    return found


def _about(key: str, message: str, hint: str = "take it from the config that the draft was trained with") -> Finding:
    return Finding("draft.config", message, file="config.json", hint=hint, data={"what": key})


def layers_config(config: Config) -> dict[str, Any]:
    """The config of the draft's layers: of speculators' the nested one, of others all but the draft's fields."""
    nested = config.get("transformer_layer_config")
    if isinstance(nested, Mapping):
        extra = {
            key: value for key, value in config.items() if key not in (*_SPECULATORS, "architectures", "model_type")
        }
        return {**extra, **nested}
    return {key: value for key, value in config.items() if key not in ("dflash_config", "auto_map")}


def written(config: Config, fields: Fields, layout: Layout, layers: int, served_as: str | None) -> dict[str, Any]:
    """The config of a stand-alone draft in another home. ``served_as``: the architecture that engines load, if known."""
    body = {key: value for key, value in layers_config(config).items() if key not in Fields._fields}
    body["num_hidden_layers"] = layers
    told = {key: value for key, value in fields._asdict().items() if value is not None}
    told["sample_from_anchor"] = fields.sample_from_anchor is not False
    match layout:
        case Layout.SERVING:
            own = config.get("architectures")
            keep = own if home_of(config) is Layout.SERVING and isinstance(own, list) else None
            return body | told | {"architectures": keep or [served_as or "Qwen3DSparkModel"]}
        case Layout.SPECFORGE:
            nested = {key: told.pop(key) for key in _NESTED if key in told}
            return (
                body
                | told
                | {"architectures": ["DSparkDraftModel"], "dflash_config": nested | {"projector_type": "dspark"}}
            )
    taps, block = told.pop("target_layer_ids", []), told.pop("block_size", None)
    told.pop("num_target_layers", None)
    return {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "transformer_layer_config": {key: value for key, value in body.items() if key != "architectures"},
        "draft_vocab_size": body.get("vocab_size"),
        "aux_hidden_state_layer_ids": [tap + 1 for tap in taps],
        "block_size": block + 1 if block and not told["sample_from_anchor"] else block,
        **told,
    }
