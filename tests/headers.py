"""Header fixtures as specs, and as folders of real headers over sparse data: no weight byte is written."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from ckptkit.files.header import Spec, lay_out

FOLDER = Path(__file__).parents[1] / "fixtures" / "headers"
FIXTURES = sorted(path.stem for path in FOLDER.glob("*.json"))

_BRACES = re.compile(r"\{([^}]*)\}")
_DIGITS = re.compile(r"(\d+)")


def load(fixture: str) -> dict[str, Any]:
    """The fixture as it is stored: source, shard_bytes, config, tensors by template."""
    found: dict[str, Any] = json.loads((FOLDER / f"{fixture}.json").read_text())
    return found


def config(fixture: str) -> dict[str, Any]:
    found: dict[str, Any] = load(fixture)["config"]
    return found


@cache
def specs(fixture: str) -> tuple[Spec, ...]:
    """Every tensor of the fixture, in natural order of the names (layer 2 before layer 10)."""
    tensors = load(fixture)["tensors"].items()
    found = [Spec(name, dtype, tuple(shape)) for template, (dtype, shape) in tensors for name in expand(template)]
    return tuple(sorted(found, key=lambda spec: _natural(spec.name)))


def materialize(fixture: str, folder: Path) -> Path:
    """Make ``folder`` the fixture's checkpoint: config.json, shards, an index if there are several; give ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = load(fixture)
    (folder / "config.json").write_text(json.dumps(stored["config"], indent=2))
    shards = list(_shards(specs(fixture), stored["shard_bytes"]))
    if len(shards) == 1:
        _write(folder / "model.safetensors", shards[0])
        return folder
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    weight_map = {spec.name: name for name, shard in zip(names, shards, strict=True) for spec in shard}
    total = sum(spec.nbytes for shard in shards for spec in shard)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    for name, shard in zip(names, shards, strict=True):
        _write(folder / name, shard)
    return folder


def expand(template: str) -> Iterator[str]:
    """The names that a template stands for: ``{0..2,7}`` is 0, 1, 2 and 7; several braces, every combination."""
    parts = _BRACES.split(template)
    for values in product(*(list(_values(text)) for text in parts[1::2])):
        yield "".join(text for pair in zip(parts[::2], (*values, ""), strict=True) for text in pair)


def _values(text: str) -> Iterator[str]:
    for run in text.split(","):
        first, _, last = run.partition("..")
        yield from map(str, range(int(first), int(last or first) + 1))


def _natural(name: str) -> list[Any]:
    """A sort key: text and numbers by turns, so that only like is compared with like."""
    parts: list[Any] = _DIGITS.split(name)
    parts[1::2] = map(int, parts[1::2])
    return parts


def _shards(tensors: Iterable[Spec], limit: int | None) -> Iterator[list[Spec]]:
    shard: list[Spec] = []
    size = 0
    for spec in tensors:
        if limit is not None and shard and size + spec.nbytes > limit:
            yield shard
            shard, size = [], 0
        shard.append(spec)
        size += spec.nbytes
    yield shard


def _write(path: Path, shard: list[Spec]) -> None:
    header, layout = lay_out(shard, {"format": "pt"})
    path.write_bytes(header)
    os.truncate(path, layout.file_size)
