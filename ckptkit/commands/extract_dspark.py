"""``ckptkit extract-dspark``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click

from ..console import Console, Table, fmt_count
from ..drafts.dense import find as find_dense
from ..drafts.fingerprint import fingerprint, mismatch, recorded
from ..drafts.identify import Fact, Layout, holds_v4
from ..drafts.keeping import nan_in_copies, same_values
from ..errors import Finding, UserError, fail
from ..exactness import inexact
from ..execute import preflight
from ..files.checkpoint import CONFIG, Checkpoint, joined, open_checkpoint
from ..files.source import Source, open_source, short_name
from ..files.torch_file import STATE, is_training_state, open_training_state
from ..options import command
from ..plan import COPY, Plan
from ..planners.draft_source import Found, asked_for, find_draft, raise_errors
from ..planners.draft_steps import Original, comparisons
from ..planners.extract_dense import plan_dense
from ..planners.extract_dspark import Extracted, Wanted, other_original, plan_extract
from .making import How, make, make_options, output_problems_too

_BASE = "base"
_FOLDER = "dspark"  # where SGLang looks for a draft beside its target
_EXAMPLE = "ckptkit extract-dspark ./DeepSeek-V4-Flash-DSpark ./draft"


@command
@click.argument("src", required=False)
@click.argument("out", required=False)
@click.option(
    "--layout",
    type=click.Choice([str(layout) for layout in Layout]),
    default="serving",
    help="What to write (default: serving).",
)
@click.option("--dequantize", type=click.Choice(["bf16", "fp8"]), help="Make FP4 and FP8 BF16, or FP4 block FP8.")
@click.option("--stages", metavar="A-B", help="Take these stages only.")
@click.option("--embeddings", type=click.Choice(["none", "copy"]), default="none", help="copy: embedding and head too.")
@click.option("--base", metavar="ORIGINAL", help="What a trained draft was cut from: it gives formats back.")
@make_options
def extract_dspark(
    console: Console,
    src: str | None,
    out: str | None,
    layout: str,
    dequantize: str | None,
    stages: str | None,
    embeddings: str,
    base: str | None,
    how: How,
) -> None:
    """Cut a DSpark draft out of its target, or bring one into another layout.

    Every tensor that the draft must have is looked for first, with its dtype and shape: engines do not check. DeepSeek-V4's
    FP4 and FP8 are kept byte for byte unless --dequantize or --layout hf says otherwise.

    \b
    serving    official names: what SGLang and vLLM load as a draft
    specforge  the same tensors with a trainer's config
    hf         names and stacked experts as transformers has them, in BF16: for exchange, no engine loads it

    Stand-alone dense drafts (Qwen3, Gemma, Ling, LFM2) have one set of names: serving writes DeepSpec's config, specforge
    SpecForge's, hf speculators'. MiniMax-M3.1's draft is cut out under its own names.

    SRC may be a target, also one with a dspark folder, a draft in any layout, or a trainer's checkpoint
    (training_state.pt). It is the current folder if left out; OUT is ./<SRC>-dspark, or that beside SRC from within it.

    \b
    Examples:
      ckptkit extract-dspark ./DeepSeek-V4-Flash-DSpark ./draft
      ckptkit extract-dspark ./DeepSeek-V4-Flash-DSpark ./warm-start --layout specforge --dequantize bf16
      ckptkit extract-dspark ./trained ./draft --base ./DeepSeek-V4-Flash-DSpark
    """
    src = src or _here()
    target = Path(out or _beside(src))
    wanted = Wanted(Layout(layout), dequantize, _range(stages), embeddings == "copy")
    with ExitStack() as stack:
        source = stack.enter_context(open_carrier(src))
        with output_problems_too(source, str(target), how.options):
            made = _planned(source, stack.enter_context(open_source(base)) if base else None, wanted, how, target)
        plan = _settled(made.extracted.plan, target)
        make(console, made.checkpoint, plan, target, how, made.extracted.warnings, list(_told(plan.settings)))


def _here() -> str:
    """The current folder. Raises UserError (``usage.arguments``) if it is no checkpoint."""
    if not Path(CONFIG).is_file():
        raise fail("usage.arguments", f"SRC is missing, and there is no {CONFIG} here", hint=_EXAMPLE)
    return "."


def _beside(src: str) -> str:
    """``./<name>-dspark``; beside the source where that would lie in it."""
    source, here = Path(src).resolve(), Path.cwd()
    name = f"{short_name(src)}-dspark"
    return f"./{name}" if source not in (here, *here.parents) else os.path.relpath(source.parent / name)


def _range(stages: str | None) -> tuple[int, int] | None:
    """``0-2`` or ``1`` as the first and the last stage. Raises UserError (``usage.arguments``)."""
    if stages is None:
        return None
    found = re.fullmatch(r"(\d{1,2})(?:-(\d{1,2}))?", stages)
    if found is None:
        raise fail("usage.arguments", f"--stages {stages!r} is no stage, and no range of them", hint="--stages 0-2")
    return int(found[1]), int(found[2] or found[1])


def open_carrier(src: str) -> Source:
    """The source; a ``training_state.pt`` stands for its folder, a target for the draft in its ``dspark`` folder."""
    path = Path(src)
    if path.name == STATE and path.is_file():
        return open_source(str(path.parent))
    return open_source(str(path / _FOLDER) if (path / _FOLDER / CONFIG).is_file() else src)


class _Made(NamedTuple):
    checkpoint: Checkpoint
    extracted: Extracted


def _planned(source: Source, base: Source | None, wanted: Wanted, how: How, out: Path) -> _Made:
    checkpoint = open_training_state(source) if is_training_state(source) else open_checkpoint(source)
    dense = None if holds_v4(checkpoint.tensors) else find_dense(checkpoint.tensors)
    if dense is not None and base is not None:
        message = f"--base gives DeepSeek-V4's drafts their formats back; {dense.family.name} is written as it is"
        raise fail("extract.base", message, hint="leave out --base")
    if dense is not None:
        options: Any = {"include": how.include, "allow": how.allow}
        target = recorded(checkpoint.config) or (fingerprint(checkpoint) if dense.family.inside else {})
        return _Made(checkpoint, plan_dense(checkpoint, dense, wanted, target=target, **options))
    return _planned_v4(checkpoint, open_checkpoint(base) if base else None, wanted, how, out)


def _planned_v4(checkpoint: Checkpoint, base: Checkpoint | None, wanted: Wanted, how: How, out: Path) -> _Made:
    found, joint, original = find_draft(checkpoint, base.config if base else None), checkpoint, None
    target = target_of(checkpoint, found)
    if base is not None:
        with asked_for("--base"):
            joint, of_base = joined(checkpoint, {_BASE: base}), find_draft(base)
        now = target_of(base, of_base)
        found.findings.extend(mismatch(target, lambda: now))
        raise_errors([*found.findings, *of_base.findings, *other_original(found, of_base)], how.allow)
        require_room(preflight(None, joint.source, out, how.options), how)
        original = _original(found, of_base, joint.source, how)
        target = now or target
    extracted = plan_extract(checkpoint, found, wanted, original, target=target, include=how.include, allow=how.allow)
    rounded = inexact(extracted.plan, joint.source, how.options.jobs)
    if rounded:
        raise UserError(replace(finding, hint="--dequantize bf16 holds all") for finding in rounded)
    steps = list(extracted.plan.steps())
    is_read = base is not None or any(step.op != COPY for step in steps)
    holding = raise_errors(nan_in_copies(steps, joint.source, how.options.jobs) if is_read else (), how.allow)
    return _Made(joint, extracted._replace(warnings=(*extracted.warnings, *holding)))


def require_room(blocked: Sequence[Finding], how: How) -> None:
    """Raise UserError with what keeps OUT from being written, before values are read; a dry run tells it at its end."""
    if blocked and not how.dry_run:
        raise UserError(blocked)


def target_of(checkpoint: Checkpoint, found: Found) -> dict[str, str]:
    """The fingerprint of the target: what the draft's config holds of it, or that of the checkpoint itself."""
    return recorded(checkpoint.config) or ({} if found.draft.layout is Layout.HF else fingerprint(checkpoint))


def _original(found: Found, theirs: Found, source: Source, how: How) -> tuple[Found, Original]:
    """The original, and which of its tensors the draft still has; ``source`` is of both."""
    tensors = {name: ref._replace(file=f"{_BASE}:{ref.file}") for name, ref in theirs.draft.tensors.items()}
    compared = comparisons(found.draft.tensors, tensors, theirs.form.block)
    return theirs, Original(tensors, same_values(compared, source, how.options.jobs))


def _settled(plan: Plan, out: Path) -> Plan:
    """The plan with the lines that start engines on ``out``."""
    launch = {engine: line.replace("{out}", str(out)) for engine, line in plan.settings["launch"].items()}
    return replace(plan, settings={**plan.settings, "launch": launch})


def _told(settings: Mapping[str, Any]) -> Iterator[str | Table]:
    """What the draft is, who says so, and how engines are started with it."""
    draft = settings["draft"]
    yield f"draft  {draft['kind']}, {fmt_count(draft['stages'], 'stage')}, layout {draft['from']}"
    rows = [_row(Fact(what, said)) for what, said in draft["says"].items()]
    yield Table(("figure", "agreed", "said by"), rows, "<<<")
    yield from (f"{engine}  {line}" for engine, line in settings["launch"].items())


def _row(fact: Fact) -> tuple[str, str, str]:
    return fact.what, ("yes" if fact.agreed else "no") if len(fact.said) > 1 else "said once", str(fact)
