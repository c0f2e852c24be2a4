"""Where a checkpoint's bytes live: a local folder, a single ``.safetensors`` file, or a server (:mod:`ckptkit.remote`).

A source is read, never written. Its own symlinks are resolved once (a Hub cache is made of them); the names it
gives are plain relative paths with ``/`` between parts. All ranges are half-open.
"""

from __future__ import annotations

import mmap
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NoReturn, Protocol

from ..errors import fail, unreadable

PIECE = 4 << 20
# Folders that are no part of a checkpoint: version control, a download cache, a filesystem's own.
PASSED_OVER = {".git", ".cache", "lost+found"}
DANGLING = "a symlink that leads nowhere"
_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(?:@.+)?")  # as the Hub has it; a revision may have slashes
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
    """A file of a source: its resolved path, and what tells that it is still the same file.

    ``tag`` is what a server says of the content: ``sha256:<hex>``, ``git:<hex>`` (of a blob) or ``etag:<text>``. A file
    that is not ``here`` is read from the server; its path is where a local cache would have it.
    """

    path: Path
    size: int
    mtime_ns: int
    inode: int
    mode: int
    tag: str | None = None
    here: bool = True

    @property
    def identity(self) -> list[int | str]:
        """What a journal records: size, mtime (ns) and inode; of a server's file size and tag."""
        return [self.size, self.mtime_ns, self.inode] if self.tag is None else [self.size, self.tag]


class Store(Protocol):
    """A server's files: what :class:`Source` asks of those that are not here. ``traffic`` has ``bytes, requests``."""

    @property
    def traffic(self) -> tuple[int, int]: ...

    def read_into(self, file: str, start: int, view: memoryview) -> None: ...

    def read_headers(self, files: Iterable[str]) -> None: ...

    def expect(self, file: str, ranges: Iterable[tuple[int, int]]) -> None: ...

    def heed(self, check: Callable[[], None]) -> None: ...

    def fetch(self, file: str) -> Path | None: ...

    def now(self) -> dict[str, FileInfo]: ...


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
    further sources, whose files are ``files`` too, as ``<key>:<name>``: see :func:`joined`. ``store`` is the server of
    the files that are not here, and ``revision`` the commit that a Hub repository is pinned to.
    """

    uri: str
    root: Path
    files: dict[str, FileInfo]
    no_files: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, Source] = field(default_factory=dict)
    store: Store | None = None
    revision: str | None = None
    _descriptors: dict[str, _Descriptor] = field(default_factory=dict, repr=False)
    _maps: dict[str, mmap.mmap] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def read(self, file: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of ``file``. Raises UserError on a short or failed read: ``source.read``, ``access.denied``."""
        buffer = bytearray(stop - start)
        self.read_into(file, start, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, file: str, start: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes of ``file`` from ``start`` on."""
        if not self.files[file].here:
            owner, name = self._owner(file)
            owner.read_into(name, start, view)
            return
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

    def mapped(self, file: str) -> mmap.mmap:
        """All of ``file``, which is not empty, as memory that is read when it is looked at: for reads here and there.

        A file that is cut off while it is mapped ends the process, which a read would say: not for what may change.
        """
        try:
            with self._lock:
                if file not in self._maps:
                    with open(self.local(file), "rb") as opened:
                        self._maps[file] = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
                return self._maps[file]
        except (OSError, ValueError) as error:  # ValueError: there is nothing in it any more
            raise fail("source.read", f"{file} cannot be read: {error}", file=file) from error

    def text(self, file: str, errors: str = "strict") -> str:
        """A whole small file as UTF-8 text. Raises UserError (``config.parse``) where it is none.

        ``errors``: ``surrogateescape`` takes any bytes, as Python does for the names of files.
        """
        try:
            return self.read(file, 0, self.files[file].size).decode("utf-8", errors)
        except UnicodeDecodeError as error:
            raise fail("config.parse", f"{file} is not UTF-8 text (byte {error.start})", file=file) from None

    def read_headers(self, files: Iterable[str]) -> None:
        """Have the headers of these shards fetched side by side, where they come from a server."""
        if self.store:
            self.store.read_headers(file for file in files if not self.files[file].here)

    def expect(self, ranges: Iterable[Range]) -> None:
        """Say what is going to be read, so that a server is asked for it in few requests."""
        if self.stores:
            batches: dict[tuple[Store, str], list[tuple[int, int]]] = {}
            for item in ranges:
                if not self.files[item.file].here:
                    batches.setdefault(self._owner(item.file), []).append((item.start, item.stop))
            for (owner, name), found in batches.items():
                owner.expect(name, found)

    def local(self, file: str) -> Path:
        """The same where nothing less will do. Raises UserError ``source.kind`` where there is no cache."""
        path = self.whole(file)
        if path is None:
            message = f"{file} is needed whole, and {self.uri} is read by ranges only"
            raise fail("source.kind", message, file=file, hint="fetch the files into a folder first")
        return path

    def whole(self, file: str) -> Path | None:
        """The whole file on a local disk, fetched into a cache if it is not here; None where there is no cache."""
        if self.files[file].here:
            return self.files[file].path
        owner, name = self._owner(file)
        return owner.fetch(name)

    def changed(self, recorded: Mapping[str, list[int | str]]) -> list[str]:
        """Names whose identity is no longer the one recorded, the vanished included."""
        files = self._now()
        return sorted(name for name, found in recorded.items() if name not in files or files[name].identity != found)

    @property
    def roots(self) -> list[Path]:
        """The folder or file that this is, and those of ``others``."""
        return [self.root, *(root for other in self.others.values() for root in other.roots)]

    @property
    def is_remote(self) -> bool:
        """Whether it is on a server, or was named as if it were: the Hub's cache serves without a network."""
        return self.store is not None or self.revision is not None

    @property
    def is_single_file(self) -> bool:
        """Whether this is a file by itself, which has no config and no folder."""
        return self.root.name.endswith(".safetensors") and list(self.files) == [self.root.name]

    def beside(self, what: str) -> str:
        """A name for what is made of it: beside a local source, in the current folder for one on a server."""
        return f"./{short_name(self.uri)}-{what}" if self.is_remote else f"{self.uri.rstrip('/')}-{what}"

    @property
    def location(self) -> str:
        """What opens the same source from anywhere."""
        return self.uri if self.is_remote else str(self.root.absolute())

    @property
    def stores(self) -> list[Store]:
        """The servers that files come from."""
        return [*([self.store] if self.store else []), *(store for o in self.others.values() for store in o.stores)]

    def _owner(self, file: str) -> tuple[Store, str]:
        """The server that a file which is not here comes from, and what it is called there."""
        key, _, name = file.partition(":")
        if key in self.others:
            return self.others[key]._owner(name)
        assert self.store is not None
        return self.store, file

    def _now(self) -> dict[str, FileInfo]:
        """The files as they are at this moment."""
        try:
            files = self.store.now() if self.store else scan_folder(self.root)[0]
        except OSError:
            files = {}
        return files | _labelled({key: other._now() for key, other in self.others.items()})

    def close(self) -> None:
        with self._lock:
            self._descriptors.clear()
            self._maps.clear()

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

    A path that exists is local. ``org/name[@revision]``, ``hf://…`` and other URLs are on a server: see
    :func:`ckptkit.remote.open_remote`. Whatever else is named is meant to be local, and so is ``org/name`` where there
    is a folder ``org``: UserError ``source.missing``, without a look at the network. A folder of which a part may not be
    read is refused whole: ``access.denied``.
    """
    if not text:  # an unset variable, which would be the current folder
        raise fail("usage.source", "the source's name is empty", hint="a folder, a .safetensors file or org/name")
    path = Path(os.path.expanduser(text))
    try:
        if not path.exists():
            if not is_remote(text):
                raise fail("source.missing", f"{text} does not exist", file=text, hint=_nearby(path))
            from ..remote import open_remote

            return open_remote(text)
        if not path.is_dir() and path.suffix != ".safetensors":
            hint = "give the folder that holds config.json and the .safetensors files"
            raise fail("source.kind", f"{text} is neither a folder nor a .safetensors file", file=text, hint=hint)
        return Source(text, path, *scan_folder(path))
    except OSError as error:
        raise unreadable(error, "source.read", text) from error


def joined(first: Source, others: Mapping[str, Source]) -> Source:
    """``first`` with the files of ``others`` as ``<key>:<name>`` too: what a plan over several sources is run on."""
    files = first.files | _labelled({key: other.files for key, other in others.items()})
    return Source(first.uri, first.root, files, first.no_files, others, first.store, first.revision)


def _labelled(files: Mapping[str, Mapping[str, FileInfo]]) -> dict[str, FileInfo]:
    return {f"{key}:{name}": info for key, found in files.items() for name, info in found.items()}


def short_name(text: str) -> str:
    """The last part of a source's name; without a revision, if it is on a server."""
    if is_remote(text) and not Path(text).exists():
        return text.partition("@")[0].rstrip("/").rpartition("/")[2].removesuffix(".safetensors")
    return Path(text).resolve().name.removesuffix(".safetensors")


def is_remote(text: str) -> bool:
    """Whether what does not exist here is the name of something on a server, and not a mistyped path."""
    if _URL.match(text):
        return True
    return bool(_REPOSITORY.fullmatch(text)) and not Path(text).parts[0].startswith(".") and not _beside(text)


def _beside(text: str) -> bool:
    return Path(text.partition("@")[0]).parent.is_dir() or text.endswith(".safetensors")


def _nearby(path: Path) -> str | None:
    parent = path.parent
    if not parent.is_dir():
        return f"{parent} does not exist either"
    try:
        names = sorted(entry.name for entry in parent.iterdir() if entry.is_dir())[:5]
    except PermissionError:
        return None
    return f"folders there: {', '.join(names)}" if names else None


def scan_folder(root: Path) -> tuple[dict[str, FileInfo], dict[str, str]]:
    """Every regular file below ``root`` by relative name, and what is none, with the reason; a file is itself.

    Raises OSError where a folder cannot be listed, or a symlink may not be followed.
    """
    if root.is_file():
        return {root.name: file_info(root)}, {}
    files, others = {}, {}
    for folder, subfolders, names in os.walk(root, onerror=_raise, followlinks=False):
        subfolders[:] = sorted(name for name in subfolders if name not in PASSED_OVER)
        links = [name for name in subfolders if os.path.islink(os.path.join(folder, name))]
        for name in sorted([*names, *links]):
            path = Path(folder, name)
            relative = path.relative_to(root).as_posix()
            try:
                if path.is_file():
                    files[relative] = file_info(path)
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


def file_info(path: Path) -> FileInfo:
    """Of a file that is here. Raises OSError."""
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


def is_of_checkpoint(name: str) -> bool:
    """True for a plain name that lies in no folder which is no part of a checkpoint."""
    return is_plain(name) and PASSED_OVER.isdisjoint(name.split("/")[:-1])


def is_plain(name: str) -> bool:
    """True for a relative path without ``..``, empty or ``.`` parts: what an index may name."""
    parts = name.split("/")
    return (
        not PurePosixPath(name).is_absolute()
        and all(part not in {"", ".", ".."} for part in parts)
        and "\0" not in name
    )
