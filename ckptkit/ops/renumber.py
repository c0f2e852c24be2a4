"""``renumber@1``: a map of draft tokens to tokens, for a vocabulary whose tokens have other ids.

Inputs: the map, integers [n], and the new id of each token, int32 [V], which the executor hands over as ``state`` (see
:mod:`.rows`). ``offsets``: whether entry i says ``token - i`` (EAGLE-3's ``d2t``) rather than the token. ``name``: of
the output, in the map's dtype; draft token i stays draft token i.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..files.header import DTYPE_BITS, Spec
from . import Args, Block, Chunk, Context, Operation, Read, Write

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


def _specs(inputs: Sequence[Spec], args: Args) -> list[Spec]:
    return [inputs[0]._replace(name=args["name"])]


def _chunks(inputs: Sequence[Spec], args: Args, budget: int) -> Iterator[Chunk]:
    """A vector is one row, so one chunk whatever the budget."""
    yield Chunk((Read(0, 0, 1),), (Write(0, 0),))


def _make(blocks: Sequence[Block], chunk: Chunk, args: Args, state: Any, context: Context) -> list[Array]:
    import numpy as np

    dtype = np.dtype(f"<i{DTYPE_BITS[blocks[0].dtype] // 8}")
    values = np.frombuffer(blocks[0].data, dtype)
    base = np.arange(len(values)) if args["offsets"] else 0
    return [(state[values + base] - base).astype(dtype).view(np.uint8)]


OPERATIONS = {
    "renumber@1": Operation("renumber@1", _specs, _chunks, _make, bits_on_cuda=True, uses_torch=False, by_rows=True)
}
