"""Heads in every format, made of random numbers, and what each row of them holds: read by loops over bits, no library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

HIDDEN = 128
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble n of a word holds row 8 w + AWQ_ORDER[n]

Tensors = dict[str, torch.Tensor]
Array = np.ndarray[Any, Any]


class Format(NamedTuple):
    """``make(rows)`` gives the head's tensors by suffix; ``rows_of(tensors, rows)`` arrays of which each row is a token's."""

    make: Callable[[int], Tensors]
    rows_of: Callable[[Tensors, int], list[Array]]
    table: dict[str, Any] | None


def _random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    size = torch.empty(0, dtype=dtype).element_size()
    data = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8)
    return data.view(dtype)


def raw(tensor: torch.Tensor) -> Array:
    """The bytes of each row."""
    return tensor.contiguous().view(torch.uint8).numpy().reshape(tensor.shape[0], -1)


def _fields(words: Array, bits: int) -> Array:
    """[rows, words] int32 as [rows, words x fields], the lowest bits first."""
    unsigned = words.astype(np.int64) & 0xFFFFFFFF
    return np.stack([(unsigned >> at) & ((1 << bits) - 1) for at in range(0, 32, bits)], -1).reshape(len(words), -1)


def _plain(*suffixes: str) -> Callable[[Tensors, int], list[Array]]:
    return lambda tensors, rows: [raw(tensors[suffix].reshape(rows, -1)) for suffix in suffixes]


def _with_zeros(bits: int) -> Callable[[Tensors, int], list[Array]]:
    def rows_of(tensors: Tensors, rows: int) -> list[Array]:
        zeros = _fields(tensors["weight_zero_point"].numpy().T, bits)[:, :rows].T
        return [raw(tensors["weight_packed"]), raw(tensors["weight_scale"]), zeros]

    return rows_of


def _gptq(tensors: Tensors, rows: int) -> list[Array]:
    zeros = _fields(tensors["qzeros"].numpy(), 4)[:, :rows].T
    return [tensors["qweight"].numpy().T, raw(tensors["scales"].T), zeros]


def _awq(tensors: Tensors, rows: int) -> list[Array]:
    def unpacked(words: Array) -> Array:
        nibbles = _fields(words, 4).reshape(len(words), -1, 8)
        made = np.empty_like(nibbles)
        for nibble, row in enumerate(AWQ_ORDER):
            made[:, :, row] = nibbles[:, :, nibble]
        return made.reshape(len(words), -1).T

    return [unpacked(tensors["qweight"].numpy()), unpacked(tensors["qzeros"].numpy()), raw(tensors["scales"].T)]


def _integers(bits: int, symmetric: bool, group: int | None) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group" if group else "channel"}
    return _compressed("pack-quantized", {**weights, **({"group_size": group} if group else {})})


def _floats(format: str, bits: int, strategy: str, group: int | None = None) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "float", "symmetric": True, "strategy": strategy}
    return _compressed(format, {**weights, **({"group_size": group} if group else {})})


def _compressed(format: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["re:.*lm_head$"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"head": group}, "ignore": []}


def _packed(bits: int, groups: int, asymmetric: bool) -> Callable[[int], Tensors]:
    def make(rows: int) -> Tensors:
        made = {
            "weight_packed": _random(torch.int32, rows, HIDDEN * bits // 32),
            "weight_scale": torch.rand(rows, groups).to(torch.bfloat16),
            "weight_shape": torch.tensor([rows, HIDDEN]),
        }
        if asymmetric:
            made["weight_zero_point"] = _random(torch.int32, -(-rows * bits // 32), groups)
        return made

    return make


_DENSE = _plain("weight", "bias")
_SCALED = _plain("weight_packed", "weight_scale")
FORMATS = {
    "bf16": Format(
        lambda rows: {"weight": _random(torch.bfloat16, rows, HIDDEN), "bias": _random(torch.bfloat16, rows)}, _DENSE, None
    ),
    "f32": Format(
        lambda rows: {"weight": torch.rand(rows, HIDDEN), "bias": torch.rand(rows)}, _DENSE, None
    ),
    "int4 group": Format(_packed(4, 4, False), _SCALED, _integers(4, True, 32)),
    "int8 channel": Format(_packed(8, 1, False), _SCALED, _integers(8, True, None)),
    "int4 group asymmetric": Format(_packed(4, 4, True), _with_zeros(4), _integers(4, False, 32)),
    "int8 channel asymmetric": Format(_packed(8, 1, True), _with_zeros(8), _integers(8, False, None)),
    "fp8 channel": Format(
        lambda rows: {"weight": torch.rand(rows, HIDDEN).to(torch.float8_e4m3fn), "weight_scale": torch.rand(rows, 1)},
        _plain("weight", "weight_scale"), _floats("float-quantized", 8, "channel"),
    ),
    "fp8 tensor": Format(
        lambda rows: {"weight": torch.rand(rows, HIDDEN).to(torch.float8_e4m3fn), "weight_scale": torch.rand(1)},
        _plain("weight"), _floats("float-quantized", 8, "tensor"),
    ),
    "nvfp4": Format(
        lambda rows: {
            "weight_packed": _random(torch.uint8, rows, HIDDEN // 2),
            "weight_scale": torch.rand(rows, HIDDEN // 16).to(torch.float8_e4m3fn),
            "weight_global_scale": torch.rand(1),
        },
        _SCALED, _floats("nvfp4-pack-quantized", 4, "tensor_group", 16),
    ),
    "mxfp4": Format(
        lambda rows: {
            "weight_packed": _random(torch.uint8, rows, HIDDEN // 2),
            "weight_scale": torch.randint(110, 130, (rows, HIDDEN // 32), dtype=torch.uint8),
        },
        _SCALED, _floats("mxfp4-pack-quantized", 4, "group", 32),
    ),
    "gptq": Format(
        lambda rows: {
            "qweight": _random(torch.int32, HIDDEN // 8, rows),
            "qzeros": _random(torch.int32, HIDDEN // 32, rows // 8),
            "scales": torch.rand(HIDDEN // 32, rows).half(),
            "g_idx": (torch.arange(HIDDEN) // 32).int(),
        },
        _gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False, "lm_head": True},
    ),
    "awq": Format(
        lambda rows: {
            "qweight": _random(torch.int32, HIDDEN, rows // 8),
            "qzeros": _random(torch.int32, HIDDEN // 32, rows // 8),
            "scales": torch.rand(HIDDEN // 32, rows).half(),
        },
        _awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True, "lm_head": True},
    ),
}  # fmt: skip
WHOLE_WORDS = frozenset({"gptq", "awq"})  # of 8 rows


def tensors_of(format: Format, rows: int, module: str = "lm_head", seed: int = 0) -> Tensors:
    torch.manual_seed(seed)
    return {f"{module}.{suffix}": tensor.contiguous() for suffix, tensor in format.make(rows).items()}


def rows_of(format: Format, tensors: Tensors, rows: int, module: str) -> list[Array]:
    """What each row holds of the head ``module`` among ``tensors``."""
    mine = {
        name.removeprefix(f"{module}."): tensor for name, tensor in tensors.items() if name.startswith(f"{module}.")
    }
    return format.rows_of(mine, rows)
