"""FP4 and FP8 with scales, made dense on a CUDA device. Imports triton, which comes with torch's builds for CUDA.

The scales come as float32, one for each block of a row, as decoding gives them; what is left is a product in float32
and one rounding, the same on every device. A thread makes eight values: 16 bytes of a 16-bit dtype at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ...decode import Coding, Encoded
from ...decode.rows import decode
from .arrays import DTYPES

_UNITS = 1024  # eights of values that a program makes
_REST = tl.constexpr(2.0**126)
_FLOAT8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


@triton.jit  # type: ignore[untyped-decorator]
def _fp4(codes, scales, out, units, per_scale: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """``codes``: a uint32 of eight E2M1 codes for each of ``units``. As float32 their bits are 2**-126 of the value."""
    unit = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    is_inside = unit < units
    word = tl.load(codes + unit, mask=is_inside, other=0)
    scale = tl.load(scales + unit // per_scale, mask=is_inside, other=0.0)
    code = word[:, None] >> (4 * tl.arange(0, 8))[None, :]
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    value = bits.to(tl.float32, bitcast=True) * _REST * scale[:, None]
    at = unit[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=is_inside[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _fp8(codes, scales, out, units, per_scale: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """``codes``: eight 8-bit floats for each of ``units``."""
    unit = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    is_inside = unit < units
    scale = tl.load(scales + unit // per_scale, mask=is_inside, other=0.0)
    at = unit[:, None] * 8 + tl.arange(0, 8)[None, :]
    value = tl.load(codes + at, mask=is_inside[:, None], other=0.0).to(tl.float32) * scale[:, None]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=is_inside[:, None])


def dequantize(codes: Tensor, scale: Tensor, out: Tensor) -> None:
    """Fill ``out``, flat, on a CUDA device.

    ``codes``: int32 words of eight E2M1 codes each, or 8-bit floats, flat. ``scale``: float32, flat; each holds for the
    same number of values, a multiple of eight, in their order.
    """
    units = out.numel() // 8
    kernel = _fp4 if codes.dtype == torch.int32 else _fp8
    with torch.cuda.device(out.device):
        kernel[(triton.cdiv(units, _UNITS),)](codes, scale, out, units, units // scale.numel(), _UNITS)


def rows(
    weight: Encoded, start: int, stop: int, data: Mapping[str, Any], dtype: str, device: str
) -> np.ndarray[Any, Any] | None:
    """Rows [start, stop) as a flat uint8 array; None where there is no kernel, or a value would not be finite."""
    if not _has_kernel(weight):
        return None
    scale = torch.from_numpy(scales(weight, start, stop, data)).to(device).flatten()
    codes = torch.frombuffer(data["codes"], dtype=stored_as(weight)).to(device)
    out = torch.empty((stop - start) * weight.cols, dtype=DTYPES[dtype], device=device)
    dequantize(codes, scale, out)
    if not out.isfinite().all():
        return None
    made: np.ndarray[Any, Any] = out.view(torch.uint8).cpu().numpy()
    return made


def _has_kernel(weight: Encoded) -> bool:
    plain = weight.scale is not None and weight.zero is None and weight.order is None
    whole = weight.width % 8 == 0 and weight.width * weight.grid[1] == weight.cols
    return plain and whole and weight.coding in {Coding.FP4, Coding.FP8}


def stored_as(weight: Encoded) -> torch.dtype:
    """What :func:`dequantize` takes its codes as."""
    return _FLOAT8[weight.codes.dtype] if weight.coding is Coding.FP8 else torch.int32


def scales(weight: Encoded, start: int, stop: int, data: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """float32 [rows, blocks]: what decoding makes of a one in each block."""
    blocks = weight.grid[1]
    ones = weight._replace(coding=Coding.DENSE, cols=blocks, width=1, codes=weight.codes._replace(dtype="F32"))
    with np.errstate(all="ignore"):
        return decode(ones, start, stop, {**data, "codes": np.ones((stop - start) * blocks, np.float32)})
