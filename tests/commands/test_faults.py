"""The real command, killed and interrupted: what is published is whole, and ``--resume`` gives the undisturbed bytes."""

from __future__ import annotations

import hashlib
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from make import checkpoint, llama, llama_config


def digests(folder: Path) -> dict[str, str]:
    """Digests of all files but the manifest, whose times differ, and what a run keeps while it publishes."""
    own = ("ckptkit.json", ".ckptkit.")
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(own))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 160 MB in eight shards: long enough to be hit in the middle."""
    tensors = llama(layers=8, hidden=1024, inter=2816, vocab=8192)
    names = list(tensors)
    step = -(-len(names) // 8)
    parts = [{name: tensors[name] for name in names[i : i + step]} for i in range(0, len(names), step)]
    config = llama_config(layers=8, hidden=1024, inter=2816, vocab=8192)
    return checkpoint(tmp_path_factory.mktemp("faults") / "src", parts, config)


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ckptkit", "quantize", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(*arguments: object) -> tuple[int, str]:
    process = start(*arguments)
    _, err = process.communicate(timeout=120)
    return process.returncode, err


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["w4a16-lm_head-w8a16", "nvfp4a16"])
def test_killed_at_random_moments(recipe: str, src: Path, tmp_path: Path) -> None:
    began = time.monotonic()
    assert run(src, tmp_path / "whole", "-r", recipe)[0] == 0
    took = time.monotonic() - began
    before, whole = digests(src), digests(tmp_path / "whole")
    moments = random.Random(0)
    killed = 0
    for number in range(6):
        out = tmp_path / f"out{number}"
        process = start(src, out, "-r", recipe)
        time.sleep(moments.uniform(0.2, 0.9) * took)
        process.kill()
        _, err = process.communicate()
        assert process.returncode in {0, -signal.SIGKILL}, err
        if process.returncode:
            killed += 1
            assert not out.exists() or digests(out) == whole
            assert run(src, out, "-r", recipe, "--resume")[0] == 0
        assert digests(out) == whole
        assert not list(tmp_path.glob("*.partial"))
    assert killed
    assert digests(src) == before


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_exits_130_with_the_command_that_resumes(sent: signal.Signals, src: Path, tmp_path: Path) -> None:
    assert run(src, tmp_path / "whole", "-r", "w4a16")[0] == 0
    out = tmp_path / "out"
    process = start(src, out, "-r", "w4a16", "--no-progress")
    journal = tmp_path / "out.partial" / ".ckptkit.journal"
    while process.poll() is None and not (journal.exists() and journal.read_text().count("\n") > 2):
        time.sleep(0.01)
    os.kill(process.pid, sent)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert not out.exists()
    (hint,) = re.findall(r"^hint: (ckptkit .* --resume)$", err, re.MULTILINE)
    resumed = subprocess.run([sys.executable, "-m", *shlex.split(hint)], capture_output=True, text=True)
    assert resumed.returncode == 0, resumed.stderr
    assert "finished by an earlier run" in resumed.stdout
    assert digests(out) == digests(tmp_path / "whole")
