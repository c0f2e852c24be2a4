"""Nothing is found on what is good: made checkpoints of many formats, and real models' headers."""

from __future__ import annotations

from pathlib import Path

import headers
import pytest

from ckptkit.checks import Level, Subject, run
from ckptkit.files.checkpoint import scan
from ckptkit.files.source import open_source
from corrupt.goods import GOOD


def found(folder: Path, level: Level, against: Path | None = None) -> list[tuple[str, str | None, str]]:
    with open_source(str(folder)) as source, open_source(str(against or folder)) as other:
        checkpoint, findings = scan(source)
        beside = scan(other)[0] if against else None
        outcome = run(Subject(checkpoint, tuple(findings), against=beside), level)
    return [(finding.id, finding.tensor, finding.message) for finding in outcome.findings]


@pytest.mark.parametrize("name", GOOD)
def test_made_checkpoints(name: str, tmp_path: Path) -> None:
    folder = GOOD[name](tmp_path / name)
    assert found(folder, Level.DATA) == []
    source = tmp_path / f"{name}-source"
    if source.exists():
        assert found(folder, Level.NUMERIC, source) == []


@pytest.mark.parametrize("name", headers.FIXTURES)
def test_headers_of_real_models(name: str, tmp_path: Path) -> None:
    headers.materialize(name, tmp_path)
    without_files = [item for item in found(tmp_path, Level.STATIC) if not item[0].startswith("files.")]
    assert without_files == []
