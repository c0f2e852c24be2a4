"""Everything beside the shards: what is copied, what is written anew, what is left out and why."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from operator import attrgetter

from ..checkpoint import INDEX_SUFFIX, Checkpoint
from ..names import Matcher
from ..plan import LeftOut, Sidecar

OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".safetensors")
OTHER_INDEXES = (".bin.index.json", ".h5.index.json", INDEX_SUFFIX)
OWN = {
    "ckptkit.json": "says what the source is",
    "SHA256SUMS": "holds digests of the source's files",
    ".ckptkit.journal": "left by a run that made the source",
    ".ckptkit.lock": "left by a run that made the source",
}
HIDDEN = {".git": "version control", ".cache": "a download cache"}


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
    kept += [Sidecar(name, text) for name, text in written.items()]
    by_name = attrgetter("name")
    return tuple(sorted(kept, key=by_name)), tuple(sorted(left_out, key=by_name))


def _reason(name: str, stray: Collection[str]) -> str | None:
    if name in OWN:
        return OWN[name]
    if name in stray:
        return "safetensors outside the index"
    if name.endswith(OTHER_WEIGHTS):
        return "other weights"
    return "index of other weights" if name.endswith(OTHER_INDEXES) else None
