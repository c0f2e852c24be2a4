"""Bytes that are going to be read soon, fetched in few requests: neighbours together, large ones in pieces."""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

WINDOW = 8 << 20  # bytes of one request
HELD = 16  # windows kept in memory: each thread reads in one or two at a time

# Fill a view with the bytes of a file from an offset on.
Fetch = Callable[[str, int, memoryview], None]


class Window(NamedTuple):
    """Bytes [start, stop) of a file that are fetched at once."""

    start: int
    stop: int


def windows(ranges: Iterable[tuple[int, int]]) -> list[Window]:
    """Ranges [start, stop) by rising start, those that touch or overlap joined, in pieces of :data:`WINDOW` bytes.

    What lies between two ranges is not fetched along.
    """
    joined: list[Window] = []
    for start, stop in sorted(ranges):
        if joined and start <= joined[-1].stop:
            joined[-1] = Window(joined[-1].start, max(stop, joined[-1].stop))
        elif start < stop:
            joined.append(Window(start, stop))
    return [Window(at, min(at + WINDOW, stop)) for start, stop in joined for at in range(start, stop, WINDOW)]


def _at(planned: Sequence[Window], at: int) -> Window | None:
    """The last window that begins at or before a byte, if the byte lies in it."""
    index = bisect_right(planned, (at, 1 << 63)) - 1
    return planned[index] if index >= 0 and at < planned[index].stop else None


@dataclass
class Windows:
    """Reads of what was said to be expected are served from whole windows, others are fetched as they are.

    Thread-safe. Each window is fetched once, whoever asks first, and kept until :data:`HELD` others were used after it.
    """

    fetch: Fetch
    _planned: dict[str, list[Window]] = field(default_factory=dict)
    _held: OrderedDict[tuple[str, Window], Future[bytes]] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def expect(self, file: str, ranges: Iterable[tuple[int, int]]) -> None:
        """Plan windows for ranges [start, stop) that are going to be read; those that are planned already stay."""
        with self._lock:
            planned = self._planned.setdefault(file, [])
            for window in windows(ranges):
                known = _at(planned, window.start)
                if known is None or known.stop < window.stop:
                    insort(planned, window)

    def read_into(self, file: str, start: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes of ``file`` from ``start`` on. Raises what ``fetch`` raises."""
        while view:
            window = self._window(file, start)
            if window is None:
                self.fetch(file, start, view)
                return
            data = self._bytes(file, window)
            piece = memoryview(data)[start - window.start :][: len(view)]
            view[: len(piece)] = piece
            start, view = start + len(piece), view[len(piece) :]

    def _window(self, file: str, at: int) -> Window | None:
        with self._lock:
            return _at(self._planned.get(file, []), at)

    def _bytes(self, file: str, window: Window) -> bytes:
        key = file, window
        with self._lock:
            found = self._held.get(key)
            mine = found is None
            if found is None:
                found = self._held[key] = Future()
                while len(self._held) > HELD:
                    self._held.popitem(last=False)
            else:
                self._held.move_to_end(key)
        if mine:
            self._fill(key, found)
        return found.result()

    def _fill(self, key: tuple[str, Window], future: Future[bytes]) -> None:
        file, window = key
        buffer = bytearray(window.stop - window.start)
        try:
            self.fetch(file, window.start, memoryview(buffer))
        except BaseException as error:
            with self._lock:
                self._held.pop(key, None)
            future.set_exception(error)
        else:
            future.set_result(bytes(buffer))
