"""``ckptkit verify``: whether a checkpoint is what it should be."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import click

from ..checks import WHOLE, Level, Outcome, Page, Result, Sample, Subject, pages, pages_of, run
from ..checks.digests import UNRECORDED
from ..console import Console
from ..errors import UserError, fail
from ..files.checkpoint import CONFIG, open_checkpoint, scan
from ..files.source import open_source
from ..heads.pages import Asked as Head
from ..manifest import environment
from ..options import command, listed
from ..reports.report import Report, Run, make_report, place_of, stats_of
from .headed import by_engine, head_options, lines
from .reporting import ReportOptions, check_allowed, check_reports, exit_code, reporting_options, tell, write_files
from .serving import How, serving_options

LEVELS = {level.label: level for level in (Level.STATIC, Level.DATA, Level.NUMERIC)}
# Reasons of checks that did not run because nobody asked for them.
_UNASKED = ("no --head", "no --engine", "no --oracle", "no --recipe", "no --provenance", "no source", "concerns ")


@dataclass(frozen=True, slots=True)
class Asked(ReportOptions):
    """All options as they were given."""

    against: str | None
    recipe: str | None
    sets: tuple[str, ...]
    level: str | None
    sample: str | None
    select: tuple[str, ...]
    ignore: tuple[str, ...]
    engine: str | None
    speculative: tuple[str, ...]
    oracle: str | None
    provenance: str | None
    head: Head | None
    hidden: str | None


@command
@click.argument("ckpts", metavar="[[LABEL=]CKPT]...", nargs=-1)
@click.option("--against", metavar="SRC", help="What it was made from; implies --level numeric.")
@click.option("-r", "--recipe", metavar="FILE|NAME", help="The recipe that should make it of --against.")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Override a key of the recipe, as it was made.")
@click.option("--level", type=click.Choice(list(LEVELS)), help="How deep to look; each level includes those before.")
@click.option("--sample", metavar="P%|n/t", help="Look at a part of the data: 2%, or part n of t.")
@click.option("--select", multiple=True, metavar="ID", help="Only these checks: an id, a family, a glob.")
@click.option("--ignore", multiple=True, metavar="ID", help="Not these checks.")
@click.option("--allow", multiple=True, metavar="ID[,ID]", help="Count errors of these ids as warnings.")
@click.option("--strict", is_flag=True, help="Exit 1 on warnings, and if no digest proves the bytes.")
@click.option("--allow-skipped", is_flag=True, help="Exit 0 though checks that were asked for could not run.")
@click.option("--exit-zero", is_flag=True, help="Exit 0 whatever is found.")
@click.option(
    "--engine",
    multiple=True,
    metavar="NAME[==VERSION]",
    help="Also what this engine refuses or misreads.",
)
@click.option("--speculative", multiple=True, metavar="NAME", help="How the engine is to speculate: NEXTN, EAGLE3 …")
@serving_options
@head_options
@click.option("--oracle", type=click.Choice(["llmcompressor"]), help="Compare bits with what this library makes.")
@click.option("--provenance", metavar="FILE", help="What `ckptkit hash --statement` wrote; implies --level data.")
@reporting_options
@click.option("-j", "--jobs", type=click.IntRange(0), default=0, metavar="N", help="Threads (default: up to 4).")
def verify(console: Console, ckpts: tuple[str, ...], how: How | None, **given: Any) -> int:
    """Check a checkpoint. Exit code 1 if something is wrong with it.

    CKPT is a folder or a .safetensors file; without it, the current folder. Levels: static looks at headers, index
    and config; data at the bytes too, all of them or a sample; numeric compares the values with those of --against.
    `ckptkit checks` lists every check, `ckptkit checks ID` explains one.

    With --serve each CKPT is then served by an engine, with every --speculative and without, and what it decodes is
    judged by its own values run in float32, and by --against.

    With --head the output head is cut into slices as --engine cuts it, and the tokens that ranks choose by exchanging
    candidates are compared with the whole head's; with --against its rows are proved to be the source's.

    \b
    Examples:
      ckptkit verify ./model
      ckptkit verify ./model-w8 --against ./model --report report.html --junit junit.xml
      ckptkit verify ./model --level data --sample 3/20
      ckptkit verify ./model --select index --select 'config.quant-*' --format github
      ckptkit verify ./model --engine sglang --speculative NEXTN
      ckptkit verify ./model --head --ranks 4 --engine sglang --against ./source
      ckptkit verify bf16=./model w8=./model-w8 --serve --against ./model --speculative ngram
    """
    asked = by_engine(Asked(**given | {"engine": _one_engine(given["engine"])}))
    console.settings.json |= asked.form == "json"
    _check_arguments(asked, how)
    selected, ignored = _named(asked.select), _named(asked.ignore)

    def wanted(id: str) -> bool:
        return (id in selected if selected else not asked.head or _about_head(id, asked)) and id not in ignored

    if how:
        from .served import serve

        return serve(
            console, ckpts or (() if how.url else (_here(),)), asked, how, partial(_look, console, how, wanted), wanted
        )
    selected = _without_serving(asked, selected)
    ckpt = _only(ckpts)
    level = _level(asked, selected)
    began, started = time.monotonic(), datetime.now(UTC)
    with contextlib.ExitStack() as opened:
        subject = _subject(console, ckpt, asked, level, opened)
        outcome = run(subject, level, wanted)
        outcome = outcome._replace(results=_asked_for(outcome.results, asked))
        not_run = _not_run(outcome, asked, level, selected)
        code = exit_code(outcome, asked, not_run)
        with_stats = console.settings.json or bool(asked.reports)
        report = _report(subject, outcome, asked, level, code, started, time.monotonic() - began, with_stats)
        write_files(report, asked)
    tell(console, report, outcome, asked, not_run, [*lines(report.figures.get("head"))])
    return code


# --- what is asked for -------------------------------------------------------------------------------------


def _named(texts: Collection[str]) -> dict[str, Page]:
    return {id: page for text in listed(texts) for id, page in pages_of(text).items()}


def _about_head(id: str, asked: Asked) -> bool:
    """Whether --head runs the check where no others are selected: those of headers, and of heads."""
    compared = id == "numeric.head" and asked.against is not None
    return id.startswith("head.") or compared or pages()[id].level == Level.STATIC


def _level(asked: Asked, selected: Mapping[str, Page]) -> Level:
    """The level that is given, or else the one that everything asked for needs."""
    depths = [page.level for page in selected.values()]
    if asked.level is None:
        deepest = Level.NUMERIC if asked.against or asked.head else Level.STATIC
        data = Level.DATA if asked.sample or asked.provenance else Level.STATIC
        return max([deepest, data, *depths])
    level = LEVELS[asked.level]
    if depths and min(depths) > level:
        message = f"none of the selected checks is of level {asked.level}"
        raise fail("usage.arguments", message, hint=f"--level {min(depths).label}")
    if asked.sample and level < Level.DATA:
        raise fail("usage.arguments", "--sample is about data, which level static does not read", hint="--level data")
    return level


def _without_serving(asked: Asked, selected: Mapping[str, Page]) -> dict[str, Page]:
    """The selected checks without those that need --serve. Raises UserError where there is no other."""
    found = {id: page for id, page in selected.items() if page.level < Level.SERVE}
    if selected and not found:
        raise fail("usage.arguments", f"--select {asked.select[0]} is about serving", hint="--serve")
    return found


def _only(ckpts: tuple[str, ...]) -> str:
    if len(ckpts) > 1:
        raise fail("usage.arguments", f"one CKPT is checked at a time, not {len(ckpts)}", hint="--serve takes several")
    return ckpts[0] if ckpts else _here()


def _one_engine(named: tuple[str, ...]) -> str | None:
    """The engine, if any. Raises UserError ``usage.arguments`` for several: all but one would go unseen."""
    if len(named) > 1:
        message = f"--engine is given {len(named)} times ({', '.join(named)}), and one run asks about one"
        raise fail("usage.arguments", message, hint=f"a run for each: --engine {named[0]}")
    return named[0] if named else None


def _check_arguments(asked: Asked, how: How | None) -> None:
    check_reports(asked.reports)
    check_allowed(asked.allowed, pages())
    if asked.recipe and not asked.against:
        raise fail("usage.arguments", "--recipe needs --against: a recipe makes one checkpoint of another")
    if asked.sets and not asked.recipe:
        raise fail("usage.arguments", "--set is about a recipe", hint="--recipe FILE|NAME")
    if asked.head and (how or asked.level or asked.sample):
        raise fail("usage.arguments", "--head looks at the whole head, and excludes --serve, --level and --sample")
    if asked.hidden and not asked.head and not asked.against:
        raise fail("usage.arguments", "--hidden is about a head", hint="--head, or --against SRC")
    if how:
        return
    if asked.speculative and not asked.engine:
        raise fail("usage.arguments", "--speculative needs --engine", hint="--engine sglang")
    if asked.engine:
        from ..checks.lint import choose

        choose(asked.engine, asked.speculative)


def sample_of(text: str) -> Sample:
    """``2%`` is the first of 50 parts, ``3/20`` the third of 20. Raises UserError ``usage.arguments``."""
    share, part = re.fullmatch(r"(\d+(?:\.\d+)?)%", text), re.fullmatch(r"(\d+)/(\d+)", text)
    if share and 0 < float(share[1]) <= 100:
        return Sample(1, round(100 / float(share[1])))
    if part and 1 <= int(part[1]) <= int(part[2]):
        return Sample(int(part[1]), int(part[2]))
    raise fail("usage.arguments", f"--sample {text}: neither a share nor a part", hint="--sample 2%, --sample 1/50")


def _here() -> str:
    if not Path(CONFIG).is_file():
        message = f"CKPT is missing, and the current folder has no {CONFIG}"
        raise fail("usage.arguments", message, hint="ckptkit verify ./model")
    return "."


def _look(
    console: Console, how: How, wanted: Callable[[str], bool], asked: Asked, ckpt: str, opened: contextlib.ExitStack
) -> tuple[Subject, Outcome]:
    """The checks before a checkpoint is served, as deep as --level says; none with --no-static."""
    level = LEVELS[asked.level or Level.STATIC.label]
    subject = _subject(console, ckpt, asked, level, opened)
    outcome = Outcome([], [], {}) if how.no_static else run(subject, level, wanted)
    return subject, outcome._replace(results=_asked_for(outcome.results, asked))


# --- the run -----------------------------------------------------------------------------------------------


def _subject(console: Console, ckpt: str, asked: Asked, level: Level, opened: contextlib.ExitStack) -> Subject:
    """What is checked. Raises UserError where there is nothing to check, or nothing sound to compare it with."""
    against = opened.enter_context(open_source(asked.against)) if asked.against else None
    checkpoint, found = scan(opened.enter_context(open_source(ckpt)))
    absent = [finding for finding in found if finding.id.startswith(("source.", "access."))]
    if absent:
        raise UserError(absent)
    options: dict[str, Any] = {
        "engine": asked.engine,
        "speculative": asked.speculative,
        "oracle": asked.oracle,
        "provenance": asked.provenance,
        "jobs": asked.jobs,
        "allow": asked.allowed,
        "head": asked.head,
        "hidden": asked.hidden,
    }
    if level > Level.STATIC:
        options["progress"] = opened.enter_context(console.progress("verify"))
    return Subject(
        checkpoint,
        tuple(found),
        open_checkpoint(against) if against else None,
        _recipe(asked.recipe, asked.sets),
        sample_of(asked.sample) if asked.sample else WHOLE,
        options,
    )


def _recipe(name: str | None, sets: tuple[str, ...]) -> Any:
    from ..recipe.recipe import load

    return load(name, sets) if name else None


def _asked_for(results: list[Result], asked: Asked) -> list[Result]:
    """Results without those of checks that only an option which was not given, or their own id, would ask for."""
    named = set(listed(asked.select))
    return [
        result
        for result in results
        if result.result != "skip" or result.id in named or not (result.reason or "").startswith(_UNASKED)
    ] or results


def _not_run(outcome: Outcome, asked: Asked, level: Level, selected: Collection[str]) -> list[str]:
    """Checks that were asked for, by id or by a level deeper than static, and did not run, which is no pass.

    That bytes have no recorded digest is no fault of theirs: it counts where digests are asked for by id, or all is.
    """
    return [
        result.id
        for result in outcome.results
        if result.result == "skip"
        and not asked.allow_skipped
        and (result.id in selected or (result.level == level > Level.STATIC and (asked.strict or not _bare(result))))
    ]


def _bare(result: Result) -> bool:
    return (result.reason or "").startswith(UNRECORDED)


# --- telling -----------------------------------------------------------------------------------------------


def _report(
    subject: Subject,
    outcome: Outcome,
    asked: Asked,
    level: Level,
    exit_code: int,
    started: datetime,
    seconds: float,
    with_stats: bool,
) -> Report:
    against = subject.against
    surroundings = {key: value for key, value in environment("", "cpu").items() if key != "backend"}
    about = Run(
        command="verify",
        target=place_of(subject.checkpoint.source),
        against=place_of(against.source) if against else None,
        level=level.label,
        sample=subject.sample.text,
        started=started,
        seconds=seconds,
        environment=surroundings | ({"engine": asked.engine} if asked.engine else {}),
        exit_code=exit_code,
    )
    stats = stats_of(subject, outcome.findings) if with_stats else None
    return make_report(about, outcome, asked.allowed, stats, asked.max_findings)
