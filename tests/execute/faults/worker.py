"""Runs the tests' plan slowly, in a process of its own: ``worker.py SOURCE OUT``. Says when it has begun."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).parents[1]))
import lab

from ckptkit import ops

# The tests' operation does without torch, whose import takes longer than all the rest.
torch = ModuleType("torch")
torch.set_num_threads = lambda count: None  # type: ignore[attr-defined]
torch.__version__ = "none"
sys.modules["torch"] = torch


class Announcing(lab.Meter):
    def start(self, total_shards: int, total_bytes: int) -> None:
        print("begun", flush=True)  # noqa: T201


if __name__ == "__main__":
    ops._operations = lab.operations
    lab.delay = 0.025
    lab.run(Path(sys.argv[1]), Path(sys.argv[2]), Announcing())
