"""Verify checkpoints level by level, against what the machine can do at all, in one run.

    python benchmarks/verify.py [--folder .cache/bench] [--pairs 3] [--case static data sha256 numeric]

``static`` looks at 1,000 shards of 230 tensors (headers over files of holes). The other cases share the checkpoint of
benchmarks/quantize.py: 4 GB of bf16 in four shards. ``data`` and ``sha256`` are compared, in turn, with a cold
sequential read of the same bytes in one thread, and with one that feeds hashlib; before each run the files are
dropped from the page cache. ``numeric`` compares a W4A16 body with a W8A16 head with their source, both in the page
cache. Seconds are the command's own, without Python's start; the peak is of the whole process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import quantize
from measure import clean, run

SHARDS, PER_SHARD = 1000, 230

READ = """
import hashlib, json, sys, time
from pathlib import Path
out, hashed, *files = sys.argv[1:]
digest, buffer = hashlib.sha256(), bytearray(1 << 20)
view, began = memoryview(buffer), time.perf_counter()
for file in files:
    with open(file, "rb", buffering=0) as stream:
        while size := stream.readinto(buffer):
            if hashed == "sha256":
                digest.update(view[:size])
Path(out).write_text(json.dumps({"seconds": time.perf_counter() - began}))
"""


class Timed(NamedTuple):
    """A run: its own seconds, and the peak of its process in MB."""

    seconds: float
    rss: float


def verify(folder: Path, scratch: Path, *options: str) -> Timed:
    report = scratch / "report.json"
    command = [sys.executable, "-m", "ckptkit", "verify", str(folder), "--report", str(report), "-q", "--exit-zero"]
    usage = run([*command, *options])
    content = json.loads(report.read_text())
    if not content["ok"] and any(finding["severity"] == "error" for finding in content["findings"]):
        sys.exit(f"{folder}: {content['findings'][0]['message']}")
    return Timed(content["seconds"], usage.rss)


def read(files: Iterable[Path], scratch: Path, hashed: str = "") -> Timed:
    report = scratch / "read.json"
    usage = run([sys.executable, "-c", READ, str(report), hashed, *map(str, files)])
    return Timed(json.loads(report.read_text())["seconds"], usage.rss)


def drop(files: Iterable[Path]) -> None:
    """Have the kernel forget what it keeps of the files."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    time.sleep(0.5)


def shards_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in shards_of(folder))


# --- the checkpoints -----------------------------------------------------------------------------------------


def many_shards(folder: Path) -> Path:
    """1,000 shards of 230 tensors: W4A16 experts of 25 layers, three tensors each, over holes."""
    from ckptkit.files.header import Spec, lay_out

    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    specs = [spec for number in range(SHARDS * PER_SHARD // 3 + 1) for spec in packed(number)][: SHARDS * PER_SHARD]
    weight_map, total = {}, 0
    for shard in range(SHARDS):
        name = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        part = specs[shard * PER_SHARD : (shard + 1) * PER_SHARD]
        head, header = lay_out([Spec(*spec) for spec in part], {"format": "pt"})
        (folder / name).write_bytes(head)
        os.truncate(folder / name, header.file_size)
        weight_map |= {spec[0]: name for spec in part}
        total += header.file_size - header.data_start
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(many_config()))
    return folder


def packed(number: int) -> list[tuple[str, str, tuple[int, ...]]]:
    layer, rest = divmod(number, 3072)
    expert, projection = divmod(rest, 3)
    rows, cols = ((2048, 7168), (2048, 7168), (7168, 2048))[projection]
    module = f"model.layers.{layer}.mlp.experts.{expert}.{('gate_proj', 'up_proj', 'down_proj')[projection]}"
    return [
        (f"{module}.weight_packed", "I32", (rows, cols // 8)),
        (f"{module}.weight_scale", "BF16", (rows, cols // 128)),
        (f"{module}.weight_shape", "I64", (2,)),
    ]


def many_config() -> dict[str, object]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
    group = {"targets": ["re:.*experts.*"], "weights": weights, "format": "pack-quantized"}
    declared = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    return {"architectures": ["BenchForCausalLM"], "model_type": "bench", "quantization_config": declared}


# --- the cases -----------------------------------------------------------------------------------------------


def static(folder: Path, scratch: Path, pairs: int) -> None:
    source = many_shards(folder / "many-shards")
    runs = [verify(source, scratch, "--level", "static") for _ in range(pairs)]
    row("static", f"{SHARDS:,} shards x {PER_SHARD} tensors", runs, "", "2 s")


def data(folder: Path, scratch: Path, pairs: int) -> None:
    source = recorded(folder, ["--per-tensor"])
    against(source, scratch, pairs, "data, xxh3", lambda files: read(files, scratch), "0.8 of the read's speed")


def sha256(folder: Path, scratch: Path, pairs: int) -> None:
    source = recorded(folder, [])
    against(
        source, scratch, pairs, "data, sha256", lambda files: read(files, scratch, "sha256"), "0.8 of hashlib's speed"
    )


def recorded(folder: Path, options: list[str]) -> Path:
    source = quantize.make(folder / f"shards-{quantize.SHARDS}")
    for name in ("SHA256SUMS", "ckptkit.digests.json"):
        (source / name).unlink(missing_ok=True)
    run([sys.executable, "-m", "ckptkit", "hash", str(source), "--no-progress", *options])
    return source


def against(
    source: Path, scratch: Path, pairs: int, title: str, other: Callable[[list[Path]], Timed], least: str
) -> None:
    """Turn by turn: the other read, and the command, each of files that are not in the page cache."""
    files, ours, theirs = shards_of(source), [], []
    for _ in range(pairs):
        drop(files)
        theirs.append(other(files))
        drop(files)
        ours.append(verify(source, scratch, "--select", "data"))
    rate = size_of(source) / seconds(theirs) / 1e9
    compared = f"{rate:.2f} GB/s read so: ratio {seconds(theirs) / seconds(ours):.2f}"
    row(
        title,
        f"{size_of(source) / 1e9:.1f} GB, {size_of(source) / seconds(ours) / 1e9:.2f} GB/s",
        ours,
        compared,
        least,
    )


def numeric(folder: Path, scratch: Path, pairs: int) -> None:
    source, made = quantize.make(folder / f"shards-{quantize.SHARDS}"), scratch / "w4a16"
    clean(made)
    quantize.ours(source, made, "w4a16-lm_head-w8a16", ["--link", "hard"])
    for path in (*shards_of(source), *shards_of(made)):
        read([path], scratch)
    for title, ids in (
        ("numeric, values", ["numeric.error", "numeric.exact"]),
        ("numeric, the head's logits", ["numeric.head"]),
    ):
        options = [f"--select={id}" for id in ids]
        runs = [verify(made, scratch, "--against", str(source), *options) for _ in range(pairs)]
        row(
            title,
            f"{size_of(source) / 1e9:.1f} GB of source, {size_of(source) / seconds(runs) / 1e9:.2f} GB/s",
            runs,
            "",
            "1 GB/s",
        )
    clean(made)


def seconds(runs: list[Timed]) -> float:
    return statistics.median(run.seconds for run in runs)


def row(title: str, what: str, runs: list[Timed], compared: str, least: str) -> None:
    rss = statistics.median(run.rss for run in runs)
    print(f"| {title} | {what} | {seconds(runs):.2f} | {compared} | {rss:.0f} | {least} |", flush=True)


CASES = {"static": static, "data": data, "sha256": sha256, "numeric": numeric}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(".cache/bench"))
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--case", nargs="*", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    scratch = arguments.folder / "out"
    scratch.mkdir(parents=True, exist_ok=True)
    print("| level | what | seconds | compared with | peak RSS MB | goal |\n|---|---|---|---|---|---|")
    for case in arguments.case:
        CASES[case](arguments.folder, scratch, arguments.pairs)


if __name__ == "__main__":
    main()
