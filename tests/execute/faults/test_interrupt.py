"""SIGINT and SIGTERM: the run stops in order, is carried on, and the handlers are as before."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import lab
import pytest

from ckptkit.errors import Interrupted


class Interrupting(lab.Meter):
    """Sends a signal, twice, at the given advance."""

    def __init__(self, number: int, moment: int):
        super().__init__()
        self.number, self.left = number, moment

    def advance(self, nbytes: int) -> None:
        super().advance(nbytes)
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(self.number)
            signal.raise_signal(self.number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", [1, 12, 30])
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_signal_stops_the_run_and_resume_ends_it(
    source: Path, out: Path, tmp_path: Path, number: int, moment: int, jobs: int
) -> None:
    handler, threads = signal.getsignal(number), threading.active_count()
    with pytest.raises(Interrupted):
        lab.run(source, out, Interrupting(number, moment), jobs=jobs)
    assert signal.getsignal(number) is handler
    assert not out.exists()
    assert not list(out.parent.rglob("*.safetensors.partial"))
    assert threading.active_count() == threads
    lab.run(source, out, resume=True)
    lab.run(source, tmp_path / "whole")
    assert lab.contents(out) == lab.contents(tmp_path / "whole")


def test_a_signal_during_publication_comes_too_late(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = os.rename

    def signalled(here: Any, there: Any) -> None:
        if Path(there) == out:
            signal.raise_signal(signal.SIGINT)
        rename(here, there)

    monkeypatch.setattr(os, "rename", signalled)
    lab.run(source, out)
    assert lab.same_tensors(lab.tensors_of(out), lab.expected(source))


def test_a_signal_that_was_ignored_stays_ignored(source: Path, out: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        lab.run(source, out, Interrupting(signal.SIGINT, 5))
    finally:
        signal.signal(signal.SIGINT, before)
    assert (out / "ckptkit.json").exists()


def test_outside_the_main_thread_no_handler_is_touched(source: Path, out: Path) -> None:
    thread = threading.Thread(target=lab.run, args=(source, out))
    thread.start()
    thread.join()
    assert (out / "ckptkit.json").exists()
