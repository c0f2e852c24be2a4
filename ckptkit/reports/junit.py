"""A report as JUnit XML: a suite for each level, a case for each check, so that a pipeline shows what failed.

A case is a check and not a tensor: a checkpoint may have 230,000 of those. Dialect: what Jenkins, GitLab and GitHub's
test reporters read in common (``testsuites/testsuite/testcase`` with ``failure``, ``skipped``, ``properties``).
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

from ..console import fmt_count
from . import legal
from .model import Check, Report, by_level

SUBJECTS_SHOWN = 20


def junit(report: Report) -> str:
    """The XML document. Checks that came out ``warn`` pass; what they found is their output."""
    root = _add(None, "testsuites", name=f"ckptkit {report.command}", time=f"{report.seconds:.3f}")
    for level, checks in by_level(report.checks):
        results = [check.result for check in checks]
        counts = {
            "tests": len(checks),
            "failures": results.count("fail"),
            "skipped": results.count("skip"),
            "errors": 0,
        }
        suite = _add(root, "testsuite", name=f"ckptkit.{level}", timestamp=report.started.isoformat(), **counts)
        _properties(suite, report)
        for check in checks:
            _case(suite, check, _subjects(check, report))
    ElementTree.indent(root, " ")
    document: bytes = ElementTree.tostring(root, "utf-8", xml_declaration=True)
    return document.decode() + "\n"


def _properties(suite: ElementTree.Element, report: Report) -> None:
    against = report.against.uri if report.against else None
    named = {
        "target": report.target.uri,
        "revision": report.target.revision,
        "manifest_sha256": report.target.manifest_sha256,
        "against": against,
        "sample": report.sample,
        "allowed": ",".join(report.allowed) or None,
        "version": report.tool.version,
    }
    properties = _add(suite, "properties")
    for name, value in named.items():
        if value is not None:
            _add(properties, "property", name=name, value=value)


def _case(suite: ElementTree.Element, check: Check, subjects: Sequence[str]) -> None:
    case = _add(suite, "testcase", classname=f"ckptkit.{check.level}", name=check.id, time=f"{check.seconds:.3f}")
    found = fmt_count(check.findings, "finding")
    text = "\n".join(subjects)
    if check.result == "fail":
        _add(case, "failure", text, message=found, type=check.id)
    elif check.result == "skip":
        _add(case, "skipped", message=check.reason or "not run")
    elif check.result == "warn":
        _add(case, "system-out", f"{found}\n{text}")


def _subjects(check: Check, report: Report) -> list[str]:
    """A line for each of the first findings of a check, and one that counts the rest."""
    lines = [f"{found.severity}: {found.text}" for found in report.findings if found.id == check.id][:SUBJECTS_SHOWN]
    more = check.findings - len(lines)
    return [*lines, f"… and {more:,} more"] if more > 0 else lines


def _add(
    parent: ElementTree.Element | None, tag: str, text: str | None = None, /, **attributes: object
) -> ElementTree.Element:
    given = {name: legal(str(value)) for name, value in attributes.items()}
    element = ElementTree.Element(tag, given) if parent is None else ElementTree.SubElement(parent, tag, given)
    element.text = None if text is None else legal(text)
    return element
