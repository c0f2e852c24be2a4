"""Every table that declares a checkpoint's quantization, and what each says of a module: bits, and what shares a scale.

``config.json`` has one at its top or in its text_config. Other tools write files of their own beside it: ModelOpt
``hf_quant_config.json``, AutoGPTQ ``quantize_config.json``, AutoAWQ ``quant_config.json``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from .consumers import LINEAR_CLASS, Declared, by_compressed_tensors
from .errors import fail
from .files.checkpoint import CONFIG, Checkpoint, parse_json
from .naming.names import unwrapped
from .naming.regexes import compiled
from .stored import Quantization, declared_quantization, tables

CT, MODELOPT, GPTQ, AWQ, FP8, MXFP4 = "compressed-tensors", "modelopt", "gptq", "awq", "fp8", "mxfp4"
AUTO_ROUND = "auto-round"
# Files that declare quantization beside config.json.
DECLARATIONS = ("hf_quant_config.json", "quantize_config.json", "quant_config.json", "quantization_config.json")

_ALIASES = {"deepseek_v4_fp8": FP8, "gpt_oss_mxfp4": MXFP4}
# The keys of lists of modules that are left as they are, by the methods' names for them.
LISTS = ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers")
# Rows and columns that share a scale, by ModelOpt's algorithm.
_MODELOPT_BLOCKS = {"FP8_PB_WO": (128, 128), "FP8_PB_REAL": (128, 128)}
_MODELOPT_STRATEGIES = {"FP8": "tensor", "FP8_PER_CHANNEL_PER_TOKEN": "channel"}
# What compressed-tensors' ``actorder`` says where inputs of a group do not lie side by side.
_ORDERED = ("group", "dynamic", True)


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
    ``symmetric`` is False where zero points are declared. Where the module itself is meant, and not only others that are
    packed alike: ``strategy`` ("tensor", "channel", "group" or "block") and ``numbers`` ("int" or "float").
    ``ordered``: which group an input is of stands in a tensor (act-order). ``unknown``: a way to pack words that is
    declared, and not known.
    """

    bits: int | None = None
    block: tuple[int, int] | None = None
    gptq: Literal["v1", "v2"] | None = None
    symmetric: bool = True
    strategy: str | None = None
    numbers: str | None = None
    ordered: bool = False
    unknown: str | None = None


def declarations(checkpoint: Checkpoint) -> list[Declaration]:
    """All of them, config.json's first. Raises UserError ``config.parse`` for a file that is no JSON object."""
    return [*_in_config(checkpoint.config or {}), *_in_files(checkpoint)]


def _in_config(config: Mapping[str, Any]) -> Iterator[Declaration]:
    for path, table in tables(config):
        yield Declaration(CONFIG, config, path, method_of(CONFIG, table), table)


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
            yield Declaration(file, table, (), method_of(file, table), table)


def method_of(file: str, table: Mapping[str, Any]) -> str:
    """The quantization method of a table: one of those above, or what it says; ``unknown`` if nothing tells."""
    said = str(table.get("quant_method") or "").lower().replace("_", "-")
    found = next((method for method in (MODELOPT, GPTQ, AWQ) if said.removeprefix("auto-").startswith(method)), None)
    if found or said:
        return found or _ALIASES.get(said.replace("-", "_"), said)
    shown = {"quant_algo": MODELOPT, "config_groups": CT, "w_bit": AWQ, "zero_point": AWQ, "bits": GPTQ}
    by_file = AWQ if file == "quant_config.json" else "unknown"
    return next((method for key, method in shown.items() if key in table), by_file)


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
        return lambda module: _for_module(groups, declared, module)
    read = _READERS.get(found[0].method)
    block = quantization.block(None)
    plain = Packing(quantization.bits(None), block, strategy=_strategy(block))
    return read(quantization) if read else lambda module: plain


def group_of(declared: Declared, module: str) -> str | None:
    """The group of a module that is quantized on disk: the only one there is, or by compressed-tensors' rules."""
    groups = {name for name, _ in declared.targets}
    return groups.pop() if len(groups) == 1 else by_compressed_tensors(declared, module, LINEAR_CLASS)


def _for_module(groups: Mapping[str, Packing], declared: Declared, module: str) -> Packing:
    """What its group says. Of one that no target reaches, the only group tells how packed numbers are to be read."""
    packing = groups.get(group_of(declared, module) or "", Packing())
    is_meant = by_compressed_tensors(declared, module, LINEAR_CLASS) is not None
    return packing if is_meant else packing._replace(strategy=None, numbers=None, ordered=False)


def _of_group(quantization: Quantization, group: str) -> Packing:
    weights, bits, block = quantization.weights(group), quantization.bits(group), quantization.block(group)
    return Packing(
        bits, block, symmetric=weights.get("symmetric") is not False,
        strategy=weights.get("strategy") or _strategy(block), numbers=weights.get("type"),
        ordered=weights.get("actorder") in _ORDERED,
    )  # fmt: skip


def _strategy(block: tuple[int, int] | None) -> str | None:
    """What shares a scale, where only its size is stated."""
    return None if block is None else "group" if block[0] == 1 else "block"


def _modelopt(quantization: Quantization) -> Callable[[str], Packing]:
    layers = quantization.table.get("quantized_layers")
    named = layers if isinstance(layers, Mapping) else {}

    def packing(module: str) -> Packing:
        own = named.get(module) or named.get(unwrapped(module)) or quantization.table
        algorithm = str(own.get("quant_algo") if isinstance(own, Mapping) else None).upper()
        block = _MODELOPT_BLOCKS.get(algorithm)
        return Packing(block=block, strategy=_MODELOPT_STRATEGIES.get(algorithm) or _strategy(block))

    return packing


def _fp8(quantization: Quantization) -> Callable[[str], Packing]:
    block = quantization.block(None)
    return lambda module: Packing(block=block, strategy=_strategy(block), numbers="float")


def _gptq(quantization: Quantization) -> Callable[[str], Packing]:
    """GPTQModel's ``dynamic`` rules set some of the table anew for the modules whose names they match, the first alone."""
    table, rules = quantization.table, list(_dynamic(quantization.table.get("dynamic")))
    said = "marlin" if table.get("is_marlin_format") else table.get("checkpoint_format") or "gptq"
    version = _GPTQ.get(str(said))
    unknown = None if version else f"checkpoint_format {said!r}, and gptq or gptq_v2 is known"

    def packing(module: str) -> Packing:
        own = next((values for rule, values in rules if rule.match(module)), {})
        return _of_words({**table, **own}, version, unknown)

    return packing


def _awq(quantization: Quantization) -> Callable[[str], Packing]:
    said = str(quantization.table.get("version") or quantization.table.get("checkpoint_format") or "gemm").lower()
    unknown = None if said == "gemm" else f"version {said!r}, and gemm is known"
    packing = _of_words(quantization.table, None, unknown)
    return lambda module: packing


def _of_words(table: Mapping[str, Any], version: Literal["v1", "v2"] | None, unknown: str | None = None) -> Packing:
    """What a table of GPTQ's or AWQ's kind says; groups of -1 are whole columns."""
    bits, size = (next((table[key] for key in keys if key in table), None) for keys in _BITS_AND_SIZE)
    block = (1, size) if type(size) is int and size > 0 else None
    return Packing(
        bits if type(bits) is int and 0 < bits <= 32 else None, block, version,
        strategy="channel" if size == -1 else _strategy(block), ordered=table.get("desc_act") is True, unknown=unknown,
    )  # fmt: skip


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


_GPTQ: Mapping[str, Literal["v1", "v2"]] = {"gptq": "v1", "gptq_v2": "v2"}
_BITS_AND_SIZE = (("bits", "w_bit"), ("group_size", "q_group_size"))

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
        return _of_words({**table, **(own if isinstance(own, Mapping) else {})}, version)

    return packing


_READERS: Mapping[str, Callable[[Quantization], Callable[[str], Packing]]] = {
    MODELOPT: _modelopt,
    GPTQ: _gptq,
    AWQ: _awq,
    FP8: _fp8,
    AUTO_ROUND: _auto_round,
}
