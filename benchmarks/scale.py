"""How a conversion grows with shards and workers on this machine.

    python benchmarks/scale.py [--folder .cache/bench] [--pairs 3]

Shards of 64 MB, each a matrix that W4A16 makes anew. One process with one thread makes 8, 16 and 32 of them; then 32 are made
by one, two and four workers (``--part``) with one thread each, and joined. A plain copy of the same bytes is timed
beside each. Prints the tables of docs/scale.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from measure import Usage, apart, clean, median, run

ROWS, COLUMNS = 8192, 4096
SHARDS = (8, 16, 32)
WORKERS = (1, 2, 4)
RECIPE = ["--recipe", "w4a16", "--allow", "recipe.class-reach", "--jobs", "1", "--quiet"]
COPY = "import shutil, sys; shutil.copytree(sys.argv[1], sys.argv[2])"


def make(folder: Path, shards: int) -> None:
    """A checkpoint of ``shards`` files with a matrix each."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    matrix = (torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16)
    weight_map = {}
    for layer in range(shards):
        name, file = f"model.layers.{layer}.mlp.up_proj.weight", f"model-{layer + 1:05}-of-{shards:05}.safetensors"
        save_file({name: matrix}, folder / file, metadata={"format": "pt"})
        weight_map[name] = file
    index = {"metadata": {"total_size": shards * matrix.nbytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"model_type": "llama", "hidden_size": COLUMNS, "intermediate_size": ROWS, "num_hidden_layers": shards}
    (folder / "config.json").write_text(json.dumps(config))


def quantize(source: Path, out: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "ckptkit", "quantize", str(source), str(out), *RECIPE, *options]


def at_once(commands: Sequence[Sequence[str]]) -> float:
    """Wall seconds of processes that run together."""
    began = time.perf_counter()
    for process in [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]:
        if process.wait():
            sys.exit(f"a worker ended with {process.returncode}")
    return time.perf_counter() - began


def grow(folder: Path, pairs: int) -> None:
    print("shards  GB read  wall s  CPU s  RSS MB  copy CPU s  GB read / CPU s")
    for count in SHARDS:
        source, out = folder / f"model-{count}", folder / "out"
        apart(make, source, count)
        runs: list[tuple[Usage, Usage]] = []
        for _ in range(pairs):
            plain = run([sys.executable, "-c", COPY, str(source), str(folder / "copy")])
            clean(folder / "copy")
            runs.append((run(quantize(source, out)), plain))
            clean(out)
        ours, plain = (median(side) for side in zip(*runs, strict=True))
        size = count * ROWS * COLUMNS * 2 / 1e9
        print(
            f"{count:6}  {size:7.2f}  {ours.wall:6.1f}  {ours.cpu:5.1f}  {ours.rss:6.0f}  {plain.cpu:10.1f}  {size / ours.cpu:.2f}"
        )
        if count != SHARDS[-1]:
            clean(source)


def divide(folder: Path, pairs: int) -> None:
    source, out = folder / f"model-{SHARDS[-1]}", folder / "out"
    print("workers  wall s  join s")
    for count in WORKERS:
        walls, joins = [], []
        for _ in range(pairs):
            parts = [quantize(source, out, "--part", f"{number}/{count}") for number in range(1, count + 1)]
            walls.append(at_once(parts))
            joins.append(at_once([[sys.executable, "-m", "ckptkit", "apply", "--finish", str(out), "--quiet"]]))
            clean(out)
        print(f"{count:7}  {statistics.median(walls):6.1f}  {statistics.median(joins):6.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, default=Path(".cache/bench/scale"))
    parser.add_argument("--pairs", type=int, default=3)
    given = parser.parse_args()
    clean(given.folder)
    grow(given.folder, given.pairs)
    divide(given.folder, given.pairs)
    clean(given.folder)


if __name__ == "__main__":
    main()
