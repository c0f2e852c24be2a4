"""What the executor's tests share: a small checkpoint, an operation that is easy to check, a plan made by hand."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from ckptkit import ops
from ckptkit.execute import Options, Result, execute
from ckptkit.files.header import Header, Spec, read_header
from ckptkit.files.source import Source, open_source
from ckptkit.ops import Args, Block, Chunk, Context, NonFinite, Operation, Read, Write
from ckptkit.plan import Plan, Ref, Shard, Sidecar, Step, copy_step

FLIP = "flip@1"
NAN = 255  # the byte that `flip` takes for a NaN
SHARDS = 4


# --- the operation: every byte xor the tensor's greatest byte, and apart from that the last byte of each row ---------

delay = 0.0  # seconds that each piece takes


def _specs(inputs: Sequence[Spec], args: Args) -> list[Spec]:
    name, _, (rows, cols) = inputs[0]
    return [Spec(f"{name}.flipped", "U8", (rows, cols)), Spec(f"{name}.last", "U8", (rows, 1))]


def _chunks(inputs: Sequence[Spec], args: Args, budget: int) -> Iterator[Chunk]:
    rows, cols = inputs[0].shape
    step = max(1, budget // cols)
    for row in range(0, rows, step):
        yield Chunk(
            (Read(0, row, min(row + step, rows)), Read(0, row, min(row + step, rows), cols - 1, cols)),
            (Write(0, row), Write(1, row)),
        )


def _measures(inputs: Sequence[Spec], args: Args, budget: int) -> Iterator[Read]:
    return (chunk.reads[0] for chunk in _chunks(inputs, args, budget))


def _measure(block: Block, args: Args, context: Context) -> float:
    return float(max(block.data))


def _make(blocks: Sequence[Block], chunk: Chunk, args: Args, state: Any, context: Context) -> list[Any]:
    time.sleep(delay)
    whole, last = (np.frombuffer(block.data, np.uint8).reshape(block.rows, block.cols) for block in blocks)
    if context.nonfinite_error and NAN in whole:
        raise NonFinite(0, "NaN")
    return [whole ^ np.uint8(state), last.copy()]


OPERATION = Operation(FLIP, _specs, _chunks, _make, _measures, _measure)


REAL = ops._operations


def operations() -> Mapping[str, Operation]:
    """The operations that ckptkit has, and `flip`."""
    return {**REAL(), FLIP: OPERATION}


# --- the checkpoint and the plan -------------------------------------------------------------------------------------


def make_checkpoint(folder: Path, rows: int = 96, cols: int = 64, seed: int = 0) -> Path:
    """Four shards, each with a matrix of bytes and three tensors more; one shard lies in a sub-folder."""
    random = np.random.default_rng(seed)
    weight_map = {}
    for i in range(SHARDS):
        tensors = {
            f"layer{i}.weight": random.integers(0, NAN - 1, (rows, cols), np.uint8),
            f"layer{i}.bias": random.standard_normal(cols - 1).astype(np.float16),
            f"layer{i}.count": np.array(i, np.int64),
            f"layer{i}.empty": np.zeros((0, 3), np.float32),
        }
        path = folder / shard_name(i)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path, metadata={"format": "pt", "part": str(i)})
        path.chmod(0o640 if i else 0o444)
        weight_map |= dict.fromkeys(tensors, shard_name(i))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text('{"model_type": "none"}')
    (folder / "assets").mkdir()
    (folder / "assets" / "notes.txt").write_bytes(bytes(range(256)) * 40)
    (folder / "assets" / "notes.txt").chmod(0o755)
    return folder


def shard_name(i: int) -> str:
    return f"part{i}.safetensors" if i < SHARDS - 1 else f"more/part{i}.safetensors"


def header_of(source: Source, file: str) -> Header:
    return read_header(lambda start, stop: source.read(file, start, stop), source.files[file].size, file)


def make_plan(source: Source, flipped: Sequence[int] = (0, 2), config: str = '{"model_type": "flipped"}') -> Plan:
    """Flip the matrix of the shards ``flipped``, leave the other shards as they are, write config.json anew."""
    shards = []
    for i in range(SHARDS):
        file = shard_name(i)
        header = header_of(source, file)
        refs = [Ref(file, *entry.spec, entry.start, entry.stop) for entry in header.entries]
        steps = tuple(_step(ref) if i in flipped else copy_step(ref, "rest") for ref in refs)
        shards.append(Shard(file, file, header.metadata, steps, linked=i not in flipped))
    sidecars = (Sidecar("assets/notes.txt"), Sidecar("config.json", config), Sidecar("model.safetensors.index.json"))
    return Plan("flip", tuple(shards), sidecars, settings={"recipe": "by hand"})


def _step(ref: Ref) -> Step:
    if not ref.name.endswith("weight"):
        return copy_step(ref, "rest")
    return Step(FLIP, (ref,), tuple(_specs([ref.spec], {})), "flip")


def expected(folder: Path, flipped: Sequence[int] = (0, 2)) -> dict[str, np.ndarray[Any, Any]]:
    """The result's tensors by name, computed from whole tensors that the safetensors package read."""
    found = {}
    for i in range(SHARDS):
        for name, array in load_file(folder / shard_name(i)).items():
            if i in flipped and name.endswith("weight"):
                found |= {f"{name}.flipped": array ^ array.max(), f"{name}.last": array[:, -1:]}
            else:
                found[name] = array
    return found


def tensors_of(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    return {name: array for i in range(SHARDS) for name, array in load_file(folder / shard_name(i)).items()}


def same_tensors(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        (array.dtype, array.shape, array.tobytes()) == (other[name].dtype, other[name].shape, other[name].tobytes())
        for name, array in one.items()
    )


# --- running ---------------------------------------------------------------------------------------------------------


@dataclass
class Meter:
    """A progress that remembers, and that may interfere."""

    shards: list[str] = field(default_factory=list)
    bytes: int = 0
    total_bytes: int = 0
    total_shards: int = 0
    finished: bool = False

    def start(self, total_shards: int, total_bytes: int) -> None:
        self.total_shards, self.total_bytes = total_shards, total_bytes

    def shard(self, name: str) -> None:
        self.shards.append(name)

    def advance(self, nbytes: int) -> None:
        self.bytes += nbytes

    def done(self) -> None:
        self.finished = True


def run(folder: Path, out: Path, meter: Meter | None = None, flipped: Sequence[int] = (0, 2), **options: Any) -> Result:
    """Flip the checkpoint in ``folder`` into ``out``, in small pieces."""
    settings = Options(**{"jobs": 2, "chunk_bytes": 1000} | options)
    with open_source(str(folder)) as source:
        return execute(make_plan(source, flipped), source, out, settings, meter or Meter(), {"note": "by a test"})


def snapshot(folder: Path) -> dict[str, tuple[str, int, int]]:
    """Every file below ``folder``: sha256, mode, mtime."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {
        path.relative_to(folder).as_posix(): (
            hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mode, path.stat().st_mtime_ns,
        )
        for path in files
    }  # fmt: skip


def contents(folder: Path) -> dict[str, Any]:
    """Every file of a result by name: mode and bytes; of the manifest, what a run on another day gives too."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if path.name == "ckptkit.json":
            manifest = json.loads(path.read_text())
            for record in [manifest, *manifest["shards"], *manifest["source"]["files"].values()]:
                for key in ("started", "seconds", "mtime_ns", "environment"):
                    record.pop(key, None)
            found[path.name] = manifest
        elif path.is_file():
            found[path.relative_to(folder).as_posix()] = (path.stat().st_mode, path.read_bytes())
    return found
