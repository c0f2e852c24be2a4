"""A checkpoint whose index is wrong, put together from its headers: what ``reshard`` and its plans start from.

The headers say which tensors there are; an index only says where to look. A shard that the index does not name is
known by its number: beside ``model-00001-of-00002.safetensors``, ``model-00002-of-00002.safetensors`` belongs to the
checkpoint, and ``consolidated.safetensors`` does not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from ..errors import Finding, UserError
from ..plan import Ref
from .checkpoint import Checkpoint, scan
from .header import Header, read_header
from .numbering import is_whole, numbered
from .source import Source

# An index that cannot be used at all.
_UNUSABLE = frozenset({"index.missing", "index.parse", "index.path", "index.ambiguous"})


def open_mended(source: Source) -> Checkpoint:
    """The checkpoint that the headers show; what its index has wrong is in ``warnings``.

    Raises UserError with every fault that an index written anew does not repair: ``layout.*``, ``config.*``, a shard
    that is missing with its tensors, ``index.duplicate`` where the index does not say which of two is meant.
    """
    checkpoint, findings = scan(source)
    index, added = checkpoint.index, _unnamed_shards(checkpoint)
    headers = dict(checkpoint.shards)
    for name in added:
        try:
            headers[name] = _header(source, name)
        except UserError as error:
            findings += error.findings
    shards = dict(sorted(headers.items()))
    weight_map = index.weight_map if index else {}
    tensors, unclear = _tensors(shards, weight_map)
    stray = tuple(name for name in checkpoint.stray if name not in added)
    findings = [finding for finding in findings if finding.id != "index.stray-shard" or finding.file in stray]
    findings += _taken_in(added) if index else []
    broken = [item for item in findings if item.severity == "error" and not _mended(item, weight_map, tensors, stray)]
    if broken or unclear:
        raise UserError([*map(_hinted, broken), *unclear])
    return replace(
        checkpoint,
        shards=shards,
        tensors=tensors,
        index=index and index._replace(weight_map={name: ref.file for name, ref in tensors.items()}),
        stray=stray,
        warnings=tuple(map(_told, findings)),
    )


def _told(finding: Finding) -> Finding:
    """A fault of the index needs no hint here, where it is written anew."""
    return replace(finding.as_warning(), hint=None if finding.id.startswith("index.") else finding.hint)


def _header(source: Source, name: str) -> Header:
    return read_header(lambda start, stop: source.read(name, start, stop), source.files[name].size, name)


def _unnamed_shards(checkpoint: Checkpoint) -> list[str]:
    """Files beside the shards that belong to the checkpoint, told by their numbers."""
    if checkpoint.index is not None:
        named = [part.set for part in map(numbered, set(checkpoint.index.weight_map.values())) if part]
        return [name for name in checkpoint.stray if (part := numbered(name)) and part.set in named]
    top = [name for name in checkpoint.stray if "/" not in name and numbered(name)]
    return top if not checkpoint.shards and is_whole(top) else []


def _tensors(shards: Mapping[str, Header], weight_map: Mapping[str, str]) -> tuple[dict[str, Ref], list[Finding]]:
    """Every tensor by name; of two with one name the one in the file that the index names."""
    tensors: dict[str, Ref] = {}
    twice: dict[str, list[str]] = {}
    for shard, header in shards.items():
        for entry in header.entries:
            if entry.name in tensors:
                twice.setdefault(entry.name, [tensors[entry.name].file]).append(shard)
            if entry.name not in tensors or weight_map.get(entry.name) == shard:
                tensors[entry.name] = Ref(shard, *entry)
    return tensors, [_unclear(name, files) for name, files in twice.items() if weight_map.get(name) not in files]


def _unclear(name: str, files: Sequence[str]) -> Finding:
    message = f"{name} lies in {' and in '.join(files)}, and no index says which is meant"
    hint = f'write "{name}": "{files[0]}" into the weight_map of the index, or another of these files'
    return Finding("index.duplicate", message, file=files[0], tensor=name, hint=hint)


def _mended(
    finding: Finding, weight_map: Mapping[str, str], tensors: Mapping[str, Ref], stray: Collection[str]
) -> bool:
    """If an index written anew is all that the fault needs."""
    if finding.id == "index.missing-shard":
        return all(name in tensors for name, shard in weight_map.items() if shard == finding.file)
    if finding.id in _UNUSABLE:
        return bool(tensors) and not any(map(numbered, stray))
    return finding.id in {"index.missing-tensor", "index.extra-tensor", "index.duplicate"}


def _taken_in(added: Sequence[str]) -> Iterator[Finding]:
    for name in added:
        message = f"{name} is not named by the index; by its number it is a shard, so it is taken in"
        yield Finding("index.stray-shard", message, file=name, severity="warning")


def _hinted(finding: Finding) -> Finding:
    if finding.id in _UNUSABLE:
        hint = "an index is written anew where the shards are named …-00001-of-0000N.safetensors and all N are there"
        return replace(finding, hint=hint)
    return finding
