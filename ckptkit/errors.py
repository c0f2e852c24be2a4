"""What can go wrong, as data: findings, and the one exception that carries them to the exit code.

A :class:`Finding` names a problem by a stable dotted id; tests and pipelines match on ids, people read
messages. :class:`UserError` carries one or more findings; :mod:`ckptkit.cli` is the only place that turns
it into an exit code and hands it to the console.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

OK, FOUND, USAGE, SOURCE, ACCESS, OUTPUT, ENGINE, BUG, INTERRUPTED = 0, 1, 2, 3, 4, 5, 6, 70, 130

# Exit code by the first part of a finding's id; ids not listed are policy: usage.
_EXIT_BY_FAMILY = {
    "source": SOURCE,
    "layout": SOURCE,
    "index": SOURCE,
    "config": SOURCE,
    "names": SOURCE,
    "shapes": SOURCE,
    "data": SOURCE,
    "draft": SOURCE,
    "files": SOURCE,
    "access": ACCESS,
    "output": OUTPUT,
    "engine": ENGINE,
}
# With several findings the gravest kind decides: a broken source before a blocked output before policy.
_PRECEDENCE = (SOURCE, ACCESS, OUTPUT, ENGINE, USAGE)


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem: a stable ``id``, what it is about, one line of text, and what to do about it.

    ``severity`` is ``error`` or ``warning``; ``hint`` is a command or an edit that can be made as it stands.
    """

    id: str
    message: str
    file: str | None = None
    tensor: str | None = None
    hint: str | None = None
    severity: str = "error"
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        return _EXIT_BY_FAMILY.get(self.id.partition(".")[0], USAGE)

    def as_dict(self) -> dict[str, Any]:
        """The finding as it stands in ``--json`` output."""
        keys = ("id", "severity", "file", "tensor", "message", "hint")
        return {key: getattr(self, key) for key in keys} | {"data": dict(self.data)}

    def as_warning(self) -> Finding:
        return replace(self, severity="warning")


class UserError(Exception):
    """A run that ends because of what it was given: findings in, one exit code out."""

    def __init__(self, findings: Finding | Iterable[Finding]):
        self.findings = (findings,) if isinstance(findings, Finding) else tuple(findings)
        if not self.findings:
            raise ValueError("a UserError needs at least one finding")
        super().__init__(self.findings[0].message)

    @property
    def exit_code(self) -> int:
        codes = {finding.exit_code for finding in self.findings}
        return next(code for code in _PRECEDENCE if code in codes)


class Interrupted(Exception):
    """Stopped by SIGINT or SIGTERM after the chunk in hand; what was finished is kept for ``--resume``."""


def unreadable(error: OSError, otherwise: str, file: str, hint: str | None = None) -> UserError:
    """To be raised where ``file`` cannot be read: ``access.denied`` if permissions forbid it, else ``otherwise``."""
    message = f"{error.filename or file} cannot be read: {error.strerror or error}"
    if isinstance(error, PermissionError):
        return fail("access.denied", message, file=file, hint="run as a user who may read it, or change its mode")
    return fail(otherwise, message, file=file, hint=hint)


def fail(id: str, message: str, **details: Any) -> UserError:
    """A :class:`UserError` of one finding, to be raised: ``raise fail("output.exists", …, hint=…)``."""
    return UserError(Finding(id, message, **details))
