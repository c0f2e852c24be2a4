"""Everything beside the shards: what is copied, what is written anew, what is left out and why."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from ..files.checkpoint import INDEX, INDEX_SUFFIX, VOCAB_ORDER, Checkpoint
from ..naming.names import Matcher
from ..plan import LeftOut, Shard, Sidecar

OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".safetensors")
OTHER_INDEXES = (".bin.index.json", ".h5.index.json", INDEX_SUFFIX)
OWN = {
    "ckptkit.json": "says what the source is",
    "SHA256SUMS": "holds digests of the source's files",
    "ckptkit.digests.json": "holds digests of the source's tensors",
    ".ckptkit.journal": "left by a run that made the source",
    ".ckptkit.lock": "left by a run that made the source",
}
HIDDEN = {".git": "version control", ".cache": "a download cache"}
# Files of digests by other tools: md5sums.txt, checksums.sha256, SHA512SUMS.
_SUMS = re.compile(
    r"(.*[-_.])?(md5|sha\d+|b[23]|blake\w+|check)-?sums?(\.\w+)*|.*\.(md5|sha\d+|b[23]|blake\w+|sfv)(sums?)?",
    re.IGNORECASE,
)


def sidecars(
    checkpoint: Checkpoint, written: Mapping[str, str], stale: Mapping[str, str], include: Iterable[str]
) -> tuple[tuple[Sidecar, ...], tuple[LeftOut, ...]]:
    """Account for every file that is not a shard.

    ``written`` maps names to the text that replaces or adds them, ``stale`` names that the plan makes untrue to the
    reason; ``include`` are patterns on file names that take a file which would be left out.
    """
    taken = Matcher(list(include))
    kept, left_out = [], []
    for name in checkpoint.source.files:
        if name in checkpoint.shards or name in written:
            continue
        reason = stale.get(name) or _reason(name, checkpoint.stray)
        if reason is None or taken.all(name):
            kept.append(Sidecar(name))
        else:
            left_out.append(LeftOut(name, reason))
    root = checkpoint.source.root
    left_out += [LeftOut(name, reason) for name, reason in HIDDEN.items() if (root / name).is_dir()]
    others = checkpoint.source.no_files
    left_out += [LeftOut(name, reason) for name, reason in others.items() if name not in written]
    kept += [Sidecar(name, text) for name, text in written.items()]
    by_name = attrgetter("name")
    return tuple(sorted(kept, key=by_name)), tuple(sorted(left_out, key=by_name))


def _reason(name: str, stray: Collection[str]) -> str | None:
    if name in OWN:
        return OWN[name]
    if _SUMS.fullmatch(name.rpartition("/")[2]):
        return OWN["SHA256SUMS"]
    if name in stray:
        return "safetensors outside the index"
    if name.endswith(OTHER_WEIGHTS) and name != VOCAB_ORDER:
        return "other weights"
    return "index of other weights" if name.endswith(OTHER_INDEXES) else None


def with_index(
    checkpoint: Checkpoint, shards: Sequence[Shard], texts: Mapping[str, str], stale: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """``texts`` with an index where there are several shards, or ``stale`` with the one that is no longer needed."""
    index = checkpoint.index
    if len(shards) > 1 or (index and shards[0].name == shards[0].source):
        text = index_text(shards, index.metadata if index else {})
        return {**texts, (index.file if index else INDEX): text}, dict(stale)
    return dict(texts), {**stale, index.file: "the result is one file"} if index else dict(stale)


def index_text(shards: Iterable[Shard], metadata: Mapping[str, Any]) -> str:
    """An index file: sorted weight_map, ``total_size`` of what is written, other metadata as it was."""
    shards = list(shards)
    weight_map = {spec.name: shard.name for shard in shards for step in shard.steps for spec in step.outputs}
    head = json.dumps({**metadata, "total_size": sum(shard.nbytes for shard in shards)}, indent=2, ensure_ascii=False)
    # As indent=2 has it; but json is slow where it indents, and these are hundreds of thousands of lines.
    ordered = {name: weight_map[name] for name in sorted(weight_map)}
    rows = json.dumps(ordered, separators=(",\n    ", ": "), ensure_ascii=False)
    indented = head.replace("\n", "\n  ")
    return f'{{\n  "metadata": {indented},\n  "weight_map": {{\n    {rows[1:-1]}\n  }}\n}}\n'
