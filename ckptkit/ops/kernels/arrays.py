"""Between bytes and tensors, and the sums that every number format starts from."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import Block, NonFinite

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}

# For each dtype the integers that hold its bits, all of them but the sign, and the bits of infinity.
_BITS = {
    torch.bfloat16: (torch.int16, 0x7FFF, 0x7F80),
    torch.float16: (torch.int16, 0x7FFF, 0x7C00),
    torch.float32: (torch.int32, 0x7FFFFFFF, 0x7F800000),
    torch.float64: (torch.int64, (1 << 63) - 1, 0x7FF << 52),
}

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def matrix(block: Block, device: str, columns: slice | None = None) -> Tensor:
    """What a read brought, on ``device``: as it lies, or some of its columns transposed to contiguous rows."""
    shape = (block.rows, block.cols)
    dtype = DTYPES[block.dtype]
    found = torch.frombuffer(block.data, dtype=dtype).view(shape) if block.data else torch.empty(shape, dtype=dtype)
    found = found.to(device)
    return found if columns is None else found[:, columns].T.contiguous()


def raw(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A tensor's bytes, flat."""
    words = tensor.flatten().cpu().view(_WORDS[tensor.itemsize]).numpy()
    return words.view(np.uint8)


def largest(x: Tensor) -> Tensor:
    """The largest magnitude in the last dimension, in x's dtype. Raises NonFinite for NaN or Inf.

    Without their sign, floats are in the order of their bits, and integers are compared much faster.
    """
    bits, unsigned, infinity = _BITS[x.dtype]
    found = (x.view(bits) & unsigned).amax(-1)
    top = int(found.max())
    if top >= infinity:
        raise NonFinite(0, "NaN" if top > infinity else "Inf")
    return found.view(x.dtype)


def over(x: Tensor, divisor: float) -> Tensor:
    """``x / divisor``, rounded once to x's dtype: by a plain number CUDA would multiply with its reciprocal."""
    return x / torch.tensor(divisor, dtype=x.dtype, device=x.device)


def scale_to(peak: Tensor, top: float) -> Tensor:
    """The scales, in peak's dtype, by which ``peak`` becomes ``top``; epsilon where there is nothing to scale."""
    scale = over(peak, top)
    return scale.masked_fill_(scale == 0, torch.finfo(scale.dtype).eps)


def pack_nibbles(codes: Tensor) -> Tensor:
    """[r, c] uint8 below 16 -> [r, c / 2] uint8, the first of each pair in the low half."""
    pairs = codes.view(torch.int16)
    return (pairs | pairs >> 4).to(torch.uint8)
