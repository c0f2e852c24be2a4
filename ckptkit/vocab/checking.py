"""What can be wrong with a draft vocabulary: by itself, and beside the head, the target and the text that it is for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from ..checks import Level, Probe, Seen
from ..errors import Finding, UserError
from ..families import config_value
from ..files.checkpoint import CONFIG, Checkpoint
from ..planners.reorder_vocab import find_head
from .coverage import Coverage
from .fingerprint import tokenizer_fingerprint
from .lists import MOST, DraftVocab, read_list, sorted_unique
from .target import Target

_OF_LISTS = ("vocab.range", "vocab.duplicate", "vocab.ambiguous", "vocab.mapping", "vocab.size")
_NO_LIST = "the list could not be read"


class Read(NamedTuple):
    """The list if it could be read, and what kept it from that or is wrong with its ids."""

    vocab: DraftVocab | None
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Listed:
    """What is checked: the list of that name, and what it is for. ``least`` is the share of text to be covered."""

    name: str
    n_vocab: int | None = None
    offsets: bool | None = None
    head: Checkpoint | None = None
    target: Target | None = None
    covered: tuple[Coverage, ...] = ()
    least: float = 0.0

    @cached_property
    def read(self) -> Read:
        """Raises UserError for what is no list at all."""
        return read_whole(self.name, self.n_vocab or (self.target.n_vocab if self.target else None), self.offsets)

    @cached_property
    def rows(self) -> tuple[str, int]:
        """The name of the head's weight, and its rows. Raises UserError where there is no head."""
        assert self.head is not None
        parts = find_head(self.head, untie=True).parts
        return parts.weight.name, parts.n_rows

    @property
    def is_of_draft(self) -> bool:
        """Whether the head is a draft's own."""
        names = self.head.tensors if self.head else ()
        return self.declared is not None or any(name.rpartition(".")[2] == "d2t" for name in names)

    @property
    def declared(self) -> Any:
        """``draft_vocab_size`` in the head's config; None where it says nothing."""
        return config_value(self.head.config if self.head else None, "draft_vocab_size")


def read_whole(name: str, n_vocab: int | None, offsets: bool | None) -> Read:
    """The list of that name. Raises UserError for what is no list at all."""
    try:
        vocab = read_list(name, n_vocab=n_vocab, offsets=offsets)
    except UserError as error:
        if any(finding.id not in _OF_LISTS for finding in error.findings):
            raise
        return Read(None, tuple(error.findings))
    try:
        sorted_unique(vocab, vocab.n_vocab or MOST)
    except UserError as error:
        return Read(vocab, tuple(error.findings))
    return Read(vocab, ())


# --- by itself ---------------------------------------------------------------------------------------------


def _ids(subject: Listed) -> Iterator[Finding]:
    yield from subject.read.findings


def _order(subject: Listed) -> Iterator[Finding]:
    import numpy as np

    vocab = subject.read.vocab
    if vocab is None or not vocab.is_map:
        return
    if vocab.is_ranked:
        at = int(np.flatnonzero(np.diff(vocab.ids) < 0)[0])
        message = f"{subject.name}: d2t gives token {vocab.ids[at]} before token {vocab.ids[at + 1]}"
        yield Finding("vocab.order", message, file=subject.name, severity="warning")
    elif np.array_equal(vocab.ids, np.arange(len(vocab.ids))) and vocab.n_vocab != len(vocab.ids):
        message = f"{subject.name}: d2t gives the tokens 0 to {len(vocab.ids) - 1:,}"
        yield Finding("vocab.untrained-map", message, file=subject.name, severity="warning")


# --- beside what it is for ---------------------------------------------------------------------------------


def _head(subject: Listed) -> Iterator[Finding]:
    vocab = subject.read.vocab
    if vocab is None:
        return
    tensor, rows = subject.rows
    largest, count = int(vocab.ids.max()), len(vocab.ids)
    if subject.is_of_draft and rows != count:
        message = f"{tensor} has {rows:,} rows, the list {count:,} tokens"
        yield Finding("vocab.head-rows", message, tensor=tensor)
    elif not subject.is_of_draft and rows <= largest:
        message = f"{tensor} has {rows:,} rows, none of them of token {largest}"
        yield Finding("vocab.head-rows", message, tensor=tensor)


def _config(subject: Listed) -> Iterator[Finding]:
    vocab, declared = subject.read.vocab, subject.declared
    if vocab is not None and declared is not None and declared != len(vocab.ids):
        said = f"{declared:,}" if type(declared) is int else repr(declared)
        message = f"{CONFIG} declares draft_vocab_size {said}, the list has {len(vocab.ids):,} tokens"
        yield Finding("vocab.config", message, file=CONFIG)


def _other_map(subject: Listed) -> Iterator[Finding]:
    """Whether the map beside the head is that of the list, in the order of rows where both are maps."""
    import numpy as np

    vocab = subject.read.vocab
    assert subject.head is not None
    if vocab is None or not any(name.rpartition(".")[2] == "d2t" for name in subject.head.tensors):
        return
    uri = subject.head.source.uri
    found = read_whole(uri, vocab.n_vocab, None)
    if found.vocab is None:
        yield from (replace(finding, id="vocab.head-map") for finding in found.findings)
        return
    pair = [vocab.ids, found.vocab.ids] if vocab.is_map else [np.sort(vocab.ids), np.sort(found.vocab.ids)]
    if not np.array_equal(pair[0], pair[1]):
        message = f"{subject.name} and the d2t of {uri} give other tokens"
        yield Finding("vocab.head-map", message, file=subject.name)


def _specials(subject: Listed) -> Iterator[Finding]:
    vocab = subject.read.vocab
    assert subject.target is not None
    if vocab is None:
        return
    for id in sorted(set(subject.target.ends) - set(vocab.ids.tolist())):
        message = f"{subject.name} lacks {id}, which ends a text"
        yield Finding("vocab.specials", message, file=subject.name, severity="warning", data={"token": id})


def _fingerprint(subject: Listed) -> Iterator[Finding]:
    vocab = subject.read.vocab
    recorded = vocab.tokenizer_sha256 if vocab else None
    assert subject.target is not None
    there = tokenizer_fingerprint(subject.head.source) if subject.head else None
    for what, known in ((subject.name, recorded), ("the head", there)):
        if known is not None and known != subject.target.fingerprint:
            message = f"{what} is of a tokenizer of fingerprint {known[:16]}, and {subject.target.path} has "
            message += subject.target.fingerprint[:16]
            yield Finding("vocab.fingerprint", message, file=subject.name)


def _coverage(subject: Listed) -> Seen:
    rows = subject.covered
    found = [
        Finding(
            "vocab.coverage",
            f"{_called(row)}: {row.share:.2%} of its tokens are in the list, less than {subject.least:.2%}",
        )
        for row in rows
        if row.share is not None and row.share < subject.least
    ]
    partly = {} if any(row.tokens for row in rows) else {"vocab.coverage": "the corpus has no token"}
    return Seen(found, len(rows), {"coverage": [row.as_dict() for row in rows]}, partly)


def _called(row: Coverage) -> str:
    return ":".join(part for part in (row.kind, row.language) if part) or "all"


def _probe(ids: Sequence[str], look: Callable[[Listed], Iterable[Finding]], needs: str = "") -> Probe:
    """A probe of ``look``, which runs if the list could be read and the part that it ``needs`` was given."""

    def unfit(subject: Listed) -> str | None:
        if needs and getattr(subject, needs) is None:
            return f"no --{_OPTIONS[needs]}"
        return _NO_LIST if subject.read.vocab is None and look is not _ids else None

    return Probe(tuple(ids), Level.STATIC, lambda subject: Seen(list(look(subject)), 1), unfit)


_OPTIONS = {"head": "head", "target": "tokenizer"}
PROBES = (
    _probe(_OF_LISTS, _ids),
    _probe(["vocab.order", "vocab.untrained-map"], _order),
    _probe(["vocab.head-rows"], _head, "head"),
    _probe(["vocab.config"], _config, "head"),
    _probe(["vocab.head-map"], _other_map, "head"),
    _probe(["vocab.specials"], _specials, "target"),
    _probe(["vocab.fingerprint"], _fingerprint, "target"),
    Probe(("vocab.coverage",), Level.DATA, _coverage, lambda subject: None if subject.covered else "no --corpus"),
)
