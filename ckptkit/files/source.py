"""Where a checkpoint's bytes live: a local folder, or a single ``.safetensors`` file.

A source is read, never written. Its own symlinks are resolved once (a Hub cache is made of them); the names it
gives are plain relative paths with ``/`` between parts. All ranges are half-open.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NoReturn, Protocol

from ..errors import UserError, fail, unreadable

PIECE = 4 << 20
# Folders that are no part of a checkpoint: version control, a download cache, a filesystem's own.
PASSED_OVER = {".git", ".cache", "lost+found"}
DANGLING = "a symlink that leads nowhere"
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
    """A folder or file with its files listed. Reads are thread-safe (``pread``); the files last read stay open.

    ``no_files`` names what lies among the files and is none, with the reason: a dangling symlink, say. ``others`` are
    further sources, whose files are ``files`` too, as ``<key>:<name>``: see :func:`joined`.
    """

    uri: str
    root: Path
    files: dict[str, FileInfo]
    no_files: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, Source] = field(default_factory=dict)
    _descriptors: dict[str, _Descriptor] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def read(self, file: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of ``file``. Raises UserError on a short or failed read: ``source.read``, ``access.denied``."""
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
            raise unreadable(error, "source.read", file) from error

    def text(self, file: str, errors: str = "strict") -> str:
        """A whole small file as UTF-8 text. Raises UserError (``config.parse``) where it is none.

        ``errors``: ``surrogateescape`` takes any bytes, as Python does for the names of files.
        """
        try:
            return self.read(file, 0, self.files[file].size).decode("utf-8", errors)
        except UnicodeDecodeError as error:
            raise fail("config.parse", f"{file} is not UTF-8 text (byte {error.start})", file=file) from None

    def changed(self, recorded: dict[str, list[int]]) -> list[str]:
        """Names whose size, mtime or inode are no longer those recorded, the vanished included."""
        files = self._now()
        return sorted(name for name, found in recorded.items() if name not in files or files[name].identity != found)

    @property
    def roots(self) -> list[Path]:
        """The folder or file that this is, and those of ``others``."""
        return [self.root, *(root for other in self.others.values() for root in other.roots)]

    def _now(self) -> dict[str, FileInfo]:
        """The files as they are at this moment."""
        try:
            files, _ = _scan(self.root)
        except OSError:
            files = {}
        return files | _labelled({key: other._now() for key, other in self.others.items()})

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
    UserError ``usage.hub``. A folder of which a part may not be read is refused whole: ``access.denied``.
    """
    path = Path(os.path.expanduser(text))
    try:
        if not path.exists():
            raise _absent(text, path)
        if not path.is_dir() and path.suffix != ".safetensors":
            hint = "give the folder that holds config.json and the .safetensors files"
            raise fail("source.kind", f"{text} is neither a folder nor a .safetensors file", file=text, hint=hint)
        return Source(text, path, *_scan(path))
    except OSError as error:
        raise unreadable(error, "source.read", text) from error


def joined(first: Source, others: Mapping[str, Source]) -> Source:
    """``first`` with the files of ``others`` as ``<key>:<name>`` too: what a plan over several sources is run on."""
    files = first.files | _labelled({key: other.files for key, other in others.items()})
    return Source(first.uri, first.root, files, first.no_files, others)


def _labelled(files: Mapping[str, Mapping[str, FileInfo]]) -> dict[str, FileInfo]:
    return {f"{key}:{name}": info for key, found in files.items() for name, info in found.items()}


def _absent(text: str, path: Path) -> UserError:
    if _looks_local(text):
        return fail("source.missing", f"{text} does not exist", file=text, hint=_nearby(path))
    message = f"{text} does not exist here; as the name of a Hub repository it cannot be read yet"
    hint = f"correct the path, or: hf download {text} --local-dir ./{text.rsplit('/', 1)[-1]}"
    return fail("usage.hub", message, hint=hint)


def _looks_local(text: str) -> bool:
    return text.startswith((".", "/", "~")) or text.count("/") >= 2 or text.endswith(".safetensors")


def _nearby(path: Path) -> str | None:
    parent = path.parent
    if not parent.is_dir():
        return f"{parent} does not exist either"
    try:
        names = sorted(entry.name for entry in parent.iterdir() if entry.is_dir())[:5]
    except PermissionError:
        return None
    return f"folders there: {', '.join(names)}" if names else None


def _scan(root: Path) -> tuple[dict[str, FileInfo], dict[str, str]]:
    """Every regular file below ``root`` by relative name, and what is none, with the reason; a file is itself.

    Raises OSError where a folder cannot be listed, or a symlink may not be followed.
    """
    if root.is_file():
        return {root.name: _info(root)}, {}
    files, others = {}, {}
    for folder, subfolders, names in os.walk(root, onerror=_raise, followlinks=False):
        subfolders[:] = sorted(name for name in subfolders if name not in PASSED_OVER)
        links = [name for name in subfolders if os.path.islink(os.path.join(folder, name))]
        for name in sorted([*names, *links]):
            path = Path(folder, name)
            relative = path.relative_to(root).as_posix()
            try:
                if path.is_file():
                    files[relative] = _info(path)
                    continue
            except FileNotFoundError:  # it went while it was looked at
                pass
            others[relative] = _no_file(path)
    return files, others


def _no_file(path: Path) -> str:
    if path.is_symlink() and not path.exists():
        return DANGLING
    return "a symlink to a folder" if path.is_dir() else "no regular file"


def _raise(error: OSError) -> NoReturn:
    raise error


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


__all__ = ["DANGLING", "PASSED_OVER", "FileInfo", "Source", "is_plain", "joined", "open_source", "same_bytes"]
