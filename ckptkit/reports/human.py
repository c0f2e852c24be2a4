"""A report for people: a table of checks in which what is well is kept short, the comparison in figures, the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..console import Table, fmt_count, fmt_duration
from .model import Check, Numeric, Report, by_level

_WORDS = {"fail": "FAIL"}
_BARS = "▁▂▃▄▅▆▇█"
_LAYERS_SHOWN = 100


def human(report: Report, verbose: bool = False) -> Iterator[str | Table]:
    """Blocks for the console. ``verbose``: a row for each check, also where nothing is wrong."""
    rows = [row for level, checks in by_level(report.checks) for row in _rows(level, checks, verbose)]
    yield Table(("level", "check", "result", "detail"), rows, "<<<<")
    if report.numeric is not None and report.numeric.tensors:
        yield from _comparison(report.numeric)
    yield f"{report.verdict} in {fmt_duration(report.seconds)}"


def _rows(level: str, checks: Sequence[Check], verbose: bool) -> Iterator[tuple[str, str, str, str]]:
    """Checks of one family that came out alike, well or not run for one reason, are one row."""
    alike: dict[tuple[str, ...], list[Check]] = {}
    for check in checks:
        quiet = check.result in {"ok", "skip"} and not verbose
        key = (check.id.partition(".")[0], check.result, check.reason or "") if quiet else (check.id,)
        alike.setdefault(key, []).append(check)
    for (family, *_), group in alike.items():
        first = group[0]
        name = first.id if len(group) == 1 else f"{family}.*"
        yield level, name, _WORDS.get(first.result, first.result), _detail(group)


def _detail(checks: Sequence[Check]) -> str:
    first = checks[0]
    looked_at = f"{max(check.checked for check in checks):,} looked at"
    if first.result == "skip":
        return first.reason or ""
    if first.result == "ok":
        return looked_at
    partly = f"; partly: {first.reason}" if first.reason else ""
    return f"{fmt_count(first.findings, 'finding')}, {looked_at}{partly}"


def _comparison(numeric: Numeric) -> Iterator[str]:
    worst = numeric.worst[0]
    errors = f"relative RMS error median {_figure(numeric.median)}, worst {_figure(worst.rel_rms)} {worst.tensor}"
    yield f"{fmt_count(numeric.tensors, 'tensor')} compared: {errors}"
    layers = numeric.per_layer[:_LAYERS_SHOWN]
    known = [layer.rel_rms for layer in layers if layer.rel_rms is not None]
    if len(layers) > 1 and any(known):
        bars = "".join(_bar(layer.rel_rms, max(known)) for layer in layers)
        yield f"by layer {bars}"


def _bar(value: float | None, largest: float) -> str:
    """A layer's error as a bar; ``!`` where it is no number."""
    return "!" if value is None else _BARS[round(value / largest * (len(_BARS) - 1))]


def _figure(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"
