"""Where a checkpoint's bytes live: a local folder, or a single ``.safetensors`` file.

A source is read, never written. Its own symlinks are resolved once (a Hub cache is made of them); the names it
gives are plain relative paths with ``/`` between parts. All ranges are half-open.
"""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Protocol

from .errors import fail

PIECE = 4 << 20
KEPT_OPEN = 64  # a process may commonly hold 1,024 descriptors, a checkpoint has more files than that


class Range(Protocol):
    """Bytes [start, stop) of a file."""

    @property
    def file(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file of a source: its resolved path, and what tells that it is still the same file."""

    path: Path
    size: int
    mtime_ns: int
    inode: int
    mode: int

    @property
    def identity(self) -> list[int]:
        """Size, mtime (ns) and inode: what a journal records."""
        return [self.size, self.mtime_ns, self.inode]


class _Descriptor:
    """An open file's number, closed once neither the source nor a reader holds it."""

    def __init__(self, number: int):
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


@dataclass
class Source:
    """A folder or file with its files listed. Reads are thread-safe (``pread``); the files last read stay open."""

    uri: str
    root: Path
    files: dict[str, FileInfo]
    _descriptors: dict[str, _Descriptor] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def read(self, file: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of ``file``. Raises UserError (``source.read``) on a short or failed read."""
        buffer = bytearray(stop - start)
        self.read_into(file, start, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, file: str, start: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes of ``file`` from ``start`` on."""
        done = 0
        try:
            descriptor = self._descriptor(file)
            while done < len(view):
                count = os.preadv(descriptor.number, [view[done:]], start + done)
                if count == 0:
                    message = f"{file} ends {len(view) - done:,} bytes before byte {start + len(view):,}"
                    raise fail("source.read", message, file=file)
                done += count
        except OSError as error:
            raise fail("source.read", f"{file} cannot be read: {error.strerror}", file=file) from error

    def text(self, file: str) -> str:
        """A whole small file as UTF-8 text. Raises UserError (``config.parse``) where it is none."""
        try:
            return self.read(file, 0, self.files[file].size).decode("utf-8")
        except UnicodeDecodeError as error:
            raise fail("config.parse", f"{file} is not UTF-8 text (byte {error.start})", file=file) from None

    def changed(self, recorded: dict[str, list[int]]) -> list[str]:
        """Names whose size, mtime or inode are no longer those recorded, the vanished included."""
        now = {name: info.identity for name, info in _scan(self.root).items()}
        return sorted(name for name, identity in recorded.items() if now.get(name) != identity)

    def close(self) -> None:
        with self._lock:
            self._descriptors.clear()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _descriptor(self, file: str) -> _Descriptor:
        with self._lock:
            found = self._descriptors.pop(file, None) or _Descriptor(os.open(self.files[file].path, os.O_RDONLY))
            self._descriptors[file] = found
            if len(self._descriptors) > KEPT_OPEN:
                del self._descriptors[next(iter(self._descriptors))]
            return found


def open_source(text: str) -> Source:
    """The source that ``text`` names.

    A path that exists is local. One that starts with ``.``, ``/`` or ``~``, has two slashes or ends in
    ``.safetensors`` is meant to be local too: UserError ``source.missing`` when absent. Anything else is a Hub name:
    UserError ``usage.hub``.
    """
    path = Path(text).expanduser()
    if not path.exists():
        if _looks_local(text):
            raise fail("source.missing", f"{text} does not exist", file=text, hint=_nearby(path))
        message = f"{text} is not a path here, so it would be a Hub name; reading from the Hub is not supported yet"
        raise fail("usage.hub", message, hint=f"hf download {text} --local-dir ./{text.rsplit('/', 1)[-1]}")
    if path.is_dir():
        return Source(text, path, _scan(path))
    if path.suffix != ".safetensors":
        hint = "give the folder that holds config.json and the .safetensors files"
        raise fail("source.kind", f"{text} is neither a folder nor a .safetensors file", file=text, hint=hint)
    return Source(text, path, _scan(path))


def _looks_local(text: str) -> bool:
    return text.startswith((".", "/", "~")) or text.count("/") >= 2 or text.endswith(".safetensors")


def _nearby(path: Path) -> str | None:
    parent = path.parent
    if not parent.is_dir():
        return f"{parent} does not exist either"
    names = sorted(entry.name for entry in parent.iterdir() if entry.is_dir())[:5]
    return f"folders there: {', '.join(names)}" if names else None


def _scan(root: Path) -> dict[str, FileInfo]:
    """Every regular file below ``root`` by relative name, ``.git`` and ``.cache`` left aside; a file is itself."""
    if root.is_file():
        return {root.name: _info(root)}
    found = {}
    for folder, subfolders, names in os.walk(root, followlinks=False):
        subfolders[:] = sorted(name for name in subfolders if name not in {".git", ".cache"})
        for name in sorted(names):
            path = Path(folder, name)
            with contextlib.suppress(
                FileNotFoundError
            ):  # a dangling symlink is no file: the index names what it misses
                if path.is_file():
                    found[path.relative_to(root).as_posix()] = _info(path)
    return found


def _info(path: Path) -> FileInfo:
    resolved = path.resolve(strict=True)
    stat = resolved.stat()
    return FileInfo(resolved, stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_mode & 0o777)


def same_bytes(source: Source, first: Range, second: Range) -> bool:
    """True if two ranges of files hold the same bytes; read side by side, a few MiB at a time."""
    if first.stop - first.start != second.stop - second.start:
        return False
    for offset in range(0, first.stop - first.start, PIECE):
        size = min(PIECE, first.stop - first.start - offset)
        pieces = (source.read(r.file, r.start + offset, r.start + offset + size) for r in (first, second))
        if next(pieces) != next(pieces):
            return False
    return True


def is_plain(name: str) -> bool:
    """True for a relative path without ``..``, empty or ``.`` parts: what an index may name."""
    parts = name.split("/")
    return (
        not PurePosixPath(name).is_absolute()
        and all(part not in {"", ".", ".."} for part in parts)
        and "\0" not in name
    )


__all__ = ["FileInfo", "Source", "is_plain", "open_source", "same_bytes"]
