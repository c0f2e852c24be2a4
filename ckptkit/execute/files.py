"""Files that appear whole and on disk, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import fail
from .staging import PARTIAL, beside

# Bytes for one call: larger writes into a hole were measured to take up to ten times the time (ext4, Linux 6.18).
PIECE = 1 << 20

# What filesystems without synchronised folders answer; there is nothing more that could be done there.
_NOT_SYNCHRONISED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EBADF}

_FULL = {errno.ENOSPC, errno.EDQUOT}
_HINTS = {
    errno.EACCES: "name an output where you may write",
    errno.EROFS: "name an output where you may write",
    errno.ENAMETOOLONG: "give the output a shorter name",
}


@contextlib.contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """A free name beside ``path`` to make a file at; it becomes ``path`` if the body ends well, else it is removed.

    What an earlier run left at either name goes first: a rename onto another link to the same file does nothing.
    """
    temporary = beside(path, PARTIAL)
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in (temporary, path):
        leftover.unlink(missing_ok=True)
    try:
        yield temporary
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def created(path: Path, mode: int | None) -> Iterator[int]:
    """A descriptor for a new file, flushed to disk at the end; ``mode`` None leaves the bits to the umask."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        yield descriptor
        if mode is not None:
            # Filesystems without permission bits refuse to set them.
            with contextlib.suppress(PermissionError):
                os.fchmod(descriptor, mode)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_at(descriptor: int, view: memoryview, offset: int) -> None:
    """Write all of ``view`` (bytes) at ``offset``."""
    while view:
        count = os.pwrite(descriptor, view[:PIECE], offset)
        view, offset = view[count:], offset + count


def write_file(path: Path, content: bytes, mode: int | None = None) -> None:
    with appearing(path) as temporary, created(temporary, mode) as descriptor:
        write_at(descriptor, memoryview(content), 0)


@contextlib.contextmanager
def output_faults(out: Path, resume_command: str = "") -> Iterator[None]:
    """Turn an OSError of the body into a UserError: ``output.space``, ``output.exists`` or ``output.write``."""
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOTEMPTY, errno.EEXIST}:
            message = f"{out} was made by another while this run went on"
            raise fail("output.exists", message, file=str(out), hint="move it away, then --resume") from error
        message = f"{error.filename or out}: {error.strerror or error}"
        if error.errno in _FULL:
            hint = f"make room, then: {resume_command or 'the same command with --resume'}"
            raise fail("output.space", message, file=str(out), hint=hint) from error
        raise fail("output.write", message, file=str(out), hint=_HINTS.get(error.errno or 0)) from error


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_SYNCHRONISED:
            raise
    finally:
        os.close(descriptor)
