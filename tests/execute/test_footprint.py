"""Memory: what a plan is said to take against what is resident, and what happens where there is not enough."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from make import checkpoint, llama, llama_config
from torch import bfloat16, full

from ckptkit import plan_file
from ckptkit.cli import explain
from ckptkit.errors import OUTPUT
from ckptkit.execute import Options, footprint, peak_memory, preflight
from ckptkit.files.checkpoint import open_checkpoint
from ckptkit.files.source import open_source
from ckptkit.plan import Plan
from ckptkit.planners.quantize import plan_quantize
from ckptkit.recipe.recipe import load
from ckptkit.replay import derived, source_of

OPTIONS = Options(jobs=2)


def planned(folder: Path, rows: int, columns: int, recipe: str = "fp8-block") -> Plan:
    weight = full((rows, columns), 0.5, dtype=bfloat16)
    checkpoint(folder, {"model.layers.0.mlp.down_proj.weight": weight}, llama_config())
    with open_source(str(folder)) as source:
        return plan_quantize(open_checkpoint(source), load(recipe)).plan


def test_rows_that_are_never_cut_count(tmp_path: Path) -> None:
    plain, wide = (peak_memory(planned(tmp_path / str(w), 256, w), OPTIONS) for w in (1024, 1 << 16))
    one_block_row = 128 * (1 << 16) * 2
    assert plain == peak_memory(planned(tmp_path / "same", 512, 1024), OPTIONS)
    assert wide > plain + 2 * one_block_row


def test_a_run_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "available", lambda: 1 << 20)
    told = []
    for columns in (1024, 1 << 16):
        src = tmp_path / str(columns)
        plan = planned(src, 256, columns)
        with open_source(str(src)) as source:
            told.append([(f.id, f.exit_code) for f in preflight(plan, source, tmp_path / "out", OPTIONS)])
    assert told == [[], [("output.memory", OUTPUT)]]


def test_no_memory_is_no_bug() -> None:
    findings, code = explain(MemoryError("no more"), [])
    assert ([finding.id for finding in findings], code) == (["output.memory"], OUTPUT)


def test_rows_that_are_only_moved_take_no_torch(tmp_path: Path) -> None:
    checkpoint(tmp_path / "src", llama(vocab=20_000, hidden=64), llama_config(vocab=20_000, hidden=64))
    options = ["--draft-vocab", "prefix:9000", "--slices", "3", "--engine", "lightllm", "--plan", "plan.jsonl"]
    resident = peak_of(["reorder-vocab", "src", "out", *options], tmp_path)
    file = plan_file.read(str(tmp_path / "plan.jsonl"))
    with source_of(file, str(tmp_path / "src")) as source, derived(file, source) as (_, plan):
        estimate = peak_memory(plan, OPTIONS)
    assert resident < estimate + 20_000_000  # pages of mapped files count as resident
    assert estimate < peak_memory(planned(tmp_path / "other", 256, 1024), OPTIONS) / 2


def peak_of(command: list[str], folder: Path) -> int:
    """Bytes that were resident at most while the command ran there."""
    command = ["-m", "ckptkit", *command, "-j", "2", "--no-verify", "--no-progress"]
    code = (
        "import resource, subprocess, sys\n"
        f"subprocess.run([sys.executable, *{command!r}], check=True, capture_output=True)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    told = subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True, text=True)
    return int(told.stdout) * (1 if sys.platform == "darwin" else 1024)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 8_000_000), (130, 200_000)])
def test_wide_rows_stay_within_the_estimate(shape: tuple[int, int], tmp_path: Path) -> None:
    estimate = peak_memory(planned(tmp_path / "src", *shape), OPTIONS)
    assert peak_of(["quantize", "src", "out", "-r", "fp8-block"], tmp_path) < estimate
