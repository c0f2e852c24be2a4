"""Many findings of one kind told as one."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from ..errors import Finding

FEW = 3
EXAMPLES = 5

_NUMBER = re.compile(r"\d+")


def _subject(finding: Finding) -> str:
    return finding.tensor or finding.file or ""


def fold(findings: Iterable[Finding], subject: Callable[[Finding], str] = _subject) -> Iterator[Finding]:
    """The findings, those of one id whose subjects differ in numbers only as one, unless they are :data:`FEW`.

    That one is the first of them; its data has ``count`` and some ``examples``. Of many only the examples are kept.
    """
    alike: dict[tuple[str, str, str], list[Finding]] = defaultdict(list)
    counts: Counter[tuple[str, str, str]] = Counter()
    for finding in findings:
        kind = finding.id, finding.severity, _NUMBER.sub("#", subject(finding))
        counts[kind] += 1
        if counts[kind] <= EXAMPLES:
            alike[kind].append(finding)
    for kind, group in alike.items():
        if counts[kind] <= FEW:
            yield from group
        else:
            examples = [subject(finding) for finding in group]
            message = f"{group[0].message} (and {counts[kind] - 1:,} more like it)"
            data = {**group[0].data, "count": counts[kind], "examples": examples}
            yield replace(group[0], message=message, data=data)
