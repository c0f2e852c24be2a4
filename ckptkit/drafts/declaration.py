"""What a config says of how a DeepSeek-V4 draft is stored, brought to what is stored. No I/O.

Engines build FP4 and FP8 layers by ``quantization_config`` and ``expert_dtype`` alone: where these say nothing, or leave
the draft's layers out, codes are taken for numbers. The fields are those of the published configs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..families.config import config_value, text_configs
from .tables import Config, Form

_TABLE = "quantization_config"
_OFFICIAL = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0"}
# Lists of modules that are not quantized; an entry reaches each module whose name holds it.
_EXEMPT = ("modules_to_not_convert", "ignored_layers", "ignore")
_QUANTIZED = (
    *(f"attn.{name}" for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")),
    *(f"ffn.{of}.{name}" for of in ("experts.0", "shared_experts") for name in ("w1", "w2", "w3")),
)


def declare(config: dict[str, Any], stages: int, form: Form) -> None:
    """Have ``config`` say in place how quantized stages are stored; for floats, nothing is changed."""
    if form.linears == "bf16":
        return
    table, holders = table_for(config, stages, form), list(_holders(config))
    for holder in holders:
        if holder.get(_TABLE) is not None:
            holder[_TABLE] = table
    if not any(holder.get(_TABLE) is not None for holder in holders):
        config[_TABLE] = table
    if config_value(config, "expert_dtype") != form.experts:
        next((holder for holder in holders if "expert_dtype" in holder), config)["expert_dtype"] = form.experts


def table_for(config: Config, stages: int, form: Form) -> dict[str, Any]:
    """The ``quantization_config`` for stages of FP8 linears: the one of ``config`` as far as it is true of them."""
    own = config_value(config, _TABLE)
    if not isinstance(own, Mapping) or own.get("quant_method") != "fp8":
        return _OFFICIAL | {"weight_block_size": list(form.block)}
    table = {"activation_scheme": "dynamic", **own, "weight_block_size": list(form.block)}
    modules = ["mtp.0.main_proj", *(f"mtp.{stage}.{name}" for stage in range(stages) for name in _QUANTIZED)]
    for key in _EXEMPT:
        if isinstance(own.get(key), list):
            table[key] = [entry for entry in own[key] if not _reaches(str(entry), modules)]
    return table


def untrue(config: Config, stages: int, form: Form) -> str:
    """What ``config`` says that is not so of stages stored in ``form``, in words; empty where all is true."""
    if form.linears == "bf16":
        return f"{_TABLE} declares a quantization, and the draft is in floats" if _declares(config) else ""
    return "; ".join(_differing(config, table_for(config, stages, form), form))


def _differing(config: Config, table: Mapping[str, Any], form: Form) -> Iterator[str]:
    own, experts = config_value(config, _TABLE), config_value(config, "expert_dtype") or "fp4"
    if own is None:
        yield f"there is no {_TABLE}, and the draft is stored with scales"
    elif not isinstance(own, Mapping) or own.get("quant_method") != "fp8":
        method = own.get("quant_method") if isinstance(own, Mapping) else own
        yield f"{_TABLE} says {method!r}, and the draft is stored as DeepSeek's FP8"
    else:
        for key in (key for key in table if table[key] != own.get(key)):
            yield f"{_TABLE}.{key} is {own.get(key)!r}, and what is stored asks for {table[key]!r}"
    if experts != form.experts:
        yield f"expert_dtype is {experts}, and the experts are {form.experts}"


def _declares(config: Config) -> bool:
    return config_value(config, _TABLE) is not None


def _reaches(entry: str, modules: list[str]) -> bool:
    text = entry.removeprefix("re:")
    try:
        found = re.compile(text if text != entry else re.escape(text))
    except re.error:
        return False
    return any(found.search(module) for module in modules)


def _holders(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (found for _, found in text_configs(config) if isinstance(found, dict))
