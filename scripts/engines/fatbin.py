"""Empty the GPU code of a shared library that one kind of GPU does not run:   fatbin.py LIBRARY SM

Only payloads are overwritten, with zeros, so that offsets and the choice of the driver stay as they are, and any
compression removes them. Of each fat binary stays the code of exactly ``SM`` (90 for an H200), or where there is none
the newest PTX that the driver can compile for it.

The container, as ``cuobjdump`` reads it: a header (magic, version, its size, size of what follows), then entries, each a
header (kind, its size, size of the payload, at byte 28 the architecture) and a payload.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAGIC = 0xBA55ED50
PTX, CUBIN = 1, 2


class Entry(NamedTuple):
    """Code for one architecture; ``start`` and ``stop`` are where its payload lies in the file."""

    kind: int
    arch: int
    start: int
    stop: int


def section(data: bytes, name: bytes) -> tuple[int, int]:
    """Start and end of a section of a 64-bit little-endian ELF file."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + at * size) for at in range(count)]
    names = headers[names_at][4]
    for title, _, _, _, offset, length in headers:
        end = data.index(b"\0", names + title)
        if data[names + title : end] == name:
            return offset, offset + length
    raise SystemExit(f"no section {name.decode()}")


def fat_binaries(data: bytes, start: int, stop: int) -> Iterator[list[Entry]]:
    """The entries of each fat binary of a section; they lie at multiples of eight bytes."""
    at = start
    while at + 16 <= stop:
        magic, _, header, length = struct.unpack_from("<IHHQ", data, at)
        if magic != MAGIC:
            at += 8
            continue
        end = at + header + length
        yield list(_entries(data, at + header, end))
        at = end + -end % 8


def _entries(data: bytes, at: int, end: int) -> Iterator[Entry]:
    while at < end:
        kind, _, header, length = struct.unpack_from("<HHIQ", data, at)
        (arch,) = struct.unpack_from("<I", data, at + 28)
        yield Entry(kind, arch, at + header, at + header + length)
        at += header + length


def unused(entries: list[Entry], sm: int) -> list[Entry]:
    """Those that a GPU of ``sm`` does not run."""
    used = [entry for entry in entries if entry.kind == CUBIN and entry.arch == sm]
    if not used:
        compiled = [entry for entry in entries if entry.kind == PTX and entry.arch <= sm]
        newest = max((entry.arch for entry in compiled), default=None)
        used = [entry for entry in compiled if entry.arch == newest]
    return [entry for entry in entries if entry not in used]


def empty(data: bytearray, sm: int) -> int:
    """Overwrite what is unused; the number of bytes that that was."""
    gone = 0
    for entries in fat_binaries(data, *section(data, b".nv_fatbin")):
        for entry in unused(entries, sm):
            data[entry.start : entry.stop] = bytes(entry.stop - entry.start)
            gone += entry.stop - entry.start
    return gone


def main(library: str, sm: str) -> None:
    path = Path(library)
    data = bytearray(path.read_bytes())
    gone = empty(data, int(sm))
    path.write_bytes(data)
    print(f"{path.name}: {gone / 1e6:.1f} of {len(data) / 1e6:.1f} MB emptied")


if __name__ == "__main__":
    main(*sys.argv[1:])
