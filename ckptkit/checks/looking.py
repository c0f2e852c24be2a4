"""One pass over the tensors' bytes: digests are compared, and what is odd in the values is counted, as they are read."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple, Protocol

import xxhash

from ..errors import Finding
from ..files.digests import TENSORS, Digest, Recorded, ShardDigests, recorded
from ..files.parallel import on_threads
from ..files.reading import Span, parts, spans
from ..plan import Ref
from . import Subject
from .roles import Role, roles
from .tally import Tally, add, counter
from .values import judge
from .watching import watched

Judge = Callable[[Ref, Role, Tally], list[Finding]]

HEADER = "header"  # in place of an algorithm: xxh3-128 of the header alone


class SpanSeen(NamedTuple):
    """What was seen of some bytes of a file.

    ``tensors`` were read. ``compared`` counts digests that were compared: of tensors, which are ``broken`` where it is
    not the recorded one, and of the header or the whole file, which are ``unlike``. ``findings`` are those of the
    values of tensors that are not broken.
    """

    span: Span
    tensors: int
    compared: int
    broken: list[Ref]
    unlike: list[Digest]
    findings: list[Finding]


class Looked(NamedTuple):
    """What was seen, shards in order and the files beside them, and what is recorded of them."""

    spans: list[SpanSeen]
    recorded: Recorded


class _Means(NamedTuple):
    """What every thread needs to know."""

    subject: Subject
    recorded: Recorded
    role_of: Callable[[Ref], Role]
    judge: Judge


def look(subject: Subject) -> Looked:
    """Read every tensor of the sample once, and whole the files of the sample whose own digest is recorded."""
    known = recorded(subject.checkpoint.source, subject.manifest)
    means = _Means(subject, known, roles(subject), judge(subject))
    work = list(_spans(subject, known))
    tasks = (partial(_see, span, means) for span in work)
    seen = watched(subject, on_threads(tasks, subject.options.get("jobs", 0)), [span.nbytes for span in work])
    return Looked(list(seen), known)


def _spans(subject: Subject, known: Recorded) -> Iterator[Span]:
    checkpoint, sample = subject.checkpoint, subject.sample
    covered = {name for name, shard in known.shards.items() if shard.header and name in checkpoint.shards}
    files = {name: digest for name, digest in known.files.items() if name not in covered}
    whole = {name: digest.algorithm for name, digest in files.items() if sample.holds(name)}
    yield from spans(checkpoint.shards, lambda ref: ref.file in whole or sample.holds(ref.name), whole)
    for name in sorted(whole.keys() - checkpoint.shards.keys()):
        info = checkpoint.source.files.get(name)
        if info is not None:
            yield Span(name, 0, info.size, (), whole[name])


_NONE = ShardDigests(None, {})


def _see(span: Span, means: _Means) -> SpanSeen:
    known = means.recorded.shards.get(span.file, _NONE)
    hashers = list(_expected(span, means.recorded))
    broken: list[Ref] = []
    findings: list[Finding] = []
    for ref, group in groupby(parts(means.subject.checkpoint.source, span), attrgetter("ref")):
        views = _fed((part.view for part in group), [hasher for hasher, digest in hashers if _covers(digest, ref)])
        if ref is None:
            deque(views, maxlen=0)
        elif (odd := _tensor(ref, views, known.tensors.get(ref.name), means)) is None:
            broken.append(ref)
        else:
            findings += odd
    compared = len(hashers) + sum(ref.name in known.tensors for ref in span.tensors)
    unlike = [digest for hasher, digest in hashers if hasher.hexdigest() != digest.value]
    return SpanSeen(span, len(span.tensors), compared, broken, unlike, findings)


def _expected(span: Span, known: Recorded) -> Iterator[tuple[_Hasher, Digest]]:
    """The digests that the bytes of a span should have: of the whole file, or of the header at its beginning."""
    if span.digest is not None:
        yield hashlib.sha256() if span.digest == "sha256" else xxhash.xxh3_128(), known.files[span.file]
    shard = known.shards.get(span.file, _NONE)
    if span.start == 0 and shard.header is not None:
        yield xxhash.xxh3_128(), Digest(HEADER, shard.header, TENSORS)


def _covers(digest: Digest, ref: Ref | None) -> bool:
    return ref is None or digest.algorithm != HEADER


def _tensor(ref: Ref, views: Iterable[memoryview], expected: str | None, means: _Means) -> list[Finding] | None:
    """What is odd about a tensor's values; None if its digest is not the ``expected`` one."""
    role = means.role_of(ref)
    count = counter(ref, role)
    own = xxhash.xxh3_128()
    tally = Tally()
    for view in views if expected is None else _fed(views, [own]):
        if count is not None:
            tally = add(tally, count(view))
    if expected is not None and own.hexdigest() != expected:
        return None
    return means.judge(ref, role, tally) if count is not None else []


class _Hasher(Protocol):
    def update(self, data: memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


def _fed(views: Iterable[memoryview], hashers: Iterable[_Hasher]) -> Iterator[memoryview]:
    """The views, each given to the hashers on its way."""
    for view in views:
        for hasher in hashers:
            hasher.update(view)
        yield view
