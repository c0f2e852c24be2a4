"""Checks of a compressed-tensors ``quantization_config`` as a whole: its targets and ignores, how consumers read it,
what it says of itself."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..consumers import LINEAR_CLASS, by_vllm
from ..errors import Finding
from ..families import LINEAR_LIKE, Kind, experts_of, fused_set
from ..files.checkpoint import CONFIG
from ..naming.patterns import looks_like_class
from .groups import Groups, Seen, spellings
from .named import Modules
from .weights import Fault, Place, Weight, place_of

TARGET, IGNORE, BOTH = "config.quant-target-unmatched", "config.quant-ignore-unmatched", "config.quant-both"
CONSUMERS, CLASS_HEAD, DRAFT = "config.quant-consumers", "config.quant-class-head", "config.quant-draft"
STATUS, FUSED, FORMAT = "config.quant-status", "config.quant-fused", "config.quant-format"
VLLM = ("0.33", "0.26")
_DISJOINT = "write targets that do not overlap: each group's as re:^(?:.*\\.)?PATH$"


class Judged(NamedTuple):
    """A weight and how the config finds it."""

    weight: Weight
    seen: Seen


# --- targets and ignores -----------------------------------------------------------------------------------


def unmatched_targets(groups: Groups, modules: Modules, judged: Sequence[Judged]) -> Iterator[Finding]:
    """Targets that find no module: an error where a group's targets all are such, else a warning."""
    dead: dict[str, list[str]] = {}
    for group, target in groups.declared.targets:
        dead.setdefault(group, [])
        if not _finds(target, modules, judged):
            dead[group].append(target)
    numbers = {group: sum(owner == group for owner, _ in groups.declared.targets) for group in dead}
    for group, targets in dead.items():
        whole = len(targets) == numbers[group]
        for target in targets:
            message = f"config.json: target {target!r} of {group} matches no module of the checkpoint"
            yield _entry(TARGET, message, target, modules, "error" if whole else "warning")
    yield from _shadowed(groups)


def _shadowed(groups: Groups) -> Iterator[Finding]:
    """Targets that stand in two groups of different schemes: all readers take the later one."""
    owners = {target: group for group, target in groups.declared.targets}
    tables = groups.quantization.table.get("config_groups")
    for group, table in tables.items() if isinstance(tables, Mapping) else ():
        targets = table.get("targets", ()) if isinstance(table, Mapping) else table
        for target in targets:
            owner = owners[target]
            if owner != group and groups.scheme(owner) != groups.scheme(group):
                message = f"config.json: target {target!r} of {group} stands in {owner} too, which takes it"
                yield Finding(TARGET, message, file=CONFIG, hint=_DISJOINT, data={"pattern": target})


def unmatched_ignores(
    entries: Sequence[str], finds: Callable[[str], bool], modules: Modules, file: str
) -> Iterator[Finding]:
    """Entries of a list of dense modules with which ``finds`` finds no module."""
    for entry in entries:
        if not looks_like_class(entry) and not finds(entry):
            message = f"{file}: {entry!r}, listed as left dense, matches no module of the checkpoint"
            yield _entry(IGNORE, message, entry, modules, "warning", file)


def named(modules: Modules, entry: str) -> bool:
    """Whether an entry as compressed-tensors reads it, a name or ``re:`` and a regex, finds a module."""
    if entry.startswith("re:"):
        return modules.matched(entry.removeprefix("re:"))
    return modules.has(entry)


def _entry(id: str, message: str, entry: str, modules: Modules, severity: str, file: str = CONFIG) -> Finding:
    near = None if entry.startswith("re:") else modules.nearest(entry)
    hint = f"is {near!r} meant?" if near and near != entry else f"take it out of {file}"
    return Finding(id, message, file=file, hint=hint, severity=severity, data={"pattern": entry})


def _finds(target: str, modules: Modules, judged: Sequence[Judged]) -> bool:
    if target == LINEAR_CLASS:
        return any(item.weight.kind in LINEAR_LIKE for item in judged)
    return looks_like_class(target) or named(modules, target)


def dead_by_ignore(groups: Groups, judged: Sequence[Judged]) -> Iterator[Fault]:
    """Weights that a target names and an ignore too, where that is so of all that the target finds."""
    ignored: dict[str, list[Weight]] = {}
    alive: set[str] = set()
    for weight, seen in judged:
        for target in seen.named_by:
            if seen.ignored:
                ignored.setdefault(target, []).append(weight)
            else:
                alive.add(target)
    for target, found in ignored.items():
        for weight in found if target not in alive else ():
            text = f"is named by target {target!r} of config.json, and its ignore list names it too, which wins"
            hint = f"take the entry that names {weight.name} out of ignore, or the target out of its group"
            yield Fault(BOTH, weight, text, None, hint, "error" if weight.quantized else "warning")


# --- consumers ---------------------------------------------------------------------------------------------


def disagreements(groups: Groups, judged: Sequence[Judged]) -> Iterator[Fault]:
    """Quantized weights that compressed-tensors and vLLM would read by different schemes."""
    for weight, seen in judged:
        theirs, vllms = groups.scheme(seen.compressed_tensors), groups.scheme(seen.vllm)
        if not weight.quantized or theirs == vllms or weight.kind not in LINEAR_LIKE - {Kind.ROUTER}:
            continue
        if weight.kind is Kind.HEAD and vllms is None and not seen.named_by:
            text = f"is a quantized head that only the class target of {seen.compressed_tensors} reaches"
            hint = f"name it: add {_pattern(weight)!r} to the targets of a group of its own"
            yield Fault(CLASS_HEAD, weight, text, None, hint)
        else:
            text = f"is read by compressed-tensors as {_group(seen.compressed_tensors)}, by vLLM as {_group(seen.vllm)}"
            yield Fault(CONSUMERS, weight, text, None, _DISJOINT)


def fused_disagreements(groups: Groups, judged: Sequence[Judged]) -> Iterator[Fault]:
    """Fused layers that vLLM, which looks for them by the fused name, reads otherwise than their parts are."""
    by_name = {item.weight.name: item.seen for item in judged}
    for weight, seen in judged:
        own, read_as = fused_set(weight.name), fused_set(spellings(weight.name)[seen.spelling])
        if not weight.quantized or not own or not read_as or own[1][0] != weight.name or experts_of(weight.name):
            continue
        parts = [by_name[member] for member in own[1] if member in by_name]
        want = groups.scheme(seen.compressed_tensors)
        if len(parts) < len(own[1]) or any(groups.scheme(part.compressed_tensors) != want for part in parts):
            continue  # not fused, or told of the parts themselves
        layer, members = read_as
        config = groups.narrowed(layer, *members)
        read = {version: by_vllm(config, layer, "LinearBase", members, version != "0.26") for version in VLLM}
        for version, group in read.items():
            if groups.scheme(group) != want:
                text = (
                    f"is read as {_group(seen.compressed_tensors)}; vLLM {version} fuses it, and reads {_group(group)}"
                )
                yield Fault(CONSUMERS, weight, text, None, _DISJOINT)
                break


def mixed_experts(groups: Groups, judged: Sequence[Judged]) -> Iterator[Fault]:
    """Experts of a layer, of which vLLM makes one, under different schemes."""
    layers: dict[Place, list[Judged]] = defaultdict(list)
    for item in judged:
        path = experts_of(item.weight.name)
        if path is not None:
            layers[place_of(path)].append(item)
    for items in layers.values():
        first = next((item for item in items if item.weight.quantized), items[0])
        own = groups.scheme(first.seen.vllm)
        other = next((item for item in items if groups.scheme(item.seen.vllm) != own), None)
        if other is not None:
            beside = f"{other.weight.name.rpartition('.')[2]} beside it is {_group(other.seen.vllm)}"
            text = f"is {_group(first.seen.vllm)}, and {beside}"
            hint = "give all experts of a layer one scheme, or leave all of them dense"
            yield Fault(FUSED, first.weight, text, None, hint)


def drafts(judged: Sequence[Judged]) -> Iterator[Fault]:
    """Quantized layers that draft tokens, reached by a class target only."""
    for weight, seen in judged:
        if weight.quantized and weight.kind in (Kind.MTP, Kind.DRAFT) and not seen.named_by:
            text = "is part of a layer that drafts tokens, quantized in passing by a class target"
            hint = f"keep it dense and add {_pattern(weight)!r} to ignore, or name it in a target if it is meant"
            yield Fault(DRAFT, weight, text, None, hint, "warning")


def _pattern(weight: Weight) -> str:
    return f"re:^(?:.*\\.)?{re.escape(weight.name)}$"


def _group(name: str | None) -> str:
    return name or "unquantized"


# --- what it says of itself --------------------------------------------------------------------------------


def status(table: Mapping[str, Any], quantized: int) -> Iterator[Finding]:
    """A config that declares groups for a checkpoint in which nothing is quantized, or a status that says so."""
    groups = table.get("config_groups") or {}
    weighted = isinstance(groups, Mapping) and any(_has_weights(group) for group in groups.values())
    said = table.get("quantization_status", "initialized")
    if weighted and not quantized:
        message = f"config.json declares {len(groups)} groups of quantized modules, and nothing on disk is quantized"
        hint = "correct targets and ignore and quantize again, or take quantization_config out"
        yield Finding(STATUS, message, file=CONFIG, hint=hint, data={"format": table.get("format")})
    elif weighted and table.get("format") == "dense":
        message = f"config.json says format 'dense', and {quantized:,} modules on disk are quantized"
        yield Finding(STATUS, message, file=CONFIG, hint="set format to that of the groups, or 'mixed-precision'")
    elif quantized and said != "compressed":
        message = f"config.json says quantization_status {said!r}, and {quantized:,} modules are stored compressed"
        hint = "set quantization_status to 'compressed'"
        yield Finding(STATUS, message, file=CONFIG, hint=hint, severity="warning")
    for name, group in groups.items() if quantized and isinstance(groups, Mapping) else ():
        if _has_weights(group) and isinstance(group, Mapping) and _says_dynamic(group["weights"]):
            message = f"config.json says that weights of {name} are quantized while they are used, and codes are stored"
            hint = f"set config_groups.{name}.weights.dynamic to false"
            yield Finding(STATUS, message, file=CONFIG, hint=hint)


def formats(table: Mapping[str, Any], quantized: int) -> Iterator[Finding]:
    """Groups of integers or 8-bit floats without the name of a format that holds them, by which vLLM picks a layer."""
    groups = table.get("config_groups")
    for name, group in groups.items() if isinstance(groups, Mapping) and quantized else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping) or (weights.get("type") == "float" and weights.get("group_size")):
            continue
        format = group.get("format") or table.get("format")
        if format in (None, "mixed-precision", "fakequant"):
            message = f"config.json: {name} says no format, nor does quantization_config: vLLM finds no scheme for it"
            hint = f"set quantization_config.config_groups.{name}.format"
            yield Finding(FORMAT, message, file=CONFIG, hint=hint, data={"group": name})


def _says_dynamic(weights: Any) -> bool:
    return isinstance(weights, Mapping) and bool(weights.get("dynamic"))


def _has_weights(group: Any) -> bool:
    return isinstance(group, list) or (isinstance(group, Mapping) and bool(group.get("weights")))
