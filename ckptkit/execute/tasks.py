"""What the threads do: read a piece of the source, compute, and say where in the file the bytes belong."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from ..errors import UserError, fail
from ..files.header import Entry, row_view
from ..files.reading import gather_block, read_block
from ..ops import Block, Chunk, Gather, Inexact, NoCode, Operation, Overflow, Read, Unfit, operation
from ..plan import Step
from .work import Work


class Part(NamedTuple):
    """Bytes and the offset in the file where they belong."""

    offset: int
    view: memoryview


_RECAST = "fp4_to_fp8_block@1"  # of which every finding is an error
Task = Callable[[], list[Part]]


def step_tasks(step: Step, places: Mapping[str, Entry], work: Work) -> Iterator[Task]:
    """The tasks of a computed step, once its inputs are measured; ``places`` says where its outputs lie."""
    if work.options.backend == "llmcompressor" and "modules" in step.args:
        yield partial(list, _make_whole(step, places, work))
        return
    op = operation(step.op)
    state = row_numbers(step, work) if op.by_rows else _measured(op, step, work)
    for chunk in op.chunks([ref.spec for ref in step.inputs], step.args, work.options.chunk_bytes):
        yield partial(_make, op, step, places, chunk, state, work)


def _make(op: Operation, step: Step, places: Mapping[str, Entry], chunk: Chunk, state: Any, work: Work) -> list[Part]:
    blocks = [_read(step, read, state, work) for read in chunk.reads]
    with _named(step, chunk.reads):
        arrays = op.make(blocks, chunk, step.args, state, work.context)
    parts = []
    for write, array in zip(chunk.writes, arrays, strict=True):
        place = places[step.outputs[write.tensor].name]
        _, width = row_view(place.dtype, place.shape)
        parts.append(Part(place.start + write.row * width, array.reshape(-1).data))
    return parts


def _read(step: Step, read: Read | Gather, state: Any, work: Work) -> Block:
    ref = step.inputs[read.tensor]
    if isinstance(read, Gather):
        return gather_block(work.source, ref, read, state)
    return read_block(work.source, ref, read)


def row_numbers(step: Step, work: Work) -> Any:
    """The step's last input, int32 [n]. Raises UserError ``source.rows`` unless it is what the plan was made with."""
    import numpy as np

    ref = step.inputs[-1]
    numbers = work.source.read(ref.file, ref.start, ref.stop)
    if hashlib.sha256(numbers).hexdigest() != step.args["rows"]:
        message = f"{ref.file}: {ref.name} is not what it was when the plan was made"
        raise fail("source.rows", message, file=ref.file, tensor=ref.name, hint="write the plan again with --plan")
    return np.frombuffer(numbers, "<i4")


def _make_whole(step: Step, places: Mapping[str, Entry], work: Work) -> list[Part]:
    """A quantizing step made by llmcompressor: one at a time, since it takes whole tensors."""
    from ..ops.llmcompressor_backend import make_whole

    reads = [Read(index, 0, row_view(ref.dtype, ref.shape)[0]) for index, ref in enumerate(step.inputs)]
    blocks = [read_block(work.source, ref, read) for ref, read in zip(step.inputs, reads, strict=True)]
    with _named(step, reads):
        arrays = make_whole(blocks, step.outputs, step.args, work.context)
    return [
        Part(places[spec.name].start, array.reshape(-1).data) for spec, array in zip(step.outputs, arrays, strict=True)
    ]


def _measured(op: Operation, step: Step, work: Work) -> Any:
    """The elementwise maximum over all that the operation wants to know first; None if that is nothing."""
    if op.measures is None:
        return None
    reads = op.measures([ref.spec for ref in step.inputs], step.args, work.options.chunk_bytes)
    state = None
    for value in work.in_order(partial(_measure, op, step, read, work) for read in reads):
        state = value if state is None else _larger(state, value)
    return state


def _measure(op: Operation, step: Step, read: Read, work: Work) -> Any:
    assert op.measure is not None
    block = read_block(work.source, step.inputs[read.tensor], read)
    with _named(step, [read]):
        return op.measure(block, step.args, work.context)


def _larger(a: Any, b: Any) -> Any:
    if isinstance(a, list):
        return [_larger(x, y) for x, y in zip(a, b, strict=True)]
    # A NaN, kept on request, stays: it makes every comparison false.
    return a if a != a or a >= b else b


def _may_be_wider(step: Step) -> bool:
    """Whether BF16 holds what the step cannot make."""
    return step.op == "dequantize@1" and step.args["dtype"] == "F16"


@contextmanager
def _named(step: Step, reads: Iterable[Read | Gather]) -> Iterator[None]:
    """Give a value that an operation cannot convert the name of its file and tensor; MemoryError is torch's too."""
    try:
        yield
    except Unfit as error:
        ref = step.inputs[list(reads)[error.index].tensor]
        message = f"{ref.file}: {ref.name} holds {error.said}"
        id = f"data.{error.what.lower()}"
        hint = "--set nonfinite=keep converts it all the same" if "modules" in step.args else f"--allow {id} keeps it"
        if step.op == _RECAST:
            hint = f"fetch the file again; --dtype bf16 --allow {id} keeps it"
        if isinstance(error, Overflow):
            way_out = "--allow data.overflow makes it Inf"
            id, hint = "data.overflow", f"--dtype bf16 holds it; {way_out}" if _may_be_wider(step) else way_out
        if isinstance(error, NoCode):
            id, hint = "data.codes", "take the tensor from the source of the checkpoint"
        if isinstance(error, Inexact):
            id, hint = "dequantize.inexact", "--inexact round rounds the least of them; --dtype bf16 holds all"
        raise fail(id, message, file=ref.file, tensor=ref.name, hint=hint) from None
    except UserError as error:  # of decoding, which is not told of files
        files = {ref.name: ref.file for ref in step.inputs}
        raise UserError(replace(item, file=files.get(item.tensor or "")) for item in error.findings) from None
    except RuntimeError as error:
        if "allocate memory" in str(error) or "out of memory" in str(error):
            raise MemoryError(str(error).partition("\n")[0]) from error
        raise
