"""config.json of a DeepSeek-V4 DSpark draft: what each layout writes, and what each says of the draft. No I/O.

Every layout keeps all fields of the target's config: engines read widths, norms and windows of the draft there. The
fields are those that SGLang 0.5.23 (``dspark_config.py``, ``model_config.py``), vLLM 0.33 (``deepseek_v4/nvidia/dspark.py``)
and SpecForge 0.2.0 read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ..families.config import config_value, text_configs
from .declaration import declare
from .identify import Layout
from .tables import Config, Form, form_of, is_v41, taps

SERVING_CONFIG = "config.serving.json"
# What transformers calls the compression of a layer's attention.
_LAYER_TYPES = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
# Fields of one layout only, which go on the way to another.
_OWN = ("dflash_config", "block_size", "layer_types", "mlp_layer_types", "num_target_layers")
_QUANTIZED = ("quantization_config", "expert_dtype")
# Where SpecForge keeps what the official config says under other names.
_SPECFORGE = {
    "dspark_target_layer_ids": "target_layer_ids",
    "dspark_noise_token_id": "mask_token_id",
    "dspark_markov_rank": "markov_rank",
    "enable_confidence_head": "enable_confidence_head",
    "confidence_head_with_markov": "confidence_head_with_markov",
}
_ON = {"enable_confidence_head": True, "confidence_head_with_markov": True}


def serving_of(config: Config, layout: Layout) -> dict[str, Any]:
    """The serving config that ``config``, of a draft in ``layout``, stands for. What it doesn't say stays unsaid."""
    found: dict[str, Any] = json.loads(json.dumps(config))
    if layout is Layout.SERVING:
        return found
    own = found.get("dflash_config")
    for key, theirs in _SPECFORGE.items():
        if isinstance(own, dict) and own.get(theirs) is not None and own[theirs] != _ON.get(key):
            found.setdefault(key, own[theirs])
    if found.get("block_size") is not None:
        found.setdefault("dspark_block_size", found["block_size"])
    if layout is Layout.HF and found.get("num_target_layers") is not None:
        found["num_hidden_layers"] = found["num_target_layers"]
    for key in _OWN:
        found.pop(key, None)
    return _named(found)


def with_stages(config: Config, stages: int, form: Form) -> dict[str, Any]:
    """The config for ``--layout serving``: engines are told how many stages there are, and how they are stored."""
    found: dict[str, Any] = json.loads(json.dumps(config))
    home = _home(found)
    home["n_mtp_layers"] = stages
    home.setdefault("sample_from_anchor", True)
    settle(found, {"compress_ratios": _of_stages(found, stages)})
    declare(found, stages, form)
    if form.linears == "bf16":
        for holder in _holders(found):
            for key in _QUANTIZED:
                holder.pop(key, None)
    return found if is_v41(found) else _named(found)


def settle(config: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set ``values`` in ``config`` where its keys stand; None leaves a key as it is."""
    for key, value in values.items():
        if value is not None:
            next((holder for holder in _holders(config) if holder.get(key) is not None), config)[key] = value


def _of_stages(config: Config, stages: int) -> list[Any] | None:
    """``compress_ratios`` with an entry of 0 for each stage behind those of the target's layers."""
    ratios, layers = (config_value(config, key) for key in ("compress_ratios", "num_hidden_layers"))
    return ratios[:layers] + [0] * stages if isinstance(ratios, list) and type(layers) is int else None


def configs(
    serving: Config, layout: Layout, stages: int, form: Form, has_confidence: bool
) -> dict[str, dict[str, Any]]:
    """The config files of a draft in ``layout`` by name; ``serving`` is the serving config that it came with."""
    mine = with_stages(serving, stages, form)
    match layout:
        case Layout.SERVING:
            return {"config.json": mine}
        case Layout.SPECFORGE:
            mine |= _specforge(mine, stages, has_confidence)
        case Layout.HF:
            mine |= _hf(mine, stages)
    return {"config.json": mine, SERVING_CONFIG: with_stages(serving, stages, form_of(serving))}


def _named(config: dict[str, Any]) -> dict[str, Any]:
    return config | {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}


def _specforge(serving: Config, stages: int, has_confidence: bool) -> dict[str, Any]:
    with_markov = config_value(serving, "confidence_head_with_markov") is not False
    return {
        "architectures": ["DeepseekV4DSparkDraftModel"],
        "model_type": "deepseek_v4_dspark",
        "block_size": config_value(serving, "dspark_block_size"),
        "dflash_config": {
            "target_layer_ids": list(taps(serving)),
            "mask_token_id": config_value(serving, "dspark_noise_token_id"),
            "markov_rank": config_value(serving, "dspark_markov_rank"),
            "markov_head_type": config_value(serving, "dspark_markov_head_type") or "vanilla",
            "enable_confidence_head": has_confidence and config_value(serving, "enable_confidence_head") is not False,
            "confidence_head_with_markov": with_markov,
            "num_layers": stages,
        },
    }


def _hf(serving: Config, stages: int) -> dict[str, Any]:
    """A model of as many layers as there are stages: the types are those of the target's layers from its last one on."""
    layers, ratios = (config_value(serving, key) for key in ("num_hidden_layers", "compress_ratios"))
    mine = ratios[layers : layers + stages] if isinstance(ratios, list) and type(layers) is int else []
    return {
        "architectures": ["DSparkDeepseekV4DraftModel"],
        "model_type": "deepseek_v4",
        "num_hidden_layers": stages,
        "num_target_layers": layers,
        "layer_types": [_LAYER_TYPES.get(ratio, _LAYER_TYPES[0]) for ratio in mine + [0] * (stages - len(mine))],
        "mlp_layer_types": ["moe"] * stages,
    }


def _home(config: dict[str, Any]) -> dict[str, Any]:
    """Where the keys of the draft stand: at the top, or in a nested text config."""
    return next((holder for holder in _holders(config) if "dspark_target_layer_ids" in holder), config)


def _holders(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (found for _, found in text_configs(config) if isinstance(found, dict))


def merged(own: Config, serving: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of a draft by its own config, and by the serving config that it stands for."""
    return {**own, **serving}
