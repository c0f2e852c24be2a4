"""Whether bytes are those that a server recorded: the sha256 of a large file, git's own digest of a small one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import fail
from ..files.source import FileInfo


class _Nothing:
    """Takes bytes that nothing is recorded of."""

    def update(self, data: bytes | memoryview, /) -> None: ...


def is_provable(info: FileInfo) -> bool:
    """Whether the server recorded a digest of the content; an object store's ETag is none."""
    return (info.tag or "").startswith(("sha256:", "git:"))


@contextmanager
def proving(info: FileInfo, file: str) -> Iterator[hashlib._Hash | _Nothing]:
    """To be given all bytes of a file in order. Raises UserError (``source.digest``) at the end if they are others."""
    kind, _, expected = (info.tag or "").partition(":")
    digest = hashlib.sha256() if kind == "sha256" else hashlib.sha1(usedforsecurity=False)
    if not is_provable(info):
        yield _Nothing()
        return
    if kind == "git":  # a blob: its size, a NUL, its bytes
        digest.update(b"blob %d\0" % info.size)
    yield digest
    if digest.hexdigest() != expected:
        message = f"{file} is not what the server recorded: its {kind} digest is {digest.hexdigest()}, not {expected}"
        raise fail("source.digest", message, file=file, hint=f"fetch {file} again; it was changed on its way")
