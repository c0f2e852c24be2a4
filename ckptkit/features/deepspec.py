"""Samples in a DeepSpec target cache, version 2: a manifest, an index of fixed records, shards of raw bytes.

A record says where in a shard the five tensors of a sample begin: token ids (int32), attention mask, loss mask (uint8),
tapped and last states (bfloat16, rows of tokens).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from ..errors import Finding, fail
from ..files.checkpoint import parse_json
from ..files.source import Source, is_plain
from .draft import Draft
from .sample import DEEPSPEC, IDS, MASK, Sample, Stored

MANIFEST, INDEX = "manifest.json", "samples.idx"
RECORD = struct.Struct("<QIIQQQQQ")  # sample, shard, tokens, and five offsets
_RECORDS = 4096  # that are read together
_FORMAT = {
    "version": 2,
    "hidden_dtype": "bfloat16",
    "token_dtype": "int32",
    "mask_dtype": "uint8",
    "index_record_size": RECORD.size,
}


class Store(NamedTuple):
    """A cache whose manifest can be read."""

    hidden: int
    layers: tuple[int, ...]
    samples: int
    shards: tuple[str, ...]


def read_manifest(source: Source, draft: Draft) -> tuple[Store | None, list[Finding]]:
    """The cache, None where its manifest does not describe one, and what is wrong with it.

    Raises UserError (``features.manifest``) where the manifest is no JSON object.
    """
    content = parse_json(source.text(MANIFEST), MANIFEST, "features.manifest")
    if not isinstance(content, dict):
        raise fail("features.manifest", f"{MANIFEST} is no JSON object", file=MANIFEST)
    store = _store(content)
    if store is None:
        return None, [_manifest("lacks hidden_size, target_layer_ids, num_samples or shards, or gives them wrongly")]
    return store, [*_misfits(content, store, draft), *_missing(content, store, source)]


def _store(content: Mapping[str, Any]) -> Store | None:
    match content:
        case {
            "hidden_size": int(hidden),
            "target_layer_ids": [*layers],
            "num_samples": int(samples),
            "shards": [*shards],
        }:
            named = [shard.get("file_name") for shard in shards if isinstance(shard, dict)]
            names = tuple(name for name in named if isinstance(name, str) and is_plain(name))
            if (
                len(names) == len(shards)
                and hidden > 0
                and samples >= 0
                and layers
                and all(type(layer) is int for layer in layers)
            ):
                return Store(hidden, tuple(layers), samples, names)
    return None


def _misfits(content: Mapping[str, Any], store: Store, draft: Draft) -> Iterator[Finding]:
    for key, expected in _FORMAT.items():
        if content.get(key) != expected:
            yield _manifest(f"gives {content.get(key)!r} as {key}, and {expected!r} is read")
    if list(store.layers) != sorted(set(store.layers)):
        yield _manifest(f"names the tapped layers {list(store.layers)}, which do not rise")
    if draft.layers is not None and store.layers != draft.layers:
        yield _manifest(f"names the tapped layers {list(store.layers)}, the draft's config {list(draft.layers)}")
    if store.hidden != draft.hidden:
        yield _manifest(f"gives {store.hidden} as hidden_size, the draft's config {draft.hidden}")
    numbers = [shard.get("shard_id") for shard in content["shards"]]
    if content.get("num_shards") != len(numbers) or numbers != [*range(len(numbers))]:
        yield _manifest(f"lists {len(numbers)} shards, numbered {numbers[:5]}, and says {content.get('num_shards')!r}")


def _missing(content: Mapping[str, Any], store: Store, source: Source) -> Iterator[Finding]:
    for name in (INDEX, *store.shards):
        if name not in source.files:
            yield Finding("features.truncated", f"{MANIFEST} needs {name}, and there is no such file", file=name)
    size = source.files[INDEX].size if INDEX in source.files else None
    if size is not None and size != store.samples * RECORD.size:
        message = f"{INDEX} holds {size:,} bytes, which are not {store.samples:,} records of {RECORD.size}"
        yield Finding("features.truncated", message, file=INDEX)


def samples(source: Source, store: Store) -> Iterator[Sample | Finding]:
    """Every sample in the order of the index, or what is wrong with its record."""
    count = min(store.samples, source.files[INDEX].size // RECORD.size) if INDEX in source.files else 0
    behind: dict[str, int] = {}  # the last sample of each shard: they lie one after the other
    for first in range(0, count, _RECORDS):
        last = min(first + _RECORDS, count)
        block = source.read(INDEX, first * RECORD.size, last * RECORD.size)
        for number, (sample, shard, tokens, *offsets) in enumerate(RECORD.iter_unpack(block), first):
            if sample != number or not tokens or shard >= len(store.shards):
                yield _index(number, f"says sample {sample}, shard {shard}, {tokens:,} tokens")
            else:
                yield _sample(source, store, number, store.shards[shard], tokens, offsets, behind)


def _sample(
    source: Source, store: Store, number: int, file: str, tokens: int, offsets: Sequence[int], behind: dict[str, int]
) -> Sample | Finding:
    tensors = _tensors(partial(source.read_into, file), store, tokens, offsets)
    laid = sorted((stored.start, stored.start + stored.extent) for stored in tensors.values())
    end = max(stop for _, stop in laid)
    if file not in source.files or end > source.files[file].size:
        message = f"sample {number} lies behind the end of {file}"
        return Finding("features.truncated", message, file=file, tensor=f"sample {number}")
    before = (0, behind.get(file, 0))
    behind[file] = max(end, before[1])
    if any(stop > start for (_, stop), (start, _) in pairwise([before, *laid])):
        return _index(number, f"has tensors lie where others do in {file}")
    return Sample(file, tensors, {}, DEEPSPEC, part=f"sample {number}", whole_mask=True)


def _tensors(
    read_into: Callable[[int, memoryview], None], store: Store, tokens: int, offsets: Sequence[int]
) -> dict[str, Stored]:
    import torch

    specs = (
        (IDS, torch.int32, (tokens,)),
        ("attention_mask", torch.uint8, (tokens,)),
        (MASK, torch.uint8, (tokens,)),
        (DEEPSPEC.taps, torch.bfloat16, (tokens, len(store.layers) * store.hidden)),
        (DEEPSPEC.last, torch.bfloat16, (tokens, store.hidden)),
    )
    return {
        key: Stored(dtype, shape, (*shape[1:], 1), start, read_into)
        for (key, dtype, shape), start in zip(specs, offsets, strict=True)
    }


def _index(number: int, what: str) -> Finding:
    return Finding("features.index", f"{INDEX}: record {number} {what}", file=INDEX, tensor=f"sample {number}")


def _manifest(what: str) -> Finding:
    return Finding("features.manifest", f"{MANIFEST} {what}", file=MANIFEST)
