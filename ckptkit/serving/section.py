"""The part of a report's page about serving: the table, completions with their first other token, differences drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..reports.svg import drawing, escape, label, line, rect

WIDTH, HEIGHT = 220, 28  # of a sparkline
LARGEST = 0.25  # nats that fill its height; larger ones are cut there
HEAD = (
    "checkpoint",
    "speculation",
    "serves",
    "off what is stored",
    "off the source",
    "equal",
    "accept length",
    "score",
    "tokens/s",
)


def section(figure: Any) -> Iterator[str]:
    """Elements for a report with the figure ``serve``; none without it."""
    if isinstance(figure, Mapping):
        cells = figure["cells"]
        yield "<h2>Serving</h2>"
        yield _table(HEAD, [_row(cell) for cell in cells])
        for number, cell in enumerate(cells):
            yield from _cell(cell, number)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{name}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _row(cell: Mapping[str, Any]) -> list[str]:
    speculated, equal = cell["speculated"], cell["equal"]
    badge = {"yes": "ok", "FAIL": "fail"}.get(cell["verdict"], "skip")
    length = speculated["accept_length"] if speculated and cell["speculation"] != "none" else None
    return [
        escape(cell["checkpoint"]),
        escape(cell["speculation"]),
        f'<span class="badge {badge}">{escape(cell["verdict"])}</span>',
        _nats(cell["stored"]),
        _nats(cell["source"]),
        f"{equal[0]}/{equal[1]}" if equal else "–",
        "–" if length is None else f"{length:.3f}",
        "–" if cell["score"] is None else f"{cell['score']:.3f}",
        "–" if cell["tokens_per_second"] is None else f"{cell['tokens_per_second']:.1f}",
    ]


def _nats(found: Mapping[str, Any] | None) -> str:
    if found is None or found["mean"] is None:
        return "–"
    return f"{found['mean']:.4f} nat (largest {found['largest']:.3f}, {found['positions']} positions)"


def _cell(cell: Mapping[str, Any], number: int) -> Iterator[str]:
    yield f'<h3>{escape(cell["name"])} <span class="muted">{escape(cell["engine"])} {escape(cell["version"] or "")}</span></h3>'
    if cell["command"]:
        yield f'<p class="mono">{escape(cell["command"])}</p>'
    for id, reason in cell["not_judged"].items():
        yield f'<p class="muted">{escape(id)} is not judged: {escape(reason)}</p>'
    for kernel in cell["kernels"]:
        yield f'<p class="muted mono">{escape(kernel)}</p>'
    if cell["completions"]:
        rows = [_completion(found, f"serve-{number}-{at}") for at, found in enumerate(cell["completions"])]
        yield _table(("prompt", "completion", "differences of logprobs"), rows)
    positions = (cell["speculated"] or {}).get("by_position")
    if positions:
        yield _positions(positions, cell["speculated"]["steps"], f"serve-{number}-accepted")
    if cell["log_end"]:
        lines = "\n".join(map(escape, cell["log_end"]))
        yield f"<details><summary>the end of the log</summary><pre>{lines}</pre></details>"


def _completion(found: Mapping[str, Any], name: str) -> list[str]:
    return [escape(found["prompt"]), _marked(found), _sparkline(found["off"], name)]


def _marked(found: Mapping[str, Any]) -> str:
    """The text, from the first other token on marked, with what was expected there."""
    text, expected = found["text"], found["expected"]
    if found["diverges_at"] is None or expected is None:
        return escape(text)
    same = next((at for at, (a, b) in enumerate(zip(text, expected, strict=False)) if a != b), len(text))
    gap = "" if found["gap"] is None else f", which led by {found['gap']:.2f} nat"
    tip = escape(f"token {found['diverges_at'] + 1}; expected {expected[same : same + 40]!r}{gap}")
    return f'{escape(text[:same])}<mark title="{tip}">{escape(text[same:])}</mark>'


def _sparkline(values: Sequence[float | None], name: str) -> str:
    """Differences position by position, up where the server is surer of the text than the reference is."""
    if not values:
        return "–"
    step, middle = WIDTH / len(values), HEIGHT / 2
    parts = [line(0, middle, WIDTH, middle, "axis")]
    for at, value in enumerate(values):
        size = middle if value is None else min(abs(value) / LARGEST, 1.0) * middle
        top = middle - size if value is None or value > 0 else middle
        style = "bad" if value is None or abs(value) > LARGEST else "bar"
        parts.append(rect(at * step, top, max(step - 0.5, 0.5), max(size, 0.5), style))
    known = [abs(value) for value in values if value is not None]
    largest = max(known, default=0.0)
    return drawing(name, WIDTH, HEIGHT, "Differences of logprobs", f"Largest {largest:.3f} nat.", parts)


def _positions(counts: Sequence[int], steps: int, name: str) -> str:
    """The share of verifications in which the draft's n-th token was accepted."""
    parts = []
    for at, count in enumerate(counts):
        share = count / steps if steps else 0.0
        parts.append(label(0, 14 + 18 * at, f"token {at + 1}"))
        parts.append(rect(70, 4 + 18 * at, max(1.0, 200 * share), 13, "bar"))
        parts.append(label(76 + 200 * share, 14 + 18 * at, f"{share:.0%}"))
    shares = f"Of {steps:,} verifications."
    return drawing(name, 340, 8 + 18 * len(counts), "Accepted by position in the draft", shares, parts)
