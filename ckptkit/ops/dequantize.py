"""``dequantize@1``: a quantized weight of any format that :mod:`ckptkit.decode` knows, as floats.

Inputs are the tensors that hold the weight. Arguments:

``name``, ``dtype``, ``shape``
    Of the output. BF16, F16 or F32; as many elements as the weight has.
``roles``
    The last part of each input's name, the weight's own first: ``["weight_packed", "weight_scale"]``. Stacked experts
    whose weight is read by columns (``blocks``) are given with their last two dimensions put together: [E, N, K / 2].
``bits``, ``block``, ``cols``, ``layout``
    What the config says of the format, see :func:`ckptkit.decode.encoded`: null, null, 0 and {} where it says nothing.
    ``layout`` are further arguments of that function: ``{"gptq": "v2"}``.

A value is the float32 that decoding gives, rounded once to nearest, ties to even; the sign of zero is kept. NaN or Inf
in codes or scales raises NonFinite, a value too large for the dtype Overflow; where they are to be kept, NaN becomes
the one quiet NaN and what is too large Inf.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import lcm
from typing import TYPE_CHECKING, Any

from ..decode import Encoded, encoded, spans
from ..decode.columns import WHOLE, columns, strips
from ..files.header import DTYPE_BITS, Spec, nbytes, row_view
from ..plan import Ref
from . import Args, Block, Chunk, Context, Operation, Read, Write

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


def specs(inputs: Sequence[Spec], args: Args) -> list[Spec]:
    """One dense tensor, as the arguments have it."""
    return [Spec(args["name"], args["dtype"], tuple(args["shape"]))]


def stored(inputs: Iterable[Spec], roles: Iterable[str], args: Args) -> Encoded:
    """How the weight lies in ``inputs``; offsets count from the beginning of each."""
    parts = {
        role: Ref("", spec.name, spec.dtype, spec.shape, 0, nbytes(spec.dtype, spec.shape))
        for role, spec in zip(roles, inputs, strict=True)
    }
    weight = parts[args["roles"][0]]
    if "blocks" in parts:
        *stack, groups = parts["scales"].shape
        parts["blocks"] = weight._replace(shape=(*stack, groups, weight.shape[-1] // max(groups, 1)))
    found = encoded(args["roles"][0], parts, args["bits"], args["block"], args["cols"], **args.get("layout") or {})
    return found._replace(codes=weight)


# --- how the work is cut -----------------------------------------------------------------------------------


def chunks(inputs: Sequence[Spec], args: Args, budget: int) -> Iterator[Chunk]:
    """Runs of rows, of whole blocks where they fit; of what is stored transposed, runs of columns of each matrix.

    ``budget`` holds for what is read and for what is made.
    """
    weight = stored(inputs, args["roles"], args)
    index = {spec.name: number for number, spec in enumerate(inputs)}
    if weight.rows and weight.cols:
        cut = _by_columns if weight.transposed else _by_rows
        yield from cut(weight, index, 8 * budget // max(DTYPE_BITS[args["dtype"]], weight.bits))


def _by_rows(weight: Encoded, index: Mapping[str, int], numbers: int) -> Iterator[Chunk]:
    """Runs of rows of about so many numbers."""
    step = _multiple(numbers // weight.cols, weight.height)
    for start in range(0, weight.rows, step):
        needed = spans(weight, start, min(start + step, weight.rows))
        reads = [_read(index, ref, needed[role].start, needed[role].stop) for role, ref in weight.parts.items()]
        yield Chunk(tuple(reads), (Write(0, start),))


def _by_columns(weight: Encoded, index: Mapping[str, int], numbers: int) -> Iterator[Chunk]:
    """Runs of columns of about so many numbers, matrix by matrix: rows of what is made."""
    least = lcm(WHOLE, weight.width)
    step = max(_multiple(numbers // weight.stack, least), least)
    for matrix in range(weight.rows // weight.stack):
        for first in range(0, weight.cols, step):
            needed = strips(weight, matrix, first, min(first + step, weight.cols))
            reads = [Read(index[ref.name], *needed[role]) for role, ref in weight.parts.items()]
            yield Chunk(tuple(reads), (Write(0, matrix * weight.cols + first),))


def _multiple(count: int, of: int) -> int:
    """``count``, at least one, cut down to a multiple of ``of`` if it is as large."""
    return max(count // of * of or count, 1)


def _read(index: Mapping[str, int], ref: Ref, start: int, stop: int) -> Read:
    """The whole rows that hold bytes [start, stop); of what is a single row, the elements."""
    rows, width = row_view(ref.dtype, ref.shape)
    if rows == 1:
        bits = DTYPE_BITS[ref.dtype]
        return Read(index[ref.name], 0, 1, start * 8 // bits, stop * 8 // bits)
    return Read(index[ref.name], start // width, -(-stop // width))


# --- the work ----------------------------------------------------------------------------------------------


def make(blocks: Sequence[Block], chunk: Chunk, args: Args, state: Any, context: Context) -> list[Array]:
    roles = [args["roles"][read.tensor] for read in chunk.reads]
    module = args["name"].removesuffix(".weight")
    inputs = [Spec(f"{module}.{role}", block.dtype, block.shape) for role, block in zip(roles, blocks, strict=True)]
    weight, row = stored(inputs, roles, args), chunk.writes[0].row
    if weight.transposed:
        first = row % weight.cols
        weight = columns(weight, first, first + blocks[0].cols * weight.cols // weight.codes.shape[-1])
        data = {role: memoryview(block.data) for role, block in zip(weight.parts, blocks, strict=True)}
        return [_computed(weight, 0, weight.rows, data, args["dtype"], context)]
    stop = row + len(blocks[0].data) // weight.row_bytes
    needed = spans(weight, row, stop)
    parts = zip(needed, blocks, inputs, chunk.plain, strict=True)
    data = {role: _bytes(block, spec, read, *needed[role][1:]) for role, block, spec, read in parts}
    return [_computed(weight, row, stop, data, args["dtype"], context)]


def _bytes(block: Block, spec: Spec, read: Read, start: int, stop: int) -> memoryview:
    """Bytes [start, stop) of the tensor, from the rows read for their sake."""
    rows, width = row_view(spec.dtype, spec.shape)
    skipped = start - read.row * width if rows > 1 else 0
    return memoryview(block.data)[skipped : skipped + stop - start]


def _computed(
    weight: Encoded, start: int, stop: int, data: Mapping[str, memoryview], dtype: str, context: Context
) -> Array:
    """The bytes of rows [start, stop), or of their transpose if the module wants that."""
    import numpy as np

    from .rounding import WORDS
    from .values import check_overall, fill

    if context.nonfinite_error:
        check_overall(weight, data)
    if context.device != "cpu" and not weight.transposed:
        from .kernels.triton_dequantize import rows

        by_device = rows(weight, start, stop, data, dtype, context.device)
        if by_device is not None:
            return by_device
    shape = (stop - start, weight.cols)
    made = np.empty(shape[::-1] if weight.transposed else shape, WORDS[dtype].dtype)
    fill(made.T if weight.transposed else made, weight, start, data, dtype, context.nonfinite_error)
    return made.reshape(-1).view(np.uint8)


OPERATIONS = {
    "dequantize@1": Operation("dequantize@1", specs, chunks, make, bits_on_cuda=True, uses_torch=False),
}
