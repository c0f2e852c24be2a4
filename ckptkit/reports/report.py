"""What a check came to, as one document: schema 1, fields are only ever added.

:func:`make_report` builds a :class:`Report` from an :class:`~ckptkit.checks.Outcome`; the modules beside it turn one into
JUnit XML, GitHub annotations and an HTML page, :func:`to_json` into JSON. A number that is not finite is ``null``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from ..checks import Outcome, Result
from ..errors import OK, Finding
from .model import Check, Counts, HeadAgreement, Numeric, Place, Problem, Report, Stats, TensorError
from .summary import numeric_of, place_of, plain, stats_of

# Figures that have fields of their own in a report; the others stand under ``figures``.
_TYPED = frozenset({"numeric", "heads"})


class Run(NamedTuple):
    """What was run on what, and how it ended: fields of the report as they stand there."""

    command: str
    target: Place
    against: Place | None
    level: str
    sample: str | None
    started: datetime
    seconds: float
    environment: Mapping[str, Any]
    exit_code: int


def make_report(
    run: Run, outcome: Outcome, allowed: Collection[str], stats: Stats | None, max_findings: int = 100
) -> Report:
    """The report of one run.

    Findings whose id is ``allowed`` become warnings. Of each id at most ``max_findings`` are kept, errors first; the
    check still counts all of them and says ``truncated``.
    """
    findings = [finding.as_warning() if finding.id in allowed else finding for finding in outcome.findings]
    numbers = Counter(finding.id for finding in findings)
    figures = {name: plain(value) for name, value in outcome.figures.items() if name not in _TYPED}
    skipped = sum(result.result == "skip" for result in outcome.results)
    errors = sum(finding.severity == "error" for finding in findings)
    started, seconds = run.started.astimezone(UTC).replace(microsecond=0), round(run.seconds, 3)
    return Report(
        **run._asdict() | {"started": started, "seconds": seconds, "environment": plain(run.environment)},
        ok=run.exit_code == OK,
        counts=Counts(errors=errors, warnings=len(findings) - errors, skipped=skipped),
        truncated=any(number > max_findings for number in numbers.values()),
        allowed=sorted(allowed),
        checks=[_check(result, result.id in allowed, max_findings) for result in outcome.results],
        findings=[_problem(finding, finding.id in allowed) for finding in _first(findings, max_findings)],
        stats=stats,
        numeric=_numeric(outcome.figures.get("numeric")),
        heads=list(_heads(outcome.figures.get("heads", {}))),
        figures=figures,
    )


def _numeric(figure: Mapping[str, Any] | None) -> Numeric | None:
    """The comparison with the source; its figure is ``{"tensors": [the fields of TensorError, …]}``."""
    return None if figure is None else numeric_of([TensorError(**plain(tensor)) for tensor in figure["tensors"]])


def _heads(figure: Mapping[str, Mapping[str, Any]]) -> Iterator[HeadAgreement]:
    """Agreement of heads; its figure is ``{tensor: {kind: the other fields of HeadAgreement}}``."""
    for tensor, kinds in figure.items():
        for kind, fields in kinds.items():
            yield HeadAgreement(tensor=plain(tensor), kind=kind, **plain(fields))


def _check(result: Result, allowed: bool, max_findings: int) -> Check:
    came_out = "warn" if allowed and result.result == "fail" else result.result
    fields = result._asdict() | {"level": result.level.label, "result": came_out}
    return Check(**plain(fields), truncated=result.findings > max_findings)


def _problem(finding: Finding, allowed: bool) -> Problem:
    return Problem(**plain(finding.as_dict()), allowed=allowed)


def _first(findings: Iterable[Finding], limit: int) -> Iterator[Finding]:
    """At most ``limit`` findings of each id; errors before warnings, else in their order."""
    taken: Counter[str] = Counter()
    for finding in sorted(findings, key=lambda finding: finding.severity != "error"):
        taken[finding.id] += 1
        if taken[finding.id] <= limit:
            yield finding


def to_dict(report: Report) -> dict[str, Any]:
    """The report as plain data, as it stands in JSON."""
    return report.model_dump(mode="json", by_alias=True)


def to_json(report: Report) -> str:
    """The report as a JSON document."""
    return report.model_dump_json(by_alias=True, indent=1)


def json_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of the documents that :func:`to_json` writes."""
    schema = Report.model_json_schema(by_alias=True, mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


__all__ = ["Place", "Report", "Stats", "json_schema", "make_report", "place_of", "stats_of", "to_dict", "to_json"]
