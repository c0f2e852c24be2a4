"""One source as a checkpoint: which shards it has, which tensors lie in them, what its index and config say.

Reads headers and small JSON files only. :func:`scan` collects every fault it sees; :func:`open_checkpoint` raises
them all at once. A tensor's :class:`~ckptkit.plan.Ref` gives its file and its bytes there.
"""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ..errors import ACCESS, Finding, UserError, fail
from ..plan import Ref
from .foreign import LOOKED_AT, foreign
from .header import Header, check_characters, read_header
from .numbering import is_whole, numbered
from .source import Source, is_plain
from .source import joined as joined_source

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
INDEX_SUFFIX = ".safetensors.index.json"
SUFFIX = ".safetensors"
VOCAB_ORDER = "vocab_order.safetensors"  # beside a checkpoint whose head has an order of its own: no shard of it
_HALF = r"\\ud[89a-f]"  # half of a surrogate pair, as grep finds it


class Index(NamedTuple):
    """A parsed index file: its name, its ``metadata`` as it stands, and tensor name -> shard."""

    file: str
    metadata: Mapping[str, Any]
    weight_map: Mapping[str, str]


@dataclass(frozen=True)
class Checkpoint:
    """Headers, index and config of one source. ``stray`` are safetensors files that no index entry names.

    ``others`` are further checkpoints that a plan reads: see :func:`joined`.
    """

    source: Source
    shards: Mapping[str, Header]
    tensors: Mapping[str, Ref]
    index: Index | None
    config: Mapping[str, Any] | None
    stray: tuple[str, ...] = ()
    warnings: tuple[Finding, ...] = field(default=())
    others: Mapping[str, Checkpoint] = field(default_factory=dict)

    def shard_tensors(self, shard: str) -> list[Ref]:
        """The tensors of one shard in the order they lie in it."""
        return [self.tensors[entry.name] for entry in self.shards[shard].entries]


def open_checkpoint(source: Source) -> Checkpoint:
    """The checkpoint, or UserError with every fault that headers, index and config show."""
    checkpoint, findings = scan(source)
    if any(finding.severity == "error" for finding in findings):
        raise UserError(finding for finding in findings if finding.severity == "error")
    return checkpoint


def joined(first: Checkpoint, others: Mapping[str, Checkpoint]) -> Checkpoint:
    """``first``, with ``others`` beside it, whose files are called ``<key>:<name>`` there and in their tensors' refs.

    All share one source that has the files of all, so that a plan on ``first`` can read the others' tensors.
    """
    source = joined_source(first.source, {key: other.source for key, other in others.items()})
    return replace(first, source=source, others={key: _labelled(o, key, source) for key, o in others.items()})


def _labelled(checkpoint: Checkpoint, key: str, source: Source) -> Checkpoint:
    shards = {f"{key}:{name}": header for name, header in checkpoint.shards.items()}
    tensors = {name: ref._replace(file=f"{key}:{ref.file}") for name, ref in checkpoint.tensors.items()}
    return replace(checkpoint, source=source, shards=shards, tensors=tensors)


def scan(source: Source) -> tuple[Checkpoint, list[Finding]]:
    """What can be read of the checkpoint, and every fault seen on the way (``index.*``, ``layout.*``, ``config.*``)."""
    findings: list[Finding] = []
    index = _collect(findings, lambda: _read_index(source))
    names = _shard_names(source, index, findings)
    source.read_headers(names)
    shards = {}
    for name in names:
        header = _collect(findings, lambda name=name: _read_shard(source, name))
        if header is not None:
            shards[name] = header
    tensors = _tensors(shards, index, source, findings)
    config = _collect(findings, lambda: read_config(source))
    stray = tuple(sorted(name for name in source.files if _is_shard(name) and name not in names))
    findings += _stray_findings(stray, index, source) if index or names else []
    warnings = tuple(finding for finding in findings if finding.severity == "warning")
    return Checkpoint(source, shards, tensors, index, config, stray, warnings), findings


def parse_json(text: str, file: str, id: str) -> Any:
    """``text`` as JSON; a key that stands twice in one object is an error too. Raises UserError ``id``."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(items)
        if len(table) != len(items):
            keys = [key for key, _ in items]
            twice = next(key for key in keys if keys.count(key) > 1)
            hint = f"remove one of them: {shlex.join(['grep', '-n', json.dumps(twice, ensure_ascii=False), file])}"
            raise fail(id, f"{file}: {twice!r} stands twice in one object", file=file, hint=hint)
        return table

    try:
        table = json.loads(text, object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        other = foreign(text[:LOOKED_AT].encode(), file)
        message = f"{file} is {other.what}" if other else f"{file} is not JSON: {what}"
        raise fail(id, message, file=file, hint=other and other.hint) from None
    try:
        check_characters(table, text)
    except (ValueError, RecursionError) as error:
        hint = f"{shlex.join(['grep', '-ni', _HALF, file])} finds it"
        raise fail(id, f"{file} is not JSON: {error}", file=file, hint=hint) from None
    return table


def _collect(findings: list[Finding], read: Any) -> Any:
    """What ``read`` gives, or None with its findings kept."""
    try:
        return read()
    except UserError as error:
        if error.exit_code == ACCESS:  # what else is wrong would only follow from it
            raise
        findings.extend(error.findings)
        return None


def read_config(source: Source) -> dict[str, Any] | None:
    """config.json, None where there is none. Raises UserError ``config.parse`` for what is no JSON object."""
    if CONFIG not in source.files:
        return None
    config = parse_json(source.text(CONFIG), CONFIG, "config.parse")
    if not isinstance(config, dict):
        raise fail("config.parse", f"{CONFIG} is a JSON {type(config).__name__}, not an object", file=CONFIG)
    return config


def _read_index(source: Source) -> Index | None:
    found = [name for name in source.files if name.endswith(INDEX_SUFFIX) and "/" not in name]
    if not found:
        return None
    file = INDEX if INDEX in found else found[0]
    if len(found) > 1 and INDEX not in found:
        raise fail("index.ambiguous", f"several index files and none is {INDEX}: {', '.join(found)}", file=file)
    table = parse_json(source.text(file), file, "index.parse")
    weight_map = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        message = f"{file} has no weight_map of tensor names to file names"
        raise fail("index.parse", message, file=file, hint=_anew(source))
    if not weight_map:
        message = f"the weight_map of {file} is empty: it names no tensor"
        raise fail("index.parse", message, file=file, hint=_anew(source))
    outside = sorted(shard for shard in set(weight_map.values()) if not is_plain(shard))
    if outside:
        message = f"{file} names {outside[0]!r}: only plain relative paths inside the checkpoint are read"
        tensor = next(name for name, shard in weight_map.items() if shard == outside[0])
        raise fail("index.path", message, file=file, tensor=tensor, hint=_anew(source))
    metadata = table.get("metadata")
    return Index(file, metadata if isinstance(metadata, dict) else {}, weight_map)


def _shard_names(source: Source, index: Index | None, findings: list[Finding]) -> list[str]:
    """The files that hold this checkpoint's tensors, in name order."""
    if index is not None:
        tensors_of: dict[str, list[str]] = defaultdict(list)
        for tensor, shard in index.weight_map.items():
            tensors_of[shard].append(tensor)
        for shard in sorted(tensors_of.keys() - source.files.keys()):
            findings.append(_missing_shard(index.file, shard, tensors_of[shard], source))
        return sorted(tensors_of.keys() & source.files.keys())
    top = _top(source)
    if len(top) > 1 and "model.safetensors" in top:
        return ["model.safetensors"]
    if len(top) == 1:
        return top
    if any(found.id.startswith("index.") for found in findings):
        return []
    if top:
        message = f"{len(top)} .safetensors files ({top[0]}, …) and no {INDEX} that says which belong together"
        findings.append(Finding("index.missing", message, file=INDEX, hint=_anew(source)))
    else:
        other = next((f" ({name} is {why})" for name, why in source.no_files.items() if name.endswith(SUFFIX)), "")
        findings.append(Finding("source.empty", f"{source.uri} holds no .safetensors file{other}", file=source.uri))
    return []


def _top(source: Source) -> list[str]:
    if source.root.is_file():
        return list(source.files)
    return sorted(name for name in source.files if _is_shard(name) and "/" not in name)


def _is_shard(name: str) -> bool:
    return name.endswith(SUFFIX) and name != VOCAB_ORDER


def _anew(source: Source) -> str:
    """The hint for an index that cannot be used: shards tell by their numbers that all of them are there."""
    top = _top(source)
    return _reshard(source) if len(top) == 1 or is_whole(top) else f"take {INDEX} from where the shards came from"


def _reshard(source: Source) -> str:
    command = shlex.join(["ckptkit", "reshard", source.uri.rstrip("/"), source.beside("mended")])
    return f"{command} writes the index anew"


def _missing_shard(index: str, shard: str, tensors: list[str], source: Source) -> Finding:
    there = f"it is {source.no_files[shard]}" if shard in source.no_files else "there is no such file"
    message = f"{index} names {shard} for {len(tensors):,} tensors ({tensors[0]}, …), and {there}"
    hint = f"fetch {shard} again from where the other shards came from"
    return Finding("index.missing-shard", message, shard, tensors[0], hint, data={"tensors": len(tensors)})


def _read_shard(source: Source, name: str) -> Header:
    return read_header(lambda start, stop: source.read(name, start, stop), source.files[name].size, name)


def _tensors(
    shards: Mapping[str, Header], index: Index | None, source: Source, findings: list[Finding]
) -> dict[str, Ref]:
    """Every tensor of the shards by name, checked against the index both ways.

    One that the index does not place where it lies is a finding, and there all the same.
    """
    refs = [Ref(shard, *entry) for shard, header in shards.items() for entry in header.entries]
    if index is None:
        return {ref.name: ref for ref in refs}
    expected = index.weight_map
    tensors = {ref.name: ref for ref in refs if expected.get(ref.name) == ref.file}
    unlisted = [ref for ref in refs if expected.get(ref.name) != ref.file] if len(tensors) < len(refs) else []
    findings += [_unlisted(ref, index, ref.name in tensors, _reshard(source)) for ref in unlisted]
    elsewhere = {ref.name for ref in unlisted}
    for name, shard in expected.items():
        if shard in shards and name not in tensors:
            message = f"{index.file} says {name} lies in {shard}, which does not hold it"
            lost = f"fetch {shard} again; or, if the tensor is not needed, {_reshard(source)}"
            hint = _reshard(source) if name in elsewhere else lost
            findings.append(Finding("index.missing-tensor", message, file=shard, tensor=name, hint=hint))
    return {ref.name: ref for ref in unlisted} | tensors if unlisted else tensors


def _unlisted(ref: Ref, index: Index, twice: bool, hint: str) -> Finding:
    listed = index.weight_map.get(ref.name)
    if twice:
        message = f"{ref.file} holds {ref.name}, and so does {listed}, where {index.file} says it lies"
        return Finding("index.duplicate", message, file=ref.file, tensor=ref.name, hint=hint)
    where = f"says it lies in {listed}" if listed else "does not list it"
    message = f"{ref.file} holds {ref.name}, but {index.file} {where}"
    return Finding("index.extra-tensor", message, file=ref.file, tensor=ref.name, hint=hint)


def _stray_findings(stray: Iterable[str], index: Index | None, source: Source) -> list[Finding]:
    """A lone ``model.safetensors`` beside an index is what transformers loads: worth a word wherever it lies.

    One that is numbered like the shards that the index names is one of them: without it tensors are missing.
    """
    sets = {part.set for part in map(numbered, set(index.weight_map.values())) if part} if index else set()
    return [
        _stray(name, index, source if (part := numbered(name)) and part.set in sets else None)
        for name in stray
        if "/" not in name
    ]


def _stray(name: str, index: Index | None, shard_of: Source | None) -> Finding:
    whose = f"not named by {index.file}" if index else "beside model.safetensors, without an index"
    if shard_of:
        message = f"{name} is {whose}, and by its number it is one of the shards: its tensors are not reached"
        hint = f"{_reshard(shard_of)} and takes it in; or remove the file"
        return Finding("index.stray-shard", message, file=name, hint=hint)
    message = f"{name} is {whose}; it is not part of the checkpoint"
    return Finding("index.stray-shard", message, file=name, severity="warning")
