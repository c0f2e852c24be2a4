"""``quantize``: a checkpoint and a recipe in, a plan out; or every reason why not, at once."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

from ..checkpoint import CONFIG, INDEX, Checkpoint
from ..consumers import by_compressed_tensors, declared
from ..errors import Finding, UserError
from ..families import Kind, fused_set, shares_global_scale, tie_locations
from ..ops import operation
from ..ops.select import select as select_operation
from ..plan import Plan, Ref, Shard, Step, copy_step
from ..recipe import Group, Recipe
from . import existing, quant_config, refusals
from .experts import Slice, bias_steps, cut
from .selection import Choice, select, tied_head
from .sidecars import sidecars


class Quantized(NamedTuple):
    """A plan, what it is allowed to do in spite of a finding, and what a reader should know."""

    plan: Plan
    warnings: tuple[Finding, ...]


def plan_quantize(
    checkpoint: Checkpoint, recipe: Recipe, include: Iterable[str] = (), allow: Collection[str] = ()
) -> Quantized:
    """The plan that quantizes ``checkpoint`` by ``recipe``.

    ``include`` are file-name patterns of sidecars to take along; ``allow`` ids of refusals to pass over. Raises
    UserError with all findings of the recipe, the checkpoint and their meeting.
    """
    problems, warnings = _sort(_source_problems(checkpoint), allow)
    if problems:
        raise UserError(problems)
    choices, unmatched = select(checkpoint, recipe)
    pieces, misfits = cut(choices.values(), checkpoint.config)
    found = chain(unmatched, misfits, _refusals(checkpoint, recipe, choices, pieces))
    problems, allowed = _sort(found, allow)
    if problems:
        raise UserError(problems)
    work = _work(checkpoint, recipe, choices, pieces)
    shards = tuple(_shard(checkpoint, name, work) for name in checkpoint.shards)
    config, disagreements = config_text(checkpoint, recipe, choices, pieces)
    problems, unclear = _sort(disagreements, allow)
    if problems:
        raise UserError(problems)
    plan = _plan(checkpoint, recipe, shards, config, include)
    return Quantized(plan, (*warnings, *allowed, *unclear))


# What stands in the way of any sensible result cannot be passed over.
_FIRM = frozenset(
    {"config.missing", "plan.divide", "plan.tie", "plan.existing", "plan.experts-3d", "recipe.target-unmatched"}
)


def _sort(findings: Iterable[Finding], allow: Collection[str]) -> tuple[list[Finding], list[Finding]]:
    """Findings that stop the run, and those that ``allow`` makes warnings."""
    stop: list[Finding] = []
    passed: list[Finding] = []
    for finding in findings:
        if finding.severity == "warning" or (finding.id in allow and finding.id not in _FIRM):
            passed.append(finding.as_warning())
        elif finding.id in _FIRM:
            stop.append(finding)
        else:
            stop.append(replace(finding, hint=f"{finding.hint}; or pass it over with --allow {finding.id}"))
    return stop, passed


def _source_problems(checkpoint: Checkpoint) -> Iterator[Finding]:
    yield from checkpoint.warnings
    if checkpoint.config is None:
        message = f"{checkpoint.source.uri} has no {CONFIG}: what is quantized could not be declared anywhere"
        yield Finding("config.missing", message, file=CONFIG, hint="give the folder that holds config.json")


def _refusals(
    checkpoint: Checkpoint, recipe: Recipe, choices: Mapping[str, Choice], pieces: Mapping[str, list[Slice]]
) -> Iterator[Finding]:
    quantized = existing.quantized_modules(checkpoint)
    yield from refusals.ties(recipe, choices, tied_head(checkpoint))
    yield from existing.refusals(recipe, checkpoint, choices.values(), quantized)
    yield from refusals.fused_differ(recipe.groups, choices, quantized)
    yield from refusals.incomplete_layers(choices, checkpoint.tensors)
    yield from refusals.head_blocks(choices.values())
    yield from refusals.indivisible(choices, pieces)


# --- steps -------------------------------------------------------------------------------------------------


class Work(NamedTuple):
    """What happens to the tensors of the source: steps by the tensor they replace, steps by the shard they join."""

    replaced: Mapping[str, list[Step]]
    added: Mapping[str, list[Step]]
    rules: Mapping[str, str]


class _Job(NamedTuple):
    """A slice to be quantized by a group; ``home`` is the tensor it replaces, or None if its step is added."""

    piece: Slice
    group: Group
    home: str | None


def _work(
    checkpoint: Checkpoint, recipe: Recipe, choices: Mapping[str, Choice], pieces: Mapping[str, list[Slice]]
) -> Work:
    replaced: dict[str, list[Step]] = {}
    added: dict[str, list[Step]] = defaultdict(list)
    sets: dict[str, dict[str, list[_Job]]] = defaultdict(lambda: defaultdict(list))
    operation_for = _chooser(recipe)
    for choice in choices.values():
        if choice.group is not None:
            home = None if choice.from_embedding else choice.ref.name
            for piece in pieces[choice.module]:
                job = _Job(piece, choice.group, home)
                sets[_set_key(job)][choice.ref.file].append(job)
            replaced |= {} if home is None else {home: [], **bias_steps(choice, checkpoint)}
        elif choice.from_embedding and recipe.tie == "untie":
            added[choice.ref.file].append(copy_step(choice.ref, "tie: untie", f"{choice.module}.weight"))
    for by_file in sets.values():
        for file, jobs in by_file.items():
            partners = [job.piece for other, theirs in by_file.items() if other != file for job in theirs]
            home = jobs[0].home
            (added[file] if home is None else replaced[home]).append(_quantize_step(jobs, partners, operation_for))
    rules = {choice.ref.name: choice.rule for choice in choices.values() if not choice.from_embedding}
    return Work(replaced, added, rules)


def _set_key(job: _Job) -> str:
    """Weights with the same key share a global scale; where there is none, each weight is its own set."""
    fused = fused_set(job.piece.module)
    if (
        fused is not None
        and job.group.scheme.weights.strategy == "tensor_group"
        and shares_global_scale(job.piece.module)
    ):
        return fused[0]
    return job.piece.module


Chooser = Callable[[str, str], tuple[str, dict[str, Any]]]


def _chooser(recipe: Recipe) -> Chooser:
    """A function from a group's name and a weight's dtype to the operation and its arguments."""
    schemes = {group.name: group.scheme for group in recipe.groups}

    @cache
    def choose(group: str, dtype: str) -> tuple[str, dict[str, Any]]:
        scheme = schemes[group]
        return select_operation(scheme.weights.model_dump(mode="json"), scheme.format, dtype, recipe.arithmetic)

    return choose


def _quantize_step(jobs: list[_Job], partners: list[Slice], operation_for: Chooser) -> Step:
    """One step for slices of one file; ``partners``, of other files, are read for their maximum only."""
    group = jobs[0].group
    pieces = [*(job.piece for job in jobs), *partners]
    op, chosen = operation_for(group.name, pieces[0].ref.dtype)
    args = {"modules": [job.piece.module for job in jobs], **chosen}
    if any(piece.columns for piece in pieces):
        args["columns"] = [piece.columns for piece in pieces]
    refs = tuple(piece.ref for piece in pieces)
    outputs = operation(op).specs([ref.spec for ref in refs], args)
    return Step(op, refs, tuple(outputs), f"groups.{group.name}", args)


def _shard(checkpoint: Checkpoint, name: str, work: Work) -> Shard:
    steps: list[Step] = []
    changed = name in work.added
    for ref in checkpoint.shard_tensors(name):
        instead = work.replaced.get(ref.name)
        changed |= instead is not None
        steps += (copy_step(ref, _copy_rule(ref, work.rules)),) if instead is None else instead
    steps += work.added.get(name, ())
    return Shard(name, name, checkpoint.shards[name].metadata, tuple(steps), linked=not changed)


def _copy_rule(ref: Ref, rules: Mapping[str, str]) -> str:
    return rules.get(ref.name) or "not a weight matrix"


# --- beside the shards -------------------------------------------------------------------------------------


def _plan(
    checkpoint: Checkpoint, recipe: Recipe, shards: tuple[Shard, ...], config: str, include: Iterable[str]
) -> Plan:
    texts = {CONFIG: config}
    if checkpoint.index is not None or len(shards) > 1:
        file = checkpoint.index.file if checkpoint.index else INDEX
        texts[file] = index_text(shards, checkpoint.index.metadata if checkpoint.index else {})
    stale: dict[str, str] = {}
    if recipe.existing == "replace":
        stale = dict.fromkeys(existing.DECLARATIONS, "declares a quantization that the result does not have")
    kept, left_out = sidecars(checkpoint, texts, stale, include)
    settings = {"recipe": recipe.as_dict(), "nonfinite": recipe.nonfinite}
    return Plan("quantize", shards, kept, left_out, settings=settings)


def config_text(
    checkpoint: Checkpoint, recipe: Recipe, choices: Mapping[str, Choice], pieces: Mapping[str, list[Slice]]
) -> tuple[str, list[Finding]]:
    """config.json as it will be written, and where a consumer would misread it."""
    present = existing.existing_config(checkpoint)
    merged = present.table if present is not None and recipe.existing == "merge" else None
    names = quant_config.group_names([group.name for group in recipe.groups], merged)
    modules = list(_modules(checkpoint, choices, pieces, names, merged))
    schemes = {names[group.name]: group.scheme for group in recipe.groups}
    table = quant_config.build(modules, schemes, merged)
    config = json.loads(json.dumps(checkpoint.config))
    path: tuple[str, ...] = ("quantization_config",)
    if present is not None:
        _put(config, present.path, table if merged else None)
        path = present.path if merged else path
    _put(config, path, table)
    if recipe.tie == "untie" and tied_head(checkpoint) is not None:
        for location in tie_locations(config):
            _put(config, location, False)
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    return text, list(quant_config.disagreements(table, modules))


def _put(table: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Set (or, for None, remove) the value at ``path``, keeping the order of the keys that are there."""
    *parents, last = path
    for key in parents:
        table = table.setdefault(key, {})
    if value is None:
        table.pop(last, None)
    else:
        table[last] = value


def _modules(
    checkpoint: Checkpoint,
    choices: Mapping[str, Choice],
    pieces: Mapping[str, list[Slice]],
    names: Mapping[str, str],
    merged: Mapping[str, Any] | None,
) -> Iterator[quant_config.Module]:
    """Every matrix of the result, with the group of the written config that it belongs to."""
    whole_experts: set[str] = set()
    for choice in choices.values():
        group = None if choice.group is None else names[choice.group.name]
        if choice.is_experts and choice.group is not None:
            yield from (quant_config.Module(piece.module, Kind.LINEAR, group) for piece in pieces[choice.module])
        else:
            yield quant_config.Module(choice.module, choice.kind, group)
            if choice.is_experts:
                whole_experts.add(choice.module.rpartition(".")[0])
    yield from (quant_config.Module(module, Kind.OTHER, None) for module in sorted(whole_experts))
    if merged is not None:
        config = declared(merged)
        for module in existing.quantized_modules(checkpoint):
            yield quant_config.Module(module, Kind.LINEAR, by_compressed_tensors(config, module))


def index_text(shards: Iterable[Shard], metadata: Mapping[str, Any]) -> str:
    """An index file: sorted weight_map, ``total_size`` of what is written, other metadata as it was."""
    shards = list(shards)
    weight_map = {spec.name: shard.name for shard in shards for step in shard.steps for spec in step.outputs}
    total = sum(shard.nbytes for shard in shards)
    table = {"metadata": {**metadata, "total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(table, indent=2, ensure_ascii=False) + "\n"
