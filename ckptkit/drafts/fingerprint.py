"""Which target a draft was cut from: digests of what the draft was trained against, and shares when it is served.

Embedding and head are too large to be read for this: of each, rows at even distances are. Two checkpoints of the same
shape that were trained apart differ in every row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import xxhash

from ..errors import Finding
from ..files.checkpoint import Checkpoint
from ..files.header import row_view
from ..files.source import Source
from ..plan import Ref

KEY = "ckptkit_target"  # in the config of what is cut out
ID = "target-mismatch"
_ROWS = 16
_TENSORS = {"embedding": "embed.weight", "head": "head.weight", "norm": "norm.weight"}
_TOKENIZERS = ("tokenizer.json", "tokenizer.model")


def fingerprint(checkpoint: Checkpoint) -> dict[str, str]:
    """xxh3-128 (hex) of embedding, head, final norm and tokenizer, of each that a target has.

    Reads 16 rows of each matrix, and the tokenizer.
    """
    found: dict[str, Iterator[bytes]] = {
        what: _rows(checkpoint.source, checkpoint.tensors[name])
        for what, name in _TENSORS.items()
        if name in checkpoint.tensors
    }
    files = checkpoint.source.files
    tokenizer = next((name for name in _TOKENIZERS if name in files), None)
    if tokenizer:
        found["tokenizer"] = iter([checkpoint.source.read(tokenizer, 0, files[tokenizer].size)])
    return {what: _digest(pieces) for what, pieces in found.items()}


def recorded(config: Mapping[str, Any] | None) -> dict[str, str]:
    """The fingerprint that a draft's config holds of the target that it was cut from; empty where it holds none."""
    found = (config or {}).get(KEY)
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, Mapping) else {}


def mismatch(was: Mapping[str, str], target: Callable[[], Mapping[str, str]]) -> Iterator[Finding]:
    """``target-mismatch`` where the target is not the one of the draft, as far as both are known."""
    now = target() if was else {}
    differing = [what for what, digest in was.items() if what in now and now[what] != digest]
    if differing:
        message = f"the draft was cut from another target: {', '.join(differing)} differ"
        hint = f"--allow {ID}, if the target was trained on since"
        yield Finding(ID, message, hint=hint, data={"differing": differing})


def unrecorded(was: Mapping[str, str]) -> Iterator[Finding]:
    """A warning, ``attach.target-unknown``, where nothing is known of the target that a draft was cut from."""
    if not was.keys() & _TENSORS.keys():
        message = f"the draft holds no record of its target ({KEY}): whether it was trained for this one cannot be told"
        hint = "extract-dspark records it where the draft is cut out of its target"
        yield Finding("attach.target-unknown", message, hint=hint, severity="warning")


def _rows(source: Source, ref: Ref) -> Iterator[bytes]:
    yield f"{ref.dtype} {ref.shape}".encode()
    rows, width = row_view(ref.dtype, ref.shape)
    for number in sorted({rows * step // _ROWS for step in range(_ROWS if rows else 0)}):
        yield source.read(ref.file, ref.start + number * width, ref.start + (number + 1) * width)


def _digest(pieces: Iterator[bytes]) -> str:
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
