"""Ranks as real processes: started, waited for, and what each of them computed and was sent. Imports numpy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..decode.numbers import Floats
from ..errors import fail
from .cut import Cut

JOB, STATES, TOKENS = "job.json", "states.npy", "tokens.npy"
PROGRAM = "ckptkit.heads.rank"
_WAIT = 0.02  # seconds between looks at the processes

Ids = np.ndarray[Any, np.dtype[np.int32]]


class Sent(NamedTuple):
    """What came of a run: by rank the logits of its rows [states, rows], and what it has after the gather.

    That is candidates' logits and tokens of all ranks [states, ranks * count], which are equal for all ranks where the
    gather works, and the winners [states].
    """

    own: list[Floats]
    logits: list[Floats]
    tokens: list[Ids]
    winners: list[Ids]
    backend: str


def run_ranks(location: str, cut: Cut, states: Floats, count: int, dtype: str) -> Sent:
    """Let every rank of ``cut`` choose ``count`` candidates of its logits for ``states`` [n, width] and gather them.

    ``location`` is the checkpoint, ``dtype`` that of the logits. Raises UserError ``engine.ranks`` where a rank ends early.
    """
    with tempfile.TemporaryDirectory(prefix="ckptkit-ranks-") as name:
        folder = Path(name)
        np.save(folder / STATES, states)
        np.save(folder / TOKENS, cut.tokens)
        slices: dict[str, Any] = {"bounds": [*cut.bounds], "held": [*cut.held]}
        job = {"location": location, "count": count, "dtype": dtype, **slices}
        (folder / JOB).write_text(json.dumps(job), "utf-8")
        run_together(PROGRAM, folder, cut.ranks)
        own = [np.load(folder / f"logits-{rank}.npy") for rank in range(cut.ranks)]
        sent = [np.load(folder / f"sent-{rank}.npz") for rank in range(cut.ranks)]
        found = {key: [rank[key] for rank in sent] for key in ("logits", "tokens", "winners")}
        return Sent(own, **found, backend=str(sent[0]["backend"]))


def run_together(module: str, folder: Path, ranks: int) -> None:
    """Run ``python -m MODULE FOLDER RANK`` for every rank at once. Raises UserError ``engine.ranks``."""
    with ExitStack() as started:
        _wait([started.enter_context(_rank(module, folder, rank, ranks)) for rank in range(ranks)], folder)


@contextmanager
def _rank(module: str, folder: Path, rank: int, ranks: int) -> Iterator[subprocess.Popen[bytes]]:
    """A rank's process, which does not outlive the block. It finds its packages where this one does."""
    threads = max((os.cpu_count() or 1) // ranks, 1)
    settings = [f"PYTHONPATH={os.pathsep.join(path for path in sys.path if path)}", f"OMP_NUM_THREADS={threads}"]
    command = ["env", *settings, sys.executable, "-P", "-m", module, str(folder), str(rank)]
    with (folder / f"said-{rank}").open("wb") as said:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def _wait(processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """Until all have ended. Raises UserError ``engine.ranks`` as soon as one has failed: the others would wait for it."""
    codes = [process.poll() for process in processes]
    while None in codes and not any(codes):
        time.sleep(_WAIT)
        codes = [process.poll() for process in processes]
    for rank, code in enumerate(codes):
        if code:
            lines = (folder / f"said-{rank}").read_text("utf-8", "replace").strip().splitlines()
            why = lines[-1] if lines else f"status {code}"
            raise fail("engine.ranks", f"rank {rank} of {len(codes)} ended early: {why}", hint="fewer --ranks")
