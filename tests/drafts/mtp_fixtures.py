"""Header fixtures of MTP families, in ``mtp/*.json``: each a small model with the true names of its tensors.

``target``, ``shared`` (its embedding and head) and ``reads`` (what a draft's loader asks for besides) are the target's;
``draft`` and ``optional`` are the layers': those that must be there and those that may. Names are templates, as in
:mod:`headers`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from headers import expand

from ckptkit.files.header import Spec, lay_out

Stored = dict[str, tuple[str, tuple[int, ...], bytes]]

INDEX = "model.safetensors.index.json"

FOLDER = Path(__file__).parent / "mtp"
FIXTURES = sorted(path.stem for path in FOLDER.glob("*.json"))


@cache
def load(fixture: str) -> dict[str, Any]:
    """The fixture as it is stored."""
    found: dict[str, Any] = json.loads((FOLDER / f"{fixture}.json").read_text())
    return found


def part(fixture: str, *parts: str) -> list[Spec]:
    """The tensors of some parts of the fixture."""
    tensors = [item for name in parts for item in load(fixture).get(name, {}).items()]
    return [Spec(name, dtype, tuple(shape)) for template, (dtype, shape) in tensors for name in expand(template)]


def names(fixture: str, *parts: str) -> list[str]:
    return [spec.name for spec in part(fixture, *parts)]


def everything(fixture: str) -> dict[str, Spec]:
    """Every tensor of the checkpoint by name."""
    return {spec.name: spec for spec in part(fixture, "target", "shared", "reads", "draft", "optional")}


# --- on disk -----------------------------------------------------------------------------------------------


def write(folder: Path, specs: Iterable[Spec], config: Mapping[str, Any]) -> Path:
    """A checkpoint of two shards, neighbours lying apart; the bytes are random."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    weight_map, random, listed = {}, Random(0), list(specs)
    for number in range(2):
        file = f"model-{number + 1:05d}-of-00002.safetensors"
        header, layout = lay_out(listed[number::2], {"format": "pt"})
        size = layout.file_size - layout.data_start
        (folder / file).write_bytes(header + random.randbytes(size))
        weight_map |= {spec.name: file for spec in listed[number::2]}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return folder


def stored(folder: Path) -> Stored:
    """Every tensor of a checkpoint, read by nothing but the format's definition; its index lists no other."""
    found: Stored = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":
                start, stop = (8 + length + at for at in entry["data_offsets"])
                found[name] = entry["dtype"], tuple(entry["shape"]), data[start:stop]
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    assert {name: (folder / file).is_file() for name, file in weight_map.items()} == dict.fromkeys(found, True)
    return found


def model(folder: Path, fixture: str, without: Iterable[str] = (), **config: Any) -> Path:
    specs = [spec for name, spec in everything(fixture).items() if name not in set(without)]
    return write(folder, specs, {**load(fixture)["config"], **config})


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def settings(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "ckptkit.json").read_text())["settings"]
    return found
