"""``cast@1``: a tensor of floats in another float dtype, rounded to nearest, ties to even. Arguments: name, dtype.

The bits are torch's: from F64 to a 16-bit dtype it rounds twice, by way of F32. NaN becomes the one quiet NaN, whatever
its payload, so that the bytes do not depend on where a chunk ends. A finite value that is too large for the dtype
raises Overflow; if that is to be passed over, it becomes Inf.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..files.header import DTYPE_BITS, Spec, row_view
from . import Args, Block, Chunk, Context, NonFinite, Operation, Overflow, Read, Write

if TYPE_CHECKING:
    import numpy as np


def specs(inputs: Sequence[Spec], args: Args) -> list[Spec]:
    """The same shape under ``name`` in ``dtype``."""
    return [Spec(args["name"], args["dtype"], inputs[0].shape)]


def chunks(inputs: Sequence[Spec], args: Args, budget: int) -> Iterator[Chunk]:
    """Runs of rows; ``budget`` holds for what is read and for what is made."""
    spec = inputs[0]
    rows, width = row_view(spec.dtype, spec.shape)
    if not width:
        return
    step = max(1, budget // max(width, width * DTYPE_BITS[args["dtype"]] // DTYPE_BITS[spec.dtype]))
    for row in range(0, rows, step):
        yield Chunk((Read(0, row, min(row + step, rows)),), (Write(0, row),))


def make(blocks: Sequence[Block], chunk: Chunk, args: Args, state: Any, context: Context) -> list[np.ndarray[Any, Any]]:
    import torch

    from .kernels.arrays import DTYPES, largest, matrix, raw

    given = matrix(blocks[0], context.device)
    made = given.to(DTYPES[args["dtype"]])
    try:
        largest(min(made, given, key=lambda tensor: tensor.itemsize))  # what a wider dtype holds fits it
    except NonFinite:
        too_large = made.isinf() & given.isfinite()
        if context.nonfinite_error and too_large.any():
            raise Overflow(0, f"{float(given[too_large][0]):g}, too large for {args['dtype']}") from None
        made.masked_fill_(given.isnan(), torch.nan)
    return [raw(made)]


OPERATIONS = {"cast@1": Operation("cast@1", specs, chunks, make)}
