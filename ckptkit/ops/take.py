"""``take@1``: every so many elements of a vector, of any dtype, as they are. Arguments: name, start, step, count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..files.header import Spec
from . import Args, Block, Chunk, Context, Operation, Read, Write

if TYPE_CHECKING:
    import numpy as np


def specs(inputs: Sequence[Spec], args: Args) -> list[Spec]:
    """One vector of ``count`` elements."""
    return [Spec(args["name"], inputs[0].dtype, (args["count"],))]


def chunks(inputs: Sequence[Spec], args: Args, budget: int) -> Iterator[Chunk]:
    """A vector is one row, so one chunk whatever the budget."""
    start, step, count = args["start"], args["step"], args["count"]
    yield Chunk((Read(0, 0, 1, start, start + (count - 1) * step + 1),), (Write(0, 0),))


def make(blocks: Sequence[Block], chunk: Chunk, args: Args, state: Any, context: Context) -> list[np.ndarray[Any, Any]]:
    import numpy as np

    elements = np.frombuffer(blocks[0].data, np.uint8).reshape(blocks[0].cols, -1)
    return [np.ascontiguousarray(elements[:: args["step"]])]


OPERATIONS = {"take@1": Operation("take@1", specs, chunks, make, bits_on_cuda=True, uses_torch=False)}
