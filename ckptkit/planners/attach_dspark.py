"""``attach-dspark``: a DSpark draft in a target, in the place of what was there; or every reason why not, at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..drafts.completeness import check, is_vendor_extra, stored_form
from ..drafts.configs import configs
from ..drafts.declaration import untrue
from ..drafts.fingerprint import mismatch, unrecorded
from ..drafts.fitting import misfits, with_draft
from ..drafts.identify import Kind, Layout, identify
from ..drafts.layouts import split_stage
from ..drafts.tables import Form, dspark, form_of
from ..errors import Finding, UserError, fail
from ..files.checkpoint import CONFIG, INDEX, Checkpoint
from ..files.header import Header
from ..plan import COPY, LeftOut, Plan, Ref, Shard, Step, copy_step
from .documents import json_text
from .draft_source import Found, raise_errors
from .draft_steps import Comparison, Original, comparisons, converted
from .packing import renumbered, stem
from .sidecars import index_text, sidecars

COMMAND = "attach-dspark"
FOLDER = "dspark"
_OWN = "the target's own"


class Wanted(NamedTuple):
    """``requantize``: ``like-base``, or ``none`` to take the draft as it is stored; ``into``: ``tensors``, ``subfolder``."""

    requantize: str = "like-base"
    into: str = "tensors"


class Given(NamedTuple):
    """A target, and a draft whose tensors lie where the plan's source has them; ``shards``: the draft's files there.

    ``own`` is the DSpark draft that the target has (empty without one), ``form`` how that is stored, or would be.
    """

    target: Checkpoint
    draft: Found
    shards: Mapping[str, Header]
    own: Mapping[str, Ref]
    form: Form


class Attached(NamedTuple):
    """A plan, and what a reader should know."""

    plan: Plan
    warnings: tuple[Finding, ...]


def given(target: Checkpoint, draft: Found, shards: Mapping[str, Header]) -> Given:
    """What is known of the two before a tensor is read. Raises UserError (``config.*``) for a target without a config."""
    config = target.config
    if config is None:
        message = f"{target.source.uri} has no {CONFIG}"
        raise UserError(Finding("config.missing", message, file=CONFIG, hint="give the folder that holds config.json"))
    own = identify(target.tensors, config)
    if own.kind is not Kind.NONE and not any(name.startswith("layers.") for name in own.others):
        raise no_target(target)
    has_draft = own.kind in (Kind.DSPARK_V4, Kind.DSPARK_V41)
    form = stored_form(own.tensors, form_of(config)) if has_draft else form_of(config)
    return Given(target, draft, shards, own.tensors if has_draft else {}, form)


def no_target(target: Checkpoint) -> UserError:
    """To be raised for a TARGET that is a draft by itself."""
    message = f"{target.source.uri} is a draft by itself: it has no layer of a target"
    hint = "give the model first and the draft second; ckptkit extract-dspark brings a draft into another layout"
    return fail("attach.target", message, file=target.source.uri, hint=hint)


def refuse(
    both: Given,
    wanted: Wanted,
    cut_from: Mapping[str, str],
    fingerprint: Callable[[], Mapping[str, str]],
    allow: Collection[str] = (),
) -> list[Finding]:
    """Raise UserError with all that is wrong with the draft, or keeps it out of the target; gives the warnings.

    ``cut_from`` is the fingerprint of the target that the draft was cut from, ``fingerprint`` takes that of this one.
    """
    config, found = both.target.config or {}, both.draft
    problems = [*found.findings, *misfits(found.draft, found.config, config), *mismatch(cut_from, fingerprint)]
    problems += [*unrecorded(cut_from), *_forms(both, wanted)]
    warnings = raise_errors(problems, allow)
    table = dspark(with_draft(config, found.config, found.draft.stages), found.draft.stages, found.form)
    raise_errors((item for item in check(found.draft, table) if item.severity == "error"), allow)
    return warnings


def compared(both: Given, wanted: Wanted) -> Iterator[Comparison]:
    """What to compare, to know which tensors of the draft are still those that the target has."""
    if wanted.requantize == "none":
        return
    tensors = both.draft.draft.tensors
    yield from comparisons(tensors, both.own, both.form.block)
    for name, ref in tensors.items():
        theirs = both.own.get(name)
        if theirs and (theirs.dtype, theirs.shape) == (ref.dtype, ref.shape):
            yield Comparison(name, copy_step(theirs, "compare", name), (ref,))


def plan_attach(
    both: Given, wanted: Wanted, same: Collection[str], warnings: Iterable[Finding] = (), include: Iterable[str] = ()
) -> Attached:
    """The plan that puts the draft into the target. ``same`` are names whose comparison held."""
    found = both.draft
    as_it_is, stages = wanted.requantize == "none", found.draft.stages
    form, original = (found.form, None) if as_it_is else (both.form, _original(both, same))
    config = with_draft(both.target.config or {}, found.config, stages)
    steps = list(converted(found.draft.tensors, dspark(config, stages, form), form, original))
    place = _into_tensors if wanted.into == "tensors" else _into_folder
    shards, texts, stale = place(both, steps, config, form)
    index = [both.target.index.file] if both.target.index else []  # where it is not written anew, it is still true
    files, left_out = sidecars(both.target, texts, stale, [*include, *index])
    made = {spec.name for step in steps for spec in step.outputs}
    gone = [name for name in both.target.tensors if wanted.into == "tensors" and _is_old(name) and name not in made]
    dropped = tuple(LeftOut(name, "not of the draft that is attached") for name in gone)
    settings = {**wanted._asdict(), "draft": {"stages": stages, "experts": form.experts, "linears": form.linears}}
    plan = Plan(COMMAND, tuple(shards), files, left_out, dropped, settings=settings)
    return Attached(plan, (*both.target.warnings, *warnings))


def _forms(both: Given, wanted: Wanted) -> Iterator[Finding]:
    """``attach.form`` where the result would have two formats of experts, or one would be rounded a second time."""
    mine, theirs = both.draft.form, both.form
    said = untrue(both.target.config or {}, both.draft.draft.stages, theirs) if wanted.into == "tensors" else ""
    if said and wanted.requantize != "none":
        message = f"{CONFIG} of the target: {said}; engines would read the draft by it"
        yield Finding("attach.form", message, file=CONFIG, hint="--into subfolder, where the draft has its own config")
    if mine[:2] == theirs[:2]:
        return
    if wanted.requantize == "none" and wanted.into == "tensors":
        message = (
            f"--requantize none: the draft's experts are {mine.experts}, the target's {theirs.experts},"
            " and SGLang takes one format of experts in a folder"
        )
        yield Finding("attach.form", message, hint="--requantize like-base, or --into subfolder")
    elif wanted.requantize != "none" and (mine.experts, theirs.experts) == ("fp8", "fp4"):
        message = "the draft's experts are FP8, the target's FP4: that would round them a second time"
        yield Finding("attach.form", message, hint="attach the draft as it was trained, in BF16")


def _scale(name: str) -> str:
    return f"{name.removesuffix('weight')}scale" if name.endswith(".weight") else ""


def _original(both: Given, same: Collection[str]) -> Original:
    """The target's own draft, and what is the same in both: of what lies in two tensors on both sides, both."""
    mine = both.draft.draft.tensors
    kept = {name for name in same if _scale(name) not in mine or _scale(name) in same}
    return Original(both.own, kept)


def _is_old(name: str) -> bool:
    """Whether a target's tensor goes when a draft comes: all below ``mtp.``, a NextN layer too, but a vendor's copies."""
    return split_stage(name) is not None and not is_vendor_extra(name)


# --- among the target's tensors ----------------------------------------------------------------------------

Placed = tuple[list[Shard], dict[str, str], dict[str, str]]


def _into_tensors(both: Given, steps: Sequence[Step], config: Mapping[str, Any], form: Form) -> Placed:
    """Stages that the target has all tensors of stay in its files; others come in a file each, behind the target's."""
    target = both.target
    there = target.tensors.keys()
    new = {stage: mine for stage, mine in _by_stage(steps).items() if not there >= {s.outputs[0].name for s in mine}}
    kept = list(_kept(target, [step for step in steps if _stage(step) not in new]))
    shards = [*kept, *_added(new, both.shards)]
    if new or len(kept) < len(target.shards):
        shards = list(renumbered(shards, stem(target)))
    metadata = dict(target.index.metadata) if target.index else {}
    metadata.pop("total_parameters", None)
    file = target.index.file if target.index else INDEX
    return shards, {CONFIG: _text(config), file: index_text(shards, metadata)}, {}


def _by_stage(steps: Iterable[Step]) -> dict[int, list[Step]]:
    stages: dict[int, list[Step]] = defaultdict(list)
    for step in steps:
        stages[_stage(step)].append(step)
    return stages


def _stage(step: Step) -> int:
    found = split_stage(step.outputs[0].name)
    assert found is not None
    return found[0]


def _kept(target: Checkpoint, steps: Iterable[Step]) -> Iterator[Shard]:
    """The target's shards without its draft, and with ``steps`` where it had tensors of their first outputs' names."""
    by_name = {step.outputs[0].name: step for step in steps}
    for name, header in target.shards.items():
        refs = target.shard_tensors(name)
        left = [
            by_name.get(ref.name) or copy_step(ref, _OWN)
            for ref in refs
            if ref.name in by_name or not _is_old(ref.name)
        ]
        if left:
            linked = len(left) == len(header.entries) and all(_is_at(step, name) for step in left)
            yield Shard(name, name, header.metadata, tuple(left), linked)


def _is_at(step: Step, file: str) -> bool:
    """Whether a step copies what lies in ``file``, under the same name."""
    return step.op == COPY and step.inputs[0].file == file and step.inputs[0].name == step.outputs[0].name


def _added(stages: Mapping[int, Sequence[Step]], files: Mapping[str, Header]) -> Iterator[Shard]:
    """A file for each stage: the draft's own where that holds nothing else, as it is. Names are to be given yet."""
    for stage, steps in sorted(stages.items()):
        source = steps[0].inputs[0].file
        header = files.get(source)
        linked = header is not None and len(steps) == len(header.entries) and all(_is_at(s, source) for s in steps)
        metadata = header.metadata if header and linked else {"format": "pt"}
        yield Shard(str(stage), source, metadata, tuple(steps), linked)


def _text(config: Mapping[str, Any]) -> str:
    return json_text(config)


# --- beside the target's tensors ---------------------------------------------------------------------------


def _into_folder(both: Given, steps: Sequence[Step], config: Mapping[str, Any], form: Form) -> Placed:
    """The target as it is, and the draft by itself in a folder that SGLang looks for."""
    target, found = both.target, both.draft
    shards = list(renumbered(list(_added(_by_stage(steps), {**target.shards, **both.shards})), "model"))
    has_confidence = any(".confidence_head." in name for name in found.draft.tensors)
    written = configs(config, Layout.SERVING, found.draft.stages, form, has_confidence)
    texts = {f"{FOLDER}/{name}": _text(content) for name, content in written.items()}
    texts[f"{FOLDER}/{INDEX}"] = index_text(shards, {})
    stale = {name: "the draft that was there" for name in target.source.files if name.startswith(f"{FOLDER}/")}
    below = [replace(shard, name=f"{FOLDER}/{shard.name}") for shard in shards]
    return [*target_as_it_is(target), *below], texts, stale


def target_as_it_is(target: Checkpoint) -> Iterator[Shard]:
    """The target's shards, each the file it was."""
    for name, header in target.shards.items():
        steps = tuple(copy_step(ref, _OWN) for ref in target.shard_tensors(name))
        yield Shard(name, name, header.metadata, steps, True)
