"""Bytes of the source that go to the output as they are.

On a local disk they are read and written by one thread through one buffer: with several, each byte was measured to cost twice the
processor time, and the disk was no faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from ..files.header import Entry
from ..plan import Step
from .target import Target
from .work import Work


class Run(NamedTuple):
    """``size`` bytes of a source file from ``start`` on, which go to ``offset`` of the output."""

    file: str
    start: int
    offset: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.size


def runs(copies: Iterable[Step], places: Mapping[str, Entry]) -> list[Run]:
    """Copy steps by rising offset, neighbours joined that lie side by side in the source too."""
    pairs = ((step.inputs[0], places[step.outputs[0].name]) for step in copies)
    found: list[Run] = []
    for ref, place in sorted(pairs, key=lambda pair: (pair[1].start, pair[1].stop)):
        last = found[-1] if found else None
        if last and (last.file, last.start + last.size, last.offset + last.size) == (ref.file, ref.start, place.start):
            found[-1] = last._replace(size=last.size + ref.nbytes)
        else:
            found.append(Run(ref.file, ref.start, place.start, ref.nbytes))
    return found


class Taker(Protocol):
    """What is shown the bytes too: a digest of them all."""

    def update(self, data: memoryview, /) -> None: ...


def copy(found: Sequence[Run], target: Target, work: Work, taker: Taker | None = None) -> None:
    """Read and write ``found``. From a server several threads read: there it is the way that takes the time."""
    if all(work.source.files[run.file].here for run in found):
        read = _one_by_one(found, work)
    else:
        work.source.expect(found)
        ordered = sorted(found, key=lambda run: (run.file, run.start))
        read = work.in_order(partial(_read, *piece, work) for run in ordered for piece in _pieces(run, work))
    for offset, view in read:
        if taker:
            taker.update(view)
        target.write(offset, view)
        work.progress.advance(len(view))


def _pieces(run: Run, work: Work) -> Iterator[tuple[Run, int, int]]:
    step = work.options.chunk_bytes
    return ((run, done, min(step, run.size - done)) for done in range(0, run.size, step))


def _read(run: Run, done: int, size: int, work: Work) -> tuple[int, memoryview]:
    return run.offset + done, memoryview(work.source.read(run.file, run.start + done, run.start + done + size))


def _one_by_one(found: Iterable[Run], work: Work) -> Iterator[tuple[int, memoryview]]:
    """Offsets and bytes; a view holds until the next."""
    buffer = memoryview(bytearray(work.options.chunk_bytes))
    for file, start, offset, size in found:
        for done in range(0, size, len(buffer)):
            work.check()
            view = buffer[: size - done]
            work.source.read_into(file, start + done, view)
            yield offset + done, view
