"""Making a file that is another file: a shared extent, another name, a pointer."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from collections.abc import Callable
from pathlib import Path

from .staging import PROBE

_FICLONE = 0x40049409  # linux/fs.h: make a file share all extents of another

# A filesystem's, or the kernel's, way of saying that these two files cannot be linked like this.
_NOT_HERE = {
    errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY, errno.ENOSYS,
}  # fmt: skip


def link(source: Path, target: Path, mode: str) -> str | None:
    """Make ``target`` the file ``source`` (resolved) without copying bytes.

    Gives the mode that worked: ``reflink``, ``hard`` or ``symlink``; None where ``source`` has to be copied.
    """
    if mode == "copy":
        return None
    kind = "reflink" if mode == "auto" else mode
    ways: dict[str, Callable[[Path, Path], None]] = {"reflink": _reflink, "hard": os.link, "symlink": os.symlink}
    try:
        ways[kind](source, target)
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise
        return None
    return kind


def links_without_bytes(source: Path, folder: Path, mode: str) -> bool:
    """If ``link`` works from ``source`` into ``folder``: tried, and undone.

    A hard link needs more than one filesystem: not two mounts of it, and the right to link another's file.
    """
    if mode in {"auto", "reflink"}:
        return _can_reflink(source, folder)
    probe = folder / PROBE
    try:
        probe.unlink(missing_ok=True)  # left by a run that was killed
        made = link(source, probe, mode)
        probe.unlink(missing_ok=True)
    except FileExistsError:  # another run tries just now, with success
        return True
    except OSError:
        return False
    return made is not None


def _reflink(source: Path, target: Path) -> None:
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        _clone(source, descriptor)
        os.fchmod(descriptor, source.stat().st_mode & 0o777)
        os.fsync(descriptor)
    except OSError:
        os.unlink(target)
        raise
    finally:
        os.close(descriptor)


def _can_reflink(source: Path, folder: Path) -> bool:
    """Tried on a file without a name, which leaves no trace."""
    if sys.platform != "linux":
        return False
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o600)
    except OSError:
        return False
    try:
        _clone(source, descriptor)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _clone(source: Path, descriptor: int) -> None:
    if sys.platform != "linux":
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    with open(source, "rb") as file:
        fcntl.ioctl(descriptor, _FICLONE, file.fileno())
