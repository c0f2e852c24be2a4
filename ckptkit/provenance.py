"""A result's ``ckptkit.json`` as an in-toto statement: which bytes were made, by what, of what. No I/O.

Form: in-toto Statement v1 (in-toto/attestation, ``spec/v1/statement.md``) with SLSA's provenance predicate v1
(``slsa.dev/spec/v1.0/provenance``). It is not signed here: that is for a tool of its own, which keeps it in an envelope;
envelopes (DSSE, and a Sigstore bundle around one) are opened, their signatures are not looked at.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from .errors import Finding, UserError, fail
from .model_card import CARD

TYPE = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD = "urn:ckptkit:plan:1"
_PAYLOAD = "application/vnd.in-toto+json"
# Of the manifest, what the result's bytes follow from.
_DECIDING = ("command", "plan", "settings")


class Material(NamedTuple):
    """A file of a source: its name there, its size in bytes and its sha256, where that is known."""

    name: str
    size: int
    sha256: str | None


class Statement(NamedTuple):
    """What a statement says: sha256 of each file of the result, the manifest's deciding fields, the sources' files."""

    subjects: Mapping[str, str]
    made: Mapping[str, Any]
    materials: tuple[Material, ...]


def statement(manifest: Mapping[str, Any], sums: Mapping[str, str], materials: Mapping[str, Material]) -> str:
    """The text of the statement. ``sums``: sha256 by file of the result; ``materials``: what is known of the source's."""
    source = manifest["source"]
    commit = {"gitCommit": source["revision"]} if isinstance(source.get("revision"), str) else {}
    started = datetime.fromisoformat(manifest["started"])
    finished = started + timedelta(seconds=manifest["seconds"])
    content = {
        "_type": TYPE,
        "subject": [{"name": name, "digest": {"sha256": value}} for name, value in sorted(sums.items())],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD,
                "externalParameters": {key: manifest[key] for key in _DECIDING},
                "internalParameters": {"allowed": manifest.get("allowed", [])},
                "resolvedDependencies": [
                    {"name": "source", "uri": source["uri"], **({"digest": commit} if commit else {})},
                    *(_material(item) for _, item in sorted(materials.items())),
                ],
            },
            "runDetails": {
                "builder": {"id": "urn:ckptkit", "version": {"ckptkit": manifest["tool"]["version"]}},
                "metadata": {"startedOn": _time(started), "finishedOn": _time(finished)},
            },
        },
    }
    return json.dumps(content, indent=1) + "\n"


def _material(item: Material) -> dict[str, Any]:
    digest = {"digest": {"sha256": item.sha256}} if item.sha256 else {}
    return {"name": item.name, **digest, "annotations": {"size": item.size}}


def _time(moment: datetime) -> str:
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")


def parse(text: str, file: str) -> Statement:
    """What a statement says, bare or in an envelope. Raises UserError (``provenance.statement``)."""
    try:
        content = _opened(json.loads(text))
        if content["_type"] != TYPE or content["predicateType"] != PREDICATE:
            raise ValueError(f"{content['_type']}, {content['predicateType']}")
        built = content["predicate"]["buildDefinition"]
        if built["buildType"] != BUILD:
            raise ValueError(f"buildType {built['buildType']}")
        subjects = {str(item["name"]): str(item["digest"]["sha256"]) for item in content["subject"]}
        found = built["resolvedDependencies"]
        materials = tuple(
            Material(str(item["name"]), int(item["annotations"]["size"]), (item.get("digest") or {}).get("sha256"))
            for item in found
            if "annotations" in item
        )
        return Statement(subjects, dict(built["externalParameters"]), materials)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, binascii.Error) as error:
        raise _no_statement(file, f"{type(error).__name__}: {error}") from None


def _opened(content: Any) -> Any:
    """The payload of an envelope, or what is none."""
    envelope = content.get("dsseEnvelope", content)
    if "payload" not in envelope:
        return content
    if envelope.get("payloadType") != _PAYLOAD:
        raise ValueError(f"payloadType {envelope.get('payloadType')}")
    return json.loads(base64.b64decode(envelope["payload"], validate=True))


def _no_statement(file: str, why: str) -> UserError:
    message = f"{file} is no statement that `ckptkit hash --statement` wrote ({why})"
    return fail("provenance.statement", message, file=file, hint="ckptkit hash OUT --statement FILE writes one")


def contradictions(
    said: Statement, manifest: Mapping[str, Any] | None, found: Mapping[str, str], others: Mapping[str, int]
) -> Iterator[Finding]:
    """``provenance.subject`` and ``provenance.plan``: what a result is other than its statement says.

    ``found``: sha256 of the files that the statement names and that are there; ``others``: files that it does not name.
    """
    for name, digest in said.subjects.items():
        if found.get(name) != digest:
            what = "has other bytes than the statement says" if name in found else "is not there"
            severity = "warning" if name == CARD else "error"  # a card is written on, by `ckptkit push` for one
            yield Finding("provenance.subject", f"{name} {what}", file=name, severity=severity)
    for name in sorted(others):
        message = f"{name} is no file that the statement names"
        severity = "error" if name.endswith(".safetensors") else "warning"
        yield Finding("provenance.subject", message, file=name, severity=severity)
    for key in _DECIDING:
        if (manifest or {}).get(key) != said.made.get(key):
            yield Finding("provenance.plan", f"ckptkit.json has another {key} than the statement")


def other_sources(said: Statement, sizes: Mapping[str, int], found: Mapping[str, str]) -> Iterator[Finding]:
    """``provenance.source``: what a source has otherwise than the statement says; by size, and sha256 where it is said."""
    for item in (item for item in said.materials if ":" not in item.name):  # those with a key are of other sources
        if item.name not in sizes:
            yield Finding("provenance.source", f"{item.name} is not in the source", file=item.name)
        elif sizes[item.name] != item.size or (item.sha256 and found.get(item.name) != item.sha256):
            yield Finding("provenance.source", f"{item.name} is another than the result was made of", file=item.name)
