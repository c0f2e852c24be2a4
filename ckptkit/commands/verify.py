"""``ckptkit verify``: whether a checkpoint is what it should be."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from ..checkpoint import CONFIG, open_checkpoint, scan
from ..checks import WHOLE, Level, Outcome, Page, Result, Sample, Subject, pages_of, run
from ..console import Console
from ..errors import FOUND, OK, UserError, fail
from ..manifest import environment
from ..options import command
from ..report import Report, make_report, place_of, stats_of, to_dict, to_json
from ..reports.human import human
from ..source import open_source

LEVELS = {level.label: level for level in (Level.STATIC, Level.DATA, Level.NUMERIC)}
# Reasons of checks that did not run because nobody asked for them.
_UNASKED = ("no --engine", "no --oracle", "no --recipe", "concerns ")


@dataclass(frozen=True, slots=True)
class Asked:
    """The options as they were given."""

    against: str | None
    recipe: str | None
    level: str | None
    sample: str | None
    select: tuple[str, ...]
    ignore: tuple[str, ...]
    allow: tuple[str, ...]
    strict: bool
    allow_skipped: bool
    exit_zero: bool
    engine: str | None
    speculative: tuple[str, ...]
    oracle: str | None
    form: str
    junit: str | None
    reports: tuple[str, ...]
    max_findings: int
    jobs: int

    @property
    def allowed(self) -> frozenset[str]:
        return frozenset(_listed(self.allow))


@command
@click.argument("ckpt", required=False)
@click.option("--against", metavar="SRC", help="What it was made from; implies --level numeric.")
@click.option("-r", "--recipe", metavar="FILE|NAME", help="The recipe that should make it of --against.")
@click.option("--level", type=click.Choice(list(LEVELS)), help="How deep to look; each level includes those before.")
@click.option("--sample", metavar="P%|n/t", help="Look at a part of the data: 2%, or part n of t.")
@click.option("--select", multiple=True, metavar="ID", help="Only these checks: an id, a family, a glob.")
@click.option("--ignore", multiple=True, metavar="ID", help="Not these checks.")
@click.option("--allow", multiple=True, metavar="ID[,ID]", help="Count errors of these ids as warnings.")
@click.option("--strict", is_flag=True, help="Exit 1 on warnings too.")
@click.option("--allow-skipped", is_flag=True, help="Exit 0 though checks that were asked for could not run.")
@click.option("--exit-zero", is_flag=True, help="Exit 0 whatever is found.")
@click.option("--engine", metavar="NAME[==VERSION]", help="Also what this engine refuses or misreads.")
@click.option("--speculative", multiple=True, metavar="NAME", help="How the engine is to speculate: NEXTN, EAGLE3 …")
@click.option("--oracle", type=click.Choice(["llmcompressor"]), help="Compare bits with what this library makes.")
@click.option("--format", "form", type=click.Choice(["human", "json", "github"]), default="human", help="On stdout.")
@click.option("--junit", metavar="FILE", help="Write a JUnit file: a case for each check.")
@click.option("--report", "reports", multiple=True, metavar="FILE", help="Write a report: .html or .json.")
@click.option("--max-findings", type=click.IntRange(1), default=100, metavar="N", help="Of each id in a report.")
@click.option("-j", "--jobs", type=click.IntRange(0), default=0, metavar="N", help="Threads (default: up to 4).")
def verify(console: Console, ckpt: str | None, **given: Any) -> int:
    """Check a checkpoint. Exit code 1 if something is wrong with it.

    CKPT is a folder or a .safetensors file; without it, the current folder. Levels: static looks at headers, index
    and config; data at the bytes too, all of them or a sample; numeric compares the values with those of --against.
    `ckptkit checks` lists every check, `ckptkit checks ID` explains one.

    \b
    Examples:
      ckptkit verify ./model
      ckptkit verify ./model-w8 --against ./model --report report.html --junit junit.xml
      ckptkit verify ./model --level data --sample 3/20
      ckptkit verify ./model --select index --select 'config.quant-*' --format github
      ckptkit verify ./model --engine sglang --speculative NEXTN
    """
    asked = Asked(**given)
    console.settings.json |= asked.form == "json"
    _check_arguments(asked)
    selected, ignored = _named(asked.select), _named(asked.ignore)
    level = _level(asked, selected)
    began, started = time.monotonic(), datetime.now(UTC)
    with contextlib.ExitStack() as opened:
        subject = _subject(console, ckpt or _here(), asked, level, opened)
        outcome = run(subject, level, lambda id: (not selected or id in selected) and id not in ignored)
        outcome = outcome._replace(results=_asked_for(outcome.results, asked))
        not_run = _not_run(outcome, level, selected)
        exit_code = _exit_code(outcome, asked, not_run)
        with_stats = console.settings.json or bool(asked.reports)
        report = _report(subject, outcome, asked, level, exit_code, started, time.monotonic() - began, with_stats)
        _write_files(report, asked)
    _tell(console, report, outcome, asked)
    if not_run and not asked.allow_skipped:
        console.note(f"hint: {', '.join(not_run)} could not run, which is no pass; --allow-skipped passes it over")
    return exit_code


# --- what is asked for -------------------------------------------------------------------------------------


def _listed(texts: Collection[str]) -> Iterator[str]:
    return (id.strip() for text in texts for id in text.split(",") if id.strip())


def _named(texts: Collection[str]) -> dict[str, Page]:
    return {id: page for text in _listed(texts) for id, page in pages_of(text).items()}


def _level(asked: Asked, selected: Mapping[str, Page]) -> Level:
    """The level that is given, or else the one that everything asked for needs."""
    depths = [page.level for page in selected.values()]
    if asked.level is None:
        implied = Level.NUMERIC if asked.against else Level.DATA if asked.sample else Level.STATIC
        return max([implied, *depths])
    level = LEVELS[asked.level]
    if depths and min(depths) > level:
        message = f"none of the selected checks is of level {asked.level}"
        raise fail("usage.arguments", message, hint=f"--level {min(depths).label}")
    if asked.sample and level < Level.DATA:
        raise fail("usage.arguments", "--sample is about data, which level static does not read", hint="--level data")
    return level


def _check_arguments(asked: Asked) -> None:
    for path in asked.reports:
        if Path(path).suffix not in _FORMS:
            raise fail("usage.arguments", f"--report {path}: no report has that ending", hint="FILE.html or FILE.json")
    if asked.recipe and not asked.against:
        raise fail("usage.arguments", "--recipe needs --against: a recipe makes one checkpoint of another")
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


# --- the run -----------------------------------------------------------------------------------------------


def _subject(console: Console, ckpt: str, asked: Asked, level: Level, opened: contextlib.ExitStack) -> Subject:
    """What is checked. Raises UserError where there is nothing to check, or nothing sound to compare it with."""
    against = opened.enter_context(open_source(asked.against)) if asked.against else None
    checkpoint, found = scan(opened.enter_context(open_source(ckpt)))
    absent = [finding for finding in found if finding.id.startswith("source.")]
    if absent:
        raise UserError(absent)
    options: dict[str, Any] = {
        "engine": asked.engine,
        "speculative": asked.speculative,
        "oracle": asked.oracle,
        "jobs": asked.jobs,
        "allow": asked.allowed,
    }
    if level > Level.STATIC:
        options["progress"] = opened.enter_context(console.progress("verify"))
    return Subject(
        checkpoint,
        tuple(found),
        open_checkpoint(against) if against else None,
        _recipe(asked.recipe),
        sample_of(asked.sample) if asked.sample else WHOLE,
        options,
    )


def _recipe(name: str | None) -> Any:
    from ..recipe import load

    return load(name) if name else None


def _asked_for(results: list[Result], asked: Asked) -> list[Result]:
    """Results without those of checks that only an option which was not given, or their own id, would ask for."""
    named = set(_listed(asked.select))
    return [
        result
        for result in results
        if result.result != "skip" or result.id in named or not (result.reason or "").startswith(_UNASKED)
    ] or results


def _not_run(outcome: Outcome, level: Level, selected: Collection[str]) -> list[str]:
    """Checks that were asked for, by id or by a level deeper than static, and did not run."""
    return [
        result.id
        for result in outcome.results
        if result.result == "skip" and (result.id in selected or result.level == level > Level.STATIC)
    ]


def _exit_code(outcome: Outcome, asked: Asked, not_run: Collection[str]) -> int:
    errors = any(finding.severity == "error" and finding.id not in asked.allowed for finding in outcome.findings)
    bad = errors or (asked.strict and outcome.findings) or (not_run and not asked.allow_skipped)
    return FOUND if bad and not asked.exit_zero else OK


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
    return make_report(
        command="verify",
        target=place_of(subject.checkpoint.source),
        against=place_of(against.source) if against else None,
        level=level.label,
        sample=subject.sample.text,
        outcome=outcome,
        allowed=asked.allowed,
        seconds=seconds,
        started=started,
        stats=stats_of(subject, outcome.findings) if with_stats else None,
        environment=surroundings | ({"engine": asked.engine} if asked.engine else {}),
        exit_code=exit_code,
        max_findings=asked.max_findings,
    )


def _html(report: Report) -> str:
    from ..reports.html import html

    return html(report)


_FORMS = {".html": _html, ".json": to_json}


def _write_files(report: Report, asked: Asked) -> None:
    for path in asked.reports:
        _write(path, _FORMS[Path(path).suffix](report))
    if asked.junit:
        from ..reports.junit import junit

        _write(asked.junit, junit(report))


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, "utf-8")
    except OSError as error:
        raise fail("output.write", f"{path} cannot be written: {error.strerror}", file=path) from None


def _tell(console: Console, report: Report, outcome: Outcome, asked: Asked) -> None:
    findings = [finding.as_warning() if finding.id in asked.allowed else finding for finding in outcome.findings]
    findings.sort(key=lambda finding: finding.severity != "error")
    ids = dict.fromkeys(finding.id for finding in findings)
    if asked.form == "github":
        from ..reports.github import github

        console.result(to_dict(report), github(report), ids)
    else:
        console.result(to_dict(report), human(report, console.settings.verbose), ids, findings)
