"""FP4 and FP8 to BF16 on a CUDA device: the kernels against a copy on the device, and a whole run against the CPU's.

    python benchmarks/dequantize_cuda.py [--folder FOLDER] [--gb 2] [--rounds 50] [--no-run]

Each kernel makes ``--gb`` GB, far more than any cache holds, after ten calls to warm up; times are those of device
events, the median of ``--rounds`` calls. Its rate counts bytes read (codes and scales) and written, as that of the copy
does, and its share is of the copy's rate. What it made is compared with the CPU's bits, all of it, and so are all bytes
of codes under all scales. The whole run dequantizes a checkpoint of 2 GB of BF16 in FOLDER on either device and compares
the files. Prints one JSON document, and ends with 1 if bits differ or a share is below 0.6.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import triton

from ckptkit.decode import Encoded, encoded
from ckptkit.files.header import Spec
from ckptkit.ops import values
from ckptkit.ops.kernels import triton_dequantize
from ckptkit.plan import Plan, Ref, Shard, Step

ASKED = 0.6
COLS = 8192


class Case(NamedTuple):
    """Parts of a weight of ``rows`` rows by the last parts of their names: dtype, and columns, all of them or for each
    block of rows (``every``)."""

    parts: dict[str, tuple[str, int]]
    every: int = 1
    block: tuple[int, int] | None = None

    def specs(self, rows: int) -> dict[str, Spec]:
        heights = {last: rows // self.every if "scale" in last else rows for last in self.parts}
        return {
            last: Spec(f"m.{last}", dtype, (heights[last], cols) if cols else (1,))
            for last, (dtype, cols) in self.parts.items()
        }


CASES = {
    "fp4": Case({"weight": ("I8", COLS // 2), "scale": ("F8_E8M0", COLS // 32)}),
    "nvfp4": Case({"weight_packed": ("U8", COLS // 2), "weight_scale": ("F8_E4M3", COLS // 16), "weight_global_scale": ("F32", 0)}),
    "fp8, float32 scales": Case({"weight": ("F8_E4M3", COLS), "weight_scale_inv": ("F32", COLS // 128)}, 128, (128, 128)),
    "fp8, exponents": Case({"weight": ("F8_E4M3", COLS), "scale": ("F8_E8M0", COLS // 128)}, 128, (128, 128)),
}  # fmt: skip


def weight_of(specs: dict[str, Spec], block: tuple[int, int] | None) -> Encoded:
    parts = {last: Ref("", *spec, 0, spec.nbytes) for last, spec in specs.items()}
    return encoded(next(iter(specs)), parts, None, block)


def sample(spec: Spec, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Random bytes; scales are such that nothing overflows and, for powers of two, much is subnormal in BF16."""
    if spec.dtype == "F32":
        return (rng.random(spec.nbytes // 4, np.float32) + np.float32(0.01)).view(np.uint8)
    low, high = {"F8_E8M0": (0, 240), "F8_E4M3": (1, 0x7F)}[spec.dtype] if "scale" in spec.name else (0, 256)
    made = rng.integers(low, high, spec.nbytes, dtype=np.uint8)
    if spec.dtype == "F8_E4M3":
        made[made & 0x7F == 0x7F] -= 1
    return made


# --- kernels -----------------------------------------------------------------------------------------------


def seconds(call: Callable[[], object], rounds: int) -> float:
    """The median time of a call on the device."""
    for _ in range(10):
        call()
    found = []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        found.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(found)


def copy_rate(size: int, rounds: int) -> float:
    """Bytes read and written in a second by a copy on the device, of half of ``size`` to the other half."""
    source, target = (torch.empty(size // 2, dtype=torch.uint8, device="cuda").random_() for _ in range(2))
    return size / seconds(lambda: target.copy_(source), rounds)


def measure(case: Case, size: int, rounds: int) -> dict[str, Any]:
    rows = size // (2 * COLS) // 128 * 128
    specs = case.specs(rows)
    weight, rng = weight_of(specs, case.block), np.random.default_rng(0)
    content = {spec.name: sample(spec, rng) for spec in specs.values()}
    data = {role: content[ref.name] for role, ref in weight.parts.items()}
    scale = torch.from_numpy(triton_dequantize.scales(weight, 0, rows, data)).cuda().flatten()
    codes = torch.from_numpy(data["codes"]).cuda().view(triton_dequantize.stored_as(weight))
    out = torch.full((rows * COLS,), torch.nan, dtype=torch.bfloat16, device="cuda")
    taken = seconds(lambda: triton_dequantize.dequantize(codes, scale, out), rounds)
    wanted = np.empty((rows, COLS), np.uint16)
    values.fill(wanted, weight, 0, data, "BF16")
    moved = codes.nbytes + scale.nbytes + out.nbytes
    copied = copy_rate(moved, rounds)
    return {
        "made_gb": out.nbytes / 1e9, "ms": taken * 1e3, "gb_per_s": moved / taken / 1e9,
        "copy_gb_per_s": copied / 1e9, "share_of_copy": moved / taken / copied,
        "equal": np.array_equal(out.view(torch.int16).cpu().numpy().view(np.uint16), wanted.ravel()),
    }  # fmt: skip


def all_codes_equal() -> bool:
    """Every byte of FP4 and FP8 codes under every power of two: what is not finite is the CPU's own affair."""
    codes, scales = np.tile(np.arange(256, dtype=np.uint8), 255), np.arange(255, dtype=np.uint8)
    for parts in (
        {"weight": ("I8", 256), "scale": ("F8_E8M0", 16)},
        {"weight": ("F8_E4M3", 256), "weight_scale": ("U8", 8)},
    ):
        specs = {last: Spec(f"m.{last}", dtype, (255, cols)) for last, (dtype, cols) in parts.items()}
        weight = weight_of(specs, None)
        data = {"codes": bytearray(codes), "scale": bytearray(scales.repeat(weight.grid[1]))}
        scale = torch.from_numpy(triton_dequantize.scales(weight, 0, 255, data)).cuda().flatten()
        out = torch.empty(255 * weight.cols, dtype=torch.bfloat16, device="cuda")
        stored = torch.frombuffer(data["codes"], dtype=torch.uint8).cuda().view(triton_dequantize.stored_as(weight))
        triton_dequantize.dequantize(stored, scale, out)
        wanted = np.empty((255, weight.cols), np.uint16)
        values.fill(wanted, weight, 0, data, "BF16", nonfinite_error=False)
        made = out.view(torch.int16).cpu().numpy().view(np.uint16).reshape(wanted.shape)
        is_number = (wanted & 0x7FFF) <= 0x7F80
        if not (np.array_equal(made[is_number], wanted[is_number]) and ((made[~is_number] & 0x7FFF) > 0x7F80).all()):
            return False
    return True


# --- a whole run -------------------------------------------------------------------------------------------


def whole_run(folder: Path) -> dict[str, Any]:
    """Seconds on either device for 2 GB of BF16 out of FP4 and FP8 in equal parts, and if the files are equal."""
    from ckptkit.execute import Options, execute
    from ckptkit.files.source import open_source

    src, rows = folder / "source", 65_536
    names = ("fp4", "fp8, float32 scales")
    steps = write_source(src, {name: CASES[name].specs(rows) for name in names})
    plan = Plan("benchmark", (Shard("model.safetensors", "model.safetensors", None, tuple(steps)),))
    found: dict[str, Any] = {}
    for device in ("cuda", "cpu", "cuda", "cpu"):  # the first of each warms up
        out = folder / device
        shutil.rmtree(out, ignore_errors=True)
        with open_source(str(src)) as source:
            began = time.perf_counter()
            execute(plan, source, out, Options(device=device, verify=False), Silent(), {})
            found[f"{device}_s"] = time.perf_counter() - began
    made = [(folder / device / "model.safetensors").read_bytes() for device in ("cuda", "cpu")]
    return {**found, "made_gb": len(made[0]) / 1e9, "equal": made[0] == made[1]}


class Silent:
    """Progress that nobody hears."""

    def start(self, total_shards: int, total_bytes: int) -> None: ...

    def shard(self, name: str) -> None: ...

    def advance(self, nbytes: int) -> None: ...

    def done(self) -> None: ...


def write_source(folder: Path, weights: dict[str, dict[str, Spec]]) -> list[Step]:
    """One file of all tensors, and a step for each weight."""
    from ckptkit.files.header import lay_out

    specs = [
        spec._replace(name=f"{number}{spec.name}")
        for number, parts in enumerate(weights.values())
        for spec in parts.values()
    ]
    head, header = lay_out(specs, None)
    refs = {entry.name: Ref("model.safetensors", *entry.spec, entry.start, entry.stop) for entry in header.entries}
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(head)
        for entry in header.entries:
            file.write(sample(entry.spec, rng).tobytes())
    steps = []
    for number, (name, parts) in enumerate(weights.items()):
        block = CASES[name].block
        first = next(iter(parts.values())).shape
        output = Spec(f"{number}m.weight", "BF16", (first[0], COLS))
        args = {
            "name": output.name, "dtype": "BF16", "shape": output.shape, "roles": list(parts), "bits": None,
            "block": block and list(block), "cols": 0,
        }  # fmt: skip
        inputs = tuple(refs[f"{number}{spec.name}"] for spec in parts.values())
        steps.append(Step("dequantize@1", inputs, (output,), name, args))
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/ckptkit-dequantize-cuda"))
    parser.add_argument("--gb", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--no-run", action="store_true", help="leave out the whole run")
    arguments = parser.parse_args()
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "cache_mb": torch.cuda.get_device_properties(0).L2_cache_size / 1e6,
        "all_codes_equal": all_codes_equal(),
        "kernels": {name: measure(case, int(arguments.gb * 1e9), arguments.rounds) for name, case in CASES.items()},
    }  # fmt: skip
    if not arguments.no_run:
        found["run"] = whole_run(arguments.folder)
        shutil.rmtree(arguments.folder)
    kernels = found["kernels"].values()
    equal = found["all_codes_equal"] and all(one["equal"] for one in [*kernels, found.get("run", {"equal": True})])
    fast = all(kernel["share_of_copy"] >= ASKED for kernel in kernels)
    print(json.dumps({**found, "ok": equal and fast}, indent=2))
    sys.exit(0 if equal and fast else 1)


if __name__ == "__main__":
    main()
