"""The same source, recipe and version give the same bytes: whatever the jobs, the chunks, the place and the surroundings."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import dsv4
import pytest
from make import checkpoint, llama, llama_config

# What may differ in ckptkit.json, as its module says.
MAY_DIFFER = ("started", "seconds", "environment", "mtime_ns", "uri", "link", "launch")
# A run of the command line with another size of chunks than its own, and another umask.
PROGRAM = """
import functools, os, sys
from ckptkit.commands import making
making.Options = functools.partial(making.Options, chunk_bytes=int(sys.argv[1]))
os.umask(int(sys.argv[2], 8))
from ckptkit.cli import main
sys.exit(main(sys.argv[3:]))
"""
RUNS: list[tuple[int, str, str, dict[str, str]]] = [
    (4 << 20, "022", "1", {"PYTHONHASHSEED": "0", "TZ": "UTC"}),
    (1 << 12, "022", "4", {"PYTHONHASHSEED": "7", "TZ": "Asia/Kathmandu", "OMP_NUM_THREADS": "1"}),
    (100_003, "077", "2", {"PYTHONHASHSEED": "11", "LC_ALL": "C", "OMP_NUM_THREADS": "3"}),
]


def dense(folder: Path) -> Path:
    tensors = llama(hidden=256, inter=512, vocab=515)
    body = {name: tensor for name, tensor in tensors.items() if "layers.1" not in name}
    rest = {name: tensor for name, tensor in tensors.items() if name not in body}
    return checkpoint(folder, [body, rest], llama_config(hidden=256, inter=512, vocab=515))


def drafting(folder: Path) -> Path:
    return dsv4.make(folder).folder


COMMANDS: dict[str, tuple[Callable[[Path], Path], list[str]]] = {
    "head": (dense, ["quantize", "--recipe", "lm_head-w8a16"]),
    "body": (dense, ["quantize", "--recipe", "w4a16-lm_head-w8a16"]),
    "nvfp4": (dense, ["quantize", "--recipe", "nvfp4a16"]),
    "fp8": (dense, ["quantize", "--recipe", "fp8-block"]),
    "reshard": (dense, ["reshard", "--max-shard-size", "300KB", "--cast", "*norm*=f32"]),
    "config": (dense, ["config", "--set", "bos_token_id=1"]),
    "dequantize": (drafting, ["dequantize"]),
    "extract": (drafting, ["extract-dspark", "--dequantize", "bf16"]),
}


def bytes_of(folder: Path) -> dict[str, str]:
    """The digest of every file; of ckptkit.json without what may differ."""
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    made = json.loads((folder / "ckptkit.json").read_text(), object_pairs_hook=_without)
    found["ckptkit.json"] = json.dumps(made)
    return found


def _without(pairs: list[tuple[str, object]]) -> dict[str, object]:
    return {key: value for key, value in pairs if key not in MAY_DIFFER}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_same_bytes(tmp_path: Path, command: str) -> None:
    make, (name, *options) = COMMANDS[command]
    results = []
    for number, (chunk, umask, jobs, surroundings) in enumerate(RUNS):
        place = tmp_path / f"place-{number}" / ("deeper" * number)
        source = make(place / "model")
        arguments = [name, str(source), str(place / "out"), *options, "--jobs", jobs, "--quiet"]
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), **surroundings}
        run = [sys.executable, "-c", PROGRAM, str(chunk), umask, *arguments]
        ended = subprocess.run(run, env=environment, cwd=place, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        results.append(bytes_of(place / "out"))
        shutil.rmtree(source)
    assert results[0] == results[1] == results[2]
