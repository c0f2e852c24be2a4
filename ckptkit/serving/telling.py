"""What a matrix came to: results by id, figures for the report, the table for people."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..checks import Level, Outcome, Result
from ..console import Table
from ..errors import Finding
from .engine import NONE, Speculation
from .judge import Divergence
from .matrix import Judged, References
from .pages import PAGES
from .recording import Item
from .section import HEAD

_OF_SOURCE = frozenset({"serve.tolerance", "serve.greedy-flip"})
_OF_SPECULATION = frozenset({"serve.spec-mismatch", "serve.accept-length"})
_OF_ALSO = frozenset({"serve.score", "serve.probe"})


def name_of(judged: Judged) -> str:
    """A cell as people call it: ``w8``, ``w8 with ngram``."""
    cell = judged.ran.cell
    return cell.label if cell.method.name == NONE else f"{cell.label} with {cell.method.name}"


def outcome(cells: Sequence[Judged], has_source: bool, also: Collection[str], seconds: float) -> Outcome:
    """Results of all checks that the cells were judged by, and their findings, each with its cell's name.

    ``also`` are ids that only options ask for.
    """
    repairs = {page.id: page.repair for page in PAGES}
    findings = [
        replace(
            finding,
            message=f"{name_of(judged)}: {finding.message}",
            hint=finding.hint or repairs.get(finding.id),
            data={**finding.data, "cell": name_of(judged)},
        )
        for judged in cells
        for finding in judged.findings
    ]
    speculative = any(judged.ran.cell.method.name != NONE for judged in cells)
    left_out = (set() if has_source else _OF_SOURCE) | (set() if speculative else _OF_SPECULATION)
    left_out = (left_out | _OF_ALSO) - set(also)
    ids = [page.id for page in PAGES if page.id not in left_out]
    results = [_result(id, cells, [f for f in findings if f.id == id], seconds) for id in ids]
    return Outcome(results, findings, {})


def _result(id: str, cells: Sequence[Judged], found: Sequence[Finding], seconds: float) -> Result:
    reasons = [f"{name_of(judged)}: {judged.skipped[id]}" for judged in cells if id in judged.skipped]
    unserved = [judged for judged in cells if not judged.ran.serves]
    if not reasons and not found and len(unserved) == len(cells) and id.startswith("serve."):
        reasons = ["nothing was served"]
    worst = "fail" if any(finding.severity == "error" for finding in found) else "warn" if found else "ok"
    result = "skip" if reasons and not found else worst
    return Result(
        id, Level.SERVE, result, len(cells) - len(reasons), len(found), seconds, reasons[0] if reasons else None
    )


# --- the table ---------------------------------------------------------------------------------------------


def table(cells: Sequence[Judged]) -> Table:
    """A row for each cell."""
    return Table(HEAD, [_row(judged) for judged in cells], "<<<>>>>>>")


def _row(judged: Judged) -> tuple[str, ...]:
    ran = judged.ran
    counted = equal(judged)
    length = ran.speculation.accept_length if ran.speculation else None
    return (
        ran.cell.label,
        ran.cell.method.name,
        verdict(judged),
        _nats(judged.own.mean if judged.own else None),
        _nats(judged.source.mean if judged.source else None),
        f"{counted[0]}/{counted[1]}" if counted else "-",
        "-" if length is None else f"{length:.3f}",
        ran.told or "-",
        "-" if ran.tokens_per_second is None else f"{ran.tokens_per_second:.1f}",
    )


def verdict(judged: Judged) -> str:
    """``yes`` and ``no`` say whether it serves what it should; ``not run`` that the engine could not be run."""
    errors = {finding.id for finding in judged.findings if finding.severity == "error"}
    if errors and all(id.startswith("engine.") for id in errors):
        return "not run"
    return "FAIL" if errors else "not judged" if judged.skipped else "yes"


def _nats(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def equal(judged: Judged) -> tuple[int, int] | None:
    """How many completions are those of the run without speculation, or else of the source; None without either."""
    answered = len(judged.ran.answers)
    if not answered:
        return None
    parted = judged.from_plain if judged.ran.cell.method.name != NONE else judged.divergences
    is_known = judged.ran.cell.method.name != NONE or judged.tolerance is not None or judged.source is not None
    return (answered - len(parted), answered) if is_known else None


def commands(cells: Iterable[Judged]) -> list[str]:
    """The launch command of each cell."""
    return [f"{name_of(judged)}: {shlex.join(judged.ran.command)}" for judged in cells if judged.ran.command]


def kept(cells: Sequence[Judged]) -> list[str]:
    """Where the server is that was left running, and how to stop it."""
    last = cells[-1].ran
    return [f"serving at {last.url}, log {last.log}; to stop it: kill -- -{last.pid}"] if last.pid else []


# --- figures -----------------------------------------------------------------------------------------------


def figures(cells: Sequence[Judged], refs: References) -> dict[str, Any]:
    """All that was measured, as plain data: ``figures.serve`` of the report."""
    return {"cells": [_figure(judged, refs) for judged in cells]}


def _figure(judged: Judged, refs: References) -> dict[str, Any]:
    ran, counted = judged.ran, equal(judged)
    items = {item.name: item for item in refs.texts[ran.cell.label].items}
    return {
        "name": name_of(judged),
        "checkpoint": ran.cell.label,
        "engine": ran.cell.engine.name,
        "version": ran.version,
        "speculation": ran.cell.method.name,
        "verdict": verdict(judged),
        "findings": sorted({finding.id for finding in judged.findings}),
        "command": shlex.join(ran.command),
        "started_seconds": ran.started,
        "tokens_per_second": ran.tokens_per_second,
        "equal": list(counted) if counted else None,
        "stored": judged.own._asdict() if judged.own else None,
        "source": judged.source._asdict() if judged.source else None,
        "tolerance": judged.tolerance,
        "not_judged": dict(judged.skipped),
        "near_ties": len(judged.from_plain or judged.divergences) - _flips(judged),
        "score": ran.score,
        "speculated": _counts(ran.speculation),
        "accept_length_windows": _windows(ran.windows, ran.cell.engine.interval),
        "kernels": list(ran.kernels),
        "log_end": list(ran.log_end) if judged.findings else [],
        "completions": [_completion(judged, name, items.get(name)) for name in ran.answers],
    }


def _flips(judged: Judged) -> int:
    return sum(finding.id in {"serve.greedy-flip", "serve.spec-mismatch"} for finding in judged.findings)


def _counts(found: Speculation | None) -> Mapping[str, Any] | None:
    return None if found is None else {**found._asdict(), "accept_length": found.accept_length}


def _windows(lengths: Sequence[float], interval: int | None) -> Mapping[str, Any] | None:
    """The mean of what the engine's log said of windows of so many steps."""
    return {"mean": sum(lengths) / len(lengths), "windows": len(lengths), "interval": interval} if lengths else None


def _completion(judged: Judged, name: str, item: Item | None) -> dict[str, Any]:
    """One completion beside the reference's, and the differences of logprobs along the reference's text."""
    answer = judged.ran.answers[name]
    parted: Sequence[Divergence] = judged.from_plain or judged.divergences
    first = next((flip for flip in parted if flip.prompt == name), None)
    ours = judged.ran.scores.get(name, ())
    return {
        "prompt": name,
        "text": answer.text,
        "expected": judged.expected.get(name),
        "tokens": list(answer.tokens or ()),
        "diverges_at": first.at if first else None,
        "gap": first.gap if first else None,
        "off": [round(a - b, 5) for a, b in zip(ours, item.logprobs, strict=False)] if item else [],
    }
