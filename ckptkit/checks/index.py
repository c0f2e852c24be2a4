"""Checks of the index against the files, both ways, and of what the files' names say about their number."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..errors import Finding
from ..files.checkpoint import INDEX, SUFFIX, Index
from . import Level, Page, Probe, Seen, Subject
from .folding import fold

_SCANNED = (
    "index.missing",
    "index.parse",
    "index.path",
    "index.ambiguous",
    "index.missing-shard",
    "index.missing-tensor",
    "index.extra-tensor",
    "index.duplicate",
    "index.stray-shard",
)
_LONE = "model.safetensors"
_COUNTED = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")


def _index(subject: Subject) -> Seen:
    index = subject.checkpoint.index
    found = (_graver(finding, subject) for finding in subject.found if finding.id in _SCANNED)
    return Seen(fold(found), len(index.weight_map) if index else 0)


def _graver(finding: Finding, subject: Subject) -> Finding:
    """A lone model.safetensors beside an index is what transformers loads."""
    index = subject.checkpoint.index
    if finding.id != "index.stray-shard" or finding.file != _LONE or index is None:
        return finding
    message = f"{_LONE} stands beside {index.file}, which does not name it: transformers loads it instead of the shards"
    hint = f"remove {_LONE}, or {index.file} and its shards if they are what is stale"
    return replace(finding, severity="error", message=message, hint=hint)


def _total_size(subject: Subject) -> Seen:
    index = subject.checkpoint.index
    if index is None or "total_size" not in index.metadata:
        return Seen((), 0)
    stated = index.metadata["total_size"]
    held = sum(entry.nbytes for header in subject.checkpoint.shards.values() for entry in header.entries)
    if stated == held:
        return Seen((), 1)
    message = f"{index.file} states total_size {stated!r}; the tensors of its shards take {held:,} bytes"
    hint = "ckptkit reshard SRC OUT writes the index anew"
    data = {"stated": stated, "held": held}
    return Seen([Finding("index.total-size", message, index.file, hint=hint, severity="warning", data=data)], 1)


def _shard_count(subject: Subject) -> Seen:
    names = _counted(subject)
    return Seen(_miscounted(names, subject.checkpoint.index), len(names))


def files_lacking(subject: Subject) -> bool:
    """Whether the files' names alone, without an index, tell that some are not there."""
    return any(finding.severity == "error" for finding in _miscounted(_counted(subject), subject.checkpoint.index))


def _counted(subject: Subject) -> set[str]:
    """Files that an index names are counted by it; without one, those that lie there."""
    index, files = subject.checkpoint.index, subject.checkpoint.source.files
    if index is not None:
        return set(index.weight_map.values())
    return {name for name in files if name.endswith(SUFFIX) and "/" not in name}


def _miscounted(names: Iterable[str], index: Index | None) -> Iterator[Finding]:
    numbers: dict[str, set[int]] = defaultdict(set)
    totals: dict[str, set[int]] = defaultdict(set)
    for name in names:
        counted = _COUNTED.fullmatch(name)
        if counted:
            numbers[counted[1]].add(int(counted[2]))
            totals[counted[1]].add(int(counted[3]))
    for prefix, said in totals.items():
        have = numbers[prefix]
        if said != {len(have)}:
            count = " and ".join(map(str, sorted(said)))
            what = f"{index.file} names" if index else "there are"
            message = f"{prefix}-…-of-….safetensors: the names count {count} files, {what} {len(have)}"
            # Without an index nothing else tells that files are missing.
            severity = "warning" if index or len(have) > max(said) else "error"
            data = {"stated": sorted(said), "files": len(have)}
            file = index.file if index else min(name for name in names if name.startswith(prefix))
            yield Finding("index.shard-count", message, file, hint=_COUNT_HINT, severity=severity, data=data)


_COUNT_HINT = "fetch the files that are missing, or ckptkit reshard SRC OUT to have them named by what there is"

_REBUILD = "Or, where files are named -00001-of-0000N and all N are there, ckptkit reshard SRC OUT writes one from the headers."

PROBES = (
    Probe(_SCANNED, Level.STATIC, _index),
    Probe(("index.total-size",), Level.STATIC, _total_size, lambda subject: subject.unknown),
    Probe(("index.shard-count",), Level.STATIC, _shard_count),
)

PAGES = (
    Page(
        "index.missing",
        Level.STATIC,
        "error",
        "Several files and no index",
        f"There are several .safetensors files and neither {INDEX} nor a file named {_LONE}, so nothing says which of "
        "them belong together. transformers loads none; vLLM and SGLang load all of them in name order, a tensor that "
        "stands in two of them from whichever comes last.",
        "model-00001-of-00002.safetensors, model-00002-of-00002.safetensors, no index",
        f"Fetch the index: hf download ORG/NAME {INDEX} --local-dir DIR. {_REBUILD}",
    ),
    Page(
        "index.parse",
        Level.STATIC,
        "error",
        "The index cannot be read",
        "The index is no JSON, names a tensor twice, or has no weight_map of tensor names to file names.",
        '{"metadata": {"total_size": 1024}}   (no weight_map)',
        f"Fetch the index again. {_REBUILD}",
    ),
    Page(
        "index.path",
        Level.STATIC,
        "error",
        "The index names a file outside the checkpoint",
        "File names in an index are relative paths below its folder. An absolute path or one with .. would make a "
        "loader read whatever lies there.",
        '"lm_head.weight": "../other/model.safetensors"',
        "Put the file into the folder and correct its name in the index.",
    ),
    Page(
        "index.ambiguous",
        Level.STATIC,
        "error",
        "Several index files, none with the usual name",
        f"Loaders look for {INDEX}. With several others and not that one, it is anyone's guess which is meant.",
        "a.safetensors.index.json, b.safetensors.index.json",
        f"Rename the one that is meant to {INDEX}, and move the others away. {_REBUILD}",
    ),
    Page(
        "index.missing-shard",
        Level.STATIC,
        "error",
        "The index names a file that is not there",
        "Its tensors are missing. transformers stops; engines that go through the files they find have been seen to "
        "start with uninitialised weights and to answer fluently with nonsense (vllm #34859, sglang PR #32279).",
        "the index names 30 shards, the folder holds 15",
        "Fetch the file: hf download ORG/NAME FILE --local-dir DIR. If the index is stale (an older one, of other "
        "shards): ckptkit reshard SRC OUT rewrites it from the headers.",
    ),
    Page(
        "index.missing-tensor",
        Level.STATIC,
        "error",
        "The index promises a tensor that its file does not hold",
        "The file is there and whole, but that tensor is not in it. Engines that read file by file never notice: the "
        "parameter keeps whatever it was initialised with.",
        'the index says "lm_head.weight" lies in model-00002-of-00002.safetensors; its header lacks it',
        "If the tensor lies in another file or is rightly gone: ckptkit reshard SRC OUT rewrites the index from the "
        "headers. If it is lost: fetch the file again.",
    ),
    Page(
        "index.extra-tensor",
        Level.STATIC,
        "error",
        "A file holds a tensor that the index does not place there",
        "Programs that go by the index skip or drop it (llm-compressor's model_free_ptq left lm_head out this way); "
        "those that go through the files load it. So two readers get two models.",
        "model-00001-of-00002.safetensors holds lm_head.weight, which the index does not list",
        "ckptkit reshard SRC OUT rewrites the index from the headers; --drop NAME if the tensor should not be there.",
    ),
    Page(
        "index.duplicate",
        Level.STATIC,
        "error",
        "Two files hold a tensor of the same name",
        "The index names one of them. Engines that go through all files take the one read last, whichever that is. A "
        "shard of an older run left in the folder looks like this.",
        "model.norm.weight lies in model-00001-of-00002.safetensors and in model-00002-of-00002.safetensors",
        "Find out which is meant (ckptkit diff A B compares them), then ckptkit reshard SRC OUT, which takes the one that the index names.",
    ),
    Page(
        "index.stray-shard",
        Level.STATIC,
        "warning",
        "A .safetensors file that is no part of the checkpoint",
        "The index does not name it, or it lies beside model.safetensors without an index. Engines that load every "
        f".safetensors file load it too. An error where it is called {_LONE} and an index is there: transformers "
        "prefers the single file to the index and so loads a stale model. An error too where its number makes it one of "
        "the shards that the index names: what lies in it (often the head) is missing for whoever goes by the index.",
        "model.safetensors from before the checkpoint was split, beside the index and the new shards",
        "Remove it from the folder. One of the shards: ckptkit reshard SRC OUT writes an index that names it.",
    ),
    Page(
        "index.total-size",
        Level.STATIC,
        "warning",
        "metadata.total_size is not the sum of the tensors",
        "Loaders use it for progress and memory estimates only, but it tells that the index was not written for these "
        "files: copied from the source of a quantization, say, or edited by hand. Some tools write 0.",
        '{"metadata": {"total_size": 0}, "weight_map": {…}}',
        "ckptkit reshard SRC OUT writes it from the headers.",
    ),
    Page(
        "index.shard-count",
        Level.STATIC,
        "warning",
        "File names that count another number of files",
        "The names say -of-00030 and there are not 30. With an index nobody reads the number, yet people do. Without "
        "one it is an error: the only sign that files are missing.",
        "model-00001-of-00002.safetensors alone, without an index",
        "Fetch the missing files, or ckptkit reshard SRC OUT, which names files by their number.",
    ),
)
