"""Nothing stays in temporary folders, unless it is told to."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from ckptkit.serving.temporary import temporary

KILLED = """
import os, sys, tempfile
from ckptkit.serving.temporary import temporary
tempfile.tempdir = sys.argv[1]
with temporary("test") as (folder, _):
    (folder / "weights").write_bytes(b"0" * 1000)
    os.kill(os.getpid(), 9)
"""


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ValueError])
def test_a_folder_is_gone_afterwards(tmp_path: Path, error: type[BaseException] | None) -> None:
    try:
        with temporary("test") as (folder, _):
            (folder / "below").mkdir()
            (folder / "below" / "file").write_text("x", "utf-8")
            if error:
                raise error
    except (KeyboardInterrupt, ValueError):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_kept(tmp_path: Path) -> None:
    with temporary("test") as (folder, keep):
        keep()
    assert list(tmp_path.iterdir()) == [folder]


def test_nothing_is_left_by_a_process_that_is_killed(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False).returncode == -9
    deadline = time.monotonic() + 30
    while list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []
