"""``scripts/engines/fatbin.py`` on libraries that are made here."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "engines" / "fatbin.py"
PTX, CUBIN = 1, 2


@pytest.fixture(scope="module")
def fatbin() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fatbin", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entry(kind: int, arch: int, payload: bytes) -> bytes:
    header = struct.pack("<HHIQ", kind, 0x101, 64, len(payload)) + bytes(12) + struct.pack("<I", arch)
    return header.ljust(64, b"\0") + payload


def fat_binary(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(code: bytes) -> bytes:
    """An ELF file with the sections that matter: none, ``.nv_fatbin`` and the names."""
    names = b"\0.nv_fatbin\0.shstrtab\0"
    begin = 64
    table = begin + len(code) + len(names)
    headers = [(0, 0, 0), (1, begin, len(code)), (12, begin + len(code), len(names))]
    elf = bytearray(64)
    elf[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", elf, 0x28, table)
    struct.pack_into("<HHH", elf, 0x3A, 64, len(headers), 2)
    rows = (struct.pack("<IIQQQQ", name, 1, 0, 0, at, size).ljust(64, b"\0") for name, at, size in headers)
    return bytes(elf) + code + names + b"".join(rows)


def test_what_the_gpu_runs_stays_and_nothing_moves(fatbin: ModuleType) -> None:
    """A fat binary with code for it; one with PTX of three ages; padding between; another one behind."""
    first = fat_binary(entry(CUBIN, 80, b"a" * 24), entry(CUBIN, 90, b"b" * 32), entry(PTX, 90, b"c" * 8))
    second = fat_binary(
        entry(CUBIN, 80, b"d" * 16), entry(PTX, 75, b"e" * 8), entry(PTX, 80, b"f" * 8), entry(PTX, 100, b"g" * 8)
    )
    before = library(first + bytes(16) + second)
    after = bytearray(before)
    assert fatbin.empty(after, 90) == 24 + 8 + 16 + 8 + 8
    gone = {letter for letter in b"abcdefg" if bytes([letter]) * 8 in before and bytes([letter]) * 8 not in after}
    assert gone == set(b"acdeg")
    changed = [at for at in range(len(before)) if before[at] != after[at]]
    assert all(after[at] == 0 and before[at] in b"acdeg" for at in changed)


def test_a_library_without_gpu_code_is_told(fatbin: ModuleType) -> None:
    with pytest.raises(SystemExit):
        fatbin.empty(bytearray(library(b"").replace(b".nv_fatbin", b".nv_elsewh")), 90)
