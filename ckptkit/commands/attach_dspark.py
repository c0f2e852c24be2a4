"""``ckptkit attach-dspark``."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from shlex import quote

import click

from ..console import Console, fmt_count
from ..drafts.dense import find as find_dense
from ..drafts.fingerprint import fingerprint, mismatch, recorded
from ..drafts.identify import holds_v4
from ..drafts.keeping import nan_in_copies, same_values
from ..drafts.layouts import split_stage
from ..errors import fail
from ..execute import preflight
from ..files.checkpoint import Checkpoint, joined, open_checkpoint
from ..files.source import open_source
from ..files.torch_file import open_draft
from ..options import command
from ..planners.attach_dense import plan_attach_dense
from ..planners.attach_dspark import Attached, Wanted, compared, given, plan_attach, refuse
from ..planners.draft_source import asked_for, find_draft, raise_errors
from .extract_dspark import open_carrier, require_room, target_of
from .making import How, make, make_options, output_problems_too

_DRAFT = "draft"


@command
@click.argument("target")
@click.argument("draft")
@click.argument("out", required=False)
@click.option(
    "--requantize",
    type=click.Choice(["like-base", "none"]),
    default="like-base",
    help="none: take the draft as it is stored (default: like-base).",
)
@click.option(
    "--into",
    type=click.Choice(["tensors", "subfolder"]),
    default="tensors",
    help="subfolder: as a checkpoint in dspark/ (default: tensors).",
)
@make_options
def attach_dspark(
    console: Console, target: str, draft: str, out: str | None, requantize: str, into: str, how: How
) -> None:
    """Put a DSpark draft into a DeepSeek-V4 target, in the place of the one it has or of none.

    TARGET is not changed: OUT is its copy with the draft in it, files that do not change linked. DRAFT may be in any
    layout of extract-dspark, a trainer's checkpoint, or another target that holds a draft. What was trained in BF16 is
    quantized as TARGET's own draft is, or as its config says; a tensor whose values are still those that TARGET has keeps
    TARGET's bytes. A fine-tuned checkpoint that lost its draft, and whose config still declares one, is repaired with the
    draft of the original.

    A stand-alone draft of another family (Qwen3, Gemma, Ling, LFM2) goes into dspark/ of its target, as engines load it.

    A draft is refused that does not fit, and one that was cut from another target of the same shape: extract-dspark
    records which. --allow target-mismatch passes that over.

    \b
    Examples:
      ckptkit attach-dspark ./DeepSeek-V4-Flash-DSpark ./trained-draft ./with-draft --link hard
      ckptkit attach-dspark ./V4-Flash-finetuned ./DeepSeek-V4-Flash-DSpark ./repaired --allow target-mismatch
      ckptkit attach-dspark ./target ./draft-bf16 ./out --into subfolder --requantize none
    """
    wanted = Wanted(requantize, into)
    if out is None and not how.dry_run:
        hint = f"ckptkit attach-dspark {quote(target)} {quote(draft)} OUT"
        raise fail("usage.arguments", "OUT is missing", hint=hint)
    with ExitStack() as stack:
        source, other = stack.enter_context(open_source(target)), stack.enter_context(open_carrier(draft))
        with output_problems_too(source, out, how.options):
            first, second = open_checkpoint(source), open_draft(other)
            joint = joined(first, {_DRAFT: second})
            attached = _planned(console, joint, first, second, wanted, how, out)
        make(console, joint, attached.plan, Path(out) if out else None, how, attached.warnings)


def _planned(
    console: Console,
    joint: Checkpoint,
    target: Checkpoint,
    draft: Checkpoint,
    wanted: Wanted,
    how: How,
    out: str | None,
) -> Attached:
    """``joint`` is both as the plan reads them: the draft's files have a key before their names."""
    dense = None if holds_v4(draft.tensors) else find_dense(draft.tensors)
    if dense is not None:
        other = list(mismatch(recorded(draft.config), lambda: fingerprint(target)))
        return plan_attach_dense(target, draft, dense, wanted, _DRAFT, other, how.include, how.allow)
    with asked_for("DRAFT"):
        found = find_draft(draft, target.config)
    tensors = {name: ref._replace(file=f"{_DRAFT}:{ref.file}") for name, ref in found.draft.tensors.items()}
    found = found._replace(draft=found.draft._replace(tensors=tensors))
    both = given(target, found, joint.others[_DRAFT].shards)
    warnings = refuse(both, wanted, target_of(draft, found), lambda: fingerprint(target), how.allow)
    if out is not None:
        require_room(preflight(None, joint.source, Path(out), how.options), how)
    comparisons = list(compared(both, wanted))
    if comparisons:
        console.note(f"comparing {fmt_count(len(comparisons), 'tensor')} with those of {target.source.uri}")
    same = same_values(comparisons, joint.source, how.options.jobs)
    made = plan_attach(both, wanted, same, warnings, how.include)
    steps = [step for step in made.plan.steps() if split_stage(step.outputs[0].name)]
    holding = raise_errors(nan_in_copies(steps, joint.source, how.options.jobs), how.allow)
    return made._replace(warnings=(*made.warnings, *holding))
