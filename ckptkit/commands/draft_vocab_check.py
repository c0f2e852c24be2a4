"""``ckptkit draft-vocab check``: whether a draft vocabulary is one, and fits the head, target and text it is for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from ..checks import Level, Outcome, run_probes
from ..console import Console, Table
from ..files.checkpoint import open_checkpoint
from ..files.source import open_source
from ..manifest import environment
from ..options import command
from ..reports.model import Place
from ..reports.report import Report, Run, make_report, place_of
from ..vocab.pages import PAGES
from .draft_vocab_build import counted
from .list_output import n_vocab_option, offsets_option
from .reporting import ReportOptions, check_allowed, check_reports, exit_code, reporting_options, tell, write_files

if TYPE_CHECKING:
    from ..vocab.checking import Listed
    from ..vocab.coverage import Coverage
    from ..vocab.target import Target


@dataclass(frozen=True, slots=True)
class Asked(ReportOptions):
    """All options as they were given."""

    head: str | None
    tokenizer: str | None
    corpus: tuple[str, ...]
    roles: tuple[str, ...]
    min_coverage: float
    offsets: bool | None
    n_vocab: int | None


@command
@click.argument("list_", metavar="LIST")
@click.option("--head", metavar="CKPT", help="The draft, or the target, whose head's rows the list is of.")
@click.option("--tokenizer", metavar="DIR", help="The target's folder: its vocabulary, special tokens and fingerprint.")
@click.option("--corpus", multiple=True, metavar="[KIND[:LANG]=]FILE", help="Text to cover; needs --tokenizer.")
@click.option("--role", "roles", multiple=True, metavar="ROLE", help="Of conversations count what these say only.")
@click.option(
    "--min-coverage", type=click.FloatRange(0, 1), default=0.0, metavar="P", help="Least share, of each kind."
)
@offsets_option
@n_vocab_option
@click.option("--allow", multiple=True, metavar="ID[,ID]", help="Count errors of these ids as warnings.")
@click.option("--strict", is_flag=True, help="Exit 1 on warnings too.")
@click.option("--exit-zero", is_flag=True, help="Exit 0 whatever is found.")
@reporting_options
@click.option("-j", "--jobs", type=click.IntRange(0), default=0, metavar="N", help="Processes (default: up to 4).")
def check(console: Console, list_: str, **given: Any) -> int:
    """Check a draft vocabulary. Exit code 1 if something is wrong with it.

    LIST is whatever `ckptkit draft-vocab convert` reads. Its ids are checked by themselves, and against what else is
    given: the rows of a head and its config, the target's tokenizer, a text. `ckptkit checks vocab` lists what is looked
    for.

    \b
    Examples:
      ckptkit draft-vocab check draft.txt --tokenizer ./Qwen3-8B
      ckptkit draft-vocab check ./eagle3-draft --head ./eagle3-draft --tokenizer ./Qwen3-8B --json
      ckptkit draft-vocab check draft.txt --tokenizer ./Qwen3-8B --corpus code=all.c --min-coverage 0.95
    """
    from ..vocab.checking import PROBES

    asked = Asked(**given, allow_skipped=True)
    console.settings.json |= asked.form == "json"
    check_reports(asked.reports)
    check_allowed(asked.allowed, {page.id: page for page in PAGES})
    began, started = time.monotonic(), datetime.now(UTC)
    with contextlib.ExitStack() as opened:
        listed = _listed(console, list_, asked, opened)
        outcome = run_probes(listed, PROBES, PAGES)
        code = exit_code(outcome, asked, ())
        report = _report(listed, outcome, asked, code, started, time.monotonic() - began)
        write_files(report, asked)
    tell(console, report, outcome, asked, (), list(_lines(listed)))
    return code


def _listed(console: Console, name: str, asked: Asked, opened: contextlib.ExitStack) -> Listed:
    """The list and what it is checked against. Raises UserError where one of them cannot be read at all."""
    from ..vocab.checking import Listed
    from ..vocab.target import target_of

    if asked.corpus and not asked.tokenizer:
        raise click.UsageError("--corpus needs --tokenizer")
    head = open_checkpoint(opened.enter_context(open_source(asked.head))) if asked.head else None
    target = target_of(asked.tokenizer) if asked.tokenizer else None
    listed = Listed(name, asked.n_vocab, asked.offsets, head, target, (), asked.min_coverage)
    if head:
        listed.rows  # noqa: B018 (raises where there is no head)
    ids = listed.read.vocab
    if not (target and asked.corpus and ids and not listed.read.findings):
        return listed
    covered = _covered(console, ids.ids, target, asked)
    return Listed(name, asked.n_vocab, asked.offsets, head, target, covered, asked.min_coverage)


def _covered(console: Console, ids: Any, target: Target, asked: Asked) -> tuple[Coverage, ...]:
    from ..vocab.corpus import corpus
    from ..vocab.counting import Counting
    from ..vocab.coverage import coverage

    how = Counting(target.path, max(asked.n_vocab or target.n_vocab, int(ids.max()) + 1), 1.0, asked.roles)
    return tuple(coverage(ids, counted(console, corpus(asked.corpus), how, asked.jobs).held_out))


def _report(listed: Listed, outcome: Outcome, asked: Asked, code: int, started: datetime, seconds: float) -> Report:
    about = Run(
        command="draft-vocab check",
        target=Place(uri=listed.name, revision=None, manifest_sha256=None),
        against=place_of(listed.head.source) if listed.head else None,
        level=(Level.DATA if listed.covered else Level.STATIC).label,
        sample=None,
        started=started,
        seconds=seconds,
        environment={key: value for key, value in environment("", "cpu").items() if key != "backend"},
        exit_code=code,
    )
    return make_report(about, outcome, asked.allowed, None, asked.max_findings)


def _lines(listed: Listed) -> Iterator[str | Table]:
    from ..vocab.coverage import coverage_table

    if listed.covered:
        yield coverage_table(list(listed.covered))
