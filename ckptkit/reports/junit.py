"""A report as JUnit XML: a suite for each level, a case for each check, so that a pipeline shows what failed.

A case is a check and not a tensor: a checkpoint may have 230,000 of those. Dialect: what Jenkins, GitLab and GitHub's
test reporters read in common (``testsuites/testsuite/testcase`` with ``failure``, ``skipped``, ``properties``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby
from xml.etree import ElementTree

from .model import Check, Problem, Report

SUBJECTS_SHOWN = 20

# What XML 1.0 has no way to say, not even escaped.
_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(report: Report) -> str:
    """The XML document, with its declaration."""
    root = _element(None, "testsuites", name=f"ckptkit {report.command}", time=f"{report.seconds:.3f}")
    for level, checks in groupby(sorted(report.checks, key=lambda check: LEVELS.index(check.level)), lambda c: c.level):
        _suite(root, report, level, list(checks))
    ElementTree.indent(root, " ")
    return ElementTree.tostring(root, "unicode", xml_declaration=True) + "\n"
