"""A report as one HTML page: opens offline, fetches nothing, runs no script, and is light or dark as its reader is."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

from ..console import fmt_bytes, fmt_count, fmt_duration, fmt_parameters
from ..heads import telling
from ..serving.section import section
from .figures import figures
from .model import Check, HeadAgreement, Problem, Report, TensorError, by_level
from .svg import Figure, escape

PROBLEMS_SHOWN = 10  # of each id; the others are folded away
DATA_SHOWN = 300  # characters
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # whatever a name smuggled in, it could load nothing
_WORDS = {"ok": "✓ ok", "warn": "! warn", "fail": "✕ FAIL", "skip": "– not run"}


def html(report: Report) -> str:
    """The page."""
    style = (files(__package__) / "page.css").read_text("utf-8")
    title = escape(f"{'passed' if report.ok else 'FAILED'}: {report.target.uri}")
    parts = (
        _header(report),
        *_problems(report),
        *_figures(report),
        *_worst(report),
        *_heads(report),
        *_ranks(report.figures.get("head")),
        *section(report.figures.get("serve")),
        *_checks(report),
        _footer(report),
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{title}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(parts)
        + "\n</main>\n</body>\n</html>\n"
    )


def _tag(name: str, content: str, style: str = "") -> str:
    """An element around ``content``, which is HTML already, of the class ``style``."""
    return f'<{name} class="{style}">{content}</{name}>' if style else f"<{name}>{content}</{name}>"


def _table(head: Sequence[str], rows: Iterable[str]) -> str:
    top = _tag("thead", _tag("tr", "".join(head))) if head else ""
    return _tag("table", top + _tag("tbody", "\n".join(rows)))


# --- the top -----------------------------------------------------------------------------------------------


def _header(report: Report) -> str:
    result = "fail" if not report.ok else "warn" if report.counts.warnings else "ok"
    badge = _tag("span", "✓ passed" if report.ok else "✕ FAILED", f"badge {result}")
    facts = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in _facts(report) if value)
    verdict = _tag("div", badge + _tag("h1", escape(report.target.uri)), "verdict")
    return _tag("header", verdict + _tag("p", escape(report.verdict), "muted") + _tag("dl", facts, "facts"))


def _facts(report: Report) -> Iterator[tuple[str, str | None]]:
    yield "command", f"ckptkit {report.command}"
    yield "level", report.level
    yield "sample", report.sample
    yield "compared with", report.against.uri if report.against else None
    yield "revision", report.target.revision
    yield "allowed", ", ".join(report.allowed)
    if stats := report.stats:
        yield "size", f"{fmt_bytes(stats.bytes)}, {fmt_parameters(stats.parameters)} parameters"
        yield "tensors", f"{fmt_count(stats.tensors, 'tensor')} in {fmt_count(stats.shards, 'shard')}"
    yield "started", f"{report.started:%Y-%m-%d %H:%M:%S} UTC"
    yield "took", f"{report.seconds:.1f} s" if report.seconds < 60 else fmt_duration(report.seconds)


def _badge(result: str) -> str:
    return _tag("span", _WORDS[result], f"badge {result}")


# --- findings ----------------------------------------------------------------------------------------------


def _problems(report: Report) -> Iterator[str]:
    yield _tag("h2", "Findings")
    if not report.findings:
        yield _tag("p", "None.", "muted")
    groups: dict[str, list[Problem]] = {}
    for problem in report.findings:
        groups.setdefault(problem.id, []).append(problem)
    totals = {check.id: check.findings for check in report.checks}
    for id, problems in groups.items():
        yield from _group(id, problems, totals.get(id, len(problems)))


def _group(id: str, problems: Sequence[Problem], total: int) -> Iterator[str]:
    """The findings of one id, the first in full and the others folded; ``total`` counts those left out too."""
    badge = _badge("fail" if problems[0].severity == "error" else "warn")
    yield _tag("h3", f"{badge} {_tag('code', escape(id))} {_tag('span', fmt_count(total, 'finding'), 'muted')}")
    hints = dict.fromkeys(problem.hint for problem in problems if problem.hint)
    yield "".join(_tag("div", f"hint: {_tag('code', escape(hint))}", "hint") for hint in [*hints][:3])
    yield _table((), map(_problem, problems[:PROBLEMS_SHOWN]))
    if rest := problems[PROBLEMS_SHOWN:]:
        yield _tag("details", _tag("summary", f"{len(rest)} more") + _table((), map(_problem, rest)))
    if total > len(problems):
        yield _tag("p", f"{total - len(problems):,} more are not in this report.", "muted")


def _problem(problem: Problem) -> str:
    where = "<br>".join(escape(part) for part in (problem.file, problem.tensor) if part) or "–"
    what = escape(problem.message)
    if problem.data:
        short = json.loads(json.dumps(problem.data), parse_float=lambda digits: float(f"{float(digits):.4g}"))
        text = json.dumps(short, ensure_ascii=False)
        text = text if len(text) <= DATA_SHOWN else text[: DATA_SHOWN - 1] + "…"
        what += "<br>" + _tag("code", escape(text), "muted")
    return _tag("tr", _tag("td", where, "place mono") + _tag("td", what))


# --- figures -----------------------------------------------------------------------------------------------


def _figures(report: Report) -> Iterator[str]:
    """Nothing for a run that is about no checkpoint's tensors."""
    found = figures(report) if report.stats or report.numeric else []
    yield from (_drawn(figure) for figure in found if figure.drawings)
    reasons: dict[str, list[str]] = {}
    for figure in found:
        if not figure.drawings:
            reasons.setdefault(figure.text, []).append(figure.title)
    if reasons:
        yield _tag("h2", "Figures that are not drawn")
    for reason, titles in reasons.items():
        yield _tag("p", f"{_tag('b', escape(', '.join(titles)))}: {escape(reason)}", "muted")


def _drawn(figure: Figure) -> str:
    title, caption = _tag("h2", escape(figure.title)), _tag("figcaption", escape(figure.text))
    return f'{title}\n<figure id="{figure.name}">{caption}\n{_tag("div", "".join(figure.drawings), "scroll")}</figure>'


def _worst(report: Report) -> Iterator[str]:
    if report.numeric is not None and report.numeric.worst:
        numbers = ("relative RMS", "bound", "largest", "cosine")
        head = [_tag("th", "tensor"), *(_tag("th", name, "number") for name in numbers)]
        yield _tag("h2", "Worst tensors")
        yield _table(head, map(_worst_row, report.numeric.worst))


def _worst_row(tensor: TensorError) -> str:
    numbers = (tensor.rel_rms, tensor.bound, tensor.max_abs, tensor.cos)
    digits = ("{:.3g}", "{:.3g}", "{:.3g}", "{:.6f}")
    cells = ["–" if value is None else form.format(value) for value, form in zip(numbers, digits, strict=True)]
    return _tag("tr", _tag("td", escape(tensor.tensor), "mono") + "".join(_tag("td", cell, "number") for cell in cells))


def _heads(report: Report) -> Iterator[str]:
    if report.heads:
        numbers = ("top 1", "top 5", "top 10", "KL, nats", "reverse", "largest Δ", "flips", "beyond rounding")
        head = [_tag("th", "head"), _tag("th", "hidden states"), *(_tag("th", name, "number") for name in numbers)]
        yield _tag("h2", "Logits of converted heads")
        yield _table(head, map(_head_row, report.heads))


def _head_row(found: HeadAgreement) -> str:
    shares = ["–" if share is None else f"{share:.1%}" for share in (found.top1, found.top5, found.top10)]
    sizes = ["–" if size is None else f"{size:.2g}" for size in (found.kl, found.kl_reverse, found.max_abs)]
    cells = [_tag("td", escape(found.tensor), "mono"), _tag("td", escape(f"{found.states} {found.kind}"))]
    cells += [_tag("td", text, "number") for text in (*shares, *sizes, str(found.flips), str(found.beyond))]
    return _tag("tr", "".join(cells))


def _ranks(figure: Any) -> Iterator[str]:
    """A head that ranks served; nothing without the figure ``head``."""
    if isinstance(figure, Mapping):
        first, *numbers = telling.COLUMNS
        yield _tag("h2", "The head under vocabulary-parallel serving")
        yield _table(
            [_tag("th", first), *(_tag("th", name, "number") for name in numbers)],
            map(_ranks_row, telling.rows(figure)),
        )
        yield from (_tag("p", escape(sentence)) for sentence in telling.sentences(figure))


def _ranks_row(cells: Sequence[str]) -> str:
    first, *numbers = map(escape, cells)
    return _tag("tr", _tag("td", first) + "".join(_tag("td", text, "number") for text in numbers))


# --- checks ------------------------------------------------------------------------------------------------


def _checks(report: Report) -> Iterator[str]:
    explained = f"{_tag('code', 'ckptkit checks ID')} explains a check and how to repair what it finds."
    numbers = ("looked at", "findings", "seconds")
    head = [
        _tag("th", "result"),
        _tag("th", "check"),
        *(_tag("th", name, "number") for name in numbers),
        _tag("th", ""),
    ]
    yield _tag("h2", "Checks")
    yield _tag("p", explained, "muted")
    for level, checks in by_level(report.checks):
        results = [check.result for check in checks]
        counts = ", ".join(f"{results.count(result)} {_WORDS[result]}" for result in _WORDS if result in results)
        odd, ok = (
            [check for check in checks if check.result != "ok"],
            [check for check in checks if check.result == "ok"],
        )
        content = _tag("h3", f"{level} {_tag('span', counts, 'muted')}")
        content += _table(head, map(_check_row, odd)) if odd else ""
        if ok:
            content += _tag("details", _tag("summary", f"{len(ok)} ok") + _table(head, map(_check_row, ok)))
        yield _tag("div", content, "checks")


def _check_row(check: Check) -> str:
    ran = check.result != "skip"
    numbers = (f"{check.checked:,}", f"{check.findings:,}", f"{check.seconds:.2f}") if ran else ("", "", "")
    cells = [_tag("td", _badge(check.result)), _tag("td", escape(check.id), "mono")]
    cells += [_tag("td", number, "number") for number in numbers]
    return _tag("tr", "".join([*cells, _tag("td", escape(check.reason or ""), "muted")]))


def _footer(report: Report) -> str:
    known = [f"{key} {value}" for key, value in report.environment.items() if value is not None]
    text = f"{report.tool.name} {report.tool.version}; {', '.join(known)}"
    return _tag("h2", "Environment") + _tag("p", escape(text), "muted")
