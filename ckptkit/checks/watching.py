"""Telling how far a long check is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from . import Subject

T = TypeVar("T")


def watched(subject: Subject, results: Iterable[T], sizes: Sequence[int]) -> Iterator[T]:
    """The results, with the subject's progress told of the bytes that each stands for."""
    progress = subject.options.get("progress")
    if progress is None:
        yield from results
        return
    progress.start(0, sum(sizes))
    for size, result in zip(sizes, results, strict=True):
        progress.advance(size)
        yield result
    progress.done()
