"""How often each token occurs in a corpus: counted by several processes, a piece of a file at a time.

A part of the documents is held out: they say what a list that was made of the others covers. Which ones is decided by a
hash of what they say, so equal documents are never on both sides, and the result is the same whoever counts.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from ..errors import Finding, UserError, fail
from .corpus import File, Label, Piece, documents, pieces
from .fingerprint import TOKENIZER

if TYPE_CHECKING:
    import numpy as np

    from .corpus import Document

    Array = np.ndarray[Any, Any]


class Counting(NamedTuple):
    """How to count: a tokenizer.json, how many ids there are, the share held out, whose words count in conversations."""

    tokenizer: str
    n_vocab: int
    held_out: float
    roles: tuple[str, ...] = ()


class Counts(NamedTuple):
    """Token counts, int64 [n_vocab]: of the documents to rank by, and by kind of text of those held out."""

    ranked: Array
    held_out: dict[Label, Array]
    documents: int
    documents_held_out: int


class _Part(NamedTuple):
    """What one piece holds: (token ids, how often each) of either side, the documents of either."""

    label: Label
    ranked: tuple[Array, Array]
    held_out: tuple[Array, Array]
    documents: tuple[int, int]


def count_tokens(files: Sequence[File], how: Counting, jobs: int, advance: Callable[[int], None]) -> Counts:
    """Count the tokens of ``files`` with ``jobs`` processes; ``advance`` is told the bytes that are done.

    Raises UserError: ``vocab.corpus``, ``vocab.tokenizer``, ``usage.extra``.
    """
    import numpy as np

    ranked = np.zeros(how.n_vocab, np.int64)
    held_out = {file.label: np.zeros(how.n_vocab, np.int64) for file in files}
    sums = [0, 0]
    for piece, part in _counted(list(pieces(files)), how, jobs):
        ranked[part.ranked[0]] += part.ranked[1]
        held_out[part.label][part.held_out[0]] += part.held_out[1]
        sums = [total + number for total, number in zip(sums, part.documents, strict=True)]
        advance(piece.stop - piece.start)
    return Counts(ranked, held_out, sums[0], sums[1])


def _counted(todo: Sequence[Piece], how: Counting, jobs: int) -> Iterator[tuple[Piece, _Part]]:
    count = partial(_count, how=how)
    if jobs == 1 or len(todo) < 2:
        yield from ((piece, _part(count(piece))) for piece in todo)
        return
    workers = min(jobs, len(todo))
    # Threads of this process may hold locks, which a fork would take along.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _ignore_interrupts)
    try:
        for piece, future in _in_order(pool, count, todo, 2 * workers):
            yield piece, _part(future.result())
    except BrokenProcessPool:
        raise MemoryError("a process that counts tokens was ended from outside") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(
    pool: ProcessPoolExecutor, count: Callable[[Piece], Any], todo: Iterable[Piece], ahead: int
) -> Iterator[tuple[Piece, Future[Any]]]:
    """Each piece with what is to come of it; no more than ``ahead`` of them are waited for at once."""
    waiting: deque[tuple[Piece, Future[Any]]] = deque()
    for piece in todo:
        waiting.append((piece, pool.submit(count, piece)))
        if len(waiting) == ahead:
            yield waiting.popleft()
    yield from waiting


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _part(found: _Part | tuple[Finding, ...]) -> _Part:
    if isinstance(found, _Part):
        return found
    raise UserError(found)


def _count(piece: Piece, how: Counting) -> _Part | tuple[Finding, ...]:
    """What a piece holds, or what is wrong with it: findings pass from one process to another, exceptions do not."""
    import numpy as np

    sides: tuple[list[Array], list[Array]] = ([], [])
    try:
        for document in documents(piece, how.roles):
            sides[_is_held_out(document, how.held_out)].append(_tokens(document, piece, how))
    except UserError as error:
        return tuple(error.findings)
    ranked, held_out = (np.unique(np.concatenate([np.zeros(0, np.int64), *side]), return_counts=True) for side in sides)
    return _Part(piece.file.label, ranked, held_out, (len(sides[0]), len(sides[1])))


def _is_held_out(document: Document, share: float) -> bool:
    content = document.encode() if isinstance(document, str) else document.astype("<i8").tobytes()
    return xxhash.xxh3_64_intdigest(content) < share * 2**64


def _tokens(document: Document, piece: Piece, how: Counting) -> Array:
    """The token ids of a document, without what a tokenizer adds; those past the target's vocabulary left out of text."""
    import numpy as np

    if isinstance(document, str):
        ids = np.array(_tokenizer(how.tokenizer).encode(document, add_special_tokens=False).ids, np.int64)
        return ids[ids < how.n_vocab]
    outside = document[(document < 0) | (document >= how.n_vocab)]
    if len(outside):
        message = f"{piece.file.path} holds {outside[0]}, which is no token of a vocabulary of {how.n_vocab:,}"
        raise fail("vocab.corpus", message, file=piece.file.path, hint="take ids of this target's tokenizer")
    return document.astype(np.int64)


@cache
def _tokenizer(path: str) -> Any:
    """The tokenizers library's own. Raises UserError: ``usage.extra``, ``vocab.tokenizer``."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        hint = "pip install 'ckptkit[vocab]'"
        raise fail(
            "usage.extra", "text is counted with the package tokenizers, which is not installed", hint=hint
        ) from None
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # the library raises plain exceptions of Rust's messages
        message = f"{path} is no tokenizer that the tokenizers library loads: {error}"
        raise fail(
            "vocab.tokenizer", message.splitlines()[0], file=Path(path).name, hint=f"fetch {TOKENIZER} again"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
