"""Rows of a matrix by their numbers: in another order, or some of them, whichever way its format stores them.

The last input of each operation is a vector of int32, the numbers: output row r is row ``rows[r]`` of what the other
input holds. The executor reads that vector whole, sees that its digest is ``args["rows"]``, and hands it to ``make`` as
``state``. Values are moved as they are.

``rows@1``
    A row [cols] is a row of the matrix. ``per`` (absent: 1): row ``rows[r] // per`` is taken, which makes what ``per``
    rows shared each row's own. ``every`` (absent: 1): only ``rows[::every]``, the way back.
``columns@1``
    Rows lie as columns, one element each: GPTQ's weights and scales, a bias.
``packed_rows@1``, ``packed_columns@1``
    I32 words along the first, or last, dimension hold ``32 // bits`` rows each, the first in the lowest bits
    (compressed-tensors' zero points; GPTQ's). ``lanes``: for each row of a word its place there (AWQ's codes and zero points).
    What is left over of the last word stays as it is where all rows are there, else it is 0.
``row_count@1``
    A shape whose first number is that of the rows (``weight_shape``).

Argument of all: ``name``, of the output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..files.header import DTYPE_BITS, Spec, row_view
from . import Args, Block, Chunk, Context, Gather, Operation, Read, Write

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

PIECE = 1 << 20  # bytes of a chunk at most: what is moved is found in the processor's cache
_WORD = 32


def _count(inputs: Sequence[Spec]) -> int:
    return inputs[-1].shape[0]


def _share(count: int, per: int) -> int:
    return -(-count // per)


# --- rows@1 ------------------------------------------------------------------------------------------------


def _rows_specs(inputs: Sequence[Spec], args: Args) -> list[Spec]:
    source = inputs[0]
    return [Spec(args["name"], source.dtype, (_share(_count(inputs), args.get("every", 1)), *source.shape[1:]))]


def _rows_chunks(inputs: Sequence[Spec], args: Args, budget: int) -> Iterator[Chunk]:
    (made,) = _rows_specs(inputs, args)
    rows, width = row_view(made.dtype, made.shape)
    at_once = max(1, min(budget, PIECE) // max(width, 1))
    for row in range(0, rows if width else 0, at_once):
        gather = Gather(0, row, min(row + at_once, rows), args.get("per", 1), args.get("every", 1))
        yield Chunk((gather,), (Write(0, row),))


def _rows(blocks: Sequence[Block], chunk: Chunk, args: Args, state: Any, context: Context) -> list[Array]:
    import numpy as np

    return [np.frombuffer(blocks[0].data, np.uint8)]


# --- columns@1 ---------------------------------------------------------------------------------------------


def _columns_specs(inputs: Sequence[Spec], args: Args) -> list[Spec]:
    source = inputs[0]
    return [Spec(args["name"], source.dtype, (*source.shape[:-1], _count(inputs)))]


def _whole_rows(inputs: Sequence[Spec], args: Args, budget: int) -> Iterator[Chunk]:
    rows, width = row_view(inputs[0].dtype, inputs[0].shape)
    at_once = max(1, min(budget, PIECE) // max(width, 1))
    for row in range(0, rows, at_once):
        yield Chunk((Read(0, row, min(row + at_once, rows)),), (Write(0, row),))


def _columns(blocks: Sequence[Block], chunk: Chunk, args: Args, state: Any, context: Context) -> list[Array]:
    import numpy as np

    word = np.dtype(f"u{DTYPE_BITS[blocks[0].dtype] // 8}")
    elements = np.frombuffer(blocks[0].data, word).reshape(blocks[0].rows, -1)
    return [_bytes(elements.take(state, axis=1))]


# --- packed ------------------------------------------------------------------------------------------------


def _packed_rows_specs(inputs: Sequence[Spec], args: Args) -> list[Spec]:
    words = _share(_count(inputs), _WORD // args["bits"])
    return [Spec(args["name"], inputs[0].dtype, (words, *inputs[0].shape[1:]))]


def _packed_rows_chunks(inputs: Sequence[Spec], args: Args, budget: int) -> Iterator[Chunk]:
    """Of each row the words that its codes are in; a chunk's rows fill whole words of the output."""
    per = _WORD // args["bits"]
    _, width = row_view(inputs[0].dtype, inputs[0].shape)
    at_once = max(1, min(budget, PIECE) // max(width, 1) // per) * per
    count = _share(_count(inputs), per) * per
    for row in range(0, count if width else 0, at_once):
        yield Chunk((Gather(0, row, min(row + at_once, count), per),), (Write(0, row // per),))


def _packed_rows(blocks: Sequence[Block], chunk: Chunk, args: Args, state: Any, context: Context) -> list[Array]:
    import numpy as np

    bits = args["bits"]
    per = _WORD // bits
    start = chunk.writes[0].row * per
    words = np.frombuffer(blocks[0].data, np.uint32).reshape(blocks[0].rows, -1)
    taken = state[start : start + blocks[0].rows]
    shifts = (np.arange(len(words)) % per * bits).astype(np.uint32)  # of what is left over, which stays where it is
    shifts[: len(taken)] = taken % per * bits
    codes = words >> shifts[:, None] & np.uint32((1 << bits) - 1)
    if not _is_all(blocks[0].shape[0], len(state), per):
        codes[len(taken) :] = 0
    codes <<= (np.arange(len(words)) % per * bits).astype(np.uint32)[:, None]
    return [_bytes(np.bitwise_or.reduce(codes.reshape(-1, per, codes.shape[1]), axis=1))]


def _packed_columns_specs(inputs: Sequence[Spec], args: Args) -> list[Spec]:
    words = _share(_count(inputs), _WORD // args["bits"])
    return [Spec(args["name"], inputs[0].dtype, (*inputs[0].shape[:-1], words))]


def _packed_columns(blocks: Sequence[Block], chunk: Chunk, args: Args, state: Any, context: Context) -> list[Array]:
    import numpy as np

    bits = args["bits"]
    per = _WORD // bits
    places = args.get("lanes") or range(per)
    words = np.frombuffer(blocks[0].data, np.uint32).reshape(blocks[0].rows, -1)
    codes = np.empty((*words.shape, per), np.uint8)
    for lane, place in enumerate(places):
        codes[:, :, lane] = words >> np.uint32(place * bits) & np.uint32((1 << bits) - 1)
    flat = codes.reshape(len(words), -1)
    made = np.zeros((len(words), _share(len(state), per) * per), np.uint8)
    made[:, : len(state)] = flat.take(state, axis=1)
    if _is_all(words.shape[1], len(state), per):
        made[:, len(state) :] = flat[:, len(state) :]
    packed = np.zeros((len(words), made.shape[1] // per), np.uint32)
    for lane, place in enumerate(places):
        packed |= made[:, lane::per].astype(np.uint32) << np.uint32(place * bits)
    return [_bytes(packed)]


def _is_all(words: int, count: int, per: int) -> bool:
    """Whether ``count`` rows are all that are packed, ``per`` in each of so many words."""
    return _share(count, per) == words


# --- row_count@1 -------------------------------------------------------------------------------------------


def _row_count_specs(inputs: Sequence[Spec], args: Args) -> list[Spec]:
    return [inputs[0]._replace(name=args["name"])]


def _row_count(blocks: Sequence[Block], chunk: Chunk, args: Args, state: Any, context: Context) -> list[Array]:
    import numpy as np

    shape = np.frombuffer(blocks[0].data, np.dtype(f"<i{DTYPE_BITS[blocks[0].dtype] // 8}")).copy()
    shape[0] = len(state)
    return [_bytes(shape)]


def _bytes(array: Array) -> Array:
    import numpy as np

    return np.ascontiguousarray(array).view(np.uint8)


def _operation(id: str, specs: Any, chunks: Any, make: Any, only_moves: bool = False) -> Operation:
    return Operation(id, specs, chunks, make, bits_on_cuda=True, uses_torch=False, by_rows=True, only_moves=only_moves)


OPERATIONS = {
    op.id: op
    for op in (
        _operation("rows@1", _rows_specs, _rows_chunks, _rows, only_moves=True),
        _operation("columns@1", _columns_specs, _whole_rows, _columns),
        _operation("packed_rows@1", _packed_rows_specs, _packed_rows_chunks, _packed_rows),
        _operation("packed_columns@1", _packed_columns_specs, _whole_rows, _packed_columns),
        _operation("row_count@1", _row_count_specs, _whole_rows, _row_count),
    )
}
