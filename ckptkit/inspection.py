"""What a checkpoint holds, from its headers, index and config: totals, formats by module, heads, drafts, warnings."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .checkpoint import Checkpoint
from .errors import Finding
from .families import LINEAR_LIKE, Kind, config_value, declared_drafts, draft_part, embedding_of, head_of, is_tied
from .names import to_template
from .plan import Ref
from .stored import SCALES, WEIGHTS, Quantization, declared_quantization, split_name
from .survey import Module, Survey, keyed, survey

_UP_TO_INDEX = re.compile(r"(?:[^.]+\.)*?\d+(?=\.)")
# Unlike ``scale``, these names stand for nothing else.
_SCALES_ONLY = (".weight_scale", ".weight_scale_inv")
_FIRST_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")


class Total(NamedTuple):
    """A line of a summary. ``parameters`` counts numbers of the model: unpacked, and no scales."""

    key: str
    tensors: int
    parameters: int
    bytes: int


class ModuleRow(NamedTuple):
    """Modules of one template that are stored and declared alike. ``bytes`` includes scales and the like."""

    module: str
    kind: str
    modules: int
    stored: str
    declared: str | None
    bytes: int


class Head(NamedTuple):
    """An output head that is stored."""

    module: str
    stored: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """All that ``ckptkit inspect`` tells of a checkpoint as a whole."""

    architectures: tuple[str, ...]
    model_type: str | None
    quantization: Quantization | None
    total: Total
    shards: int
    dtypes: tuple[Total, ...]
    modules: tuple[ModuleRow, ...]
    embedding: str | None
    heads: tuple[Head, ...]
    tied: bool
    drafts: tuple[Total, ...]
    declared_drafts: Mapping[str, Any]
    warnings: tuple[Finding, ...]


def summarize(checkpoint: Checkpoint, tensors: Sequence[Ref]) -> Summary:
    """The summary of ``tensors``: all of the checkpoint's, or some, about which no warning is given."""
    config = checkpoint.config or {}
    quantization, findings = declared_quantization(config)
    found = survey(tensors, config, quantization)
    names = [cell.first.name for cell in found.cells.values()]
    drafts = tuple(_drafts(found, config))
    embedding = embedding_of(names)
    if len(tensors) == len(checkpoint.tensors):
        findings += [*checkpoint.warnings, *_format_warnings(found, quantization), *_scale_warnings(found)]
        findings += [*_tie_warnings(config, embedding, names), *_draft_warnings(config, drafts)]
    architectures = config.get("architectures")
    model_type = config_value(config, "model_type")
    heads = [module for module in found.modules if module.kind is Kind.HEAD]
    return Summary(
        architectures=tuple(map(str, architectures)) if isinstance(architectures, list) else (),
        model_type=None if model_type is None else str(model_type),
        quantization=quantization,
        total=next(iter(_totals(found, lambda ref: "total")), Total("total", 0, 0, 0)),
        shards=len({ref.file for ref in tensors}),
        dtypes=tuple(sorted(_totals(found, lambda ref: ref.dtype), key=lambda row: -row.bytes)),
        modules=tuple(_module_rows(found.modules, quantization)),
        embedding=embedding,
        heads=tuple(Head(head.name, head.stored.label, head.shape) for head in heads),
        tied=is_tied(config),
        drafts=drafts,
        declared_drafts=declared_drafts(config),
        warnings=tuple(findings),
    )


# --- totals ------------------------------------------------------------------------------------------------


def _totals(found: Survey, key: Callable[[Ref], str | None]) -> list[Total]:
    """Totals by what ``key`` says of the first tensor of a cell, in the order of first appearance; None is left out."""
    rows: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for cell in found.cells.values():
        name = key(cell.first)
        if name is not None:
            row = rows[name]
            row[0] += cell.number
            row[1] += cell.number * found.parameters[cell.key]
            row[2] += cell.bytes
    return [Total(name, *row) for name, row in rows.items()]


def _by_layer(ref: Ref) -> str:
    return _FIRST_INDEX.sub("#", split_name(ref.name)[0] or ref.name, count=1)


def _by_module(ref: Ref) -> str:
    return to_template(split_name(ref.name)[0] or ref.name)


GROUPS: Mapping[str, Callable[[Ref], str]] = {
    "layer": _by_layer,
    "module": _by_module,
    "dtype": lambda ref: ref.dtype,
    "shard": lambda ref: ref.file,
}


def grouped(checkpoint: Checkpoint, tensors: Sequence[Ref], by: str) -> list[Total]:
    """Totals of ``tensors`` by one of :data:`GROUPS`: ``layer`` takes the layers' tensors together, ``module`` those
    of experts and other numbered modules too."""
    config = checkpoint.config or {}
    quantization, _ = declared_quantization(config)
    found = survey(tensors, config, quantization)
    rows: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for ref, key in keyed(tensors):
        row = rows[GROUPS[by](ref)]
        row[0] += 1
        row[1] += found.parameters[key]
        row[2] += ref.nbytes
    return [Total(name, *row) for name, row in rows.items()]


def _module_rows(modules: Iterable[Module], quantization: Quantization | None) -> Iterator[ModuleRow]:
    rows: dict[tuple[str, str, str, str | None], list[int]] = defaultdict(lambda: [0, 0])
    for module in modules:
        if module.kind in LINEAR_LIKE | {Kind.EXPERTS, Kind.EMBEDDING} or module.stored.quantized:
            declared = quantization.label(module.group) if quantization else None
            row = rows[to_template(module.name), module.kind.value, module.stored.label, declared]
            row[0] += module.weight.number
            row[1] += module.bytes
    for (name, kind, stored, declared), (count, nbytes) in sorted(rows.items(), key=lambda item: item[0][:3]):
        yield ModuleRow(name, kind, count, stored, declared, nbytes)


def _drafts(found: Survey, config: Mapping[str, Any]) -> list[Total]:
    """Tensors of parts that draft tokens, by the part: ``mtp.0``, ``model.layers.61``, ``eagle3``."""
    part_of = draft_part(config)

    def part(ref: Ref) -> str | None:
        if part_of(ref.name) is None:
            return None
        index = _UP_TO_INDEX.match(ref.name)
        return index[0] if index else ref.name.partition(".")[0]

    return _totals(found, part)


# --- warnings ----------------------------------------------------------------------------------------------


def _warning(id: str, message: str, **details: Any) -> Finding:
    return Finding(id, message, severity="warning", **details)


def _format_warnings(found: Survey, quantization: Quantization | None) -> Iterator[Finding]:
    """Where disk and config disagree on which modules are quantized, once for the modules of one template.

    Only compressed-tensors says it module by module; of other methods it is asked only that there is a config.
    """
    by_module = quantization is not None and quantization.declared is not None
    wrong: dict[tuple[str, str], list[Module]] = defaultdict(list)
    for module in found.modules:
        template = to_template(module.name)
        if module.stored.quantized and module.group is None and (by_module or quantization is None):
            wrong["config.quant-undeclared", template].append(module)
        elif module.group is not None and not module.stored.quantized:
            wrong["config.quant-dense", template].append(module)
    for (id, template), modules in wrong.items():
        number = sum(module.weight.number for module in modules)
        declares = f"puts it into {modules[0].group}" if modules[0].group else "does not declare it"
        likes = f" (and {number - 1:,} more of {template})" if number > 1 else ""
        message = f"{modules[0].name} is stored as {modules[0].stored.label}, and config.json {declares}{likes}"
        ref = modules[0].weight.first
        yield _warning(id, message, file=ref.file, tensor=ref.name, data={"modules": number})


def _scale_warnings(found: Survey) -> Iterator[Finding]:
    """Quantized weights without a scale, and scales without a weight; names are looked at only where cells differ."""
    quantized = [module for module in found.modules if module.stored.quantized]
    if not any(map(_lacks_scales, quantized)) and not _orphans(found):
        return
    keys = {module.weight.key for module in quantized}
    weights = {split_name(ref.name)[0]: ref for ref, key in keyed(found.tensors) if key in keys}
    scales = {split_name(ref.name)[0]: ref for ref in found.tensors if split_name(ref.name)[1] in SCALES}
    for name in sorted(weights.keys() - scales.keys()):
        ref = weights[name]
        yield _warning("names.weight-without-scale", f"{ref.name} has no scale", file=ref.file, tensor=ref.name)
    for name in sorted(scales.keys() - weights.keys()):
        ref = scales[name]
        if ref.name.endswith(_SCALES_ONLY):
            yield _warning("names.scale-without-weight", f"{ref.name} has no weight", file=ref.file, tensor=ref.name)


def _lacks_scales(module: Module) -> bool:
    numbers = [module.companions[part].number for part in SCALES if part in module.companions]
    return module.stored.lacks_scale or any(number != module.weight.number for number in numbers)


def _orphans(found: Survey) -> bool:
    """Whether there are scales in a place that has no weights."""
    beside = {cell.key for module in found.modules for cell in module.companions.values()}
    return any(cell.first.name.endswith(_SCALES_ONLY) and cell.key not in beside for cell in found.cells.values())


def _tie_warnings(config: Mapping[str, Any], embedding: str | None, names: Iterable[str]) -> Iterator[Finding]:
    head = head_of(embedding) if embedding else None
    if head is None:
        return
    stored = any(split_name(name)[0] == head and split_name(name)[1] in WEIGHTS for name in names)
    if stored and is_tied(config):
        message = f"config.json ties {head} to {embedding}, yet {head} is stored too: engines ignore the stored one"
        yield _warning("config.tie", message, file="config.json", tensor=head)
    elif not stored and not is_tied(config):
        message = f"config.json does not tie {head} to {embedding}, yet there is no {head}"
        yield _warning("config.tie", message, file="config.json", tensor=head)


def _draft_warnings(config: Mapping[str, Any], drafts: Sequence[Total]) -> Iterator[Finding]:
    keys = declared_drafts(config)
    if keys and not drafts:
        message = f"config.json declares draft layers ({', '.join(keys)}), and the checkpoint has no tensors of them"
        yield _warning("names.draft-missing", message, file="config.json")
