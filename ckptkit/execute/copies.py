"""Bytes of the source that go to the output as they are.

They are read and written by one thread through one buffer: with several, each byte was measured to cost twice the
processor time, and the disk was no faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

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


def copy(found: Iterable[Run], target: Target, work: Work) -> None:
    buffer = memoryview(bytearray(work.options.chunk_bytes))
    for file, start, offset, size in found:
        for done in range(0, size, len(buffer)):
            work.check()
            view = buffer[: size - done]
            work.source.read_into(file, start + done, view)
            target.write(offset + done, view)
            work.progress.advance(len(view))
