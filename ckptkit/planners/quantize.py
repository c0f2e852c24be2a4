"""``quantize``: a checkpoint and a recipe in, a plan out; or every reason why not, at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

from ..declarations import DECLARATIONS
from ..errors import Finding
from ..families import fused_set, shares_global_scale
from ..files.checkpoint import CONFIG, Checkpoint
from ..files.header import Spec
from ..ops import operation
from ..ops.select import select as select_operation
from ..plan import Plan, Shard, Step, copy_step
from ..recipe.recipe import Group, Recipe
from . import existing, reach, refusals
from .allowing import passed_over
from .config_json import config_text
from .documents import no_config
from .experts import Slice, bias_steps, cut
from .selection import Choice, select, tied_head
from .sidecars import sidecars, with_index


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
    warnings = passed_over(_source_problems(checkpoint), allow, _FIRM.__contains__)
    choices = select(checkpoint, recipe)
    pieces, misfits = cut(choices, checkpoint.config)
    found = chain(misfits, _refusals(checkpoint, recipe, choices, pieces))
    warnings += passed_over(found, allow, _FIRM.__contains__)
    work = _work(checkpoint, recipe, choices, pieces)
    shards = tuple(_shard(checkpoint, name, work) for name in checkpoint.shards)
    config, disagreements = config_text(checkpoint, recipe, choices, pieces)
    warnings += passed_over(disagreements, allow, _FIRM.__contains__)
    return Quantized(_plan(checkpoint, recipe, shards, config, include), tuple(warnings))


# What stands in the way of any sensible result cannot be passed over.
_FIRM = frozenset(
    {"config.missing", "plan.divide", "plan.tie", "plan.existing", "plan.experts-3d", "recipe.target-unmatched"}
)


def _source_problems(checkpoint: Checkpoint) -> Iterator[Finding]:
    yield from checkpoint.warnings
    if checkpoint.config is None:
        yield no_config(checkpoint, "what is quantized")


def _refusals(
    checkpoint: Checkpoint, recipe: Recipe, choices: Sequence[Choice], pieces: Mapping[str, list[Slice]]
) -> Iterator[Finding]:
    quantized = existing.quantized_modules(checkpoint)
    yield from reach.overreach(recipe, choices, checkpoint)
    yield from reach.unmatched(recipe, choices, checkpoint)
    yield from reach.experts_left(recipe, choices)
    yield from refusals.ties(recipe, choices, tied_head(checkpoint))
    yield from existing.refusals(recipe, checkpoint, choices, quantized)
    yield from refusals.fused_differ(recipe.groups, choices, quantized)
    yield from refusals.incomplete_layers(choices, checkpoint.tensors)
    yield from refusals.head_blocks(choices)
    yield from refusals.indivisible(choices, pieces)


# --- steps -------------------------------------------------------------------------------------------------


class Work(NamedTuple):
    """What happens to the tensors of the source: steps by the tensor they replace, steps by the shard they join.

    ``rules`` says by tensor why it is copied.
    """

    replaced: dict[str, list[Step]]
    added: dict[str, list[Step]]
    rules: dict[str, str]


class _Job(NamedTuple):
    """A slice to be quantized by a group, and the steps that its own is to join."""

    piece: Slice
    group: Group
    steps: list[Step]


def _work(checkpoint: Checkpoint, recipe: Recipe, choices: Sequence[Choice], pieces: Mapping[str, list[Slice]]) -> Work:
    work = Work({}, defaultdict(list), {})
    sets: dict[str, dict[str, list[_Job]]] = defaultdict(lambda: defaultdict(list))
    quantizing = _quantizing(recipe)
    for choice in choices:
        if choice.group is None:
            _leave(choice, recipe, work)
            continue
        for module, ref in choice.modules.items():
            steps = work.added[ref.file] if choice.alike.from_embedding else work.replaced.setdefault(ref.name, [])
            for piece in pieces[module]:
                job = _Job(piece, choice.group, steps)
                shared = _shared_scale(job)
                if shared is None:
                    steps.append(quantizing([job], []))
                else:
                    sets[shared][ref.file].append(job)
            if choice.is_experts:
                work.replaced.update(bias_steps(module, choice, checkpoint))
    for by_file in sets.values():
        for file, jobs in by_file.items():
            partners = [job.piece for other, theirs in by_file.items() if other != file for job in theirs]
            jobs[0].steps.append(quantizing(jobs, partners))
    return work


def _leave(choice: Choice, recipe: Recipe, work: Work) -> None:
    if not choice.alike.from_embedding:
        work.rules.update(dict.fromkeys(choice.weights(), choice.rule))
    elif recipe.tie == "untie":
        module, ref = choice.first
        work.added[ref.file].append(copy_step(ref, "tie: untie", f"{module}.weight"))


def _shared_scale(job: _Job) -> str | None:
    """The layer all of whose weights have one global scale with this one; None where each has its own, or there is none."""
    if job.group.scheme.weights.strategy != "tensor_group" or not shares_global_scale(job.piece.module):
        return None
    fused = fused_set(job.piece.module)
    return fused and fused[0]


def _quantizing(recipe: Recipe) -> Callable[[list[_Job], list[Slice]], Step]:
    """A function from the jobs of one file, and the slices of other files that share their scale, to the jobs' step.

    Those slices are read for their maximum only.
    """
    schemes = {group.name: group.scheme for group in recipe.groups}

    @cache
    def chosen(group: str, dtype: str) -> tuple[str, dict[str, Any]]:
        scheme = schemes[group]
        return select_operation(scheme.weights.model_dump(mode="json"), scheme.format, dtype, recipe.arithmetic)

    @cache
    def made(group: str, dtype: str, shape: tuple[int, ...]) -> list[Spec]:
        """What stands for such a weight. Names are a module's and a suffix: here the suffix alone."""
        op, args = chosen(group, dtype)
        return operation(op).specs([Spec("", dtype, shape)], {"modules": [""], **args})

    def step(jobs: list[_Job], partners: list[Slice]) -> Step:
        group, mine = jobs[0].group.name, [job.piece for job in jobs]
        pieces = mine + partners
        op, args = chosen(group, mine[0].ref.dtype)
        args = {"modules": [piece.module for piece in mine], **args}
        columns = [piece.columns for piece in pieces]
        if any(columns):
            args["columns"] = columns
        outputs = [
            Spec(piece.module + suffix, dtype, shape)
            for piece in mine
            for suffix, dtype, shape in made(group, piece.ref.dtype, piece.shape)
        ]
        return Step(op, tuple([piece.ref for piece in pieces]), tuple(outputs), f"groups.{group}", args)

    return step


def _shard(checkpoint: Checkpoint, name: str, work: Work) -> Shard:
    replaced, rules = work.replaced, work.rules
    steps: list[Step] = []
    changed = name in work.added
    for ref in checkpoint.shard_tensors(name):
        if ref.name in replaced:
            changed = True
            steps += replaced[ref.name]
        else:
            steps.append(copy_step(ref, rules.get(ref.name, "not a weight matrix")))
    steps += work.added.get(name, ())
    return Shard(name, name, checkpoint.shards[name].metadata, tuple(steps), linked=not changed)


# --- beside the shards -------------------------------------------------------------------------------------


def _plan(
    checkpoint: Checkpoint, recipe: Recipe, shards: tuple[Shard, ...], config: str, include: Iterable[str]
) -> Plan:
    replaced = DECLARATIONS if recipe.existing == "replace" else ()
    untrue = dict.fromkeys(replaced, "declares a quantization that the result does not have")
    texts, stale = with_index(checkpoint, shards, {CONFIG: config}, untrue)
    kept, left_out = sidecars(checkpoint, texts, stale, include)
    settings = {"recipe": recipe.as_dict(), "nonfinite": recipe.nonfinite}
    return Plan("quantize", shards, kept, left_out, settings=settings)
