"""Which draft a checkpoint holds, told by its tensors; and whether tensors and config say the same of it. No I/O.

``mtp.`` alone decides nothing: a V4 base keeps a NextN layer there, and a fine-tuned checkpoint often declares a draft
that its tensors no longer hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from ..errors import Finding
from ..families.config import config_value, declared_drafts, model_types
from ..plan import Ref
from .layouts import SHARED, from_hf, looks_like_hf, split_stage
from .tables import Config, is_v41

MOST_STAGES = 64

# Names below ``mtp.<stage>.`` that only one kind has.
_OF_DSPARK = ("main_proj.", "main_norm.", "markov_head.", "confidence_head.")
_OF_NEXTN = ("e_proj.", "h_proj.", "enorm.", "hnorm.")
_OF_V41 = ("markov_head.embed.", "markov_head.head.")
_OF_V4 = ("markov_head.markov_w", "hc_head_")


class Kind(StrEnum):
    """What drafts there are in a DeepSeek-V4 checkpoint."""

    DSPARK_V4 = "DSpark of DeepSeek-V4"
    DSPARK_V41 = "DSpark of DeepSeek-V4.1"
    NEXTN = "NextN"
    DECLARED = "declared only"
    NONE = "none"


class Layout(StrEnum):
    """How a draft's tensors are named and its config is written: see :mod:`ckptkit.drafts.layouts`."""

    SERVING = "serving"
    SPECFORGE = "specforge"
    HF = "hf"


# Sizes of a config, and the tensors below a stage whose axis has them.
_SHOWN = {
    "hidden_size": (("attn_norm.weight", 0), ("ffn_norm.weight", 0), ("ffn.gate.weight", 1)),
    "q_lora_rank": (("attn.q_norm.weight", 0), ("attn.wq_a.weight", 0)),
    "head_dim": (("attn.kv_norm.weight", 0), ("attn.wkv.weight", 0)),
    "num_attention_heads": (("attn.attn_sink", 0),),
    "moe_intermediate_size": (("ffn.experts.0.w1.weight", 0), ("ffn.experts.0.w3.weight", 0)),
    "n_routed_experts": (("ffn.gate.weight", 0), ("ffn.gate.bias", 0)),
    "vocab_size": (("markov_head.markov_w1.weight", 0), ("markov_head.markov_w2.weight", 0)),
}


class Draft(NamedTuple):
    """A draft: its tensors by serving name, the target's embedding and head if they are there, and all other names.

    ``stages`` counts from the tensors.
    """

    kind: Kind
    layout: Layout
    stages: int
    tensors: Mapping[str, Ref]
    shared: Mapping[str, Ref]
    others: Sequence[str]


def identify(tensors: Mapping[str, Ref], config: Config) -> Draft:
    """The draft among ``tensors``; of a target or a draft by itself, in any layout."""
    is_hf = not any(name.startswith("mtp.") for name in tensors) and looks_like_hf(tensors)
    named = from_hf(tensors) if is_hf else tensors
    shared = {name: ref for name, ref in named.items() if name in SHARED}
    mine = {name: ref for name, ref in named.items() if name not in shared and (is_hf or name.startswith("mtp."))}
    others = [name for name in named if name not in mine and name not in shared]
    stages = 1 + max((stage for stage in map(_stage, mine) if stage is not None), default=-1)
    layout = Layout.HF if is_hf else Layout.SPECFORGE if is_specforge(config) else Layout.SERVING
    heads_last = dict(_heads_last(mine, stages))
    return Draft(_kind(mine, stages, config), layout, stages, heads_last, shared, others)


def holds_v4(tensors: Mapping[str, Ref]) -> bool:
    """Whether there is a tensor that a draft of DeepSeek-V4 or V4.1 may have, in any layout."""
    return any(_stage(name) is not None for name in tensors) or looks_like_hf(tensors)


def is_specforge(config: Config) -> bool:
    """Whether a config is that of SpecForge's V4 draft."""
    return "deepseek_v4_dspark" in model_types(config)


def _stage(name: str) -> int | None:
    found = split_stage(name)
    return found[0] if found and found[0] < MOST_STAGES else None


def _kind(tensors: Mapping[str, Ref], stages: int, config: Config) -> Kind:
    rests = [split[1] for name in tensors if (split := split_stage(name)) and _stage(name) is not None]
    if not rests:
        keys = {path.rpartition(".")[2] for path in declared_drafts(config)}
        return Kind.DECLARED if any(key.startswith("dspark_") for key in keys) else Kind.NONE
    has_nextn = stages == 1 or any(rest.startswith(_OF_NEXTN) for rest in rests)
    if has_nextn and not any(rest.startswith(_OF_DSPARK) for rest in rests):
        return Kind.NEXTN
    by_tensors = {
        v41: sum(rest.startswith(which) for rest in rests) for v41, which in ((True, _OF_V41), (False, _OF_V4))
    }
    told = by_tensors[True] > by_tensors[False] if any(by_tensors.values()) else is_v41(config)
    return Kind.DSPARK_V41 if told else Kind.DSPARK_V4


def _heads_last(tensors: Mapping[str, Ref], stages: int) -> Iterator[tuple[str, Ref]]:
    """Markov and confidence heads at the last stage: some writers put them at the first. Two of one name stay two."""
    for name, ref in tensors.items():
        stage, rest = split_stage(name) or (None, name)
        wanted = f"mtp.{stages - 1}.{rest}"
        at_first = stage == 0 and rest.startswith(("markov_head.", "confidence_head."))
        yield (wanted if at_first and wanted not in tensors else name), ref


# --- what is said twice ------------------------------------------------------------------------------------


class Fact(NamedTuple):
    """A figure of a draft, and what each source says of it, the tensors first where they show it."""

    what: str
    said: Mapping[str, Any]

    @property
    def agreed(self) -> bool:
        values = list(self.said.values())
        return all(value == values[0] for value in values)

    def __str__(self) -> str:
        return ", ".join(f"{value} ({source})" for source, value in self.said.items()) or "not stated"


def facts(draft: Draft, config: Config) -> list[Fact]:
    """Stage count, taps, block size, noise token and Markov rank, by all who say something of them."""
    taps = config_value(config, "dspark_target_layer_ids")
    own = config.get("dflash_config")
    own = own if isinstance(own, Mapping) else {}
    hidden, last = config_value(config, "hidden_size"), f"mtp.{draft.stages - 1}."
    main = _shape(draft, "mtp.0.main_proj.weight")
    markov = _shape(draft, f"{last}markov_head.markov_w1.weight") or _shape(draft, f"{last}markov_head.embed.weight")
    confidence = _shape(draft, f"{last}confidence_head.proj.weight")
    with_markov = config_value(config, "confidence_head_with_markov") is not False
    of_v41, is_served = draft.kind is Kind.DSPARK_V41, draft.layout is Layout.SERVING  # trainers count by num_layers
    found = {
        "stages": {
            "tensors": draft.stages,
            "number of dspark_target_layer_ids": len(taps) if isinstance(taps, list) and is_served else None,
            "n_mtp_layers": config_value(config, "n_mtp_layers"),
            "num_nextn_predict_layers": config_value(config, "num_nextn_predict_layers") if of_v41 else None,
            "dflash_config.num_layers": own.get("num_layers"),
        },
        "taps": {
            "dspark_target_layer_ids": taps,
            "dflash_config.target_layer_ids": own.get("target_layer_ids"),
        },
        "number of taps": {
            "width of mtp.0.main_proj": _times(main, hidden),
            "number of dspark_target_layer_ids": len(taps) if isinstance(taps, list) else None,
        },
        "block size": {
            "dspark_block_size": config_value(config, "dspark_block_size"),
            "block_size": config.get("block_size"),
        },
        "noise token": {
            "dspark_noise_token_id": config_value(config, "dspark_noise_token_id"),
            "dflash_config.mask_token_id": own.get("mask_token_id"),
        },
        "rank": {
            "width of the Markov head": markov[1] if len(markov) == 2 else None,
            "width of the confidence head": _rest(confidence, hidden) if with_markov else None,
            "dspark_markov_rank": config_value(config, "dspark_markov_rank"),
            "dflash_config.markov_rank": own.get("markov_rank"),
        },
    }
    return [Fact(what, {who: v for who, v in said.items() if v is not None}) for what, said in found.items()]


def shown(draft: Draft, config: Config) -> dict[str, int]:
    """Sizes that ``config`` gives otherwise than two or more tensors do, all of which agree: as the tensors have them."""
    found = {}
    for key, witnesses in _SHOWN.items():
        key = f"dspark_{key}" if config_value(config, f"dspark_{key}") else key
        shapes = [_shape(draft, f"mtp.{stage}.{name}") for stage in range(draft.stages) for name, _ in witnesses]
        axes = [axis for _ in range(draft.stages) for _, axis in witnesses]
        sizes = [shape[axis] for shape, axis in zip(shapes, axes, strict=True) if len(shape) > axis]
        stated = config_value(config, key)
        if type(stated) is int and len(sizes) > 1 and set(sizes) == {sizes[0]} and sizes[0] not in (stated, 0):
            found[key] = sizes[0]
    return found


def resolved(draft: Draft, config: Config) -> dict[str, Any]:
    """What the tensors show otherwise than ``config``: sizes, stages, rank, stages' compression; by key."""
    found: dict[str, Any] = dict(shown(draft, config))
    said = {fact.what: fact.said for fact in facts(draft, {**config, **found})}
    ranks = [value for who, value in said["rank"].items() if who.startswith("width")]
    if len(ranks) > 1 and ranks[0] == ranks[1] and config_value(config, "dspark_markov_rank") is not None:
        found["dspark_markov_rank"] = ranks[0]
    for key in ("n_mtp_layers", "num_nextn_predict_layers"):
        if key in said["stages"]:
            found[key] = draft.stages
    if config_value(config, "dspark_markov_head_type") is not None:
        found["dspark_markov_head_type"] = "vanilla"
    ratios, layers = (config_value(config, key) for key in ("compress_ratios", "num_hidden_layers"))
    if isinstance(ratios, list) and type(layers) is int and 0 < layers <= len(ratios):
        found["compress_ratios"] = ratios[:layers] + [0] * draft.stages
    return {key: value for key, value in found.items() if config_value(config, key) != value}


def disagreements(draft: Draft, config: Config) -> Iterator[Finding]:
    """``draft.config`` for each figure that is said twice and differently, that is missing, or that cannot be.

    ``data.firm`` marks those that the tensors don't decide.
    """
    sizes, settled = shown(draft, config), resolved(draft, config)
    for key, size in sizes.items():
        yield _config(f"{key} is {config_value(config, key)}; the tensors have {size}", key, size)
    yield from _ratios(draft, config)
    config = {**config, **sizes}
    for fact in facts(draft, config):
        if not fact.agreed:
            decided = not _still_differ(fact, settled)
            hint = "set the others in config.json to what the tensors say"
            yield _finding(fact, f"{fact.what}: {fact}", hint, decided)
        elif not fact.said:
            yield _finding(fact, f"no {fact.what} in config.json", "take config.json from the draft's target")
    taps, layers = (config_value(config, key) for key in ("dspark_target_layer_ids", "num_hidden_layers"))
    if isinstance(taps, list) and type(layers) is int and not all(type(t) is int and -1 <= t < layers for t in taps):
        yield _config(f"dspark_target_layer_ids is {taps}; the target has layers 0 to {layers - 1}", "taps")
    elif isinstance(taps, list) and len({str(tap) for tap in taps}) < len(taps):
        yield _config(f"dspark_target_layer_ids is {taps}: a layer is tapped twice", "taps")
    token, vocab = (config_value(config, key) for key in ("dspark_noise_token_id", "vocab_size"))
    if token is not None and type(vocab) is int and not (type(token) is int and 0 <= token < vocab):
        yield _config(f"dspark_noise_token_id is {token!r}; the vocabulary has {vocab:,} tokens", "noise token")
    size = config_value(config, "dspark_block_size")
    if size is not None and not (type(size) is int and size > 0):
        yield _config(f"dspark_block_size is {size!r}, no number of tokens", "block size")
    head = config_value(config, "dspark_markov_head_type")
    if head not in (None, "vanilla"):
        yield _config(
            f"dspark_markov_head_type is {head!r}; the tensors are those of a vanilla head", "head", "vanilla"
        )
    types = [name for name in model_types(config) if name]
    is_other = bool(types) and not any(name.startswith("deepseek_v4") for name in types)
    if is_other or (draft.kind is Kind.DSPARK_V41) is not is_v41(config):
        stated = ", ".join(types) or "nothing"
        yield _config(f"the tensors are those of {draft.kind}, model_type says {stated}", "kind")


def _still_differ(fact: Fact, settled: Config) -> bool:
    """Whether those who say something of a figure still differ where ``settled`` is what the config says."""
    values = [settled.get(who, value) for who, value in fact.said.items() if not who.startswith("dflash_config.")]
    return any(value != values[0] for value in values)


def _ratios(draft: Draft, config: Config) -> Iterator[Finding]:
    """Stages attend without compression, and engines look for that behind the entries of the target's layers."""
    ratios, layers = (config_value(config, key) for key in ("compress_ratios", "num_hidden_layers"))
    if type(layers) is not int or layers < 1:
        yield _config(f"num_hidden_layers is {layers!r}, no number of layers", "layers")
    elif not isinstance(ratios, list) or len(ratios) < layers:
        yield _config(f"compress_ratios gives no entry for each of {layers} layers and {draft.stages} stages", "ratios")
    elif ratios[layers : layers + draft.stages] != [0] * draft.stages:
        there = ratios[layers : layers + draft.stages]
        message = f"compress_ratios is {there} for the stages, behind {layers} layers; engines ask for 0 for each"
        yield _config(message, "ratios", [0] * draft.stages)


def _finding(fact: Fact, message: str, hint: str, decided: bool = False) -> Finding:
    data = {"what": fact.what, "firm": not decided, **fact.said}
    return Finding("draft.config", message, file="config.json", hint=_or_allow(hint, decided), data=data)


def _config(message: str, what: str, tensors: Any = None) -> Finding:
    """``tensors`` is what they show, if they decide."""
    hint = "take config.json from the draft's target" if tensors is None else f"set it to {tensors} in config.json"
    data = {"what": what, "firm": tensors is None}
    hint = _or_allow(hint, tensors is not None)
    return Finding("draft.config", f"config.json: {message}", file="config.json", hint=hint, data=data)


def _or_allow(hint: str, decided: bool) -> str:
    return f"{hint}; or --allow draft.config writes what the tensors say" if decided else hint


def _shape(draft: Draft, name: str) -> tuple[int, ...]:
    return draft.tensors[name].shape if name in draft.tensors else ()


def _times(shape: Sequence[int], size: Any) -> int | float | None:
    if len(shape) != 2 or type(size) is not int or not size:
        return None
    return shape[1] // size if shape[1] % size == 0 else shape[1] / size


def _rest(shape: Sequence[int], size: Any) -> int | None:
    return shape[1] - size if len(shape) == 2 and type(size) is int else None
