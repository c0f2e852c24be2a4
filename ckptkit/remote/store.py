"""What every server's files have in common: ranges in windows, headers side by side, whole small files proven."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ..files.header import MAX_HEADER
from ..files.source import FileInfo
from .proof import is_provable, proving
from .ranges import Traffic
from .windows import Fetch, Windows

PREFETCH = 256 << 10  # bytes from a shard's beginning: most headers are shorter
SMALL = 1 << 20  # bytes of a file that is kept once it was read: configs are asked for again and again
CONNECTIONS = 8


@dataclass(eq=False)
class RemoteStore:
    """The files of a server as :class:`~ckptkit.files.source.Store` has them.

    ``fetch_range`` reads, ``fetch_whole`` puts a file into a local cache (None: there is none), ``list_now`` lists anew.
    """

    files: Mapping[str, FileInfo]
    fetch_range: Fetch
    fetch_whole: Callable[[str], Path | None]
    list_now: Callable[[], dict[str, FileInfo]]
    counted: Traffic
    _kept: dict[str, bytes] = field(default_factory=dict, repr=False)
    _windows: Windows = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._windows = Windows(self.fetch_range)

    @property
    def traffic(self) -> tuple[int, int]:
        return self.counted.bytes, self.counted.requests

    def read_into(self, file: str, start: int, view: memoryview) -> None:
        """Fill ``view``; one that is no shard and is read whole is held against the server's record (``source.digest``)."""
        kept, info = self._kept.get(file, b""), self.files[file]
        if start + len(view) <= len(kept):
            view[:] = kept[start : start + len(view)]
            return
        self._windows.read_into(file, start, view)
        if len(view) == info.size and is_provable(info) and not file.endswith(".safetensors"):
            with proving(info, file) as digest:
                digest.update(view)
        if len(view) == info.size <= SMALL:
            self._kept[file] = bytes(view)

    def read_headers(self, files: Iterable[str]) -> None:
        """Fetch the headers of shards, :data:`CONNECTIONS` at a time. They are kept: later reads of them cost nothing."""
        missing = [file for file in files if file not in self._kept]
        with ThreadPoolExecutor(CONNECTIONS, "ckptkit-headers") as pool:
            tasks = [pool.submit(partial(self._header, file)) for file in missing]
            for file, task in zip(missing, tasks, strict=True):
                self._kept[file] = task.result()

    def _header(self, file: str) -> bytes:
        """The header's bytes, length prefix included; of what is no safetensors file, its beginning."""
        size = self.files[file].size
        beginning = self._range(file, 0, min(PREFETCH, size))
        stop = 8 + int.from_bytes(beginning[:8], "little")
        if stop <= len(beginning):
            return beginning[:stop]
        if stop > min(size, 8 + MAX_HEADER):
            return beginning
        return beginning + self._range(file, len(beginning), stop)

    def _range(self, file: str, start: int, stop: int) -> bytes:
        buffer = bytearray(stop - start)
        self.fetch_range(file, start, memoryview(buffer))
        return bytes(buffer)

    def heed(self, check: Callable[[], None]) -> None:
        """Call ``check`` while bytes come and are waited for; what it raises ends a read."""
        self.counted.check = check

    def expect(self, file: str, ranges: Iterable[tuple[int, int]]) -> None:
        self._windows.expect(file, ranges)

    def fetch(self, file: str) -> Path | None:
        return self.fetch_whole(file)

    def now(self) -> dict[str, FileInfo]:
        return self.list_now()
