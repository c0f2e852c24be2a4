"""Reports for tests: of a fixture's headers, with made-up results, findings and errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headers import materialize

from ckptkit.checks import Level, Outcome, Result, Subject
from ckptkit.errors import Finding
from ckptkit.files.checkpoint import Checkpoint, open_checkpoint
from ckptkit.files.source import open_source
from ckptkit.reports.report import Report, Run, make_report, place_of, stats_of

STARTED = datetime(2026, 11, 29, 20, 31, 7, 123456, UTC)
AGREEMENT = {
    "states": 32, "top1": 0.96875, "top5": 0.975, "top10": 0.98, "kl": 0.0012, "kl_reverse": 0.0013, "mean_abs": 0.01, "max_abs": 0.25,
    "flips": 1, "beyond": 0,
}  # fmt: skip
ENVIRONMENT = {"python": "3.11.7", "platform": "Linux x86_64", "torch": None}


def load(fixture: str, folder: Path) -> Checkpoint:
    return open_checkpoint(open_source(str(materialize(fixture, folder))))


def outcome(findings: Iterable[Finding] = (), skipped: Mapping[str, str] | None = None, **figures: Any) -> Outcome:
    """Results that fit the findings: a check for each id, two that found nothing, and those ``skipped``."""
    found = list(findings)
    results = [_result(id, found) for id in sorted({finding.id for finding in found} | {"layout.header", "data.nan"})]
    results += [Result(id, Level.NUMERIC, "skip", 0, 0, 0.0, why) for id, why in (skipped or {}).items()]
    return Outcome(sorted(results, key=lambda result: result.level), found, figures)


def _result(id: str, findings: Iterable[Finding]) -> Result:
    severities = [finding.severity for finding in findings if finding.id == id]
    level = {"data": Level.DATA, "numeric": Level.NUMERIC}.get(id.partition(".")[0], Level.STATIC)
    result = "fail" if "error" in severities else "warn" if severities else "ok"
    return Result(id, level, result, 1234, len(severities), 0.25)


def report(outcome: Outcome, checkpoint: Checkpoint, against: Checkpoint | None = None, **changes: Any) -> Report:
    run = Run(
        command="verify",
        target=place_of(checkpoint.source),
        against=place_of(against.source) if against else None,
        level="numeric",
        sample="1/50",
        started=STARTED,
        seconds=12.3456,
        environment=ENVIRONMENT,
        exit_code=int(any(result.result == "fail" for result in outcome.results)),
    )
    known = {key: changes.pop(key) for key in run._fields if key in changes}
    stats = stats_of(Subject(checkpoint, against=against), outcome.findings)
    return make_report(run._replace(**known), outcome, **{"allowed": (), "stats": stats} | changes)
