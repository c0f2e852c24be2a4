"""A safetensors file that is being written: bytes at their offsets, and the digest of each tensor of them."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence

import xxhash

from ..files.header import Entry
from .files import PIECE, write_at


class Target:
    """The file behind ``descriptor``, which is to hold ``entries``, given in the order in which they lie.

    A tensor's bytes must come once, in order and without a gap: anything else is a bug of the operation that made
    them, and raises RuntimeError.
    """

    def __init__(self, descriptor: int, entries: Sequence[Entry]):
        self._descriptor, self._entries = descriptor, entries
        self._starts = [entry.start for entry in entries]
        self._open: dict[str, tuple[int, xxhash.xxh3_128]] = {}
        self._done: dict[str, str] = {}

    def write(self, offset: int, view: memoryview) -> None:
        """Write ``view`` (bytes) at ``offset``; it may span tensors, and the header before them."""
        write_at(self._descriptor, view, offset)
        index = bisect_right(self._starts, offset) - 1
        if index < 0:
            header = (self._starts[0] if self._starts else offset + len(view)) - offset
            view, offset, index = view[header:], offset + header, 0
        while view:
            entry = self._entries[index]
            piece = view[: entry.stop - offset]
            self._feed(entry, offset, piece)
            view, offset, index = view[len(piece) :], offset + len(piece), index + 1

    def put(self, offset: int, view: memoryview) -> None:
        """Write ``view``, of a tensor whose bytes come in any order: :meth:`read_back` ends it."""
        write_at(self._descriptor, view, offset)

    def read_back(self, entry: Entry) -> None:
        """Take the digest of a tensor that was :meth:`put`, from the file."""
        digest = xxhash.xxh3_128()
        for start in range(entry.start, entry.stop, PIECE):
            digest.update(os.pread(self._descriptor, min(PIECE, entry.stop - start), start))
        self._done[entry.name] = digest.hexdigest()

    def _feed(self, entry: Entry, offset: int, piece: memoryview) -> None:
        due, digest = self._open.pop(entry.name) if entry.name in self._open else (entry.start, xxhash.xxh3_128())
        if due != offset or entry.name in self._done:
            raise RuntimeError(f"{entry.name}: bytes for {offset:,} came where those for {due:,} were due")
        digest.update(piece)
        if offset + len(piece) == entry.stop:
            self._done[entry.name] = digest.hexdigest()
        else:
            self._open[entry.name] = (offset + len(piece), digest)

    def digests(self) -> dict[str, str]:
        """The xxh3-128 (hex) of every tensor by name, once each is filled."""
        empty = xxhash.xxh3_128_hexdigest(b"")
        found = {e.name: self._done.get(e.name, "" if e.nbytes else empty) for e in self._entries}
        unfilled = [name for name, digest in found.items() if not digest]
        if unfilled:
            raise RuntimeError(f"{unfilled[0]} was not filled")
        return found
