"""What the quantizing operations compute. Imports torch: import it only to compute.

A kernel is a pure function ``(w, args, state) -> {suffix: tensor}``: of some rows [r, c] of a weight, in its dtype,
it gives their part of every output that grows with the rows. It raises NonFinite where the rows hold NaN or Inf;
if that is to be kept, compressed-tensors' own functions take those rows. Bytes are that library's: where it rounds
to the weight's dtype so do kernels, and what is done in float32 instead is exact in both.

Kernels work on tiles of a chunk, so that what they allocate stays small and near the processor.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import Args, Block, Chunk, Context, NonFinite
from ..quantizers import Weight, granule, outputs
from .arrays import largest, matrix, raw

Kernel = Callable[[Tensor, Args, Any], dict[str, Tensor]]

TILE = 512 << 10

_HOMES = {
    "pack_int@1": ("integer", "pack_int"),
    "int8@1": ("integer", "int8"),
    "fp8_channel@1": ("fp8", "channel"),
    "fp8_block@1": ("fp8", "block"),
    "mxfp8@1": ("fp8", "mxfp8"),
    "nvfp4@1": ("fp4", "nvfp4"),
    "mxfp4@1": ("fp4", "mxfp4"),
    "ct_generic@1": ("generic", "encode"),
}


def _kernel(id: str) -> Kernel:
    """Kernels are imported one by one: the generic one brings all of compressed-tensors."""
    module, name = _HOMES[id]
    kernel: Kernel = getattr(import_module(f".{module}", __name__), name)
    return kernel


def make(
    id: str, block: Block, chunk: Chunk, args: Args, state: Any, context: Context
) -> list[np.ndarray[Any, Any]]:
    """The bytes of each output that the chunk writes."""
    w = matrix(block, chunk.reads[0].tensor, args, context.device)
    weight = Weight(0, block.dtype, *w.shape)
    made = outputs(weight, args)
    # On a GPU the chunk is one tile: launches cost there, not caches.
    tile = TILE if w.device.type == "cpu" else block_bytes
    parts = [_encode(id, w[a:b], args, state, context) for a, b in weight.runs(tile, granule(made)) if b > a]
    ...
