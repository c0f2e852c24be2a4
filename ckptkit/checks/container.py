"""Checks of the safetensors files themselves: headers, the bytes that they promise, alignment."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from ..errors import Finding
from ..files.header import ALIGN, DTYPE_BITS, Header
from . import Level, Page, Probe, Seen, Subject
from .folding import EXAMPLES, fold

_FAULTS = (
    "layout.header",
    "layout.duplicate-key",
    "layout.truncated",
    "layout.trailing",
    "layout.gap",
    "layout.overlap",
)
_ITEM_BYTES = {dtype: bits // 8 for dtype, bits in DTYPE_BITS.items() if bits > 8}


def _files(subject: Subject) -> Seen:
    faults = [finding for finding in subject.found if finding.id in _FAULTS]
    broken = {finding.file for finding in faults}
    return Seen(fold(faults), len(subject.checkpoint.shards.keys() | broken))


def _alignment(subject: Subject) -> Seen:
    shards = subject.checkpoint.shards
    findings = chain.from_iterable(_unaligned(name, header) for name, header in shards.items())
    return Seen(fold(findings), len(shards))


def _unaligned(file: str, header: Header) -> Iterator[Finding]:
    """One finding for a file, or none."""
    wrong = [entry.name for entry in header.entries if entry.start % _ITEM_BYTES.get(entry.dtype, 1)]
    if not wrong and header.data_start % ALIGN == 0:
        return
    hint = "ckptkit reshard SRC OUT --max-shard-size 5GB lays out anew what it splits or joins"
    if wrong:
        message = f"{file}: {wrong[0]} does not start at a multiple of its element size"
        data = {"tensors": len(wrong), "examples": wrong[:EXAMPLES]}
    else:
        message = f"{file}: the header is not padded to {ALIGN} bytes"
        data = {"tensors": 0, "examples": []}
    yield Finding("layout.unaligned", message, file=file, hint=hint, severity="warning", data=data)


PROBES = (Probe(_FAULTS, Level.STATIC, _files), Probe(("layout.unaligned",), Level.STATIC, _alignment))

PAGES = (
    Page(
        "layout.header",
        Level.STATIC,
        "error",
        "A file has no readable safetensors header",
        "A safetensors file begins with the length of its header (8 bytes, little-endian) and the header itself, JSON "
        "that gives each tensor's dtype, shape and place. Here the length is over 100 MB, the text is not JSON, or an "
        "entry contradicts itself: an unknown dtype, a shape that does not take the bytes that data_offsets span. "
        "Every reader refuses the file, with errors such as HeaderTooLarge or InvalidHeaderDeserialization. A Git LFS "
        "pointer and an HTML error page saved under the file's name look like this.",
        '"lm_head.weight": {"dtype": "BF16", "shape": [8, 4], "data_offsets": [0, 32]}   (BF16 [8, 4] takes 64 bytes)',
        "Fetch the file again: hf download ORG/NAME FILE --local-dir DIR --force-download. For LFS pointers: git lfs "
        "pull.",
    ),
    Page(
        "layout.duplicate-key",
        Level.STATIC,
        "error",
        "A header names a tensor twice",
        "JSON readers differ in which of two equal keys they take, so two engines may load different bytes under the "
        "same name. The reference reader keeps one of them, and refuses the file where that leaves bytes that no tensor "
        "claims.",
        '{"norm.weight": {… "data_offsets": [0, 8]}, "norm.weight": {… "data_offsets": [8, 16]}}',
        "Write the file again with the program that made it; which of the two tensors was meant, only it can know.",
    ),
    Page(
        "layout.truncated",
        Level.STATIC,
        "error",
        "A file ends before its header says",
        "The header promises more bytes than the file has: a download or copy that was interrupted, or a full disk. "
        "Readers refuse it (MetadataIncompleteBuffer). The finding names the last tensor that is whole.",
        "model-00003-of-00030.safetensors is 41 bytes short",
        "Fetch the file again: hf download ORG/NAME FILE --local-dir DIR --force-download",
    ),
    Page(
        "layout.trailing",
        Level.STATIC,
        "error",
        "A file goes on after its last tensor",
        "Bytes that no tensor claims follow the data. The reference reader refuses the file, others ignore them. Two "
        "downloads appended to one file look like this.",
        "model.safetensors has 4,096 bytes after its last tensor",
        "Fetch the file again. If the tensors are known to be right, cut the rest off: truncate --size=-4096 FILE, with "
        "the number of bytes that the finding gives.",
    ),
    Page(
        "layout.gap",
        Level.STATIC,
        "error",
        "Tensors leave a hole in the file",
        "Between two tensors, or before the first, lie bytes that belong to none. The reference reader refuses the "
        "file. Usually a header was edited by hand, or tensors were cut out of a file without moving the others.",
        '"a": {… "data_offsets": [0, 64]}, "b": {… "data_offsets": [80, 144]}',
        "Write the file again with a program that lays out tensors without gaps.",
    ),
    Page(
        "layout.overlap",
        Level.STATIC,
        "error",
        "Tensors share bytes of the file",
        "Two tensors claim the same bytes. The reference reader refuses the file; a reader that does not check gives "
        "two tensors of which at least one is wrong.",
        '"a": {… "data_offsets": [0, 64]}, "b": {… "data_offsets": [32, 96]}',
        "Write the file again from its source. Tied tensors are stored once, not as overlapping entries.",
    ),
    Page(
        "layout.unaligned",
        Level.STATIC,
        "warning",
        "Tensors do not start at a multiple of their element size",
        "Readers that map a file and look at it in place need each tensor's first byte at a multiple of its element "
        "size, and the data to begin at a multiple of 8. Others copy first, which costs a second pass over the bytes; "
        "loaders that go straight to the GPU refuse or take a slow path.",
        "norm.weight F32 starts at byte 2,051 of the file",
        "ckptkit reshard SRC OUT --max-shard-size SIZE lays out anew what it splits or joins, every tensor aligned; a file "
        "that stays whole is taken over as it is.",
    ),
)
