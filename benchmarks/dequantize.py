"""Dequantize 4 GB: ckptkit, a plain copy of as many bytes, straightforward torch code and llm-dequant in turn, in one run.

    python benchmarks/dequantize.py [--folder .cache/bench] [--pairs 3] [--case fp4 fp8 nvfp4] [--peer FOLDER]

Makes its own checkpoints: codes of 20 layers of Qwen3-4B's shapes in four shards, random, which become 4.0 GB of BF16.
``fp4`` is MXFP4, ``fp8`` has float32 scales for blocks of 128 x 128, ``nvfp4`` is compressed-tensors' NVFP4. The copy
writes files as large as the result's, 1 MiB at a time, and synchronises them as ckptkit does; it reads one file of
64 MiB over and over, so from the page cache. The peer is taken from FOLDER (pip install --no-deps --target FOLDER llm-dequant) and left out without it.
Before a ratio is printed, results are compared bit for bit. Prints the tables of docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import quantize
from measure import Usage, apart, clean, median, run
from quantize import check_same, tell

LAYERS, SHARDS, THREADS = 20, 4, 2
FP4_WEIGHTS = {"num_bits": 4, "type": "float", "symmetric": True}
SCHEMES: dict[str, dict[str, Any]] = {
    "fp4": {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {"body": {"targets": ["Linear"], "weights": {**FP4_WEIGHTS, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}}},
        "ignore": ["lm_head"],
    },
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "nvfp4": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"body": {"targets": ["Linear"], "weights": {**FP4_WEIGHTS, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}}},
        "ignore": ["lm_head"],
    },
}  # fmt: skip

# What anyone would write. ``lut`` is E2M1; each gives a BF16 weight from the tensors of a module.
STRAIGHTFORWARD = """
import sys, torch
from pathlib import Path
from safetensors import safe_open
from safetensors.torch import save_file
torch.set_num_threads(2)
lut = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6])
def fp4(codes, scale):
    values = torch.stack([lut[(codes & 15).long()], lut[(codes >> 4).long()]], -1).reshape(len(codes), scale.shape[1], -1)
    return (values * scale[..., None]).bfloat16().reshape(len(codes), -1)
def dense(t, m):
    if m + ".weight_global_scale" in t:
        return fp4(t[m + ".weight_packed"], t[m + ".weight_scale"].float() / t[m + ".weight_global_scale"])
    if m + ".weight_packed" in t:
        return fp4(t[m + ".weight_packed"], torch.exp2(t[m + ".weight_scale"].float() - 127))
    w, s = t[m + ".weight"].float(), t[m + ".weight_scale_inv"]
    return (w * s.repeat_interleave(128, 0)[:len(w)].repeat_interleave(128, 1)[:, :w.shape[1]]).bfloat16()
def convert(src, out):
    Path(out).mkdir()
    for file in sorted(Path(src).glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            t = {name: f.get_tensor(name) for name in f.keys()}
        parts = {n: n.rpartition(".")[0] for n in t if n.endswith(("_packed", "_scale_inv"))}
        made = {m + ".weight": dense(t, m) for m in parts.values()}
        rest = {n: w for n, w in t.items() if n.rpartition(".")[0] not in set(parts.values())}
        save_file(made | rest, Path(out) / file.name)
"""
COPY = """
import os, sys
from pathlib import Path
model, file, out = map(Path, sys.argv[1:])
out.mkdir()
view = memoryview(bytearray(1 << 20))
for made in sorted(model.glob("*.safetensors")):
    left = made.stat().st_size
    with file.open("rb", buffering=0) as source, (out / made.name).open("wb", buffering=0) as target:
        while left:
            size = source.readinto(view[:left])
            target.write(view[:size])
            left -= size
            if not size:
                source.seek(0)
        os.fsync(target.fileno())
"""
PEER = "import sys; sys.path.insert(0, sys.argv.pop(1)); from llm_dequant.cli import main; sys.exit(main(['convert', *sys.argv[1:]]))"


# --- checkpoints -------------------------------------------------------------------------------------------


def parts_of(case: str, rows: int, cols: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The tensors of a module, by the last parts of their names: dtype and shape."""
    if case == "fp8":
        return {"weight": ("F8_E4M3", (rows, cols)), "weight_scale_inv": ("F32", (-(-rows // 128), -(-cols // 128)))}
    if case == "fp4":
        return {"weight_packed": ("U8", (rows, cols // 2)), "weight_scale": ("U8", (rows, cols // 32))}
    return {
        "weight_packed": ("U8", (rows, cols // 2)), "weight_scale": ("F8_E4M3", (rows, cols // 16)),
        "weight_global_scale": ("F32", (1,)),
    }  # fmt: skip


def tensors(case: str, layers: Iterable[int]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    for layer in layers:
        for name, shape in quantize.PROJECTIONS.items():
            for last, (dtype, stored) in parts_of(case, *shape).items():
                yield f"model.layers.{layer}.{name}.{last}", dtype, stored
        for norm in quantize.NORMS:
            yield f"model.layers.{layer}.{norm}.weight", "BF16", (quantize.HIDDEN,)


def content(name: str, dtype: str, nbytes: int, rng: Any) -> bytes:
    """Random bytes that no format calls NaN, and scales of common size."""
    import numpy as np

    if dtype == "BF16":
        return b"\x80\x3f" * (nbytes // 2)
    if dtype == "F32":
        return bytes((rng.random(nbytes // 4, np.float32) * 1e-3 + (448 if "global" in name else 1e-4)).tobytes())
    low, high = {"U8": (110, 125), "F8_E4M3": (0x38, 0x7F)}[dtype] if "weight_scale" in name else (0, 256)
    codes = rng.integers(low, high, nbytes, dtype=np.uint8)
    if dtype == "F8_E4M3":
        codes[codes & 0x7F == 0x7F] -= 1
    return bytes(codes)


def write_shard(path: Path, listed: list[tuple[str, str, tuple[int, ...]]], seed: int) -> None:
    import numpy as np

    from ckptkit.files.header import Spec, lay_out

    head, header = lay_out([Spec(*item) for item in listed], {"format": "pt"})
    rng = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(head)
        for entry in header.entries:
            file.write(content(entry.name, entry.dtype, entry.nbytes, rng))


def make(folder: Path, case: str, count: int = SHARDS) -> Path:
    """The checkpoint, made once."""
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for number in range(count):
        name = f"model-{number + 1:05}-of-{count:05}.safetensors"
        listed = list(tensors(case, range(number * LAYERS // count, (number + 1) * LAYERS // count)))
        if number == count - 1:
            edges = ("model.embed_tokens.weight", "lm_head.weight")
            listed += [(edge, "BF16", (1024, quantize.HIDDEN)) for edge in edges]
            listed.append(("model.norm.weight", "BF16", (quantize.HIDDEN,)))
        apart(write_shard, folder / name, listed, number)
        weight_map |= {tensor: name for tensor, *_ in listed}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = {**quantize.config(LAYERS), "vocab_size": 1024, "quantization_config": SCHEMES[case]}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


# --- whole processes ---------------------------------------------------------------------------------------


def warm(*paths: Path) -> None:
    """Bring files into the page cache, once all that was written before is on the disk."""
    os.sync()
    for path in paths:
        for file in [path] if path.is_file() else path.glob("*.safetensors"):
            with file.open("rb", buffering=0) as stream:
                while stream.read(1 << 20):
                    pass


def ours(src: Path, out: Path, *options: str) -> Usage:
    clean(out)
    command = [sys.executable, "-m", "ckptkit", "dequantize", str(src), str(out), "--no-progress", "-j", str(THREADS)]
    return run([*command, *options])


def script(code: str, src: Path, out: Path, *before: str) -> Usage:
    clean(out)
    return run([sys.executable, "-c", code, *before, str(src), str(out)])


class Row(NamedTuple):
    """Medians of a case, of one run for ``torch`` and ``peer``."""

    ours: Usage
    copy: Usage
    torch: Usage
    peer: Usage | None


def measured(case: str, folder: Path, pairs: int, peer: str | None) -> Row:
    src, out = make(folder / f"dequantize-{case}", case), folder / "out"
    small = folder / "64MiB"
    with small.open("wb") as file:
        for _ in range(64):
            file.write(os.urandom(1 << 20))
    warm(src, small)
    straightforward = STRAIGHTFORWARD + "\nconvert(*sys.argv[1:])"
    runs: dict[str, list[Usage]] = {"ours": [], "copy": [], "torch": [], "peer": []}
    for number in range(pairs):
        runs["ours"].append(ours(src, out / "ours"))
        runs["copy"].append(script(COPY, small, out / "copy", str(out / "ours")))
        clean(out / "copy")
        if number == 0:
            others = {"torch": (straightforward, ()), "peer": (PEER, (peer or "",))}
            for name, (code, before) in others.items():
                if name == "torch" or (peer and case == "nvfp4"):
                    runs[name].append(script(code, src, out / name, *before))
                    apart(check_same, out / "ours", out / name)
                    clean(out / name)
    clean(out / "ours")
    found = {name: median(of) if of else None for name, of in runs.items()}
    return Row(**found)  # type: ignore[arg-type]


def whole(folder: Path, cases: list[str], pairs: int, peer: str | None) -> None:
    print(
        "| 4.0 GB of BF16 from | ckptkit, 2 threads | a copy | torch code | llm-dequant | speed of a copy | against torch |"
    )
    print("|---|---|---|---|---|---|---|")
    for case in cases:
        row = measured(case, folder, pairs, peer)
        others = " | ".join(tell(usage) if usage else "" for usage in row[1:])
        ratios = f"{row.copy.wall / row.ours.wall:.2f} | {row.torch.wall / row.ours.wall:.1f}x, CPU {row.torch.cpu / row.ours.cpu:.1f}x"
        print(f"| {case} | {tell(row.ours)} | {others} | {ratios} |", flush=True)


def growth(folder: Path) -> None:
    print("\n| fp4, by shard size | wall / CPU s / RSS MB |\n|---|---|")
    for count in (4, 1):
        src = make(folder / f"dequantize-fp4-in-{count}", "fp4", count)
        warm(src)
        print(f"| {count} shards of {4 / count:.0f} GB made | {tell(ours(src, folder / 'out' / 'ours'))} |", flush=True)
        clean(folder / "out" / "ours", src)


# --- kernels alone -----------------------------------------------------------------------------------------

SHAPE = (8192, 8192)


class Spent(NamedTuple):
    """GB made in a second of wall time, and of CPU time."""

    wall: float
    cpu: float


def kernels(cases: list[str]) -> None:
    """In memory, one weight of 8192 x 8192: the work alone, the best of five; results compared."""
    print(
        "\n| kernel alone, GB/s made | 1 thread | 2 threads | per CPU second | torch, 2 threads | per CPU second | ratios |"
    )
    print("|---|---|---|---|---|---|---|")
    for case in cases:
        one, two, plain = _kernel(case)
        ratios = f"{two.wall / plain.wall:.1f}x, CPU {two.cpu / plain.cpu:.1f}x"
        ours = f"{one.wall:.2f} | {two.wall:.2f} | {two.cpu:.2f}"
        print(f"| {case} | {ours} | {plain.wall:.3f} | {plain.cpu:.3f} | {ratios} |", flush=True)


def _kernel(case: str) -> tuple[Spent, Spent, Spent]:
    """ckptkit with one thread and with two, and the torch code with two."""
    import numpy as np
    import torch

    from ckptkit.files.header import Spec
    from ckptkit.ops import Block, Chunk, Context, operation

    op, straightforward = operation("dequantize@1"), {}
    exec(STRAIGHTFORWARD, straightforward)
    rng = np.random.default_rng(0)
    specs = [Spec(f"m.{last}", *stored) for last, stored in parts_of(case, *SHAPE).items()]
    data = [bytearray(content(spec.name, spec.dtype, spec.nbytes, rng)) for spec in specs]
    args = {
        "name": "m.weight", "dtype": "BF16", "shape": SHAPE, "roles": [spec.name[2:] for spec in specs],
        "bits": None, "block": [128, 128] if case == "fp8" else None, "cols": 0,
    }  # fmt: skip

    def blocks(chunk: Chunk) -> list[Block]:
        sizes = [specs[read.tensor].nbytes // specs[read.tensor].shape[0] for read in chunk.reads]
        return [
            Block(
                data[r.tensor][r.row * size : r.row_stop * size],
                spec.dtype,
                r.row_stop - r.row,
                spec.shape[-1],
                spec.shape,
            )
            for r, size in zip(chunk.reads, sizes, strict=True)
            for spec in [specs[r.tensor]]
        ]

    work = [(blocks(chunk), chunk) for chunk in op.chunks(specs, args, 4 << 20)]
    names = {"U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32}
    given = {s.name: torch.frombuffer(d, dtype=names[s.dtype]).view(s.shape) for s, d in zip(specs, data, strict=True)}

    def ours(threads: int) -> None:
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(lambda item: len(op.make(*item, args, None, Context())), work):
                pass

    wanted = straightforward["dense"](given, "m").view(torch.uint8).flatten().numpy()
    if not np.array_equal(np.concatenate([op.make(*item, args, None, Context())[0] for item in work]), wanted):
        sys.exit(f"{case}: results differ")
    return spent(lambda: ours(1), 5), spent(lambda: ours(2), 5), spent(lambda: straightforward["dense"](given, "m"), 3)


def spent(function: Callable[[], Any], times: int) -> Spent:
    """The best of some calls."""
    seconds = []
    for _ in range(times):
        wall, cpu = time.perf_counter(), time.process_time()
        function()
        seconds.append((time.perf_counter() - wall, time.process_time() - cpu))
    size = 2 * SHAPE[0] * SHAPE[1] / 1e9
    return Spent(*(size / min(of) for of in zip(*seconds, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(".cache/bench"))
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--case", nargs="*", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--peer", metavar="FOLDER", help="where llm-dequant lies")
    parser.add_argument("--no-growth", action="store_true", help="leave out the table on shard size")
    parser.add_argument("--kernels", action="store_true", help="the kernels alone, and nothing else")
    arguments = parser.parse_args()
    (arguments.folder / "out").mkdir(parents=True, exist_ok=True)
    if not arguments.kernels:
        whole(arguments.folder, arguments.case, arguments.pairs, arguments.peer)
        if not arguments.no_growth:
            growth(arguments.folder)
    os.sync()
    apart(kernels, arguments.case)


if __name__ == "__main__":
    main()
