"""A draft vocabulary as a list of token ids, read from whatever it is kept in. Nothing in a file is executed."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import fail
from .conventions import tokens_of
from .list_files import Kept, read_kept

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_PREFIX = re.compile(r"prefix:(\d+)(?:\+tail:(\d+))?")
MOST = 1 << 24  # tokens of a vocabulary whose size is not known: no model has as many


class DraftVocab(NamedTuple):
    """Token ids, int32 [n], in the order of the file; what else the file says of them.

    ``is_ranked``: the order is another than ascending, so it is one of rank, the most frequent first. ``n_vocab`` is
    the target's vocabulary size where that is known, ``tokenizer_sha256`` the fingerprint recorded with the list.
    ``is_map``: the file has it as ``d2t``, whose draft ids are those of a head's rows.
    """

    ids: Array
    is_ranked: bool
    n_vocab: int | None
    origin: str
    tokenizer_sha256: str | None = None
    is_map: bool = False


def read_list(path: str | Path, *, n_vocab: int | None = None, offsets: bool | None = None) -> DraftVocab:
    """The list that ``path`` holds, or that it says: ``prefix:N``, ``prefix:N+tail:M``.

    Files: text (integers, ``#`` comments), JSON, ``.pt``, ``.npy``, safetensors or a checkpoint's folder, GGUF; lists,
    masks, and maps with or without ``t2d``. ``offsets`` says that a map is of offsets (True) or of token ids (False);
    ``n_vocab``, the size of the target's vocabulary, helps to tell. Duplicates are kept: see :func:`sorted_unique`.
    Raises UserError: ``vocab.list``, ``vocab.size``, ``vocab.range``, ``vocab.ambiguous``, ``vocab.mapping``,
    ``access.denied``.
    """
    text = str(path)
    said = _PREFIX.fullmatch(text)
    if said:
        return _prefix(int(said[1]), int(said[2] or 0), n_vocab, text)
    kept = read_kept(Path(text).expanduser())
    size = _size(kept, n_vocab, text)
    ids = _ids(kept, size, offsets, text)
    if not len(ids):
        raise fail("vocab.list", f"{text} holds no token", file=text)
    _check_range(ids, size, text)
    return _vocab(ids, size, text, kept.tokenizer_sha256)._replace(is_map=kept.is_offset is not False)


def sorted_unique(vocab: DraftVocab, n_vocab: int) -> Array:
    """The ids in ascending order, int32 [n]. Raises UserError: ``vocab.range``, ``vocab.duplicate``."""
    import numpy as np

    _check_range(vocab.ids, n_vocab, vocab.origin)
    ordered, counts = np.unique(vocab.ids, return_counts=True)
    if len(ordered) < len(vocab.ids):
        message = f"{vocab.origin}: token {ordered[counts > 1][0]} stands more than once in the list"
        hint = "keep one of each; or, if these are offsets of a map: --offsets"
        raise fail("vocab.duplicate", message, file=vocab.origin, hint=hint)
    return ordered.astype(np.int32)


def list_sha256(ids: Array) -> str:
    """SHA-256 (hex) of the ids as little-endian int32, in the order given."""
    return hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest()


def _vocab(ids: Array, size: int | None, origin: str, fingerprint: str | None = None) -> DraftVocab:
    import numpy as np

    ranked = bool((np.diff(ids) < 0).any())
    return DraftVocab(ids.astype(np.int32), ranked, size, origin, fingerprint)


def _prefix(count: int, tail: int, n_vocab: int | None, text: str) -> DraftVocab:
    import numpy as np

    if not count + tail:
        raise fail("vocab.list", f"{text} is a list of no token", hint="prefix:32768")
    if tail and n_vocab is None:
        hint = "add --n-vocab with the rows of the target's head, or --tokenizer with its folder"
        raise fail("vocab.size", f"{text}: where the tail begins depends on the vocabulary's size", hint=hint)
    most = MOST if n_vocab is None else n_vocab
    if count + tail > most:
        raise fail("vocab.range", f"{text} names more than the {most:,} tokens there are", hint="name fewer")
    last = np.arange((n_vocab or 0) - tail, n_vocab or 0) if tail else np.zeros(0, np.int64)
    return _vocab(np.concatenate([np.arange(count), last]), n_vocab, text)


def _size(kept: Kept, n_vocab: int | None, file: str) -> int | None:
    found = len(kept.t2d) if kept.t2d is not None else kept.n_vocab
    if None not in (found, n_vocab) and found != n_vocab:
        message = f"{file} is of a vocabulary of {found:,} tokens, not of {n_vocab:,}"
        raise fail("vocab.size", message, file=file, hint="take the list that was made for this target")
    return n_vocab if found is None else found


def _ids(kept: Kept, size: int | None, offsets: bool | None, file: str) -> Array:
    import numpy as np

    if kept.values is None:
        return np.flatnonzero(np.asarray(kept.t2d))
    says = kept.is_offset if offsets is None else offsets
    return tokens_of(kept.values, kept.t2d, size, says, file)


def _check_range(ids: Array, size: int | None, file: str) -> None:
    """Raises UserError (``vocab.range``) for an id that is no token's."""
    limit = MOST if size is None else size
    outside = ids[(ids < 0) | (ids >= limit)]
    if len(outside):
        message = f"{file}: {outside[0]} is no token of a vocabulary of {limit:,}"
        hint = "take the list of this target; or, if these are offsets of a map: --offsets"
        raise fail("vocab.range", message, file=file, hint=hint, data={"outside": len(outside)})
