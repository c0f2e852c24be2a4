"""Provenance: is a result what a statement says of it, and its source the one that is named there?"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from ..errors import unreadable
from ..files.digests import SUMS, TENSORS
from ..files.hashing import gather, take
from ..files.source import Source
from ..provenance import Statement, contradictions, other_sources, parse
from . import Level, Page, Probe, Seen, Subject

UNASKED = "no --provenance"


def read(path: str) -> Statement:
    """The statement in a file. Raises UserError (``source.missing``, ``access.denied``, ``provenance.statement``)."""
    try:
        text = Path(path).read_text("utf-8", "surrogateescape")
    except OSError as error:
        raise unreadable(error, "source.missing", path) from None
    return parse(text, path)


def _result(subject: Subject) -> Seen:
    path = subject.options["provenance"]
    said, source = read(path), subject.checkpoint.source
    found = _sums(source, said.subjects.keys() & source.files.keys(), subject)
    beside = {SUMS, TENSORS}
    others = {
        name: info.size
        for name, info in source.files.items()
        if name not in said.subjects and name not in beside and info.path.resolve() != Path(path).resolve()
    }
    return Seen(contradictions(said, subject.manifest, found, others), len(said.subjects))


def _source(subject: Subject) -> Seen:
    said, against = read(subject.options["provenance"]), subject.against
    assert against is not None
    known = [item.name for item in said.materials if item.sha256 and item.name in against.source.files]
    sizes = {name: info.size for name, info in against.source.files.items()}
    return Seen(other_sources(said, sizes, _sums(against.source, known, subject)), len(said.materials))


def _sums(source: Source, names: Collection[str], subject: Subject) -> Mapping[str, str]:
    """The sha256 of files, by name."""
    return gather(take(source, sorted(names), {}, jobs=subject.options.get("jobs", 0)), ())[0]


def _unfit(subject: Subject) -> str | None:
    return None if subject.options.get("provenance") else UNASKED


def _unfit_source(subject: Subject) -> str | None:
    return _unfit(subject) or (None if subject.against else "no source")


PROBES = (
    Probe(("provenance.subject", "provenance.plan"), Level.DATA, _result, _unfit),
    Probe(("provenance.source",), Level.DATA, _source, _unfit_source),
)

PAGES = (
    Page(
        "provenance.subject",
        Level.DATA,
        "error",
        "A file is not what the statement of provenance says",
        "The statement that `ckptkit hash --statement` wrote holds the sha256 of every file of the result. One of them has "
        "other bytes now, or is not there, or there are files that it does not name: weights are an error then, others a "
        "warning, and so is README.md, which `ckptkit push` adds to. Statements in envelopes (DSSE, Sigstore bundles) are "
        "opened; whether the envelope's signature is good is for the tool to say that signed it.",
        "ckptkit verify ./model-w8 --provenance model-w8.intoto.json",
        "Fetch or make the result again; if the change is meant, write a new statement.",
    ),
    Page(
        "provenance.plan",
        Level.DATA,
        "error",
        "ckptkit.json and the statement of provenance differ",
        "Command, plan digest and settings of the statement are not those of the result's ckptkit.json: the statement is "
        "another result's.",
        "a statement that was kept from an earlier run with another recipe",
        "ckptkit hash OUT --statement FILE writes the statement of this result.",
    ),
    Page(
        "provenance.source",
        Level.DATA,
        "error",
        "The source is not the one that the statement of provenance names",
        "With --against, the files of the source are compared with those that the statement says the result was made of: by "
        "size, and by sha256 where it says one.",
        "ckptkit verify ./model-w8 --provenance model-w8.intoto.json --against ./model",
        "Compare with the revision of the source that the result was made of.",
    ),
)
