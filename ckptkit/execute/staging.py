"""The staging folder: where a result is made, and which process may work there.

It lies beside OUT as ``OUT.partial`` and is renamed to OUT. Where OUT cannot be replaced by a rename (a mount point,
the current folder, a parent that is not writable) it lies in OUT, and its entries are renamed into OUT one by one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..errors import Finding, UserError

JOURNAL = ".ckptkit.journal"
LOCK = ".ckptkit.lock"
PARTIAL = ".partial"
INSIDE = ".ckptkit-"
PROBE = f"{INSIDE}probe"
NAME_MAX = 255  # bytes that a file name may have, on every filesystem that is in common use


class Place(NamedTuple):
    """OUT and its staging folder, symlinks resolved; ``inside`` if the one lies in the other."""

    out: Path
    folder: Path
    inside: bool

    def aside(self, owner: int) -> Path:
        """Where process ``owner`` keeps the OUT that it overwrites."""
        name = f"replaced-{owner}"
        return self.out / (INSIDE + name) if self.inside else beside(self.out, f".{name}")


def beside(path: Path, suffix: str) -> Path:
    """``path`` with ``suffix`` behind its name; a name that is too long for that gives way to its digest."""
    name = path.name + suffix
    if len(os.fsencode(name)) > NAME_MAX:
        name = hashlib.sha256(os.fsencode(path.name)).hexdigest() + suffix
    return path.with_name(name)


def locate(out: Path) -> Place:
    out = out.resolve()
    within = out / f"{INSIDE}partial"
    if out.is_dir() and (within.is_dir() or out == Path.cwd() or _is_mount(out) or not writable(out.parent)):
        return Place(out, within, inside=True)
    return Place(out, beside(out, PARTIAL), inside=False)


def _is_mount(path: Path) -> bool:
    return os.path.ismount(path) or os.fsencode(path) in _mount_points()


def _mount_points() -> set[bytes]:
    """From Linux's mount table: a folder bound from its own filesystem has no device number of its own."""
    with contextlib.suppress(FileNotFoundError), open("/proc/self/mountinfo", "rb") as table:
        return {line.split()[4].decode("unicode_escape").encode("latin-1") for line in table}
    return set()


def writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)


def entries(folder: Path) -> list[str]:
    """What stands in a folder, by name, without the executor's own and a filesystem's ``lost+found``."""
    return sorted(name for name in os.listdir(folder) if not name.startswith(INSIDE) and name != "lost+found")


@contextlib.contextmanager
def locked(place: Place, command: str) -> Iterator[None]:
    """Hold the staging folder, made if need be. Raises UserError (``output.locked``) while another process does.

    A folder in which nothing was begun is removed again.
    """
    place.folder.mkdir(parents=True, exist_ok=True)
    path = place.folder / LOCK
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if not _flock(descriptor, fcntl.LOCK_EX) or not _is_at(descriptor, path):
            raise UserError(held(place))
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()} ({command})".encode())
        try:
            yield
        finally:
            if _is_at(descriptor, path) and os.listdir(place.folder) == [LOCK]:
                path.unlink()
                place.folder.rmdir()
    finally:
        os.close(descriptor)


def is_held(place: Place) -> bool:
    """True while another process holds the staging folder. Changes nothing."""
    try:
        descriptor = os.open(place.folder / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _flock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def held(place: Place) -> Finding:
    owner = "another process"
    with contextlib.suppress(OSError):
        owner = (place.folder / LOCK).read_text("utf-8", "replace") or owner
    message = f"{place.out} is being made by {owner}"
    return Finding("output.locked", message, file=str(place.out), hint="let it end, stop it, or name another output")


def _flock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """False once the lock file was published away by the process that held it."""
    return path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())
