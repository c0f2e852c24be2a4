"""The tensors of DeepSeek-V4 and V4.1 as their config implies them: names, dtypes, shapes and where they belong.

A DSpark draft is ``mtp.0`` to ``mtp.N``: stages that are whole MoE layers, of which the first also projects the tapped
hidden states and the last also holds the final norm and the Markov and confidence heads. In a V4 base, ``mtp.0`` is a
NextN layer instead. Definition: the modules that SGLang 0.5.23 (``deepseek_v4.py``, ``deepseek_v4_dspark.py``) and
vLLM 0.33 (``models/deepseek_v4``, ``models/deepseek_v41``) load; with them the parameters of the published checkpoints
come out to the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from math import ceil
from typing import Any, NamedTuple

from ..errors import Finding, UserError, fail
from ..families.config import config_value, model_types

Config = Mapping[str, Any]

# Engines copy plain floats into parameters of another plain float type; the official one stands first.
_BF16 = ("BF16", "F32", "F16")
_F32 = ("F32", "BF16", "F16")
_CODES = {"fp4": ("I8", "U8", "F4"), "fp8": ("F8_E4M3",), "bf16": _BF16}
_SCALES = {"fp4": ("F8_E8M0",), "fp8": ("F8_E8M0", "F32")}
FP4_GROUP = 32
_ROUTED = "n_routed_experts"
_HINT = "set it in config.json, or take config.json from the draft's target"
_SIZES = (
    "hidden_size",
    "vocab_size",
    "dspark_markov_rank",
    "moe_intermediate_size",
    "num_attention_heads",
    "head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "hc_mult",
)
# More experts than any model has: a table of as many names as a config may claim would not end.
_MOST_EXPERTS = 1 << 14


class Expected(NamedTuple):
    """The dtypes a tensor may have (safetensors' spelling, the official one first), its shape, if it may be absent."""

    dtypes: tuple[str, ...]
    shape: tuple[int, ...]
    optional: bool = False

    def fits(self, dtype: str, shape: tuple[int, ...]) -> bool:
        """Whether a stored tensor is what is expected. ``F4`` has the logical shape: two codes a byte, as one each."""
        if dtype == "F4" and shape:
            shape = (*shape[:-1], shape[-1] // 2)
        return dtype in self.dtypes and shape == self.shape


Table = dict[str, Expected]


class Form(NamedTuple):
    """How matrices are stored: ``fp4`` (two codes a byte), ``fp8`` (scaled in ``block``s of [rows, columns]), ``bf16``."""

    experts: str
    linears: str
    block: tuple[int, int] = (128, 128)


class Parts(NamedTuple):
    """The tensors of DSpark stages, without ``mtp.N.``: of every stage, and of the first and the last one besides."""

    every: Table
    first: Table
    last: Table


BF16 = Form("bf16", "bf16")


def form_of(config: Config) -> Form:
    """The form that ``quantization_config`` and ``expert_dtype`` declare; without the former, BF16.

    Raises UserError (``config.expert-dtype``, ``config.draft-field``).
    """
    table = config_value(config, "quantization_config")
    if not isinstance(table, Mapping):
        return BF16
    experts = config_value(config, "expert_dtype") or "fp4"
    if not isinstance(experts, str) or experts not in _CODES:
        hint = f"set expert_dtype to one of {', '.join(_CODES)}"
        raise fail("config.expert-dtype", f"config.json: expert_dtype is {experts!r}", file="config.json", hint=hint)
    block = table.get("weight_block_size") or (128, 128)
    if not (isinstance(block, list | tuple) and len(block) == 2 and all(map(_is_size, block))):
        message = f"config.json: weight_block_size is {block!r}, not [rows, columns]"
        hint = "set it to [128, 128], or V4.1's [32, 32]"
        raise fail("config.draft-field", message, file="config.json", hint=hint)
    return Form(experts, "fp8", (block[0], block[1]))


def is_v41(config: Config) -> bool:
    """Whether the config is DeepSeek-V4.1's: other Markov names, no ``hc_head_*`` in the draft, smaller FP8 blocks."""
    return any(name.startswith("deepseek_v41") for name in model_types(config))


def draft_experts(config: Config) -> int:
    """Routed experts of a stage: V4.1 drafts have fewer than the target's layers."""
    return _experts(config, "dspark_n_routed_experts" if _optional(config, "dspark_n_routed_experts") else _ROUTED)


def draft_experts_per_token(config: Config) -> int:
    """Routed experts that one token is sent to in a stage."""
    return _optional(config, "dspark_num_experts_per_tok") or _size(config, "num_experts_per_tok")


def taps(config: Config) -> tuple[int, ...]:
    """``dspark_target_layer_ids``: the target's layers whose output (V4.1: input) the draft reads.

    Raises UserError (``config.draft-field``) where they are no list of layer numbers.
    """
    found = config_value(config, "dspark_target_layer_ids")
    if isinstance(found, list | tuple) and found and all(type(item) is int for item in found):
        return tuple(found)
    message = f"config.json: dspark_target_layer_ids is {found!r}, not a list of layers"
    raise fail("config.draft-field", message, file="config.json", hint=_HINT)


def lacking(config: Config) -> Iterator[Finding]:
    """A finding for each figure of a DSpark draft's sizes that the config does not give, all of them at once."""
    asked: list[Callable[[], object]] = [partial(_size, config, key) for key in _SIZES]
    asked += [partial(ask, config) for ask in (draft_experts, taps, form_of)]
    for ask in asked:
        try:
            ask()
        except UserError as error:
            yield from error.findings


def dspark_parts(config: Config, form: Form | None = None) -> Parts:
    """The tensors of a DSpark draft's stages; ``form`` where they are stored otherwise than the config declares.

    Raises UserError (``config.draft-field``, ``config.expert-dtype``) where the config does not give their sizes.
    """
    form = form or form_of(config)
    hidden, vocab, rank = _size(config, "hidden_size"), _size(config, "vocab_size"), _size(config, "dspark_markov_rank")
    every = _block(config, form, draft_experts(config)) | {"ffn.gate.bias": Expected(_F32, (draft_experts(config),))}
    first = _linear("main_proj", hidden, len(taps(config)) * hidden, form.linears, form.block) | _norms(
        main_norm=hidden
    )
    last = _norms(norm=hidden)
    if is_v41(config):
        every["ffn.gate.bias_vl"] = Expected(_F32, (draft_experts(config),), optional=True)
    else:
        last |= _mixer("hc_head", config, head=True)
    for name in ("embed", "head") if is_v41(config) else ("markov_w1", "markov_w2"):
        last[f"markov_head.{name}.weight"] = Expected(_BF16, (vocab, rank))
    width = hidden + (0 if config_value(config, "confidence_head_with_markov") is False else rank)
    absent = config_value(config, "enable_confidence_head") is False
    last["confidence_head.proj.weight"] = Expected(_BF16, (1, width), optional=absent)
    return Parts(*(_strict(table, form) for table in (every, first, last)))


def _strict(table: Table, form: Form) -> Table:
    """Beside quantized matrices what is F32 stays F32; a trainer's floats may all be of one dtype."""
    if form.linears == "bf16":
        return table
    return {name: item._replace(dtypes=("F32",)) if item.dtypes == _F32 else item for name, item in table.items()}


def dspark(config: Config, stages: int, form: Form | None = None) -> Table:
    """Every tensor of a DSpark draft of ``stages`` (one or more), by full name. Raises what :func:`dspark_parts` raises."""
    parts = dspark_parts(config, form)
    found = _below((f"mtp.{stage}.", parts.every) for stage in range(stages))
    return found | _below([("mtp.0.", parts.first), (f"mtp.{stages - 1}.", parts.last)])


def nextn(config: Config, form: Form | None = None) -> Table:
    """Every tensor of a V4 base's NextN layers (``mtp.0`` where ``num_nextn_predict_layers`` is 1), by full name."""
    form = form or form_of(config)
    hidden, experts = _size(config, "hidden_size"), _experts(config)
    layer = _block(config, form, experts) | {"ffn.gate.bias": Expected(_F32, (experts,))}
    for name in ("e_proj", "h_proj"):
        layer |= _linear(name, hidden, hidden, form.linears, form.block)
    layer |= _norms(enorm=hidden, hnorm=hidden, norm=hidden) | _mixer("hc_head", config, head=True)
    return _below((f"mtp.{i}.", layer) for i in range(_optional(config, "num_nextn_predict_layers") or 1))


def target(config: Config, form: Form | None = None) -> Table:
    """Every tensor of a V4 target without its draft, by full name: 43 layers, embedding, head and final norm in Flash.

    Raises UserError (``config.draft-field``, ``config.expert-dtype``).
    """
    form = form or form_of(config)
    layers, experts = _size(config, "num_hidden_layers"), _experts(config)
    hidden, vocab = _size(config, "hidden_size"), _size(config, "vocab_size")
    block, compressed = (
        _block(config, form, experts),
        {ratio: _compressed(config, form, ratio) for ratio in (0, 4, 128)},
    )
    hashed = Expected(("I64",), (vocab, _size(config, "num_experts_per_tok")))
    routers = ({"ffn.gate.tid2eid": hashed}, {"ffn.gate.bias": Expected(_F32, (experts,))})
    learned_from = _optional(config, "num_hash_layers")
    found = {name: Expected(_BF16, (vocab, hidden)) for name in ("embed.weight", "head.weight")}
    found |= _norms(norm=hidden) | _mixer("hc_head", config, head=True)
    for layer, ratio in zip(range(layers), _ratios(config, layers), strict=True):
        found |= _below([(f"layers.{layer}.", block | routers[layer >= learned_from] | compressed[ratio])])
    return found


def _block(config: Config, form: Form, experts: int) -> Table:
    """What every layer and every stage has, its router's bias or hash table apart."""
    hidden, inter = _size(config, "hidden_size"), _size(config, "moe_intermediate_size")
    heads, dim, rank = (_size(config, key) for key in ("num_attention_heads", "head_dim", "q_lora_rank"))
    groups, out_rank = _size(config, "o_groups"), _size(config, "o_lora_rank")
    found = {"attn.attn_sink": Expected(_F32, (heads,)), "ffn.gate.weight": Expected(_BF16, (experts, hidden))}
    found |= _norms(attn_norm=hidden, ffn_norm=hidden) | _norms("attn.", q_norm=rank, kv_norm=dim)
    linears = {
        "attn.wq_a": (rank, hidden),
        "attn.wq_b": (heads * dim, rank),
        "attn.wkv": (dim, hidden),
        "attn.wo_a": (groups * out_rank, heads * dim // groups),
        "attn.wo_b": (hidden, groups * out_rank),
    }
    linears |= _gated("ffn.shared_experts", hidden, inter * (_optional(config, "n_shared_experts") or 1))
    for module, shape in linears.items():
        found |= _linear(module, *shape, form.linears, form.block)
    for expert in range(experts):
        for module, shape in _gated(f"ffn.experts.{expert}", hidden, inter).items():
            found |= _linear(module, *shape, form.experts, form.block)
    return found | _mixer("hc_attn", config) | _mixer("hc_ffn", config)


def _gated(at: str, hidden: int, inter: int) -> dict[str, tuple[int, int]]:
    return {f"{at}.w1": (inter, hidden), f"{at}.w2": (hidden, inter), f"{at}.w3": (inter, hidden)}


def _compressed(config: Config, form: Form, ratio: int) -> Table:
    """The compressor of a layer that has one, and the indexer where ``ratio`` is 4."""
    if not ratio:
        return {}
    found = _compressor("attn.compressor.", config, ratio, _size(config, "head_dim"))
    if ratio == 4:
        heads, dim = _size(config, "index_n_heads"), _size(config, "index_head_dim")
        found |= _compressor("attn.indexer.compressor.", config, ratio, dim)
        found["attn.indexer.weights_proj.weight"] = Expected(_BF16, (heads, _size(config, "hidden_size")))
        rank = _size(config, "q_lora_rank")
        found |= _linear("attn.indexer.wq_b", heads * dim, rank, form.linears, form.block)
    return found


def _compressor(at: str, config: Config, ratio: int, dim: int) -> Table:
    width = dim * (2 if ratio == 4 else 1)  # windows of ratio 4 overlap: each token is in two
    matrix = Expected(_BF16, (width, _size(config, "hidden_size")))
    found = {f"{at}ape": Expected(_F32, (ratio, width)), f"{at}wgate.weight": matrix, f"{at}wkv.weight": matrix}
    return found | _norms(at, norm=dim)


def _mixer(at: str, config: Config, head: bool = False) -> Table:
    """Hyper-connections: combinations of the ``hc_mult`` residual streams. Its ``_scale`` is no quantization scale."""
    streams = _size(config, "hc_mult")
    rows = streams if head else (2 + streams) * streams
    shapes = {"fn": (rows, streams * _size(config, "hidden_size")), "base": (rows,), "scale": (1 if head else 3,)}
    return {f"{at}_{name}": Expected(_F32, shape) for name, shape in shapes.items()}


def _norms(at: str = "", /, **sizes: int) -> Table:
    return {f"{at}{name}.weight": Expected(_BF16, (size,)) for name, size in sizes.items()}


def _linear(module: str, rows: int, columns: int, form: str, block: tuple[int, int]) -> Table:
    if form == "bf16":
        return {f"{module}.weight": Expected(_BF16, (rows, columns))}
    if form == "fp4":
        shape, scales = (rows, columns // 2), (rows, columns // FP4_GROUP)
    else:
        shape, scales = (rows, columns), (ceil(rows / block[0]), ceil(columns / block[1]))
    return {f"{module}.weight": Expected(_CODES[form], shape), f"{module}.scale": Expected(_SCALES[form], scales)}


def _below(tables: Iterable[tuple[str, Table]]) -> Table:
    return {prefix + name: expected for prefix, table in tables for name, expected in table.items()}


def _ratios(config: Config, layers: int) -> list[int]:
    found = config_value(config, "compress_ratios")
    if isinstance(found, list) and len(found) >= layers and all(ratio in (0, 4, 128) for ratio in found[:layers]):
        return found[:layers]
    message = f"config.json: compress_ratios does not give 0, 4 or 128 for each of {layers} layers"
    raise fail("config.draft-field", message, file="config.json")


def _experts(config: Config, key: str = _ROUTED) -> int:
    count = _size(config, key)
    if count > _MOST_EXPERTS:
        message = f"config.json: {key} is {count}, more than {_MOST_EXPERTS}"
        raise fail("config.draft-field", message, file="config.json", hint=_HINT, data={"field": key})
    return count


def _size(config: Config, key: str) -> int:
    """A positive integer of the config. Raises UserError (``config.draft-field``)."""
    value = config_value(config, key)
    if _is_size(value):
        return int(value)
    said = "is missing" if value is None else f"is {value!r}, not a positive integer"
    raise fail("config.draft-field", f"config.json: {key} {said}", file="config.json", hint=_HINT, data={"field": key})


def _optional(config: Config, key: str) -> int:
    """The integer of the config, 0 where it is absent or null. Raises UserError (``config.draft-field``)."""
    return 0 if config_value(config, key) in (None, 0) else _size(config, key)


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0
