"""Parts made by real processes in a shared folder, and joined: the bytes of one run, whatever happens to a worker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from make import checkpoint, llama, llama_config
from told import Told, teller

from ckptkit.errors import OUTPUT, SOURCE, USAGE
from ckptkit.scheduling import Part, part_here

RECIPE = ["--recipe", "w4a16-lm_head-w8a16"]
# A worker that stops in the middle of its second shard until a file is there.
SLOW = """
import sys, time
from pathlib import Path
from ckptkit.execute import run
made, gate, count = run.make_shard, Path(sys.argv[1]), 0
def slowly(*args):
    global count
    count += 1
    if count == 2:
        Path(f"{gate}.reached").touch()
        while not gate.exists():
            time.sleep(0.01)
    return made(*args)
run.make_shard = slowly
from ckptkit.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tensors = llama(layers=4)
    names = sorted(tensors)
    parts = [{name: tensors[name] for name in names[i::7]} for i in range(7)]
    return checkpoint(tmp_path / "model", parts, llama_config(layers=4))


@pytest.fixture
def quantized(capsys: pytest.CaptureFixture[str]) -> Told:
    return teller(capsys, "quantize")


@pytest.fixture
def applied(capsys: pytest.CaptureFixture[str]) -> Told:
    return teller(capsys, "apply")


def worker(*arguments: object, gate: Path | None = None) -> subprocess.Popen[str]:
    program = ["-c", SLOW, str(gate)] if gate else ["-m", "ckptkit"]
    run = [sys.executable, *program, "quantize", *map(str, arguments), *RECIPE, "--json", "--jobs", "1"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(run, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, list[str]]:
    out, _ = process.communicate(timeout=60)
    found: dict[str, Any] = json.loads(out)
    return process.returncode, [finding["id"] for finding in found["findings"]]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "ckptkit.json"}


def manifest(folder: Path) -> dict[str, Any]:
    """What of the manifest may not differ."""
    found = json.loads((folder / "ckptkit.json").read_text())
    for shard in found["shards"]:
        del shard["mtime_ns"]
    return {key: value for key, value in found.items() if key not in {"started", "seconds", "environment"}}


def wait_for(path: Path) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("count", [1, 3, 9])
def test_parts_become_the_bytes_of_one_run(
    tmp_path: Path, source: Path, quantized: Told, applied: Told, count: int
) -> None:
    quantized(source, tmp_path / "whole", *RECIPE)
    for number in range(1, count + 1):
        quantized(source, tmp_path / "out", *RECIPE, "--part", f"{number}/{count}")
    assert not (tmp_path / "out").exists()
    applied("--finish", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert manifest(tmp_path / "out") == manifest(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out", "whole"]


def test_workers_at_once(tmp_path: Path, source: Path, quantized: Told, applied: Told) -> None:
    quantized(source, tmp_path / "whole", *RECIPE)
    workers = [worker(source, tmp_path / "out", "--part", f"{number}/3") for number in (1, 2, 3)]
    assert [ended(process) for process in workers] == [(0, [])] * 3
    applied("--finish", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_shares_are_even_and_complete(tmp_path: Path, source: Path, quantized: Told) -> None:
    shards = [quantized(source, tmp_path / "out", *RECIPE, "--part", f"{number}/3")["shards"] for number in (1, 2, 3)]
    assert sum(shards) == 7
    assert max(shards) - min(shards) <= 1


def test_one_part_is_made_by_one_worker(tmp_path: Path, source: Path, applied: Told) -> None:
    gate = tmp_path / "gate"
    first = worker(source, tmp_path / "out", "--part", "1/2", gate=gate)
    wait_for(Path(f"{gate}.reached"))
    assert ended(worker(source, tmp_path / "out", "--part", "1/2")) == (OUTPUT, ["output.locked"])
    assert ended(worker(source, tmp_path / "out", "--part", "2/2")) == (0, [])
    document = applied("--finish", tmp_path / "out", code=OUTPUT)
    assert [finding["id"] for finding in document["findings"]] == ["output.parts"]
    gate.touch()
    assert ended(first) == (0, [])
    applied("--finish", tmp_path / "out")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_is_killed_goes_on_where_it_was(
    tmp_path: Path, source: Path, quantized: Told, applied: Told, number: signal.Signals
) -> None:
    quantized(source, tmp_path / "whole", *RECIPE)
    gate = tmp_path / "gate"
    first = worker(source, tmp_path / "out", "--part", "1/2", gate=gate)
    wait_for(Path(f"{gate}.reached"))
    first.send_signal(number)
    gate.touch()
    first.communicate(timeout=60)
    assert first.returncode != 0
    applied("--finish", tmp_path / "out", code=OUTPUT)
    quantized(source, tmp_path / "out", *RECIPE, "--part", "1/2")
    quantized(source, tmp_path / "out", *RECIPE, "--part", "2/2")
    applied("--finish", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_part_that_is_missing_is_named_with_the_command_that_makes_it(
    tmp_path: Path, source: Path, quantized: Told, applied: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    quantized(source, tmp_path / "out", *RECIPE, "--part", "2/3")
    document = applied("--finish", tmp_path / "out", code=OUTPUT)
    assert len(document["findings"]) == 2
    for finding in document["findings"]:
        words = finding["hint"].split()
        assert words[:2] == ["ckptkit", "apply"]
        applied(*words[2:])
    applied("--finish", tmp_path / "out")


def test_finishing_again_after_a_crash_in_the_middle(
    tmp_path: Path, source: Path, quantized: Told, applied: Told
) -> None:
    quantized(source, tmp_path / "whole", *RECIPE)
    for number in (1, 2):
        quantized(source, tmp_path / "out", *RECIPE, "--part", f"{number}/2")
    program = """
import os, sys
from ckptkit.execute import parts
rename, count = os.rename, 0
def failing(here, there):
    global count
    count += "out.parts" in str(here)
    if count == 3:
        os._exit(9)
    rename(here, there)
parts.os.rename = failing
from ckptkit.cli import main
sys.exit(main(sys.argv[1:]))
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = [sys.executable, "-c", program, "apply", "--finish", str(tmp_path / "out")]
    assert subprocess.run(run, env=environment, capture_output=True, check=False).returncode == 9
    assert not (tmp_path / "out").exists()
    applied("--finish", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_parts_of_another_division_are_refused(tmp_path: Path, source: Path, quantized: Told) -> None:
    def refused(*arguments: object) -> list[str]:
        document = quantized(source, tmp_path / "out", *arguments, code=OUTPUT)
        return [finding["id"] for finding in document["findings"]]

    quantized(source, tmp_path / "out", *RECIPE, "--part", "1/2")
    assert refused(*RECIPE, "--part", "1/3") == ["output.plan-differs"]
    assert refused("--recipe", "lm_head-w8a16", "--part", "2/2") == ["output.plan-differs"]
    quantized(source, tmp_path / "out", *RECIPE, "--part", "2/2")


def test_a_source_that_changed_since_is_refused(tmp_path: Path, source: Path, quantized: Told, applied: Told) -> None:
    quantized(source, tmp_path / "out", *RECIPE, "--part", "1/1")
    (source / "config.json").write_text("{}")
    applied("--finish", tmp_path / "out", code=SOURCE)
    assert not (tmp_path / "out").exists()


def test_a_result_that_is_there_is_not_replaced_unasked(
    tmp_path: Path, source: Path, quantized: Told, applied: Told
) -> None:
    quantized(source, tmp_path / "out", "--recipe", "lm_head-w8a16")
    before = contents(tmp_path / "out")
    quantized(source, tmp_path / "out", *RECIPE, "--part", "1/1", code=OUTPUT)
    quantized(source, tmp_path / "out", *RECIPE, "--part", "1/1", "--overwrite")
    applied("--finish", tmp_path / "out", code=OUTPUT)
    assert contents(tmp_path / "out") == before
    applied("--finish", tmp_path / "out", "--overwrite")
    assert contents(tmp_path / "out") != before


def test_an_equal_result_is_replaced_where_that_is_asked_for(
    tmp_path: Path, source: Path, quantized: Told, applied: Told
) -> None:
    quantized(source, tmp_path / "out", *RECIPE)
    before, shard = contents(tmp_path / "out"), tmp_path / "out" / "model-00001-of-00007.safetensors"
    shard.write_bytes(before[shard.name][:-1] + bytes([before[shard.name][-1] ^ 1]))
    quantized(source, tmp_path / "out", *RECIPE, "--part", "1/1", "--overwrite")
    applied("--finish", tmp_path / "out", code=OUTPUT)
    assert contents(tmp_path / "out") != before
    applied("--finish", tmp_path / "out", "--overwrite")
    assert contents(tmp_path / "out") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_joining_again_once_the_result_is_there(tmp_path: Path, source: Path, quantized: Told, applied: Told) -> None:
    """Killed after it had published, and before the parts were cleared away."""
    quantized(source, tmp_path / "out", *RECIPE, "--part", "1/1")
    program = """
import os, sys
from ckptkit.commands import making
making.clear = lambda out: os._exit(9)
from ckptkit.cli import main
sys.exit(main(sys.argv[1:]))
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = [sys.executable, "-c", program, "apply", "--finish", str(tmp_path / "out")]
    assert subprocess.run(run, env=environment, capture_output=True, check=False).returncode == 9
    before = contents(tmp_path / "out")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    applied("--finish", tmp_path / "out", "--overwrite")
    assert contents(tmp_path / "out") == before
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == times
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_what_others_keep_beside_the_output_stays(tmp_path: Path, source: Path, quantized: Told, applied: Told) -> None:
    kept = tmp_path / "out.parts" / "notes.txt"
    kept.parent.mkdir()
    kept.write_text("mine")
    quantized(source, tmp_path / "out", *RECIPE, "--part", "1/1", "--overwrite")
    applied("--finish", tmp_path / "out")
    assert [path.name for path in kept.parent.iterdir()] == ["notes.txt"]
    assert kept.read_text() == "mine"
    quantized(source, tmp_path / "out", *RECIPE, "--overwrite")
    assert kept.read_text() == "mine"


def test_parts_outlive_a_run_of_its_own(tmp_path: Path, source: Path, quantized: Told) -> None:
    quantized(source, tmp_path / "out", *RECIPE, "--part", "1/2")
    before = sorted(tmp_path.rglob("out.parts/**/*"))
    quantized(source, tmp_path / "out", *RECIPE)
    assert sorted(tmp_path.rglob("out.parts/**/*")) == before


def test_a_file_where_the_parts_would_be(tmp_path: Path, source: Path, quantized: Told) -> None:
    (tmp_path / "out.parts").write_text("mine")
    document = quantized(source, tmp_path / "out", *RECIPE, "--part", "1/1", code=OUTPUT)
    assert [(finding["id"], finding["file"]) for finding in document["findings"]] == [
        ("output.exists", str(tmp_path / "out.parts"))
    ]
    assert (tmp_path / "out.parts").read_text() == "mine"


def test_what_workers_were_allowed_is_recorded(tmp_path: Path, source: Path, quantized: Told, applied: Told) -> None:
    quantized(source, tmp_path / "out", *RECIPE, "--part", "1/2", "--allow", "plan.unchanged")
    quantized(source, tmp_path / "out", *RECIPE, "--part", "2/2")
    applied("--finish", tmp_path / "out", "--allow", "config.vocab")
    assert manifest(tmp_path / "out")["allowed"] == ["config.vocab", "plan.unchanged"]


def test_usage(tmp_path: Path, source: Path, quantized: Told, applied: Told) -> None:
    for part in ("0/3", "4/3", "1", "a/b", "1/0", "auto"):
        quantized(source, tmp_path / "out", *RECIPE, "--part", part, code=USAGE)
    quantized(source, tmp_path / "out", *RECIPE, "--part", "1/2", "--executor", "ray", code=USAGE)
    quantized(source, tmp_path / "out", *RECIPE, "--address", "x:1", code=USAGE)
    applied("--finish", tmp_path / "plan", tmp_path / "out", code=USAGE)
    applied("--finish", tmp_path / "out", "--dry-run", code=USAGE)
    applied("--finish", tmp_path / "out", code=OUTPUT)
    assert "--part" not in str(quantized(source, tmp_path / "out", *RECIPE, "--part", "1/2", "--dry-run")["findings"])
    assert not (tmp_path / "out.parts").exists()


@pytest.mark.parametrize(
    ("variables", "part"),
    [
        ({}, None),
        ({"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_MIN": "5"}, Part(3, 4)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, Part(1, 2)),
        ({"JOB_COMPLETION_INDEX": "3", "JOB_COMPLETIONS": "8"}, Part(4, 8)),
        ({"JOB_COMPLETION_INDEX": "3"}, None),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Part(2, 2)),
        ({"RANK": "2", "WORLD_SIZE": "2"}, None),
        ({"RANK": "x", "WORLD_SIZE": "2"}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "RANK": "1", "WORLD_SIZE": "2"}, Part(2, 2)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, Part(1, 1)),
        (
            {"SLURM_ARRAY_TASK_ID": "4", "SLURM_ARRAY_TASK_COUNT": "3", "SLURM_ARRAY_TASK_MIN": "0"}
            | {"SLURM_ARRAY_TASK_STEP": "2"},
            Part(3, 3),
        ),
        (  # --array=1,3,7 does not say which of three the last one is
            {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_COUNT": "3", "SLURM_ARRAY_TASK_MIN": "1"}
            | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
            None,
        ),
    ],
)
def test_what_schedulers_say(variables: dict[str, str], part: Part | None) -> None:
    assert part_here(variables) == part


def test_a_part_by_its_scheduler(
    tmp_path: Path, source: Path, quantized: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert quantized(source, tmp_path / "out", *RECIPE, "--part", "auto")["part"] == "2/2"
