"""``ckptkit bench``: how fast a device does what a command verifies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..console import Console, Table
from ..errors import FOUND, OK, fail
from ..heads import bench as timing
from ..manifest import environment
from ..options import command

FORMS = {".svg": "a plot", ".json": "data"}


@command
@click.argument("what", type=click.Choice(["topk"]), metavar="topk")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", help="Where (default: cuda).")
@click.option("--ranks", type=click.IntRange(1), metavar="N", help="Also exchanges between so many (default: GPUs).")
@click.option("--replays", type=click.IntRange(1), default=100, metavar="N", help="Runs of each operation.")
@click.option("--report", "reports", multiple=True, metavar="FILE", help="Write a plot (.svg) or the data (.json).")
def bench(console: Console, what: str, device: str, ranks: int | None, replays: int, reports: tuple[str, ...]) -> int:
    """Time how candidates of a vocabulary-parallel head are chosen and exchanged.

    topk: of 32,768 and 131,072 logits for 1, 8 and 64 tokens the first 1 or 128, with their ids: by a plain topk, by one
    that obeys the rule of ties, for rows in the order of tokens and in another, and by max. Between ranks: choice, gather
    and winner against the gather of all logits, with winners that move from rank to rank. On CUDA all of it runs as
    replayed graphs, and each rank needs a GPU; medians of microseconds. Figures of --device cpu say nothing of a GPU.

    \b
    Examples:
      ckptkit bench topk --report topk.svg
      ckptkit bench topk --ranks 2 --json
      ckptkit bench topk --device cpu --ranks 2 --replays 5
    """
    for path in reports:
        if Path(path).suffix not in FORMS:
            raise fail("usage.arguments", f"--report {path}: no report has that ending", hint="FILE.svg or FILE.json")
    name, count = _device(device, ranks)
    data: dict[str, Any] = {"bench": what, "device": device, "name": name, "ranks": count, "replays": replays}
    data["environment"] = dict(environment("", device))
    data["choices"] = timing.choices(device, replays)
    data["exchanges"] = timing.exchanges(count, device == "cuda", replays) if count > 1 else None
    for path in reports:
        _write(path, data)
    wrong = any(not found["right"] for found in data["exchanges"] or ())
    code = FOUND if wrong else OK
    console.result(data, _lines(data), exit_code=code)
    return code


def _device(device: str, ranks: int | None) -> tuple[str, int]:
    """The device's name and the number of ranks. Raises UserError ``engine.device`` where there are not so many."""
    import platform

    import torch

    if device == "cpu":
        return platform.processor() or platform.machine(), ranks or 1
    there = torch.cuda.device_count()
    if there < (ranks or 1):
        message = f"{ranks or 1} CUDA devices are needed, and {there} are here"
        raise fail("engine.device", message, hint="--device cpu times the same on this processor")
    return torch.cuda.get_device_name(), ranks or there


def _lines(data: dict[str, Any]) -> list[str | Table]:
    """The tables, under what they were measured on."""
    lines: list[str | Table] = [f"on {data['name']} ({data['device']}), medians of {data['replays']}"]
    lines.append(Table(timing.COLUMNS, [*timing.rows(data["choices"])], ">>><>>"))
    if data["exchanges"] is None:
        return [*lines, "exchanges between ranks: not run (--ranks 2)"]
    return [*lines, f"{data['ranks']} ranks", Table(timing.COLUMNS, [*timing.rows(data["exchanges"])], ">>><>>")]


def _write(path: str, data: dict[str, Any]) -> None:
    """Raises UserError ``output.write``."""
    import json

    found = [*data["choices"], *(data["exchanges"] or ())]
    is_plot = Path(path).suffix == ".svg"
    text = timing.plot(found, f"ckptkit bench topk, {data['name']}, µs") if is_plot else json.dumps(data, indent=1)
    try:
        Path(path).write_text(text, "utf-8")
    except OSError as error:
        raise fail("output.write", f"{path} cannot be written: {error.strerror}", file=path) from None
