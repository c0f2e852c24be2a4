"""What the commands that report findings share: options, the files they write, what they print, the exit code."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from ..checks import Outcome, Page
from ..console import Console, Table
from ..errors import FOUND, OK, fail
from ..naming.patterns import nearest
from ..options import listed
from ..reports.human import human
from ..reports.report import Report, to_dict, to_json

Function = TypeVar("Function", bound=Callable[..., Any])

_NAMED = 4  # checks of one family that did not run, by their ids


def reporting_options(function: Function) -> Function:
    """``--format``, ``--junit``, ``--report`` and ``--max-findings``: how the report is given."""
    forms = click.Choice(["human", "json", "github"])
    options = (
        click.option("--format", "form", type=forms, default="human", help="On stdout."),
        click.option("--junit", metavar="FILE", help="Write a JUnit file: a case for each check."),
        click.option("--report", "reports", multiple=True, metavar="FILE", help="Write a report: .html or .json."),
        click.option(
            "--max-findings", type=click.IntRange(1), default=100, metavar="N", help="Of each id in a report."
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """The options that these commands share, as they were given."""

    allow: tuple[str, ...]
    strict: bool
    allow_skipped: bool
    exit_zero: bool
    form: str
    junit: str | None
    reports: tuple[str, ...]
    max_findings: int
    jobs: int

    @property
    def allowed(self) -> frozenset[str]:
        return frozenset(listed(self.allow))


def check_reports(reports: Collection[str]) -> None:
    """Raises UserError (``usage.arguments``) for a file that ``--report`` names and no form is for."""
    for path in reports:
        if Path(path).suffix not in _FORMS:
            raise fail("usage.arguments", f"--report {path}: no report has that ending", hint="FILE.html or FILE.json")


def check_allowed(allowed: Collection[str], known: Mapping[str, Page]) -> None:
    """Raises UserError (``usage.pattern-unmatched``) for an id that ``--allow`` names and no check has."""
    for id in sorted(set(allowed) - known.keys()):
        like = nearest(id, known)
        hint = f"--allow {like}" if like else "ckptkit checks lists them"
        raise fail("usage.pattern-unmatched", f"--allow {id}: no check has that id", hint=hint)


def exit_code(outcome: Outcome, asked: ReportOptions, not_run: Collection[str]) -> int:
    """1 for an error that is not allowed, for what was asked for and did not run, and under ``--strict`` for a warning."""
    if asked.exit_zero:
        return OK
    errors = any(finding.severity == "error" and finding.id not in asked.allowed for finding in outcome.findings)
    return FOUND if errors or not_run or (asked.strict and outcome.findings) else OK


def write_files(report: Report, asked: ReportOptions) -> None:
    """Write the files that were asked for. Raises UserError (``output.write``)."""
    for path in asked.reports:
        _write(path, _FORMS[Path(path).suffix](report))
    if asked.junit:
        from ..reports.junit import junit

        _write(asked.junit, junit(report))


def tell(
    console: Console,
    report: Report,
    outcome: Outcome,
    asked: ReportOptions,
    not_run: Collection[str],
    lines: Collection[str | Table] = (),
) -> None:
    """Print the report; in the form for people with ``lines`` after it, and the findings on stderr."""
    allowed = asked.allowed
    findings = [finding.as_warning() if finding.id in allowed else finding for finding in outcome.findings]
    findings.sort(key=lambda finding: finding.severity != "error")
    ids = dict.fromkeys([*(finding.id for finding in findings), *not_run])
    if asked.form == "github":
        from ..reports.github import github

        console.result(to_dict(report), github(report), ids)
    else:
        console.result(to_dict(report), [*human(report, console.settings.verbose), *lines], ids, findings)
    if not_run:
        told = ", ".join(_shortly(not_run))
        console.note(f"hint: {told} could not run, which is no pass; --allow-skipped passes it over")


def _shortly(ids: Collection[str]) -> Iterator[str]:
    """The ids; many of one family by their number."""
    families: dict[str, list[str]] = {}
    for id in ids:
        families.setdefault(id.partition(".")[0], []).append(id)
    for family, alike in families.items():
        yield from alike if len(alike) <= _NAMED else [f"{len(alike)} checks of {family}.*"]


def _html(report: Report) -> str:
    from ..reports.html import html

    return html(report)


_FORMS: Mapping[str, Callable[[Report], str]] = {".html": _html, ".json": to_json}


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, "utf-8")
    except OSError as error:
        raise fail("output.write", f"{path} cannot be written: {error.strerror}", file=path) from None
