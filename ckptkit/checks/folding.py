"""Many findings of one kind told as one."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..errors import Finding

FEW = 3
EXAMPLES = 5

_NUMBER = re.compile(r"\d+")


def fold(findings: Iterable[Finding]) -> Iterator[Finding]:
    """The findings, those of one id whose subjects differ in numbers only as one, unless they are :data:`FEW`.

    That one is the first of them; its data has ``count`` and some ``examples``.
    """
    alike: dict[tuple[str, str, str], list[Finding]] = defaultdict(list)
    for finding in findings:
        alike[finding.id, finding.severity, _NUMBER.sub("#", _subject(finding))].append(finding)
    for group in alike.values():
        if len(group) <= FEW:
            yield from group
        else:
            examples = [_subject(finding) for finding in group[:EXAMPLES]]
            message = f"{group[0].message} (and {len(group) - 1:,} more like it)"
            data = {**group[0].data, "count": len(group), "examples": examples}
            yield replace(group[0], message=message, data=data)


def _subject(finding: Finding) -> str:
    return finding.tensor or finding.file or ""
