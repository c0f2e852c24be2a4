"""A report as GitHub Actions annotations: workflow commands that a runner reads from the log.

``::error file=…,title=…::message``. Definition: GitHub's documentation of workflow commands, and the escaping of its
toolkit's ``core`` package: ``%``, CR and LF in messages, ``:`` and ``,`` in properties too.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator

from .model import Problem, Report

_MESSAGE = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
_PROPERTY = _MESSAGE | str.maketrans({":": "%3A", ",": "%2C"})


def github(report: Report) -> Iterator[str]:
    """A line for each finding, errors first, for each check whose findings are cut short, and one that sums up."""
    for problem in report.findings:
        hint = f"\nhint: {problem.hint}" if problem.hint else ""
        file = _path(report.target.uri, problem)
        yield _command(problem.severity, problem.text + hint, file=file, title=problem.id)
    for check in report.checks:
        if check.truncated:
            shown = sum(problem.id == check.id for problem in report.findings)
            yield _command("notice", f"{check.findings - shown:,} more findings are left out", title=check.id)
    yield _command("notice", report.verdict, file=report.target.uri, title=f"ckptkit {report.command}")


def _path(uri: str, problem: Problem) -> str:
    """The file's path as the run named it; a checkpoint may be that file itself."""
    if problem.file is None or problem.file == uri or posixpath.basename(uri) == problem.file:
        return uri
    return posixpath.join(uri, problem.file)


def _command(name: str, message: str, **properties: str) -> str:
    escaped = ",".join(f"{key}={value.translate(_PROPERTY)}" for key, value in properties.items())
    return f"::{name} {escaped}::{message.translate(_MESSAGE)}"
