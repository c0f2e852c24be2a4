from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lab
import pytest


@pytest.fixture(autouse=True)
def _flip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptkit.ops._operations", lab.operations)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Path]:
    """A checkpoint that must be the same, byte for byte, after the test."""
    folder = lab.make_checkpoint(tmp_path / "source")
    before = lab.snapshot(folder)
    yield folder
    assert lab.snapshot(folder) == before


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


class Abandoned(Exception):
    pass


@pytest.fixture
def abandoned(source: Path, out: Path) -> Callable[..., None]:
    """Begin a run and give it up after two shards."""

    class Meter(lab.Meter):
        def shard(self, name: str) -> None:
            super().shard(name)
            if len(self.shards) == 2:
                raise Abandoned

    def begin(**options: Any) -> None:
        with pytest.raises(Abandoned):
            lab.run(source, out, Meter(), **options)

    return begin
