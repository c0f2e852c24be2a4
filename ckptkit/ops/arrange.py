"""Other arrangements of the same values: rows taken and put together, codes spread and packed, matrices transposed.

``arrange@1``
    Rows as bytes, of any dtype. Inputs are matrices of one size, of which the rows ``take`` are used (all if absent):
    ``{"start": s, "step": k, "count": n}``, row s, s + k, and so on. Of every ``interleave`` inputs (absent: 1) the
    rows alternate; what that gives lies one after another. ``codes``: absent, ``"spread"`` (two 4-bit codes of a byte
    become a byte each, the low half first) or ``"pack"`` (the inverse, which refuses a byte above 15). The result is called ``name``, ``dtype`` and
    ``shape``, which must have as many bytes.

``transpose@1``
    ``columns`` of the one input [in, out'], ``{"start", "step", "count"}``, as the rows of ``name`` [count, in].

``stack_transposed@1``
    Inputs [out, in], all of one size: of every ``members`` of them the transposes lie side by side as [in, members x
    out], or column by column in turn if ``alternate``. Those matrices one after another are ``name``, ``shape``
    [stack, in, members x out].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..files.header import DTYPE_BITS, Spec, row_view
from . import Args, Block, Chunk, Context, NoCode, Operation, Read, Write

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


def _named(inputs: Sequence[Spec], args: Args) -> list[Spec]:
    return [Spec(args["name"], args["dtype"], tuple(args["shape"]))]


_LAST_CODE = 15
_FACTOR = {None: (1, 1), "spread": (2, 1), "pack": (1, 2)}  # how many bytes of so many


# --- arrange@1 ---------------------------------------------------------------------------------------------


def _arrange_chunks(inputs: Sequence[Spec], args: Args, budget: int) -> Iterator[Chunk]:
    """Runs of rows of as many inputs as alternate: the output's rows are theirs, one for one, as bytes."""
    rows, width = row_view(inputs[0].dtype, inputs[0].shape)
    take = args.get("take") or {"start": 0, "step": 1, "count": rows}
    start, step, count, every = take["start"], take["step"], take["count"], args.get("interleave", 1)
    made = width * _FACTOR[args.get("codes")][0] // _FACTOR[args.get("codes")][1]  # bytes that a row becomes
    _, row = row_view(args["dtype"], tuple(args["shape"]))  # bytes of the output's own rows
    if not made or not count:
        return
    unit = max(1, row // (made * every))  # a chunk writes whole rows of the output
    at_once = max(1, budget // (max(width * step, made) * every * unit)) * unit
    for first in range(0, len(inputs), every):
        for at in range(0, count, at_once):
            stop = min(at + at_once, count)
            span = start + at * step, start + (stop - 1) * step + 1
            reads = tuple(Read(index, *span) for index in range(first, first + every))
            yield Chunk(reads, (Write(0, (first * count + at * every) * made // row),))


def _arrange(blocks: Sequence[Block], chunk: Chunk, args: Args, state: Any, context: Context) -> list[Array]:
    import numpy as np

    step = (args.get("take") or {"step": 1})["step"]
    if args.get("codes") == "pack":
        _check_codes(blocks, step)
    taken = [np.frombuffer(block.data, np.uint8).reshape(block.rows, -1)[::step] for block in blocks]
    rows: Array = taken[0] if len(taken) == 1 else np.stack(taken, axis=1)
    match args.get("codes"):
        case "spread":
            rows = np.stack((rows & 15, rows >> 4), axis=-1)
        case "pack":
            rows = rows[..., ::2] | rows[..., 1::2] << 4
    return [np.ascontiguousarray(rows)]


def _check_codes(blocks: Sequence[Block], step: int) -> None:
    """Raises NoCode for a byte that would spill into the code beside it."""
    import numpy as np

    for index, block in enumerate(blocks):
        largest = int(np.frombuffer(block.data, np.uint8).reshape(block.rows, -1)[::step].max(initial=0))
        if largest > _LAST_CODE:
            raise NoCode(index, f"the byte {largest}, which is no code of 4 bits")


# --- transposes --------------------------------------------------------------------------------------------


def _transpose_specs(inputs: Sequence[Spec], args: Args) -> list[Spec]:
    return [Spec(args["name"], inputs[0].dtype, (args["columns"]["count"], inputs[0].shape[0]))]


def _transpose_chunks(inputs: Sequence[Spec], args: Args, budget: int) -> Iterator[Chunk]:
    rows, _ = inputs[0].shape
    start, step, count = (args["columns"][key] for key in ("start", "step", "count"))
    at_once = max(1, budget // max(rows * step * DTYPE_BITS[inputs[0].dtype] // 8, 1))
    for row in range(0, count, at_once):
        stop = min(row + at_once, count)
        yield Chunk((Read(0, 0, rows, start + row * step, start + (stop - 1) * step + 1),), (Write(0, row),))


def _transpose(blocks: Sequence[Block], chunk: Chunk, args: Args, state: Any, context: Context) -> list[Array]:
    return [_bytes(_elements(blocks[0])[:, :: args["columns"]["step"]].T)]


def _stack_specs(inputs: Sequence[Spec], args: Args) -> list[Spec]:
    return [Spec(args["name"], inputs[0].dtype, tuple(args["shape"]))]


def _stack_chunks(inputs: Sequence[Spec], args: Args, budget: int) -> Iterator[Chunk]:
    outputs, columns = inputs[0].shape
    members = args["members"]
    at_once = max(1, budget // max(members * outputs * DTYPE_BITS[inputs[0].dtype] // 8, 1))
    for first in range(0, len(inputs), members):
        for column in range(0, columns, at_once):
            stop = min(column + at_once, columns)
            reads = tuple(Read(index, 0, outputs, column, stop) for index in range(first, first + members))
            yield Chunk(reads, (Write(0, first // members * columns + column),))


def _stack(blocks: Sequence[Block], chunk: Chunk, args: Args, state: Any, context: Context) -> list[Array]:
    import numpy as np

    sides = [_elements(block).T for block in blocks]
    joined = np.stack(sides, axis=2) if args["alternate"] else np.concatenate(sides, axis=1)
    return [_bytes(joined)]


def _elements(block: Block) -> Array:
    """[rows, cols], elements as words of their size."""
    import numpy as np

    word = np.dtype(f"u{DTYPE_BITS[block.dtype] // 8}")
    return np.frombuffer(block.data, word).reshape(block.rows, block.cols)


def _bytes(array: Array) -> Array:
    import numpy as np

    return np.ascontiguousarray(array).view(np.uint8)


OPERATIONS = {
    "arrange@1": Operation("arrange@1", _named, _arrange_chunks, _arrange, bits_on_cuda=True, uses_torch=False),
    "transpose@1": Operation(
        "transpose@1", _transpose_specs, _transpose_chunks, _transpose, bits_on_cuda=True, uses_torch=False
    ),
    "stack_transposed@1": Operation(
        "stack_transposed@1", _stack_specs, _stack_chunks, _stack, bits_on_cuda=True, uses_torch=False
    ),
}
