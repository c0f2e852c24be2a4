"""Killed at any moment: what is left never looks finished, and the next run ends with the uninterrupted bytes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lab
import pytest

HERE = Path(__file__).parent
MOMENTS = 20
SECONDS = 0.5  # about how long the worker takes from its first byte to publication


def test_kill_at_random_moments(source: Path, tmp_path: Path) -> None:
    lab.run(source, tmp_path / "whole")
    whole = lab.contents(tmp_path / "whole")
    moments = random.Random(20)
    unfinished = 0
    for number in range(MOMENTS):
        out = tmp_path / f"out{number}"
        command = [sys.executable, HERE / "worker.py", source, out]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout
            assert worker.stdout.readline() == "begun\n"
            time.sleep(moments.uniform(0, SECONDS))
            worker.kill()
        unfinished += not out.exists()
        if out.exists():  # published; the journal may still lie in it
            assert {name: held for name, held in lab.contents(out).items() if ".ckptkit." not in str(name)} == whole
        lab.run(source, out, resume=True)
        assert lab.contents(out) == whole
        assert not out.with_name(f"{out.name}.partial").exists()
    assert unfinished  # else every moment came too late to say anything


# --- and before each single change of the filesystem ---------------------------------------------------------------------

CHANGES = ("open", "pwrite", "ftruncate", "truncate", "fchmod", "fsync", "rename", "unlink", "mkdir", "rmdir", "link")


def die_at(moment: int, run: Callable[[], Any]) -> bool:
    """Do ``run`` in a process of its own that dies before change number ``moment``; False if it came to its end."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    left = moment

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def change(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                os._exit(9)
            return None if call is fsync else call(*args, **kwargs)

        return change

    fsync = os.fsync
    try:
        for name in CHANGES:
            setattr(os, name, counted(getattr(os, name)))
        run()
    finally:
        os._exit(0)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_death_before_each_change(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: bool, overwrite: bool, step: int
) -> None:
    options: dict[str, Any] = {"jobs": 1, "chunk_bytes": 4000, "link": "hard"}
    lab.run(source, tmp_path / "whole", **options)
    lab.run(source, tmp_path / "before", flipped=(), **options)
    whole, before = lab.contents(tmp_path / "whole"), lab.contents(tmp_path / "before")
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    died, moment = True, 0
    while died:
        out = tmp_path / f"out{moment}"
        if overwrite:
            lab.run(source, out, flipped=(), **options)
        elif inside:
            out.mkdir()
        if inside:
            monkeypatch.chdir(out)
        died = die_at(moment, partial(lab.run, source, out, overwrite=overwrite, **options))
        assert result_in(out) in (None, whole, before if overwrite else whole)
        lab.run(source, out, resume=True, overwrite=overwrite, **options)
        assert lab.contents(out) == whole
        assert not list(tmp_path.glob(f"{out.name}.*"))
        moment += step
    assert moment > 50


def result_in(out: Path) -> dict[str, Any] | None:
    """The files of an output without the executor's own, if it holds a manifest."""
    if not (out / "ckptkit.json").exists():
        return None
    return {name: value for name, value in lab.contents(out).items() if not name.startswith(".ckptkit")}
