"""A disk that fills up or fails while a shard is written."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lab
import pytest

from ckptkit.errors import OUTPUT, UserError


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of one megabyte."""
    if os.geteuid() != 0 or sys.platform != "linux":
        pytest.skip("only root may mount a filesystem")
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("this machine mounts no filesystem")
    yield folder
    subprocess.run(["umount", folder], check=True)


class Filling(lab.Meter):
    """Takes all space that is left, once so many bytes are written."""

    def __init__(self, disk: Path, after: int):
        super().__init__()
        self.filler, self.after = disk / "filler", after

    def advance(self, nbytes: int) -> None:
        super().advance(nbytes)
        if self.bytes > self.after and not self.filler.exists():
            with open(self.filler, "wb", buffering=0) as file:
                try:
                    while file.write(bytes(4096)):
                        pass
                except OSError:
                    pass


@pytest.mark.parametrize("after", [10_000, 200_000, 350_000])
@pytest.mark.parametrize("place", ["out", "."])
def test_space_that_vanishes_after_the_check(tmp_path: Path, disk: Path, after: int, place: str) -> None:
    source = lab.make_checkpoint(tmp_path / "large", rows=1500)
    lab.run(source, tmp_path / "whole", link="copy")
    before = lab.snapshot(source)
    out = disk / place
    with pytest.raises(UserError) as caught:
        lab.run(source, out, Filling(disk, after), link="copy")
    assert ([finding.id for finding in caught.value.findings], caught.value.exit_code) == (["output.space"], OUTPUT)
    assert not (out / "ckptkit.json").exists()
    assert not (out / "config.json").exists()
    (disk / "filler").unlink()
    lab.run(source, out, resume=True, link="copy")
    assert lab.contents(out) == lab.contents(tmp_path / "whole")
    assert lab.snapshot(source) == before


@pytest.mark.parametrize(
    ("number", "id"),
    [
        (errno.ENOSPC, "output.space"),
        (errno.EDQUOT, "output.space"),
        (errno.EIO, "output.write"),
        (errno.EROFS, "output.write"),
        (errno.EACCES, "output.write"),
    ],
)
@pytest.mark.parametrize("call", ["pwrite", "fsync", "rename"])
def test_a_disk_that_fails(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, number: int, id: str, call: str
) -> None:
    calls = 0
    real = getattr(os, call)

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError(number, os.strerror(number))
        return real(*args)

    monkeypatch.setattr(os, call, failing)
    with pytest.raises(UserError) as caught:
        lab.run(source, out)
    assert ([finding.id for finding in caught.value.findings], caught.value.exit_code) == ([id], OUTPUT)
    assert not out.exists()
    assert not list(out.parent.rglob("*.safetensors.partial"))
    lab.run(source, out, resume=True)
    assert lab.same_tensors(lab.tensors_of(out), lab.expected(source))
