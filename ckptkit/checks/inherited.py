"""What is wrong with a result that was not wrong with its source."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ..errors import Finding
from ..files.checkpoint import Checkpoint, scan
from ..files.source import open_source
from ..plan import Plan
from ..stored import split_name
from . import Level, Subject, run

_NUMBER = re.compile(r"\d+")


class Told(NamedTuple):
    """Findings on a result: ``new`` ones are errors that its source does not have, ``others`` are warnings."""

    new: list[Finding]
    others: list[Finding]


def check_result(folder: Path, source: Checkpoint, plan: Plan, allow: Collection[str]) -> Told:
    """The static checks of what was made in ``folder`` from ``source`` by ``plan``.

    An error that the source has too (the same id about the same file, or about the module that the tensor was made
    of, whatever it is called now) is a warning here, with ``inherited`` in its data, and so is one that could not be looked for there (a single file has no config); a warning that the
    source has too is not told again. Errors whose id is in ``allow`` are warnings.
    """
    with open_source(str(folder)) as made:
        checkpoint, found = scan(made)
        findings = run(Subject(checkpoint, tuple(found)), Level.STATIC).findings
    told = Told([], [])
    if not findings:
        return told
    earlier = run(Subject(source, source.warnings), Level.STATIC)
    untold = {result.id for result in earlier.results if result.result == "skip"}
    origins = _origins(plan)
    before, after = _numbers(earlier.findings, {}), _numbers(findings, origins)
    for finding in findings:
        about = _about(finding, origins)
        if finding.id in untold or after[about] <= before[about]:
            if finding.severity == "error":
                told.others.append(replace(finding, severity="warning", data={**finding.data, "inherited": True}))
        elif finding.severity == "warning" or finding.id in allow:
            told.others.append(finding.as_warning())
        else:
            told.new.append(finding)
    return told


def _origins(plan: Plan) -> dict[str, str]:
    """The tensor of the source that each tensor of the result was made of."""
    origins: dict[str, str] = {}
    for step in plan.steps():
        made_of = dict(zip(step.args.get("modules", ()), step.inputs, strict=False))
        for spec in step.outputs:
            origins[spec.name] = made_of.get(spec.name.rpartition(".")[0], step.inputs[0]).name
    return origins


def _about(finding: Finding, origins: Mapping[str, str]) -> tuple[str, str]:
    """What a finding is about in the source; like ones that were folded into one differ in numbers."""
    tensor = origins.get(finding.tensor or "", finding.tensor)
    about = (split_name(tensor)[0] or tensor) if tensor else finding.file or ""
    return finding.id, _NUMBER.sub("#", about)


def _numbers(findings: Iterable[Finding], origins: Mapping[str, str]) -> Counter[tuple[str, str]]:
    numbers: Counter[tuple[str, str]] = Counter()
    for finding in findings:
        numbers[_about(finding, origins)] += int(finding.data.get("count", 1))
    return numbers
