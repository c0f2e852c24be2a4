"""Quantized modules as the tools write them, from their formats' descriptions: names, dtypes and shapes, no values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from ckptkit.checks import Subject
from ckptkit.errors import Finding
from ckptkit.files.checkpoint import Checkpoint, scan
from ckptkit.files.header import Spec
from ckptkit.files.source import Source, open_source
from ckptkit.plan import Ref

Tensors = dict[str, torch.Tensor]
Make = Callable[[int, int], Tensors]


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def packed(bits: int = 4, group: int | None = 64, zero: bool = False) -> Make:
    """compressed-tensors' pack-quantized; ``group`` None: one scale a row."""

    def make(rows: int, columns: int) -> Tensors:
        groups = columns // group if group else 1
        parts = {
            "weight_packed": zeros(rows, columns * bits // 32, dtype=torch.int32),
            "weight_scale": zeros(rows, groups),
            "weight_shape": torch.tensor([rows, columns]),
        }
        points = {"weight_zero_point": zeros(rows * bits // 32, groups, dtype=torch.int32)} if zero else {}
        return parts | points

    return make


def nvfp4(rows: int, columns: int) -> Tensors:
    return {
        "weight_packed": zeros(rows, columns // 2, dtype=torch.uint8),
        "weight_scale": zeros(rows, columns // 16, dtype=torch.float8_e4m3fn),
        "weight_global_scale": zeros(1, dtype=torch.float32),
    }


def modelopt_nvfp4(rows: int, columns: int) -> Tensors:
    return {
        "weight": zeros(rows, columns // 2, dtype=torch.uint8),
        "weight_scale": zeros(rows, columns // 16, dtype=torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(1.0),
        "input_scale": torch.tensor(1.0),
    }


def fp8(rows: int, columns: int) -> Tensors:
    return {"weight": zeros(rows, columns, dtype=torch.float8_e4m3fn), "weight_scale": zeros(rows, 1)}


def fp8_tensor(rows: int, columns: int) -> Tensors:
    scales = {"weight_scale": torch.tensor(1.0), "input_scale": torch.tensor(1.0)}
    return {"weight": zeros(rows, columns, dtype=torch.float8_e4m3fn), **scales}


def fp8_block(block: int = 128) -> Make:
    def make(rows: int, columns: int) -> Tensors:
        scale = zeros(-(-rows // block), -(-columns // block), dtype=torch.float32)
        return {"weight": zeros(rows, columns, dtype=torch.float8_e4m3fn), "weight_scale_inv": scale}

    return make


def gptq(bits: int = 4, group: int = 64) -> Make:
    def make(rows: int, columns: int) -> Tensors:
        groups = columns // group if group > 0 else 1
        return {
            "qweight": zeros(columns * bits // 32, rows, dtype=torch.int32),
            "qzeros": zeros(groups, rows * bits // 32, dtype=torch.int32),
            "scales": zeros(groups, rows, dtype=torch.float16),
            "g_idx": zeros(columns, dtype=torch.int32),
        }

    return make


def awq(rows: int, columns: int, group: int = 64) -> Tensors:
    return {
        "qweight": zeros(columns, rows // 8, dtype=torch.int32),
        "qzeros": zeros(columns // group, rows // 8, dtype=torch.int32),
        "scales": zeros(columns // group, rows, dtype=torch.float16),
    }


def quantized(tensors: Tensors, *changes: tuple[str, Make]) -> Tensors:
    """``tensors`` with the modules that each regex matches replaced by their parts; the first that matches counts."""
    result: Tensors = {}
    for name, value in tensors.items():
        module = name.removesuffix(".weight")
        makes = [make for pattern, make in changes if re.match(pattern, module)]
        if makes and value.dim() == 2:
            result |= {f"{module}.{part}": tensor for part, tensor in makes[0](*value.shape).items()}
        else:
            result[name] = value
    return result


def subject_of(specs: Iterable[Spec], config: dict[str, Any]) -> Subject:
    """A subject of tensors that lie nowhere."""
    tensors = {spec.name: Ref("model.safetensors", *spec, 0, spec.nbytes) for spec in specs}
    return Subject(Checkpoint(Source("nowhere", Path(), {}), {}, tensors, None, config))


def found_in(subject: Subject, *modules: Any) -> list[Finding]:
    """What the probes of check modules find in a subject."""
    probes = (probe for module in modules for probe in module.PROBES if probe.unfit(subject) is None)
    return [finding for probe in probes for finding in probe.run(subject).findings]


def found(folder: Path, *modules: Any) -> list[Finding]:
    """What the probes of check modules find in a checkpoint."""
    with open_source(str(folder)) as source:
        checkpoint, faults = scan(source)
        return found_in(Subject(checkpoint, tuple(faults)), *modules)
