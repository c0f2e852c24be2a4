"""Whether a DeepSeek-V4 DSpark draft fits a target, by their configs; and the target's config with the draft in it.

A draft of other widths cannot be run, which engines find out late; one that was trained on other layers or another
model runs and is not accepted, which nobody finds out. No I/O.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ..errors import Finding
from ..families.config import config_value, model_types, text_configs
from .dense_config import Fields
from .identify import Draft
from .tables import Config, is_v41, taps

# What a stage has of the target's sizes.
_WIDTHS = (
    "hidden_size",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_lora_rank",
    "o_groups",
    "moe_intermediate_size",
    "n_routed_experts",
    "n_shared_experts",
    "hc_mult",
)
# Fields of the draft beside those called ``dspark_…``.
_OF_DRAFT = ("enable_confidence_head", "confidence_head_with_markov", "sample_from_anchor")


def misfits(draft: Draft, config: Config, target: Config) -> Iterator[Finding]:
    """What keeps ``draft``, of serving ``config``, out of ``target``.

    ``attach.family``, ``attach.widths``, ``attach.vocabulary``, ``attach.taps``, ``attach.stages``.
    """
    if not any(name.startswith("deepseek_v4") for name in model_types(target)) or is_v41(config) is not is_v41(target):
        stated = ", ".join(filter(None, model_types(target))) or "nothing"
        yield _misfit("family", f"the draft is {draft.kind}; the target's model_type says {stated}")
        return
    differing = _differing(_WIDTHS, config, target)
    if differing:
        yield _misfit("widths", f"draft and target differ in {differing}")
    vocabulary = _differing(("vocab_size",), config, target)
    if vocabulary:
        yield _misfit("vocabulary", f"draft and target differ in {vocabulary}")
    layers, declared = _differing(("num_hidden_layers",), config, target), _declared_taps(target)
    if layers or (declared is not None and declared != taps(config)):
        said = layers or f"dspark_target_layer_ids: {list(taps(config))} and {list(declared or ())}"
        yield _misfit("taps", f"the draft reads other layers than the target says; they differ in {said}")
    stages = _declared_stages(target)
    if stages is None and draft.stages != len(taps(config)):
        yield _misfit(
            "stages", f"the draft has {draft.stages} stages and {len(taps(config))} taps: SGLang counts by taps"
        )
    if stages is not None and stages != draft.stages:
        yield _misfit("stages", f"the draft has {draft.stages} stages, the target's config says {stages}")


def dense_misfits(fields: Fields, config: Config, target: Config) -> Iterator[Finding]:
    """As :func:`misfits` for a dense draft, whose layers have ``config``: it may be narrower than its target."""
    wide = config_value(config, "target_hidden_size") or config_value(config, "hidden_size")
    for what, key, mine in (
        ("widths", "hidden_size", wide),
        ("vocabulary", "vocab_size", config_value(config, "vocab_size")),
        ("taps", "num_hidden_layers", fields.num_target_layers),
    ):
        theirs = config_value(target, key)
        if None not in (mine, theirs) and mine != theirs:
            yield _misfit(what, f"the draft was trained for {key} {mine}, the target has {theirs}")
    layers, last = config_value(target, "num_hidden_layers"), max(fields.target_layer_ids or [0])
    if type(layers) is int and last >= layers:
        yield _misfit("taps", f"the draft taps layer {last}, the target has layers 0 to {layers - 1}")


def with_draft(target: Config, config: Config, stages: int) -> dict[str, Any]:
    """The target's config with what engines read of a draft with ``config``; all else stays as it is."""
    found: dict[str, Any] = json.loads(json.dumps(target))
    home = _home(found)
    for _, mine in reversed(list(text_configs(config))):
        home |= {key: value for key, value in mine.items() if key.startswith("dspark_") or key in _OF_DRAFT}
    home["n_mtp_layers"] = stages
    home.setdefault("sample_from_anchor", True)
    ratios, layers = home.get("compress_ratios"), home.get("num_hidden_layers")
    if isinstance(ratios, list) and type(layers) is int:
        home["compress_ratios"] = ratios[:layers] + [0] * stages
    if is_v41(found):
        home["num_nextn_predict_layers"] = stages
    return found


def _home(config: dict[str, Any]) -> dict[str, Any]:
    """Where the sizes of the language model stand: at the top, or in a nested text config."""
    return next((held for _, held in text_configs(config) if "hidden_size" in held and isinstance(held, dict)), config)


def _differing(keys: tuple[str, ...], config: Config, target: Config) -> str:
    """Those of ``keys`` that both state, and differently: ``hidden_size: 4096 and 7168``."""
    pairs = [(key, config_value(config, key), config_value(target, key)) for key in keys]
    return ", ".join(f"{key}: {a} and {b}" for key, a, b in pairs if None not in (a, b) and a != b)


def _declared_taps(target: Config) -> tuple[int, ...] | None:
    return None if config_value(target, "dspark_target_layer_ids") is None else taps(target)


def _declared_stages(target: Config) -> int | None:
    stated = config_value(target, "n_mtp_layers")
    if type(stated) is int:
        return stated
    declared = _declared_taps(target)
    return None if declared is None else len(declared)


def _misfit(what: str, message: str) -> Finding:
    hint = "attach the draft to the target that it was trained for"
    return Finding(f"attach.{what}", message, file="config.json", hint=hint)
