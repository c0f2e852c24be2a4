"""The tensors of a checkpoint that have a row, or a number, for each token: which they are. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..families import Kind, classifier
from ..families.ties import embedding_of
from ..files.checkpoint import Checkpoint
from ..plan import Ref
from ..stored import WEIGHTS, split_name

MASK = "t2d"
# The last part of the name of a map of draft tokens, and whether it holds offsets; None where both are in use.
MAPS = {"d2t": None, "draft_id_to_target_id": True, "token_map": False}
# In layers that draft: what is an embedding or a head, though its kind says only where it lies.
_DRAFTED = re.compile(r"(^|\.)(embed(_tokens)?|lm_head|head|shared_head|markov_w[12])$")
# Tables of the text model, which may have fewer rows than there are ids.
_OF_TEXT = re.compile(r"(?:(?:model|language_model|text_model)\.)*(?:lm_head|embed_tokens|embed_tokens_per_layer)")
_SHARED = re.compile(r"(?:model\.)?shared")  # the embedding of an encoder-decoder
_HASHED = re.compile(r"engram|n_?gram|(^|\.)ple[._]", re.IGNORECASE)
_ROUTED = "tid2eid"  # DeepSeek-V4: the experts of each token


class Tables(NamedTuple):
    """Modules with a row for each token; maps of draft tokens; tensors with a number for each token; and the strange.

    ``strange`` have as many rows, and nobody knows of what. ``hashed`` are of embeddings that compute with ids.
    """

    modules: tuple[str, ...]
    maps: tuple[Ref, ...]
    numbers: tuple[Ref, ...]
    strange: tuple[Ref, ...]
    hashed: tuple[Ref, ...]


def embedding(checkpoint: Checkpoint) -> str | None:
    """The module of the token embedding."""
    names = checkpoint.tensors
    found = embedding_of((_as_weight(name) for name in names), checkpoint.config)
    return found or next((module for name in names if _SHARED.fullmatch(module := split_name(name)[0])), None)


def mask_of(checkpoint: Checkpoint) -> Ref | None:
    """``t2d``, which has a truth value for each of the target's tokens."""
    return next((ref for name, ref in checkpoint.tensors.items() if split_name(name)[1] == MASK), None)


def tables(checkpoint: Checkpoint, n_rows: int) -> Tables:
    """All that goes by token ids in a checkpoint whose vocabulary has ``n_rows`` rows."""
    maps = tuple(ref for name, ref in checkpoint.tensors.items() if split_name(name)[1] in MAPS)
    drafted = {ref.shape[0] for ref in maps if ref.shape}
    modules = tuple(dict.fromkeys(_modules(checkpoint, n_rows, drafted)))
    taken = {*modules, *(split_name(ref.name)[0] for ref in maps if ref.shape == (n_rows,))}
    rest = [ref for name, ref in checkpoint.tensors.items() if split_name(name)[0] not in taken]
    hashed = tuple(ref for ref in checkpoint.tensors.values() if _HASHED.search(ref.name))
    by_token = [ref for ref in rest if _goes_by_token(ref.shape, n_rows)]
    numbers = tuple(ref for ref in by_token if _is_numbers(ref, n_rows))
    return Tables(modules, maps, numbers, tuple(ref for ref in by_token if ref not in numbers), hashed)


def _modules(checkpoint: Checkpoint, n_rows: int, drafted: Iterable[int]) -> Iterator[str]:
    kind_of = classifier(checkpoint.config)
    for name, ref in checkpoint.tensors.items():
        module, last = split_name(name)
        if last not in WEIGHTS or len(ref.shape) != 2:
            continue
        kind = kind_of(f"{module}.weight", ref.shape)
        is_table = kind in (Kind.EMBEDDING, Kind.HEAD) or (kind in (Kind.MTP, Kind.DRAFT) and _DRAFTED.search(module))
        is_shorter = _OF_TEXT.fullmatch(module) and ref.shape[0] not in drafted
        if is_table and (_goes_by_token(_sizes(checkpoint, module), n_rows) or is_shorter):
            yield module


def _sizes(checkpoint: Checkpoint, module: str) -> tuple[int, ...]:
    """The sizes of a weight, and of the scales that tell how many outputs one has that is packed."""
    found = (checkpoint.tensors.get(f"{module}.{last}") for last in (*WEIGHTS, "scales"))
    return tuple(size for ref in found if ref for size in (ref.shape[0], ref.shape[-1]))


def _goes_by_token(shape: tuple[int, ...], n_rows: int) -> bool:
    return bool(shape) and n_rows in (shape[0], shape[-1])


def _is_numbers(ref: Ref, n_rows: int) -> bool:
    """A bias for each token, its experts, or ``t2d``."""
    last = split_name(ref.name)[1]
    if last == _ROUTED:
        return len(ref.shape) == 2 and ref.shape[0] == n_rows
    return ref.shape in ((n_rows,), (1, n_rows)) and (last.endswith("bias") or last == MASK)


def _as_weight(name: str) -> str:
    module, last = split_name(name)
    return f"{module}.weight" if last in WEIGHTS else name
