"""``ckptkit will-it-serve``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import click

from ..checks import Subject
from ..checks.lint import Chosen, boundaries, choose, problems
from ..console import Console, fmt_count
from ..drafts.dense_config import fields_of
from ..drafts.fitting import dense_misfits
from ..errors import FOUND, OK, Finding, UserError, fail
from ..files.checkpoint import CONFIG, scan
from ..files.source import open_source
from ..options import command, listed


@command
@click.argument("src")
@click.option("--draft", metavar="D", help="The draft that is to speculate for SRC.")
@click.option("--engine", required=True, metavar="NAME[==VERSION]", help="Without a version: the newest known.")
@click.option("--speculative", multiple=True, metavar="NAME", help="How the engine is to speculate: NEXTN, EAGLE3 …")
@click.option("--lint-data", metavar="FILE", help="Rules of the engine, instead of those that are packaged.")
@click.option("--allow", multiple=True, metavar="ID[,ID]", help="Count errors of these ids as warnings.")
def will_it_serve(
    console: Console,
    src: str,
    draft: str | None,
    engine: str,
    speculative: tuple[str, ...],
    lint_data: str | None,
    allow: tuple[str, ...],
) -> int:
    """Say whether an engine takes a checkpoint, from headers and config alone. Exit code 1 if it does not.

    The rules are what is known of versions of SGLang, vLLM, transformers and llama.cpp, each with where it is known
    from (`ckptkit checks lint`). If the version does not take it, the first one that would is named. That no rule
    speaks against a checkpoint is not proof that it serves: `ckptkit verify --serve` is.

    \b
    Examples:
      ckptkit will-it-serve ./model-w8 --engine sglang==0.5.23
      ckptkit will-it-serve ./model-w8 --engine sglang --speculative NEXTN
      ckptkit will-it-serve ./target --draft ./draft --engine vllm==0.33 --speculative dspark --json
    """
    chosen = choose(engine, speculative, lint_data)
    allowed = frozenset(listed(allow))
    with ExitStack() as opened:
        subjects = [_subject(path, opened) for path in filter(None, (src, draft))]
        found = [*_problems(chosen, subjects), *(_misfits(*subjects) if draft else ())]
        findings = [finding.as_warning() if finding.id in allowed else finding for finding in found]
        serves = not _errors(findings)
        others = [] if serves else _working(chosen, subjects, allowed)
    code = OK if serves else FOUND
    data = {
        "engine": chosen.engine.name,
        "version": str(chosen.version),
        "speculative": sorted(chosen.speculative),
        "serves": serves,
        "works_with": others,
    }
    console.result(data, list(_told(chosen, findings, others)), [finding.id for finding in findings], findings, code)
    return code


def _subject(path: str, opened: ExitStack) -> Subject:
    """Raises UserError where the checkpoint cannot be read."""
    checkpoint, found = scan(opened.enter_context(open_source(path)))
    subject = Subject(checkpoint, tuple(found))
    broken = [finding for finding in found if finding.severity == "error"]
    if subject.unknown or any(finding.id.startswith(("source.", "access.", "config.")) for finding in broken):
        raise UserError(broken)
    if checkpoint.config is None:
        uri = checkpoint.source.uri
        message = f"{uri} has no {CONFIG}: engines would not know what it is"
        raise fail("config.missing", message, file=CONFIG, hint="give the folder that holds config.json")
    return subject


def _problems(chosen: Chosen, subjects: Sequence[Subject]) -> Iterator[Finding]:
    """What the rules find, in the draft with its place before each message."""
    target, *drafts = subjects
    yield from problems(chosen, target)
    for draft in drafts:
        place = draft.checkpoint.source.uri
        yield from (replace(finding, message=f"{place}: {finding.message}") for finding in problems(chosen, draft))


def _misfits(target: Subject, draft: Subject) -> Iterator[Finding]:
    return dense_misfits(fields_of(draft.config), draft.config, target.config)


def _errors(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.severity == "error"]


def _working(chosen: Chosen, subjects: Sequence[Subject], allowed: frozenset[str]) -> list[str]:
    """The versions that no rule is against, of those at which rules begin or end; ascending."""
    return [
        str(version)
        for version in boundaries(chosen.engine)
        if all(
            finding.severity != "error" or finding.id in allowed
            for finding in _problems(chosen._replace(version=version), subjects)
        )
    ]


def _told(chosen: Chosen, findings: Sequence[Finding], others: Sequence[str]) -> Iterator[str]:
    named = f"{chosen.engine.label} {chosen.version}"
    named += f" with {', '.join(sorted(chosen.speculative))}" if chosen.speculative else ""
    errors = _errors(findings)
    if not errors:
        yield f"{named}: no rule is against it"
        return
    yield f"{named}: will not serve it ({fmt_count(len(errors), 'error')})"
    newest = chosen.engine.newest
    yield f"first version that works: {others[0]}" if others else f"no version up to {newest} is known to work"
