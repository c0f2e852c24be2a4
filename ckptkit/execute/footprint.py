"""How much memory a run takes: known before it begins, since every chunk is planned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import nlargest

from ..errors import Finding
from ..files.header import DTYPE_BITS, row_view
from ..files.memory import available
from ..ops import Gather, Read, operation
from ..plan import COPY, Plan, Ref, Step
from .options import Options

_MOVING, _COMPUTING = 60_000_000, 240_000_000  # the interpreter; with torch
# What a chunk grows to, counted in the bytes it reads: intermediate values, results, what waits its turn.
_ORDINARY, _WIDE = 8, 12


def peak_memory(plan: Plan, options: Options) -> int:
    """About how many bytes of memory a run takes at its peak: the interpreter, torch where it is used, and the chunks in flight."""
    computed = [step for step in plan.steps() if step.op != COPY]
    if not _uses_torch(computed):
        largest = max((_largest_chunk(step, options) for step in computed), default=0)
        return _MOVING + max(2 * options.chunk_bytes, _ORDINARY * options.threads * largest)
    wide = sum(nlargest(options.threads, _wide_chunks(computed, options)))
    return max(_COMPUTING + _WIDE * wide, _ordinary(options))


def _uses_torch(steps: Iterable[Step]) -> bool:
    return any(operation(op).uses_torch for op in {step.op for step in steps})


def _ordinary(options: Options) -> int:
    """The peak of a run none of whose chunks is larger than it should be."""
    return _COMPUTING + _ORDINARY * options.threads * options.chunk_bytes


def _wide_chunks(steps: list[Step], options: Options) -> Iterator[int]:
    """Bytes of the chunks that are larger than they should be, since a row (or a row of blocks) is never cut."""
    known: dict[tuple[object, ...], int] = {}
    for step in steps:
        if step.bytes_read <= options.chunk_bytes:
            continue
        key = (step.op, step.rule, *(ref.spec[1:] for ref in step.inputs))
        if key not in known:
            known[key] = _largest_chunk(step, options)
        if known[key] > options.chunk_bytes:
            yield from [known[key]] * min(options.threads, -(-step.bytes_read // known[key]))


def _largest_chunk(step: Step, options: Options) -> int:
    """Bytes that the first chunk reads: those after it are no larger."""
    if options.backend != "native":
        return step.bytes_read
    chunks = operation(step.op).chunks([ref.spec for ref in step.inputs], step.args, options.chunk_bytes)
    first = next(iter(chunks), None)
    return sum(_read_bytes(read, step.inputs[read.tensor]) for read in first.reads) if first else 0


def _read_bytes(read: Read | Gather, ref: Ref) -> int:
    if isinstance(read, Gather):
        return (read.stop - read.start) * row_view(ref.dtype, ref.shape)[1]
    columns = ref.shape[-1] if ref.shape else 1
    stop = columns if read.col_stop is None else read.col_stop
    return (read.row_stop - read.row) * (stop - (read.col or 0)) * DTYPE_BITS[ref.dtype] // 8


def too_large(plan: Plan, options: Options) -> Iterator[Finding]:
    """``output.memory``: wide rows for which there is not enough memory, where the system tells how much there is."""
    needed, free = peak_memory(plan, options), available()
    if free is not None and needed > max(free, _ordinary(options)):
        message = f"the run takes about {needed:,} bytes of memory at its peak, and {free:,} are available"
        hint = "--jobs 1 takes the least" if options.threads > 1 else "run it where there is more memory"
        yield Finding("output.memory", message, hint=hint, data={"needed": needed, "available": free})
