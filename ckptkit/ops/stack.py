"""``dense_stack@1``: matrices in any format that ``dequantize@1`` reads, as floats, one after another in one tensor.

Inputs are those of ``dequantize@1`` for the first matrix, then for the next. Arguments: ``name``, ``dtype`` and ``shape`` of
the output, whose rows are those of the matrices in their order; ``matrix``, the shape of one; and ``roles``, ``bits``,
``block``, ``cols``, ``layout``, which hold for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..files.header import Spec
from . import Args, Block, Chunk, Context, Operation, Write, dequantize

if TYPE_CHECKING:
    import numpy as np


def chunks(inputs: Sequence[Spec], args: Args, budget: int) -> Iterator[Chunk]:
    """Those of the matrices, one matrix after another."""
    parts, rows = len(args["roles"]), args["matrix"][0]
    for number in range(len(inputs) // parts):
        first = number * parts
        for chunk in dequantize.chunks(inputs[first : first + parts], _of_one(args), budget):
            reads = tuple([read._replace(tensor=first + read.tensor) for read in chunk.reads])
            yield Chunk(reads, (Write(0, number * rows + chunk.writes[0].row),))


def make(blocks: Sequence[Block], chunk: Chunk, args: Args, state: Any, context: Context) -> list[np.ndarray[Any, Any]]:
    parts, rows = len(args["roles"]), args["matrix"][0]
    reads = tuple([read._replace(tensor=read.tensor % parts) for read in chunk.reads])
    mine = Chunk(reads, (Write(0, chunk.writes[0].row % rows),))
    return dequantize.make(blocks, mine, _of_one(args), state, context)


def _of_one(args: Args) -> Args:
    return {**args, "shape": args["matrix"]}


OPERATIONS = {
    "dense_stack@1": Operation("dense_stack@1", dequantize.specs, chunks, make, bits_on_cuda=True, uses_torch=False)
}
