"""A checkpoint under the checks of data and numeric, and small damages to its bytes."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from ckptkit.checks import WHOLE, Level, Outcome, Sample, Subject, run
from ckptkit.cli import main
from ckptkit.errors import Finding
from ckptkit.files.checkpoint import open_checkpoint, scan
from ckptkit.files.source import open_source


def outcome(folder: Path, against: Path | None = None, sample: Sample = WHOLE, **options: Any) -> Outcome:
    """The checks of values against a source if there is one, else those of data."""
    family = "numeric." if against else "data."
    with open_source(str(folder)) as source, open_source(str(against or folder)) as other:
        checkpoint, found = scan(source)
        subject = Subject(
            checkpoint, tuple(found), open_checkpoint(other) if against else None, None, sample, options | {"jobs": 2}
        )
        return run(subject, Level.NUMERIC if against else Level.DATA, lambda id: id.startswith(family))


def findings(folder: Path, against: Path | None = None, sample: Sample = WHOLE, **options: Any) -> list[Finding]:
    return outcome(folder, against, sample, **options).findings


def ids(folder: Path, against: Path | None = None, **options: Any) -> list[str]:
    """The ids of all findings, sorted; one that stands for several is there once."""
    return sorted(finding.id for finding in findings(folder, against, **options))


def results(found: Outcome) -> dict[str, str]:
    return {result.id: result.result for result in found.results}


def quantize(source: Path, out: Path, recipe: str, *options: str) -> Path:
    """What the command makes of ``source`` by a built-in recipe, or by the text of one."""
    if ":" in recipe:
        path = out.with_name(f"{out.name}.yaml")
        path.write_text(f"schema: 1\nname: test\n{recipe}")
        recipe = str(path)
    command = ["quantize", str(source), str(out), "--recipe", recipe, "-q", "--no-progress", "--no-verify", *options]
    assert main(command) == 0
    return out


def hashed(folder: Path, *options: str) -> Path:
    assert main(["hash", str(folder), "-q", "--no-progress", *options]) == 0
    return folder


def place(folder: Path, tensor: str) -> tuple[Path, int, int]:
    """The file that holds a tensor, and its bytes there: by another reader of the header than the package's."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        if tensor in header:
            start, stop = header[tensor]["data_offsets"]
            return path, 8 + length + start, 8 + length + stop
    raise KeyError(tensor)


def edit(folder: Path, tensor: str, at: int, change: bytes) -> None:
    """Write ``change`` over a tensor's bytes from ``at`` on. A file that is linked elsewhere is parted from it first."""
    path, start, stop = place(folder, tensor)
    assert start + at + len(change) <= stop
    content = bytearray(path.read_bytes())
    content[start + at : start + at + len(change)] = change
    path.unlink()
    path.write_bytes(content)


def stored(folder: Path, tensor: str) -> bytes:
    path, start, stop = place(folder, tensor)
    return path.read_bytes()[start:stop]


def flip(folder: Path, tensor: str, at: int, bit: int) -> None:
    edit(folder, tensor, at, bytes([stored(folder, tensor)[at] ^ 1 << bit]))
