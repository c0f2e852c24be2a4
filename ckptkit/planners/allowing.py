"""``--allow``: which refusals of a planner are policy, and can be passed over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from ..errors import Finding, UserError


def passed_over(findings: Iterable[Finding], allow: Collection[str], is_firm: Callable[[str], bool]) -> list[Finding]:
    """The findings as warnings: those that were warnings, and errors whose ids ``allow`` names and ``is_firm`` does not.

    Raises UserError with all other errors; the hint of one that could be passed over says how.
    """
    found = list(findings)
    errors = [item for item in found if item.severity == "error" and (item.id not in allow or is_firm(item.id))]
    if errors:
        raise UserError(item if is_firm(item.id) else _with_way_out(item) for item in errors)
    return [item.as_warning() for item in found]


def _with_way_out(finding: Finding) -> Finding:
    way_out = f"pass it over with --allow {finding.id}"
    return replace(finding, hint=f"{finding.hint}; or {way_out}" if finding.hint else way_out)
