"""What the executor is told, whom it tells how far it is, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from ..errors import Finding
from ..files.parallel import threads


@dataclass(frozen=True, slots=True)
class Options:
    """How a plan is run; what is made does not depend on it.

    ``jobs`` 0 means as many threads as there are processors, at most four. ``link``: ``auto``, ``hard``,
    ``reflink``, ``symlink`` or ``copy``. ``hash``: ``xxh3`` or ``sha256`` (whole files, one more read).
    ``backend``: ``native`` or ``llmcompressor``. ``cache_limit``: bytes of whole files
    that the run may leave in the Hub cache. ``resume_command`` is what a hint tells to type. ``check`` looks at
    the staging folder when everything but the manifest is in it, and gives what forbids to publish it.
    """

    jobs: int = 0
    device: str = "cpu"
    link: str = "auto"
    hash: str = "xxh3"
    resume: bool = False
    overwrite: bool = False
    nonfinite_error: bool = True
    backend: str = "native"
    verify: bool = True
    chunk_bytes: int = 4 << 20
    streaming: bool = False
    cache_limit: int | None = None
    resume_command: str = ""
    check: Callable[[Path], Iterable[Finding]] = lambda folder: ()

    @property
    def threads(self) -> int:
        return threads(self.jobs)


class Progress(Protocol):
    """Told how far a run is: its size first, bytes and shards as they are finished, ``done`` once it is published."""

    def start(self, total_shards: int, total_bytes: int) -> None: ...

    def shard(self, name: str) -> None: ...

    def advance(self, nbytes: int) -> None: ...

    def done(self) -> None: ...


class Result(NamedTuple):
    """What was published.

    ``links`` counts shards by how they were made (``written``, ``copy``, ``reflink``, ``hard``, ``symlink``). Bytes
    are file sizes: ``bytes_written`` of written and copied shards, ``bytes_copied`` of the copied among them (what a
    link would have saved), ``bytes_linked`` of the others. ``resumed`` shards were there already.
    ``fetched``: ``bytes`` and ``requests``, where the source is on a server.
    """

    path: Path
    digest: str
    links: Mapping[str, int]
    resumed: int
    bytes_written: int
    bytes_copied: int
    bytes_linked: int
    seconds: float
    fetched: Mapping[str, int] | None = None

    @property
    def shards(self) -> int:
        return sum(self.links.values())
