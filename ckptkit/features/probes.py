"""The run over a store of features: one pass over its samples, whose findings the probes give by level."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any, NamedTuple

from ..checks import WHOLE, Level, Probe, Sample, Seen
from ..checks.folding import fold
from ..errors import Finding, UserError, fail
from ..files.parallel import on_threads
from ..files.source import Source
from . import ckpt, deepspec, target, values
from .draft import Draft
from .sample import Dialect, rows
from .sample import Sample as Features
from .specs import about_dialect, ambiguous_width, finding, specs
from .target import Picked, Target


class Examined(NamedTuple):
    """What one sample came to: its findings, a digest of its token ids, the number of last states, some of them."""

    name: str
    sample: bool
    nbytes: int
    findings: list[Finding]
    tokens: bytes | None = None
    states: int = 0
    picked: Picked | None = None


class Looked(NamedTuple):
    """What the pass over all samples came to."""

    findings: list[Finding]
    samples: int
    states: int
    picked: list[Picked]


@dataclass(frozen=True)
class Captured:
    """What is checked: a folder of features, the draft that they are for, and perhaps its target.

    ``misfits`` is what makes that checkpoint another model than the draft's target.
    """

    source: Source
    draft: Draft
    target: Target | None = None
    misfits: tuple[Finding, ...] = ()
    max_len: int | None = None
    sample: Sample = WHOLE
    jobs: int = 0
    progress: Any = field(default=None, repr=False)

    @property
    def is_cache(self) -> bool:
        """Whether it is a DeepSpec target cache."""
        names = self.source.files
        return deepspec.MANIFEST in names and (deepspec.INDEX in names or not ckpt.sample_files(self.source))

    @cached_property
    def files(self) -> list[str]:
        """The files that hold samples. Raises UserError (``source.empty``) where there are none."""
        found = ckpt.sample_files(self.source)
        if not found and not self.is_cache:
            message = f"{self.source.uri} holds neither {ckpt.PLAIN} or {ckpt.PACKED} files nor a {deepspec.MANIFEST}"
            hint = "give the folder that a capture of the target has written"
            raise fail("source.empty", message, file=self.source.uri, hint=hint)
        return found

    @cached_property
    def looked(self) -> Looked:
        """What one pass over the samples shows: each is opened in turn, its values are looked at on several threads."""
        known: set[bytes] = set()
        samples, states, picked = 0, 0, list[Picked]()

        def findings() -> Iterator[Finding]:
            nonlocal samples, states
            for examined in _watched(self, on_threads(_tasks(self), self.jobs)):
                yield from examined.findings
                if examined.tokens is not None and examined.tokens in known:
                    text = f"{examined.name}: the tokens are those of an earlier sample"
                    yield Finding("features.repeated", text, file=examined.name, severity="warning")
                if examined.tokens is not None:
                    known.add(examined.tokens)
                samples += examined.sample
                states += examined.states
                picked.extend([examined.picked] if examined.picked else [])

        return Looked(list(fold(findings(), _place)), samples, states, picked)


def _place(finding: Finding) -> str:
    return ": ".join(part for part in (finding.file, finding.tensor) if part)


def _watched(captured: Captured, results: Iterator[Examined]) -> Iterator[Examined]:
    total = sum(info.size for info in captured.source.files.values()) // captured.sample.of
    if captured.progress is not None:
        captured.progress.start(0, total)
    for result in results:
        if captured.progress is not None:
            captured.progress.advance(result.nbytes)
        yield result
    if captured.progress is not None:
        captured.progress.done()


# --- the samples -------------------------------------------------------------------------------------------

_Opened = tuple[Features | list[Finding], int, int]  # the sample, its number, and how many there are


def _opened(captured: Captured) -> Iterator[_Opened]:
    """Each sample, or what keeps it from being looked at."""
    if captured.is_cache:
        yield from _of_cache(captured)
        return
    names = [name for name in captured.files if captured.sample.holds(name)]
    yield list(ckpt.duplicates(captured.files)), 0, len(names)
    for number, name in enumerate(names):
        try:
            yield ckpt.open_sample(captured.source, name), number, len(names)
        except UserError as error:
            if not all(found.id.startswith("features.") for found in error.findings):
                raise
            yield list(error.findings), number, len(names)


def _of_cache(captured: Captured) -> Iterator[_Opened]:
    try:
        store, found = deepspec.read_manifest(captured.source, captured.draft)
    except UserError as error:
        store, found = None, list(error.findings)
    yield found, 0, 0
    if store is None or (store.hidden, len(store.layers)) != (captured.draft.hidden, captured.draft.taps):
        return
    total = max(1, store.samples // captured.sample.of)
    for number, sample in enumerate(deepspec.samples(captured.source, store)):
        if isinstance(sample, Finding):
            yield [sample], number, total
        elif captured.sample.holds(f"{sample.name}:{sample.part}"):
            yield sample, number // captured.sample.of, total


def _tasks(captured: Captured) -> Iterator[Callable[[], Examined]]:
    """What looks at each sample; what concerns all of them comes with the first."""
    dialect: Dialect | None = None
    first = [found for found in (ambiguous_width(captured.draft),) if found]
    for opened, number, total in _opened(captured):
        if isinstance(opened, list):
            yield partial(Examined, "", False, 0, first + opened)
            first = []
            continue
        if opened.dialect is None:
            held = ", ".join(sorted([*opened.tensors, *opened.others])) or "nothing"
            first.append(finding("features.dialect", opened, f"no dialect has these keys: {held}"))
        elif dialect is None:
            dialect = opened.dialect
            first += [found for found in (about_dialect(dialect, captured.draft),) if found]
        elif dialect is not opened.dialect:
            text = f"has {opened.dialect.taps}, and samples before it {dialect.taps}: one dialect is read"
            first.append(finding("features.dialect", opened, text))
        yield partial(_examine, captured, opened, _picks(captured, number, total), first)
        first = []


def _picks(captured: Captured, number: int, total: int) -> int:
    """How many states of a sample the head is to be applied to."""
    if captured.target is None or captured.target.head is None or number % math.ceil(total / target.POSITIONS):
        return 0
    return max(1, target.POSITIONS // total)


def _examine(captured: Captured, sample: Features, picks: int, found: list[Finding]) -> Examined:
    """Look at all of one sample, and close it."""
    try:
        dialect = sample.dialect
        held = sum(stored.extent for stored in sample.tensors.values())
        nbytes = held if sample.part else captured.source.files[sample.name].size
        if dialect is None:
            return Examined(sample.name, True, nbytes, found)
        draft = captured.draft
        sound, more = specs(sample, dialect, draft, captured.max_len)
        found = found + more
        digest = None
        if sound.ids is not None:
            ids = rows(sound.ids, 0, sound.ids.shape[0]).long()
            found += values.tokens(sample, ids, draft)
            digest = blake2b(ids.numpy().tobytes(), digest_size=12).digest()
        if sound.mask is not None:
            mask = rows(sound.mask, 0, sound.mask.shape[0])
            found += values.masks(sample, mask, dialect, draft, captured.max_len)
        norm = captured.target.norm if captured.target else None
        seen, normed = values.Seen({}), list[float]()
        for taps, last in values.blocks(sound):
            values.look(seen, taps, last, draft)
            if norm is not None and last is not None:
                normed += target.rms(last, norm).tolist()
        found += values.states(sample, seen)
        found += target.pre_norm(sample, dialect.last, [value for value in normed if math.isfinite(value)])
        return Examined(sample.name, True, nbytes, found, digest, len(normed), target.pick(sound, picks))
    finally:
        sample.close()


# --- the probes --------------------------------------------------------------------------------------------


def _samples(ids: tuple[str, ...], captured: Captured) -> Seen:
    looked = captured.looked
    partly = {} if looked.samples else dict.fromkeys(ids, "no sample could be looked at")
    return Seen(looked.findings, looked.samples, partly=partly)


def _states(captured: Captured) -> Seen:
    looked = captured.looked
    partly = {} if looked.states else {"features.pre-norm": "no last state could be looked at"}
    return Seen(looked.findings, looked.states, partly=partly)


def _target(captured: Captured) -> Seen:
    return Seen(captured.misfits, 1)


def _next_token(captured: Captured) -> Seen:
    import torch

    assert captured.target is not None
    picked = captured.looked.picked
    states = sum(len(some.states) for some in picked)
    if states < target.FEWEST:
        reason = f"{states} states whose next token is trained on are too few to judge by"
        return Seen((), states, partly={"features.next-token": reason})
    together = Picked(torch.cat([some.states for some in picked]), torch.cat([some.tokens for some in picked]))
    shares = target.agreement(captured.target, together)
    figures = {"next_token": {"states": states, "agreement": shares[1]}}
    return Seen(list(target.misaligned(shares, states)), states, figures)


def _no_norm(captured: Captured) -> str | None:
    return captured.target.no_norm if captured.target else "no --target"


def _no_head(captured: Captured) -> str | None:
    return captured.target.no_head if captured.target else "no --target"


def _no_target(captured: Captured) -> str | None:
    return None if captured.target else "no --target"


_STORED = (
    "features.truncated", "features.unreadable", "features.unsafe", "features.manifest", "features.index",
    "features.duplicate", "features.dialect", "features.keys", "features.dtype", "features.shape", "features.length",
    "features.width", "features.width-ambiguous", "features.max-len",
)  # fmt: skip
_VALUES = (
    "features.tokens", "features.noise", "features.mask", "features.nonfinite", "features.dead-tap",
    "features.zero-states", "features.same-taps", "features.repeated",
)  # fmt: skip

PROBES = (
    Probe(_STORED, Level.STATIC, partial(_samples, _STORED)),
    Probe(_VALUES, Level.DATA, partial(_samples, _VALUES)),
    Probe(("features.target",), Level.NUMERIC, _target, _no_target),
    Probe(("features.pre-norm",), Level.NUMERIC, _states, _no_norm),
    Probe(("features.next-token",), Level.NUMERIC, _next_token, _no_head),
)
