"""Reading a checkpoint's bytes from one end to the other: in bounded pieces, tensor by tensor, on several threads;
or a part of one tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import fail
from ..ops import Block, Gather, Read
from ..plan import Ref
from .header import DTYPE_BITS, Header, row_view
from .source import Source

if TYPE_CHECKING:
    import numpy as np

PIECE = 1 << 20  # bytes of one read: what is done with them finds them in the processor's cache
SPAN = 32 << 20  # bytes that a thread takes at a time


class Span(NamedTuple):
    """Bytes [start, stop) of a file that one thread reads in order, and the tensors that lie there.

    ``digest``: the whole file is read, and its digest of this kind is taken (``sha256``, ``xxh3``).
    """

    file: str
    start: int
    stop: int
    tensors: tuple[Ref, ...] = ()
    digest: str | None = None

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class Part(NamedTuple):
    """Bytes as they were read. ``ref`` is the tensor they belong to, None for those of no wanted tensor (the header).

    Of a tensor larger than a piece a part is whole rows, or, if a row is larger still, a multiple of 64 bytes.
    ``view`` holds until the next part.
    """

    ref: Ref | None
    view: memoryview


def spans(
    shards: Mapping[str, Header], wanted: Callable[[Ref], bool], whole: Mapping[str, str | None]
) -> Iterator[Span]:
    """What to read of each shard: all of it where ``whole`` names a digest for it, else its header and wanted tensors."""
    for file, header in shards.items():
        refs = [Ref(file, *entry) for entry in header.entries]
        taken = [ref for ref in refs if ref.nbytes and wanted(ref)]
        digest = whole.get(file)
        if digest:
            yield Span(file, 0, header.file_size, tuple(taken), digest)
        else:
            yield Span(file, 0, header.data_start)
            yield from _runs(file, taken)


def _runs(file: str, refs: Iterable[Ref]) -> Iterator[Span]:
    """Neighbours together up to :data:`SPAN` bytes; a larger tensor is a run of its own."""
    run: list[Ref] = []
    for ref in refs:
        if run and (ref.start != run[-1].stop or ref.stop - run[0].start > SPAN):
            yield Span(file, run[0].start, run[-1].stop, tuple(run))
            run = []
        run.append(ref)
    if run:
        yield Span(file, run[0].start, run[-1].stop, tuple(run))


def parts(source: Source, span: Span) -> Iterator[Part]:
    """The bytes of a span in order; one buffer is filled again and again."""
    source.expect([span])
    buffer = memoryview(bytearray(PIECE))
    for run in _reads(span):
        first, last = run[0][1], run[-1][2]
        source.read_into(span.file, first, buffer[: last - first])
        for ref, start, stop in run:
            yield Part(ref, buffer[start - first : stop - first])


_Cut = tuple[Ref | None, int, int]


def _reads(span: Span) -> Iterator[list[_Cut]]:
    """Cuts that are read with one call: neighbours as long as they fit into a piece."""
    run: list[_Cut] = []
    for cut in _cuts(span):
        if run and cut[2] - run[0][1] > PIECE:
            yield run
            run = []
        run.append(cut)
    if run:
        yield run


def _cuts(span: Span) -> Iterator[_Cut]:
    at = span.start
    for ref in span.tensors:
        yield from _steps(None, at, ref.start, PIECE)
        yield from _steps(ref, ref.start, ref.stop, _step(ref))
        at = ref.stop
    yield from _steps(None, at, span.stop, PIECE)


def _steps(ref: Ref | None, start: int, stop: int, step: int) -> Iterator[_Cut]:
    for at in range(start, stop, step):
        yield ref, at, min(at + step, stop)


def _step(ref: Ref) -> int:
    """Bytes of a part: whole rows, unless a row alone is larger than a piece."""
    _, width = row_view(ref.dtype, ref.shape)
    return PIECE // width * width if 0 < width <= PIECE else PIECE


# --- a part of a tensor ------------------------------------------------------------------------------------


def read_block(source: Source, ref: Ref, read: Read) -> Block:
    """The rows of a tensor that ``read`` asks for, or some columns of them."""
    _, width = row_view(ref.dtype, ref.shape)
    columns = ref.shape[-1] if ref.shape else 1
    rows = read.row_stop - read.row
    first, stop = read.col or 0, columns if read.col_stop is None else read.col_stop
    left, size = (count * DTYPE_BITS[ref.dtype] // 8 for count in (first, stop - first))
    data = bytearray(rows * size)
    view = memoryview(data)
    start = ref.start + read.row * width + left
    if size == width:
        source.read_into(ref.file, start, view)
    else:
        for row in range(rows):
            source.read_into(ref.file, start + row * width, view[row * size : (row + 1) * size])
    return Block(data, ref.dtype, rows, stop - first, ref.shape)


def gather_block(source: Source, ref: Ref, gather: Gather, rows: np.ndarray[Any, Any]) -> Block:
    """The rows of a tensor that ``gather`` asks for by ``rows``, from the file as it is mapped into memory.

    Raises UserError ``source.read`` where the file is shorter than it was.
    """
    import numpy as np

    count, width = row_view(ref.dtype, ref.shape)
    file = source.mapped(ref.file)
    if len(file) < ref.stop:
        message = f"{ref.file} ends {ref.stop - len(file):,} bytes before byte {ref.stop:,}"
        raise fail("source.read", message, file=ref.file)
    matrix = np.frombuffer(file, np.uint8, ref.nbytes, ref.start).reshape(count, width)
    start, stop, every = gather.start, gather.stop, gather.every
    numbers = rows[start * every : stop * every : every]
    if len(numbers) < stop - start:
        numbers = np.concatenate([numbers, np.arange(start + len(numbers), stop, dtype=numbers.dtype)])
    taken = matrix.take(numbers if gather.per == 1 else numbers // gather.per, axis=0)
    columns = ref.shape[-1] if ref.shape else 1
    return Block(taken.reshape(-1).data, ref.dtype, stop - start, columns, ref.shape)
