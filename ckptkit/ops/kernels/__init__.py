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
from math import isnan
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...files.memory import keep_freed_memory
from .. import Args, Block, Chunk, Context, NonFinite
from ..quantizers import Weight, granule, outputs
from .arrays import largest, matrix, raw

Kernel = Callable[[Tensor, Args, Any], dict[str, Tensor]]

TILE = 512 << 10  # bytes of a weight

_HOMES = {
    "pack_int@1": ("integer", "pack_int"),
    "int8@1": ("integer", "int8"),
    "fp8_channel@1": ("fp8", "channel"),
    "fp8_block@1": ("fp8", "block"),
    "mxfp8@1": ("fp8", "mxfp8"),
    "nvfp4@1": ("fp4", "nvfp4"),
    "mxfp4@1": ("fp4", "mxfp4"),
    "ct_generic@1": ("generic", "checked"),
}


def _kernel(id: str) -> Kernel:
    """Kernels are imported one by one: the generic one brings all of compressed-tensors."""
    module, name = _HOMES[id]
    kernel: Kernel = getattr(import_module(f".{module}", __name__), name)
    return kernel


def make(id: str, block: Block, chunk: Chunk, args: Args, state: Any, context: Context) -> list[np.ndarray[Any, Any]]:
    """The bytes of each output that the chunk writes."""
    w = matrix(block, context.device, _columns(args))
    weight = Weight(0, block.dtype, *w.shape)
    made = outputs(weight, args)
    # On a GPU the chunk is one tile: launches cost there, not caches.
    tile = TILE if w.device.type == "cpu" else len(block.data)
    runs = weight.runs(tile, granule(made)) if len(w) else ()
    parts = [_encode(id, w[start:stop], args, state, context) for start, stop in runs]
    found = {name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else ())}
    if len(chunk.writes) == len(made):
        found |= _at_end(w, chunk.writes[0].row + len(w), args, state)
    return [raw(found.get(out.suffix, w[:0])) for out in made[: len(chunk.writes)]]


def _columns(args: Args) -> slice | None:
    """Of columns that do not lie side by side, a read brings what lies between as well."""
    return slice(None, None, args["columns"][0]["step"]) if "columns" in args else None


def _encode(id: str, w: Tensor, args: Args, state: Any, context: Context) -> dict[str, Tensor]:
    try:
        return _kernel(id)(w, args, state)
    except NonFinite:
        if context.nonfinite_error:
            raise
        from .generic import encode

        return encode(w, args, state)


def _at_end(w: Tensor, rows: int, args: Args, state: Any) -> dict[str, Tensor]:
    """What depends on all ``rows`` of a weight; ``w`` are the last of them."""
    found = {"weight_shape": torch.tensor([rows, w.shape[1]])}
    if args["weights"]["strategy"] == "tensor":
        from .generic import qparams

        found |= qparams(w, args, state)
    if args["weights"]["strategy"] == "tensor_group":
        from .fp4 import global_scale

        found["weight_global_scale"] = global_scale(state, w)
    return found


def measure(block: Block, args: Args, context: Context) -> list[float]:
    """Greatest value, least value negated (both the largest magnitude if the scheme is symmetric), 1 for a NaN."""
    w = matrix(block, context.device, _columns(args))
    if not len(w):
        return [0.0, 0.0, 0.0]
    try:
        peak = float(largest(w).max())
        if args["weights"]["symmetric"]:
            return [peak, peak, 0.0]
    except NonFinite:
        if context.nonfinite_error:
            raise
    low, high = (float(end) for end in w.aminmax())
    return [0.0, 0.0, 1.0] if isnan(low) else [high, -low, 0.0]


keep_freed_memory()
