"""``attach-dspark`` for dense drafts: beside the target, in the folder where SGLang looks for one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from ..drafts.dense import Dense, find
from ..drafts.dense_config import fields_of, layers_config
from ..drafts.fingerprint import recorded, unrecorded
from ..drafts.fitting import dense_misfits
from ..errors import Finding
from ..files.checkpoint import Checkpoint
from ..plan import Plan, Shard, Step
from .attach_dspark import COMMAND, FOLDER, Attached, Wanted, no_target, target_as_it_is
from .draft_source import raise_errors
from .extract_dense import plan_dense
from .extract_dspark import Wanted as Layout
from .sidecars import sidecars


def plan_attach_dense(
    target: Checkpoint,
    draft: Checkpoint,
    found: Dense,
    wanted: Wanted,
    key: str,
    mismatches: Iterable[Finding] = (),
    include: Iterable[str] = (),
    allow: Collection[str] = (),
) -> Attached:
    """The plan that puts ``draft`` (its files called ``<key>:<name>``) into :data:`FOLDER`, as engines load it.

    Raises UserError: what extracting it raises, ``attach.*``, ``mismatches`` unless they are allowed.
    """
    own = find(target.tensors)
    if own is not None and not own.family.inside:
        raise no_target(target)
    made = plan_dense(draft, found, Layout(), target=recorded(draft.config), allow=allow)
    problems = [*_problems(target, draft, wanted), *mismatches, *unrecorded(recorded(draft.config))]
    warnings = raise_errors(problems, allow)
    beside = [_below(shard, key) for shard in made.plan.shards]
    texts = {f"{FOLDER}/{item.name}": item.text for item in made.plan.sidecars if item.text is not None}
    stale = {name: "the draft that was there" for name in target.source.files if name.startswith(f"{FOLDER}/")}
    index = [target.index.file] if target.index else []
    files, left_out = sidecars(target, texts, stale, [*include, *index])
    settings = {**wanted._asdict(), "draft": made.plan.settings["draft"]}
    plan = Plan(COMMAND, (*target_as_it_is(target), *beside), files, left_out, made.plan.dropped, settings)
    return Attached(plan, (*target.warnings, *made.warnings, *warnings))


def _problems(target: Checkpoint, draft: Checkpoint, wanted: Wanted) -> Iterator[Finding]:
    if wanted.into != "subfolder":
        message = "this draft has no place among a target's tensors: its layers have names that the target's have too"
        yield Finding("attach.family", message, hint="--into subfolder")
    config: Mapping[str, object] = draft.config or {}
    yield from dense_misfits(fields_of(config), layers_config(config), target.config or {})


def _below(shard: Shard, key: str) -> Shard:
    """The shard in the folder, its tensors read where the joined source has them."""
    steps = tuple(_moved(step, key) for step in shard.steps)
    return replace(shard, name=f"{FOLDER}/{shard.name}", source=f"{key}:{shard.source}", steps=steps)


def _moved(step: Step, key: str) -> Step:
    return step._replace(inputs=tuple(ref._replace(file=f"{key}:{ref.file}") for ref in step.inputs))
