"""Checks: what can be wrong with a checkpoint, level by level, each with a stable id and a page that explains it.

A *probe* is one function that looks at a :class:`Subject` and gives findings of the ids it names; a *page* explains an
id. A new check is a probe (or an id more in one) and a page, both in the module of its kind. Levels are cumulative
and cheap first:

==========  ====================================================================================
static      headers, index, config; no tensor bytes, no torch
data        every byte or a sample: digests, NaN, scales, codes, repeated rows
numeric     against a source: dequantize and compare, within the bound of format and arithmetic
serve       a real engine
==========  ====================================================================================

A probe that cannot run says why (:attr:`Probe.unfit`): what was asked for and not run is no pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from fnmatch import fnmatchcase
from functools import cached_property
from importlib import import_module
from itertools import chain
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

from ..errors import Finding, fail
from ..files.checkpoint import Checkpoint
from ..inspecting.survey import Survey, survey
from ..naming.patterns import nearest
from ..stored import Quantization, declared_quantization
from .sidecars import Sidecars

if TYPE_CHECKING:
    from .looking import Looked
    from .matching import Matched


class Level(IntEnum):
    """How deep a run looks; each level includes those before it."""

    STATIC = 1
    DATA = 2
    NUMERIC = 3
    SERVE = 4

    @property
    def label(self) -> str:
        return self.name.lower()


class Page(NamedTuple):
    """What an id means, for ``ckptkit checks ID`` and docs/checks.md. Plain text; ``example`` and ``repair`` may span lines.

    ``severity`` is the one its findings usually have.
    """

    id: str
    level: Level
    severity: str
    title: str
    meaning: str
    example: str
    repair: str


class Sample(NamedTuple):
    """The part of the data that is looked at: share ``part``/``of`` of the pieces, so that ``n/t`` for all n is everything.

    ``fraction`` is the share; a piece (some rows of a tensor) belongs to it by a hash of its name and place.
    """

    part: int = 1
    of: int = 1

    @property
    def text(self) -> str | None:
        return None if self.of == 1 else f"{self.part}/{self.of}"

    def holds(self, name: str) -> bool:
        """Whether the piece of that name belongs to the sample."""
        return self.of == 1 or crc32(name.encode("utf-8", "surrogatepass")) % self.of == self.part - 1


WHOLE = Sample()


# Findings of the index that leave no doubt about what there is.
_ABOUT_ONE_TENSOR = frozenset({"index.missing-tensor", "index.extra-tensor", "index.duplicate"})


@dataclass(frozen=True)
class Subject:
    """What is checked, and with what beside it.

    ``found`` are the findings of reading the checkpoint (:func:`ckptkit.files.checkpoint.scan`): probes of container and
    index pass them on. ``options`` holds what a level's command line adds (``engine``, ``speculative``, ``oracle`` …).
    """

    checkpoint: Checkpoint
    found: tuple[Finding, ...] = ()
    against: Checkpoint | None = None
    recipe: Any = None
    sample: Sample = WHOLE
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Mapping[str, Any]:
        """The checkpoint's config.json; empty where it has none that can be read."""
        return self.checkpoint.config or {}

    @cached_property
    def unknown(self) -> str | None:
        """Why it is not known which tensors the checkpoint has, if so: what makes probes of names and shapes unfit."""
        broken = (f for f in self.found if f.severity == "error" and f.id.startswith(("layout.", "index.")))
        from .index import files_lacking

        id = next((finding.id for finding in broken if finding.id not in _ABOUT_ONE_TENSOR), None)
        id = id or ("index.shard-count" if files_lacking(self) else None)
        return id and f"not all tensors are known ({id})"

    @cached_property
    def quantization(self) -> Quantization | None:
        """What the config declares."""
        return declared_quantization(self.config)[0]

    @cached_property
    def survey(self) -> Survey:
        """The checkpoint's tensors counted by likeness: one pass for all probes."""
        return survey(list(self.checkpoint.tensors.values()), self.config, self.quantization)

    @cached_property
    def manifest(self) -> Mapping[str, Any] | None:
        """The checkpoint's ckptkit.json, if it has one that can be read."""
        from ..manifest import read_manifest

        return read_manifest(self.checkpoint.source)

    @cached_property
    def sidecars(self) -> Sidecars:
        """The JSON files beside the shards, each parsed once."""
        return Sidecars(self.checkpoint.source)

    @cached_property
    def looked(self) -> Looked:
        """What one pass over the tensors' bytes shows, digests and values together: bytes are read once."""
        from .looking import look

        return look(self)

    @cached_property
    def matched(self) -> Matched:
        """Every tensor with the tensor of the source that it was made of; only with ``against``."""
        from .matching import match

        return match(self)


class Seen(NamedTuple):
    """What a probe found, how many things it looked at, and figures for the report (``numeric``, ``stats``).

    ``partly`` says of an id why some of it could not be looked at: without a finding it is skipped then, not passed.
    """

    findings: Iterable[Finding]
    checked: int
    figures: Mapping[str, Any] = {}
    partly: Mapping[str, str] = {}


class Probe(NamedTuple):
    """One look at a subject, a :class:`Subject` for those of ``verify``.

    ``unfit`` gives the reason why it cannot run on a subject, or None.
    """

    ids: tuple[str, ...]
    level: Level
    run: Callable[[Any], Seen]
    unfit: Callable[[Any], str | None] = lambda subject: None


class Result(NamedTuple):
    """How one check id came out: ``ok``, ``warn``, ``fail``, or ``skip`` with the reason."""

    id: str
    level: Level
    result: str
    checked: int
    findings: int
    seconds: float
    reason: str | None = None


class Outcome(NamedTuple):
    """A whole run: results by id, all findings, figures by name."""

    results: list[Result]
    findings: list[Finding]
    figures: dict[str, Any]


# The modules that hold probes (PROBES) and pages (PAGES), by level; imported when they are needed.
_HOMES = {
    Level.STATIC: (
        "container", "index", "config", "vocab_order", "quantization", "shapes", "names", "files", "settings", "recipe",
        "lint",
    ),
    Level.DATA: ("digests", "values", "tied", "provenance"),
    Level.NUMERIC: ("numeric", "heads", ".heads.pages"),
    Level.SERVE: (".serving.pages",),
}  # fmt: skip


def probes(level: Level) -> Iterator[Probe]:
    """The probes of all levels up to ``level``, cheap ones first."""
    return chain.from_iterable(module.PROBES for module in _modules(level))


def _modules(level: Level) -> Iterator[ModuleType]:
    for at, homes in _HOMES.items():
        if at <= level:
            yield from (import_module(f".{home}", __name__) for home in homes)


def pages() -> dict[str, Page]:
    """The page of every check of a checkpoint by id, sorted."""
    return {page.id: page for page in sorted(_pages(Level.SERVE))}


def _pages(level: Level) -> Iterator[Page]:
    return chain.from_iterable(module.PAGES for module in _modules(level))


def pages_of(text: str, known: Mapping[str, Page] | None = None) -> dict[str, Page]:
    """The pages (those that are ``known``, or else of ``verify``) that an id, a family (``index``) or a glob names.

    Raises UserError (``usage.pattern-unmatched``) where there is none.
    """
    known = pages() if known is None else known
    found = {id: page for id, page in known.items() if id.partition(".")[0] == text or fnmatchcase(id, text)}
    if not found:
        like = nearest(text, known)
        hint = f"ckptkit checks {like}" if like else "ckptkit checks"
        raise fail("usage.pattern-unmatched", f"no check is called {text!r}", hint=hint)
    return found


def run(subject: Subject, level: Level, wanted: Callable[[str], bool] = lambda id: True) -> Outcome:
    """Run every probe up to ``level`` that has an id that is ``wanted``; findings of other ids are dropped."""
    return run_probes(subject, probes(level), _pages(level), wanted)


def run_probes(
    subject: Any, probes: Iterable[Probe], pages: Iterable[Page], wanted: Callable[[str], bool] = lambda id: True
) -> Outcome:
    """Run probes on what they are for. A finding without a hint gets the repair of its page."""
    outcome = Outcome([], [], {})
    repairs = {page.id: page.repair.replace("\n", " ") for page in pages}
    for probe in probes:
        ids = [id for id in probe.ids if wanted(id)]
        if not ids:
            continue
        began = time.monotonic()
        reason = probe.unfit(subject)
        seen = Seen((), 0, partly=dict.fromkeys(ids, reason)) if reason else probe.run(subject)
        findings = [f if f.hint else replace(f, hint=repairs[f.id]) for f in seen.findings if f.id in ids]
        seconds = round(time.monotonic() - began, 3)
        outcome.findings.extend(findings)
        outcome.figures.update(seen.figures)
        outcome.results.extend(_result(id, probe, findings, seen, seconds) for id in ids)
    return outcome


def _result(id: str, probe: Probe, findings: list[Finding], seen: Seen, seconds: float) -> Result:
    mine = [finding for finding in findings if finding.id == id]
    reason = seen.partly.get(id)
    worst = "fail" if any(finding.severity == "error" for finding in mine) else "warn" if mine else "ok"
    result = "skip" if reason and not mine else worst
    return Result(id, probe.level, result, seen.checked, len(mine), seconds, reason)
