"""One file made of another: its pieces written beside it, flushed, checked, and published whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

from ..errors import Finding, fail, unreadable
from ..pieces import Copied, Made, Piece, Taken
from .files import PIECE, output_faults, sync_folder, write_at
from .options import Progress
from .staging import PARTIAL, beside
from .work import stopping


def mapped(path: Path) -> memoryview:
    """The bytes of a file, read as they are looked at. Raises UserError: ``source.*``, ``layout.truncated``."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise fail("layout.truncated", f"{path} is empty", file=str(path), hint=f"fetch {path} again")
            return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    except FileNotFoundError:
        raise fail("source.missing", f"{path} does not exist", file=str(path)) from None
    except OSError as error:
        raise unreadable(error, "source.read", str(path)) from error


def blocked(source: Path, out: Path, size: int, overwrite: bool) -> list[Finding]:
    """All that keeps a file of ``size`` bytes from being made at ``out``: ``output.*``."""
    name, found = str(out), []
    folder = out.resolve().parent
    if out.exists() and out.resolve() == source.resolve():
        message = f"{out} is the source, which is never written"
        return [Finding("output.same", message, file=name, hint="name an output beside the source")]
    if out.is_dir():
        found.append(Finding("output.exists", f"{out} is a folder", file=name, hint="name a file"))
    elif os.path.lexists(out) and not overwrite:
        hint = "--overwrite replaces it, once the new one is whole"
        found.append(Finding("output.exists", f"{out} exists", file=name, hint=hint))
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        what = "is not writable" if folder.is_dir() else "is no folder"
        message = f"{out} cannot be made: {folder} {what}"
        return [*found, Finding("output.write", message, file=name, hint="name an output where you may write")]
    free = os.statvfs(folder)
    if free.f_bavail * free.f_frsize < size:
        message = f"{out} needs {size:,} bytes, and {free.f_bavail * free.f_frsize:,} are free there"
        found.append(Finding("output.space", message, file=name, hint="free the rest, or name another output"))
    return found


def make_file(
    pieces: tuple[Piece, ...],
    source: memoryview,
    out: Path,
    overwrite: bool,
    progress: Progress,
    check: Callable[[Path, str], None],
) -> str:
    """Make ``out`` of ``pieces`` of ``source``, and give the xxh3-128 (hex) of its bytes.

    ``check`` looks at the file before it is published, given its digest, and raises UserError against it. Raises
    UserError ``output.*``, and Interrupted; ``out`` is then what it was. A run that is killed leaves ``OUT.partial``,
    which the next one begins anew.
    """
    with output_faults(out, "the same command"):
        out = out.resolve()
        with _staged(out) as (path, descriptor), stopping() as stop:
            progress.start(1, sum(piece.nbytes for piece in pieces))
            digest, at = xxhash.xxh3_128(), 0
            for part in _parts(pieces, source):
                stop()
                write_at(descriptor, part, at)
                digest.update(part)
                at += len(part)
                progress.advance(len(part))
            os.fsync(descriptor)
            check(path, digest.hexdigest())
            stop()
            _publish(path, out, overwrite)
        progress.done()
    return digest.hexdigest()


def digest_of(source: memoryview) -> str:
    """The xxh3-128 (hex) of a whole file."""
    digest = xxhash.xxh3_128()
    for start in range(0, len(source), PIECE):
        digest.update(source[start : start + PIECE])
    return digest.hexdigest()


def _parts(pieces: tuple[Piece, ...], source: memoryview) -> Iterator[memoryview]:
    """The bytes of the pieces, about a MiB at a time."""
    for piece in pieces:
        match piece:
            case Made(content):
                yield memoryview(content)
            case Copied(start, stop):
                for at in range(start, stop, PIECE):
                    yield source[at : min(at + PIECE, stop)]
            case Taken():
                yield from _rows(piece, source)


def _rows(piece: Taken, source: memoryview) -> Iterator[memoryview]:
    import numpy as np

    if not piece.nbytes:
        return
    reach = (int(piece.rows.max()) + 1) * piece.width
    table = np.frombuffer(source, np.uint8, reach, piece.start).reshape(-1, piece.width)
    at_once = max(1, PIECE // piece.width)
    for start in range(0, len(piece.rows), at_once):
        yield table.take(piece.rows[start : start + at_once], axis=0).reshape(-1).data


# --- publishing --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _staged(out: Path) -> Iterator[tuple[Path, int]]:
    """An empty file beside ``out`` that is this process's alone; gone at the end unless it was published."""
    path = beside(out, PARTIAL)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = _is_at(descriptor, path)
        except BlockingIOError:
            is_ours = False
        if not is_ours:
            hint = "let it end, stop it, or name another output"
            raise fail("output.locked", f"{out} is being made by another process", file=str(out), hint=hint)
        try:
            os.ftruncate(descriptor, 0)
            yield path, descriptor
        finally:
            if _is_at(descriptor, path):
                path.unlink()
    finally:
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    return path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())


def _publish(path: Path, out: Path, overwrite: bool) -> None:
    """Give the file its name. A file that has come to have it since is replaced only if that was asked for."""
    if overwrite:
        os.replace(path, out)
    else:
        try:
            os.link(path, out)
            path.unlink()
        except OSError as error:
            if error.errno not in {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP}:
                raise
            if os.path.lexists(out):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(out)) from None
            os.rename(path, out)
    sync_folder(out.parent)
