"""Every table that declares a checkpoint's quantization, and what each says of a module: bits, and what shares a scale.

``config.json`` has one at its top or in its text_config. Other tools write files of their own beside it: ModelOpt
``hf_quant_config.json``, AutoGPTQ ``quantize_config.json``, AutoAWQ ``quant_config.json``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ..checkpoint import CONFIG, Checkpoint, parse_json
from ..consumers import LINEAR_CLASS, Declared, by_compressed_tensors
from ..errors import fail
from ..names import unwrapped
from ..regexes import compiled
from ..stored import Quantization, declared_quantization
from .existing import DECLARATIONS

CT, MODELOPT, GPTQ, AWQ, FP8, MXFP4 = "compressed-tensors", "modelopt", "gptq", "awq", "fp8", "mxfp4"
AUTO_ROUND = "auto-round"

_KEYS = ("quantization_config", "compression_config")
_ALIASES = {"deepseek_v4_fp8": FP8, "gpt_oss_mxfp4": MXFP4}
# Rows and columns that share a scale, by ModelOpt's algorithm.
_MODELOPT_BLOCKS = {"FP8_PB_WO": (128, 128), "FP8_PB_REAL": (128, 128)}


class Declaration(NamedTuple):
    """A table, the file it stands in, all of that file, the keys that lead to the table there, and its method."""

    file: str
    document: Mapping[str, Any]
    path: tuple[str, ...]
    method: str
    table: Mapping[str, Any]


class Packing(NamedTuple):
    """What a declaration says of a module's numbers; None where it does not.

    ``block``: rows and columns that share a scale, [1, size] for groups. ``gptq``: how GPTQ's zero points are stored.
    ``symmetric`` is False where zero points are declared.
    """

    bits: int | None = None
    block: tuple[int, int] | None = None
    gptq: Literal["v1", "v2"] | None = None
    symmetric: bool = True


def declarations(checkpoint: Checkpoint) -> list[Declaration]:
    """All of them, config.json's first. Raises UserError ``config.parse`` for a file that is no JSON object."""
    return [*_in_config(checkpoint.config or {}), *_in_files(checkpoint)]


def _in_config(config: Mapping[str, Any]) -> Iterator[Declaration]:
    text = config.get("text_config")
    for path, holder in (((), config), (("text_config",), text if isinstance(text, Mapping) else {})):
        for key in _KEYS:
            if isinstance(table := holder.get(key), Mapping) and table:
                yield Declaration(CONFIG, config, (*path, key), _method(CONFIG, table), table)


def _in_files(checkpoint: Checkpoint) -> Iterator[Declaration]:
    for file in DECLARATIONS:
        if file not in checkpoint.source.files:
            continue
        table = parse_json(checkpoint.source.text(file), file, "config.parse")
        if not isinstance(table, Mapping) or not table:
            continue
        inner = table.get("quantization")  # ModelOpt's own file
        if isinstance(inner, Mapping) and inner:
            yield Declaration(file, table, ("quantization",), MODELOPT, inner)
        else:
            yield Declaration(file, table, (), _method(file, table), table)


def _method(file: str, table: Mapping[str, Any]) -> str:
    said = str(table.get("quant_method") or "").lower().replace("_", "-")
    found = next((method for method in (MODELOPT, GPTQ, AWQ) if said.removeprefix("auto-").startswith(method)), None)
    if found or said:
        return found or _ALIASES.get(said.replace("-", "_"), said)
    shown = {"quant_algo": MODELOPT, "config_groups": CT, "w_bit": AWQ, "zero_point": AWQ, "bits": GPTQ}
    return next((method for key, method in shown.items() if key in table), "unknown")


# --- what a table says of a module -------------------------------------------------------------------------


def packing_of(found: Sequence[Declaration]) -> Callable[[str], Packing]:
    """A function from a module to what the first of the declarations says of it."""
    if not found:
        return lambda module: Packing()
    table = found[0].table
    quantization = declared_quantization({"quantization_config": table})[0]
    assert quantization is not None
    declared = quantization.declared
    if declared is not None:
        groups = {name: _of_group(quantization, name) for name, _ in declared.targets}
        return lambda module: groups.get(group_of(declared, module) or "", Packing())
    read = _READERS.get(found[0].method)
    plain = Packing(quantization.bits(None), quantization.block(None))
    return read(quantization) if read else lambda module: plain


def group_of(declared: Declared, module: str) -> str | None:
    """The group of a module that is quantized on disk: the only one there is, or by compressed-tensors' rules."""
    groups = {name for name, _ in declared.targets}
    return groups.pop() if len(groups) == 1 else by_compressed_tensors(declared, module, LINEAR_CLASS)


def _of_group(quantization: Quantization, group: str) -> Packing:
    symmetric = quantization.weights(group).get("symmetric") is not False
    return Packing(quantization.bits(group), quantization.block(group), symmetric=symmetric)


def _modelopt(quantization: Quantization) -> Callable[[str], Packing]:
    layers = quantization.table.get("quantized_layers")
    named = layers if isinstance(layers, Mapping) else {}

    def packing(module: str) -> Packing:
        own = named.get(module) or named.get(unwrapped(module)) or quantization.table
        algorithm = own.get("quant_algo") if isinstance(own, Mapping) else None
        return Packing(block=_MODELOPT_BLOCKS.get(str(algorithm).upper()))

    return packing


def _gptq(quantization: Quantization) -> Callable[[str], Packing]:
    """GPTQModel's ``dynamic`` rules set some of the table anew for the modules whose names they match, the first alone."""
    table, rules = quantization.table, list(_dynamic(quantization.table.get("dynamic")))
    version: Literal["v1", "v2"] = "v2" if table.get("checkpoint_format") == "gptq_v2" else "v1"

    def packing(module: str) -> Packing:
        own = next((values for rule, values in rules if rule.match(module)), {})
        return Packing(quantization._replace(table={**table, **own}).bits(None), gptq=version)

    return packing


def _dynamic(rules: Any) -> Iterator[tuple[re.Pattern[str], Mapping[str, Any]]]:
    """Rules that set something. Raises UserError (``config.quant``) for one that is no regex."""
    for text, values in rules.items() if isinstance(rules, Mapping) else ():
        if text.startswith("-:") or not isinstance(values, Mapping):
            continue
        try:
            yield compiled(text.removeprefix("+:")), values
        except (re.error, OverflowError, RecursionError) as error:
            message = f"{CONFIG}: the dynamic rule {text!r} is no regex: {error}"
            raise fail("config.quant", message, file=CONFIG, hint="correct the rule") from None


# How auto-round's own packings store zero points: as they are, but in the one that is AutoGPTQ's.
_AUTO_ROUND: Mapping[str, Literal["v1", "v2"]] = {
    "auto_round": "v2",
    "auto_round:gptqmodel": "v2",
    "auto_round:auto_gptq": "v1",
}


def _auto_round(quantization: Quantization) -> Callable[[str], Packing]:
    """``extra_config`` sets some of the table anew for the modules it names."""
    table, extra = quantization.table, quantization.table.get("extra_config")
    named = extra if isinstance(extra, Mapping) else {}
    version = _AUTO_ROUND.get(str(table.get("packing_format")))

    def packing(module: str) -> Packing:
        own = named.get(module)
        stated = {**table, **(own if isinstance(own, Mapping) else {})}
        return Packing(quantization._replace(table=stated).bits(None), gptq=version)

    return packing


_READERS: Mapping[str, Callable[[Quantization], Callable[[str], Packing]]] = {
    MODELOPT: _modelopt,
    GPTQ: _gptq,
    AUTO_ROUND: _auto_round,
}
