"""Weights to quantize: ordinary ones, and every value that arithmetic can trip over."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ops.runner import DTYPES

SOURCES = ("BF16", "F16", "F32")
_BITS = {"BF16": (torch.int16, 0x7F80), "F16": (torch.int16, 0x7C00), "F32": (torch.int32, 0x7F800000)}


def normal(rows: int, cols: int, dtype: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, cols, generator=generator) * 0.02).to(DTYPES[dtype])


def from_bits(bits: np.ndarray, dtype: str) -> Tensor:
    """Any bits as floats, NaN and Inf made finite by taking a bit out of their exponent."""
    integers, infinity = _BITS[dtype]
    raw = torch.from_numpy(np.ascontiguousarray(bits)).to(integers)
    lowest = infinity & -infinity
    return torch.where(raw & infinity == infinity, raw ^ lowest, raw).view(DTYPES[dtype])


def difficult(dtype: str, cols: int = 256) -> Tensor:
    """Finite values of every size, one kind to a row: zeros, extremes, subnormals, ties, lone and equal values."""
    kind = torch.finfo(DTYPES[dtype])
    rng = np.random.default_rng(7)
    count = torch.arange(cols)
    alternating = (count % 2 * 2 - 1).double()
    rows = [torch.zeros(cols), -torch.zeros(cols), torch.full((cols,), 0.1), torch.full((cols,), -kind.max)]
    rows += [alternating * kind.max, alternating * kind.tiny, torch.cat([torch.tensor([-1.0]), torch.zeros(cols - 1)])]
    # Multiples of a fraction of the largest: in many of them the quotient lies half-way between two codes.
    for top in (1.0, 1.75, 1.7499, 6.0, 7.5, 12.0, 127.5, 448.0):
        for parts in (15, 24, 60, 64, 255):
            rows.append((count % (2 * parts + 1) - parts) * (top / parts))
    shaped = torch.stack([row.double() for row in rows]).to(DTYPES[dtype])
    # Sizes from below the smallest to above the largest, and bits without any order.
    sizes = torch.exp2(torch.linspace(-152, 128, 71, dtype=torch.float64))[:, None]
    spread = torch.from_numpy(rng.uniform(-1, 1, (71, cols))) * sizes
    mixed = torch.from_numpy(
        rng.normal(size=(24, cols)) * np.exp2(rng.integers(-24, 10, (24, cols // 16))).repeat(16, 1)
    )
    small = torch.from_numpy(rng.integers(-40, 41, (24, cols))).to(_BITS[dtype][0])
    subnormal = torch.where(small < 0, small.abs() | torch.iinfo(small.dtype).min, small).view(DTYPES[dtype])
    chaos = from_bits(rng.integers(-(2**31), 2**31, (40, cols)), dtype)
    finite = [part.clamp(kind.min, kind.max).to(DTYPES[dtype]) for part in (spread, mixed)]
    return torch.cat([shaped, *finite, subnormal, chaos])
