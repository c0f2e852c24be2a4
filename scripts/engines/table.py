"""The table of docs/serving/README.md, from the reports beside it:   table.py docs/serving"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HEAD = (
    "| checkpoint | speculation | CUDA graphs | verdict | off what is stored, mean / largest | off the source | equal "
    "| accept length | tokens/s | report |\n|---|---|---|---|---|---|---|---|---|---|"
)
_EAGER = ("--enforce-eager", "--disable-cuda-graph")

Cell = Mapping[str, Any]


def cells(folder: Path) -> Iterator[tuple[Path, Cell]]:
    """Those of all reports of a folder; one without speculation that several have once, any other as often as it was run."""
    seen = set()
    for path in sorted(folder.glob("*.json")):
        for cell in json.loads(path.read_text("utf-8"))["figures"]["serve"]["cells"]:
            key = (cell["checkpoint"], _graphs(cell))
            if cell["speculation"] != "none" or key not in seen:
                yield path, cell
            if cell["speculation"] == "none":
                seen.add(key)


def _graphs(cell: Cell) -> bool:
    return not any(word in cell["command"] for word in _EAGER)


def row(path: Path, cell: Cell) -> str:
    """A line of the table; what was not measured is a dash."""
    stored, source, speculated = cell["stored"], cell["source"], cell["speculated"]
    ids, equal = " ".join(f"`{id}`" for id in cell["findings"]), cell["equal"]
    columns = [
        cell["checkpoint"],
        cell["speculation"],
        "yes" if _graphs(cell) else "no",
        f"{cell['verdict']} {ids}".strip(),
        f"{stored['mean']:.4f} / {stored['largest']:.4f}" if stored else "-",
        f"{source['mean']:.4f}" if source else "-",
        f"{equal[0]}/{equal[1]}" if equal else "-",
        f"{speculated['accept_length']:.3f}" if speculated else "-",
        f"{cell['tokens_per_second']:.0f}" if cell["tokens_per_second"] else "-",
        f"[{path.stem}]({path.parent.name}/{path.name})",
    ]
    return f"| {' | '.join(columns)} |"


def table(folder: Path) -> str:
    """All cells of one engine: those that are to serve, by checkpoint, then the broken ones."""
    return "\n".join([HEAD, *(row(path, cell) for path, cell in sorted(cells(folder), key=_order))])


def _order(item: tuple[Path, Cell]) -> tuple[bool, str, bool]:
    checkpoint: str = item[1]["checkpoint"]
    return checkpoint.startswith("bad-"), checkpoint, _graphs(item[1])


if __name__ == "__main__":
    for engine in sorted(path for path in Path(sys.argv[1]).iterdir() if path.is_dir()):
        print(f"## {engine.name}\n\n{table(engine)}\n")
