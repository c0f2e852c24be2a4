"""Digests: are the bytes still those that were recorded?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import Finding
from ..files.checkpoint import SUFFIX
from ..files.digests import Recorded
from ..files.header import Header
from . import Level, Page, Probe, Seen, Subject
from .folding import fold

if TYPE_CHECKING:
    from .looking import Looked, SpanSeen

ID = "data.digest"
UNRECORDED = "no digest is recorded"  # how the reason begins why it could not run


def _digests(subject: Subject) -> Seen:
    looked = subject.looked
    findings = [*_unreadable(looked.recorded)]
    findings += fold(finding for seen in looked.spans for finding in _of_span(seen, subject))
    findings += fold(_gone(subject, looked.recorded)) if subject.sample.of == 1 else ()
    checked = sum(seen.compared for seen in looked.spans)
    reason = _not_run(subject, looked)
    return Seen(findings, checked, partly={ID: reason} if reason else {})


def _unreadable(known: Recorded) -> Iterator[Finding]:
    """A record that cannot be read proves nothing, and may have been damaged with what it is of."""
    for finding in known.unreadable:
        yield replace(finding, id=ID, message=f"{finding.message}: nothing can be compared with it")


def _of_span(seen: SpanSeen, subject: Subject) -> Iterator[Finding]:
    """A finding for each tensor that is not as recorded; for the file only where no tensor explains it.

    What is odd about values there is said with it: it is no second fault.
    """
    file = seen.span.file
    again = f"fetch or make {file} again; if the change is meant: ckptkit hash {_uri(subject)} --overwrite"
    for ref in seen.broken:
        message = f"{ref.name} in {file} is not what it was when its digest was recorded"
        yield Finding(ID, message, file=file, tensor=ref.name, hint=f"{again} --per-tensor")
    for digest in seen.unlike if not seen.broken else ():
        message = f"{file} does not have the {digest.algorithm} digest that is recorded in {digest.where}"
        severity = "error" if file.endswith(SUFFIX) else "warning"
        tensor = seen.findings[0].tensor if seen.findings else None
        text = "; ".join([message, *(odd.message for odd in seen.findings[:1])])
        yield Finding(ID, text, file, tensor, again, severity, {"values": [odd.id for odd in seen.findings]})


def _gone(subject: Subject, known: Recorded) -> Iterator[Finding]:
    """What has a recorded digest and is not there."""
    checkpoint = subject.checkpoint
    for file, shard in known.shards.items():
        header = checkpoint.shards.get(file)
        if header is not None:
            for name in shard.tensors.keys() - {entry.name for entry in header.entries}:
                yield Finding(ID, f"{name} was in {file} when its digest was recorded", file=file, tensor=name)
    for file in known.files.keys() - checkpoint.source.files.keys():
        message = f"{file} is recorded in {known.files[file].where}, and there is no such file"
        yield Finding(ID, message, file=file, severity="warning")


def _not_run(subject: Subject, looked: Looked) -> str | None:
    """Which shards have no digest that could be compared."""
    known = looked.recorded
    shards = subject.checkpoint.shards
    bare = [name for name, header in shards.items() if name not in known.files and not _covers(known, name, header)]
    if not bare:
        return None
    return f"{UNRECORDED} of {len(bare):,} of {len(shards):,} shards ({bare[0]}): ckptkit hash {_uri(subject)}"


def _covers(known: Recorded, shard: str, header: Header) -> bool:
    names = known.shards[shard].tensors if shard in known.shards else {}
    return all(entry.name in names for entry in header.entries if entry.nbytes)


def _uri(subject: Subject) -> str:
    return subject.checkpoint.source.uri


PROBES = (Probe((ID,), Level.DATA, _digests),)

PAGES = (
    Page(
        ID,
        Level.DATA,
        "error",
        "Bytes are not those whose digest was recorded",
        "Some bytes have changed since their digest was taken: bit rot, an interrupted copy, a disk or a network that "
        "lies, or an edit by hand. Safetensors has no checksum, so every engine loads such a file without a word and "
        "computes with what it finds. Compared are the tensors' digests in ckptkit.digests.json and ckptkit.json, "
        "and the whole files' in SHA256SUMS, the Hub's cache and beside its downloads. A tensor's finding names the "
        "tensor; a file's is given where no tensor explains it. What is not as recorded gives no finding about its "
        "values besides. A change of a file beside the shards is a warning. "
        "A record that cannot be read is an error. A shard of which no digest is recorded is skipped, never passed: that "
        "is no failure unless this check is asked for by name, or with --strict.",
        "One bit of model.layers.3.mlp.up_proj.weight flipped on disk: the model still loads and answers.",
        "Fetch the file again (hf download … --force-download) or make it again. If the change is meant, record it:\n"
        "ckptkit hash ./model --per-tensor --overwrite",
    ),
)
