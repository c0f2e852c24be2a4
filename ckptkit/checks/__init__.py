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
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from importlib import import_module
from typing import Any, NamedTuple

from ..checkpoint import Checkpoint
from ..errors import Finding
from ..stored import Quantization, declared_quantization
from ..survey import Survey, survey


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


WHOLE = Sample()


@dataclass(frozen=True)
class Subject:
    """What is checked, and with what beside it.

    ``found`` are the findings of reading the checkpoint (:func:`ckptkit.checkpoint.scan`): probes of container and
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


class Seen(NamedTuple):
    """What a probe found, how many things it looked at, and figures for the report (``numeric``, ``stats``)."""

    findings: Iterable[Finding]
    checked: int
    figures: Mapping[str, Any] = {}


class Probe(NamedTuple):
    """One look at a subject. ``unfit`` gives the reason why it cannot run on a subject, or None."""

    ids: tuple[str, ...]
    level: Level
    run: Callable[[Subject], Seen]
    unfit: Callable[[Subject], str | None] = lambda subject: None


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
    Level.STATIC: ("container", "index", "config", "quantization", "shapes", "names", "files", "lint"),
    Level.DATA: ("digests", "values"),
    Level.NUMERIC: ("numeric", "heads"),
}


def probes(level: Level) -> Iterator[Probe]:
    """The probes of all levels up to ``level``, cheap ones first."""
    for at, homes in _HOMES.items():
        if at <= level:
            for home in homes:
                yield from import_module(f".{home}", __name__).PROBES


def pages() -> dict[str, Page]:
    """Every check's page by id, sorted."""
    found = [page for homes in _HOMES.values() for home in homes for page in import_module(f".{home}", __name__).PAGES]
    return {page.id: page for page in sorted(found)}


def run(subject: Subject, level: Level, wanted: Callable[[str], bool] = lambda id: True) -> Outcome:
    """Run every probe up to ``level`` that has an id that is ``wanted``; findings of other ids are dropped."""
    outcome = Outcome([], [], {})
    for probe in probes(level):
        ids = [id for id in probe.ids if wanted(id)]
        if not ids:
            continue
        began = time.monotonic()
        reason = probe.unfit(subject)
        seen = Seen((), 0) if reason else probe.run(subject)
        findings = [finding for finding in seen.findings if finding.id in ids]
        seconds = round(time.monotonic() - began, 3)
        outcome.findings.extend(findings)
        outcome.figures.update(seen.figures)
        outcome.results.extend(_result(id, probe, findings, seen.checked, seconds, reason) for id in ids)
    return outcome


def _result(id: str, probe: Probe, findings: list[Finding], checked: int, seconds: float, reason: str | None) -> Result:
    mine = [finding for finding in findings if finding.id == id]
    worst = "fail" if any(finding.severity == "error" for finding in mine) else "warn" if mine else "ok"
    return Result(id, probe.level, "skip" if reason else worst, checked, len(mine), seconds, reason)
