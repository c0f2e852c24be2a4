"""``ckptkit bench topk``: choices on one device and exchanges between ranks, timed; as data, a table, a plot."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from ..reports.svg import MONO, count_ticks, drawing, label, line, rect
from .ranks import JOB, run_together

ROWS, STATES, COUNTS = (32_768, 131_072), (1, 8, 64), (1, 128)
COLUMNS = ("rows", "tokens", "k", "operation", "median µs", "quartiles")
PROGRAM = "ckptkit.heads.timed_rank"
_COLORS = ("#7ea6d8", "#e8b15c", "#8cc084", "#bd9acb", "#7fc4c0", "#c2a387")
_STYLE = (
    "text{font:10px ui-monospace,Menlo,Consolas,monospace;fill:#1b1f24}.strong{font-weight:700}"
    ".axis{stroke:#5d6670}.grid{stroke:#dfe3e8}.paper{fill:#ffffff}"
    + "".join(f".c{number}{{fill:{color}}}" for number, color in enumerate(_COLORS))
)


def cases() -> list[tuple[int, int, int]]:
    """Rows, states and candidates of the reference table."""
    return [*product(ROWS, STATES, COUNTS)]


def choices(device: str, replays: int) -> list[dict[str, Any]]:
    """Timings of every operation on one device."""
    import torch

    from .timing import Case, timings

    found = timings(torch.device(device), [Case(*case) for case in cases()], replays)
    return [timing._asdict() for timing in found]


def exchanges(ranks: int, cuda: bool, replays: int) -> list[dict[str, Any]]:
    """Timings of choice, gather and winner, and of the dense gather, between ``ranks`` processes: the slowest rank's.

    ``right``: every rank took the right token for the winner in every replay. Raises UserError ``engine.ranks``.
    """
    with tempfile.TemporaryDirectory(prefix="ckptkit-bench-") as name:
        folder = Path(name)
        job = {"ranks": ranks, "cuda": cuda, "replays": replays, "cases": cases()}
        (folder / JOB).write_text(json.dumps(job), "utf-8")
        run_together(PROGRAM, folder, ranks)
        by_rank = [json.loads((folder / f"timed-{rank}.json").read_text("utf-8")) for rank in range(ranks)]
    return [
        max(found, key=lambda line: line["median"]) | {"right": all(line["right"] for line in found)}
        for found in zip(*by_rank, strict=True)
    ]


def rows(timings: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """A row under ``COLUMNS`` for each timing."""
    for found in timings:
        wrong = "" if found.get("right", True) else "  WRONG"
        yield (
            f"{found['rows']:,}", str(found["states"]), str(found["k"]), f"{found['what']}{wrong}",
            f"{found['median']:.1f}", f"{found['low']:.1f}-{found['high']:.1f}",
        )  # fmt: skip


# --- the plot ----------------------------------------------------------------------------------------------

_LEFT, _FULL, _BAR, _GAP = 190, 640, 11, 9


def plot(timings: Sequence[dict[str, Any]], title: str) -> str:
    """An SVG file: a group of bars for each case, a bar for each operation."""
    groups: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
    for found in timings:
        groups.setdefault((found["rows"], found["states"], found["k"]), []).append(found)
    styles = {
        what: f"c{number % len(_COLORS)}" for number, what in enumerate(dict.fromkeys(t["what"] for t in timings))
    }
    largest = max(found["median"] for found in timings)
    top = 44 + 15 * len(styles)
    height = top + sum(_BAR * len(found) + _GAP for found in groups.values()) + 24
    width = _LEFT + _FULL + 80
    parts = [rect(0, 0, width, height, "paper"), label(8, 18, title, "strong")]
    for number, (what, style) in enumerate(styles.items()):
        parts += [rect(8, 30 + 15 * number, 10, 10, style), label(24, 39 + 15 * number, what)]
    parts += _axis(largest, top, height)
    y = float(top)
    for (held, states, count), bars in groups.items():
        parts.append(label(_LEFT - 8, y + 10, f"{held:,} x {states} tokens, k {count}", anchor="end"))
        for bar in bars:
            size = _FULL * bar["median"] / largest
            parts.append(rect(_LEFT, y, size, _BAR - 1, styles[bar["what"]], f"{bar['what']}: {bar['median']} µs"))
            parts.append(label(_LEFT + size + 4, y + 9, f"{bar['median']:.1f}"))
            y += _BAR
        y += _GAP
    made = drawing("topk", width, height, title, "Median microseconds, a bar for each operation.", parts)
    return made.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(
        "</desc>", f"</desc><style>{_STYLE}</style>", 1
    )


def _axis(largest: float, top: float, height: float) -> Iterator[str]:
    for tick in count_ticks(max(int(largest), 1)):
        x = _LEFT + _FULL * tick / largest
        yield line(x, top - 4, x, height - 22, "axis" if tick == 0 else "grid")
        yield label(x - MONO * len(str(tick)) / 2, height - 8, str(tick))
