"""Operations: specs in -> specs out, arrays in -> arrays out. Pure: no I/O, no state, torch only inside ``make``.

An :class:`Operation` is four functions. ``specs`` gives the output specs (names included) of a step, from headers
alone. ``chunks`` cuts the work into pieces of bounded size: what each piece reads and where its results go.
``make`` computes one piece. ``measure``, where there is one, looks at every input first (a whole-tensor maximum,
say) and gives a small JSON-able value that ``make`` is handed.

Tensors are matrices here: leading dimensions flattened to rows, the last dimension the row
(:func:`ckptkit.files.header.row_view`). Ids carry a version: changing the bytes an operation makes means changing its id.

Arguments of the quantizing operations (all but ``take@1`` and ``cast@1``):

``modules``
    Names of the modules made, one for each of the first inputs: input i, [rows, cols], is the weight of ``modules[i]``.
    Outputs are named ``<module>.weight_packed`` and so on, module by module. Several modules in a step are a fused
    set, whose measured value is shared; further inputs are its members in other shards, measured only.
``columns``
    Absent, or for each input ``{"start": s, "step": k, "count": n}``, k the same for all of them: the weight is then
    ``input[:, s::k][:, :n].T``, shape [n, rows of the input].
``format``, ``weights``
    The compressed-tensors format and those fields of its ``QuantizationArgs`` that decide the bytes.
``arithmetic``
    Absent (compressed-tensors' arithmetic, in the weight's dtype), or ``float32`` (integer schemes): the same
    scales, but codes divided and rounded in float32.

:func:`ckptkit.ops.select.select` chooses the operation and gives the last three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import fail
from ..files.header import Spec

if TYPE_CHECKING:
    import numpy as np

Args = Mapping[str, Any]


class Gather(NamedTuple):
    """Rows ``rows[start * every : stop * every : every] // per`` of input ``tensor``; ``rows`` is the step's last input.

    Numbers past the end of ``rows`` are themselves.
    """

    tensor: int
    start: int
    stop: int
    per: int = 1
    every: int = 1


class Read(NamedTuple):
    """Rows [row, row_stop) of input ``tensor``; with ``col``/``col_stop`` (elements) only those columns of them."""

    tensor: int
    row: int
    row_stop: int
    col: int | None = None
    col_stop: int | None = None


class Write(NamedTuple):
    """Whole rows of output ``tensor``, from ``row`` on: as many as the array that ``make`` gives for it holds."""

    tensor: int
    row: int


class Chunk(NamedTuple):
    """A piece of a step. Chunks of a step come in row order for every output; together they fill each exactly."""

    reads: tuple[Read | Gather, ...]
    writes: tuple[Write, ...]

    @property
    def plain(self) -> list[Read]:
        """The reads, of an operation that gathers no rows."""
        return [read for read in self.reads if isinstance(read, Read)]


@dataclass(frozen=True, slots=True)
class Block:
    """What a read brought: ``rows`` x ``cols`` elements of ``dtype``, contiguous, in a writable buffer.

    ``shape`` is that of the tensor they are a part of.
    """

    data: bytearray | memoryview
    dtype: str
    rows: int
    cols: int
    shape: tuple[int, ...] = ()


class Context(NamedTuple):
    """How to compute: the torch device, and whether a NaN or Inf, found or made, is an error (else it is kept)."""

    device: str = "cpu"
    nonfinite_error: bool = True


class Unfit(ValueError):
    """A value that cannot be converted. ``index`` is the block it was seen in; the executor names file and tensor.

    ``said`` is what the tensor holds in words, if these are not ``what``.
    """

    def __init__(self, index: int, what: str, said: str | None = None):
        super().__init__(what)
        self.index, self.what, self.said = index, what, said or what


class NonFinite(Unfit):
    """A weight holds NaN or Inf: ``what``."""


class Overflow(Unfit):
    """A value is too large for the dtype it is to have."""


class NoCode(Unfit):
    """A byte that is to be a code of a narrower format is none."""


class Inexact(Unfit):
    """A value that is to be kept as it is lies between those of the dtype it is to have."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A named pure operation.

    specs(inputs, args)             -> output specs
    chunks(inputs, args, budget)    -> chunks reading at most about ``budget`` bytes each
    make(blocks, chunk, args, state, context) -> one C-contiguous uint8 array per write of the chunk
    measures(inputs, args, budget)  -> reads to look at first, one at a time (empty: nothing to measure)
    measure(block, args, context)   -> a float or list of floats of one read; combined by elementwise maximum,
                                       the combined value is ``state``
    bits_on_cuda                    -> True if the bytes made on a CUDA device were shown equal to the CPU's
    uses_torch                      -> False if ``make`` does without torch on the CPU
    by_rows                         -> True if the last input is a vector of row numbers: it is ``state``, gathers go by it
    only_moves                      -> True if ``make`` gives what was read: several threads would only get in the way
    """

    id: str
    specs: Callable[[Sequence[Spec], Args], list[Spec]]
    chunks: Callable[[Sequence[Spec], Args, int], Iterator[Chunk]]
    make: Callable[[Sequence[Block], Chunk, Args, Any, Context], list[np.ndarray]]
    measures: Callable[[Sequence[Spec], Args, int], Iterator[Read]] | None = None
    measure: Callable[[Block, Args, Context], Any] | None = None
    bits_on_cuda: bool = False
    uses_torch: bool = True
    by_rows: bool = False
    only_moves: bool = False


def operation(id: str) -> Operation:
    """The operation of that id. Raises UserError (``plan.unknown-op``) for one this version does not have."""
    found = _operations().get(id)
    if found is None:
        message = f"this version of ckptkit has no operation {id!r}"
        raise fail("plan.unknown-op", message, hint=f"known: {', '.join(sorted(_operations()))}, copy@1")
    return found


@cache
def _operations() -> Mapping[str, Operation]:
    from . import (
        arrange,
        cast,
        dequantize,
        fp4_to_fp8,
        quantizers,
        renumber,
        requantize,
        rows,
        stack,
        take,
    )  # here, because they are made of what is above

    made = (take, cast, arrange, dequantize, stack, fp4_to_fp8, quantizers, requantize, rows, renumber)
    return {id: op for module in made for id, op in module.OPERATIONS.items()}
