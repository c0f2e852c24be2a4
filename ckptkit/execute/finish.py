"""What follows the shards: the files beside them, a check of what was written, digests of whole files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import xxhash

from ..errors import Finding, UserError
from ..files.header import Header, compare, read_header
from ..manifest import FileRecord, ShardRecord
from ..plan import Plan, Shard, Sidecar
from ..remote.proof import proving
from .files import appearing, created, write_at
from .shards import OWN_BYTES, planned_entries
from .work import Work


def write_sidecars(plan: Plan, folder: Path, work: Work) -> dict[str, FileRecord]:
    """Write the files beside the shards, with the permission bits of the source's file of that name."""
    return {item.name: _write_sidecar(item, folder / item.name, work) for item in plan.sidecars}


def _write_sidecar(item: Sidecar, path: Path, work: Work) -> FileRecord:
    info = work.source.files.get(item.name)
    proof = proving(info, item.name) if info and item.text is None else nullcontext()
    digest, size = xxhash.xxh3_128(), 0
    with appearing(path) as temporary, created(temporary, info.mode if info else None) as descriptor, proof as whole:
        for piece in _content(item, work):
            work.check()
            write_at(descriptor, memoryview(piece), size)
            digest.update(piece)
            if whole is not None:
                whole.update(piece)
            size += len(piece)
    return FileRecord(size=size, xxh3=digest.hexdigest())


def _content(item: Sidecar, work: Work) -> Iterator[bytes]:
    if item.text is not None:
        yield item.text.encode()
        return
    size, step = work.source.files[item.name].size, work.options.chunk_bytes
    for start in range(0, size, step):
        yield work.source.read(item.name, start, min(start + step, size))


def check_written(plan: Plan, folder: Path, records: Mapping[str, ShardRecord]) -> Iterator[Finding]:
    """Findings (``output.layout``) where a shard on disk is not the planned one, or another reader refuses it."""
    for shard in plan.shards:
        if records[shard.name]["link"] in OWN_BYTES:
            yield from _check_shard(shard, folder / shard.name)


def _check_shard(shard: Shard, path: Path) -> list[Finding]:
    size = path.stat().st_size
    with open(path, "rb") as file:
        try:
            header = read_header(lambda start, stop: os.pread(file.fileno(), stop - start, start), size, shard.name)
        except UserError as error:
            return [Finding("output.layout", str(error), file=shard.name)]
    return compare(header, _planned(shard, size), shard.name) or _read_elsewhere(shard, path)


def _planned(shard: Shard, size: int) -> Header:
    if not shard.linked:
        return shard.layout[1]
    entries = tuple(planned_entries(shard))
    metadata = None if shard.metadata is None else dict(shard.metadata)
    return Header(entries, metadata, entries[0].start if entries else size, size)


def _read_elsewhere(shard: Shard, path: Path) -> list[Finding]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            found = set(file.keys())
    except SafetensorError as error:
        return [Finding("output.layout", f"{shard.name}: safetensors refuses it: {error}", file=shard.name)]
    differing = found ^ {spec.name for step in shard.steps for spec in step.outputs}
    message = "safetensors does not find it as planned"
    return [
        Finding("output.layout", f"{shard.name}: {name}: {message}", shard.name, name) for name in sorted(differing)
    ]


def sha256_sums(folder: Path, names: Iterable[str], work: Work) -> dict[str, str]:
    """The sha256 (hex) of whole files, each read once more."""
    ordered = sorted(names)
    return dict(zip(ordered, work.in_order(partial(_sha256, folder / name, work) for name in ordered), strict=True))


def _sha256(path: Path, work: Work) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(work.options.chunk_bytes):
            work.check()
            digest.update(piece)
    return digest.hexdigest()
