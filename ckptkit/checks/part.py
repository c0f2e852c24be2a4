"""What is declared of a part of a checkpoint, which is to be a checkpoint of its own, held against what is stored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace

from ..errors import Finding
from ..files.checkpoint import Checkpoint
from . import Subject, quantization, run_probes
from .weights import weights


def misdeclared(checkpoint: Checkpoint, names: Collection[str]) -> list[Finding]:
    """Errors, ``config.quant-*``: the tensors ``names`` are stored otherwise than ``checkpoint`` declares; one of each id.

    None where all of them are dense: a result of dense tensors alone declares nothing.
    """
    tensors = {name: ref for name, ref in checkpoint.tensors.items() if name in names}
    subject = Subject(replace(checkpoint, tensors=tensors))
    if not any(weight.quantized for weight in weights(subject)):
        return []
    alike: dict[str, list[Finding]] = defaultdict(list)
    for finding in run_probes(subject, quantization.PROBES, quantization.PAGES).findings:
        if finding.severity == "error" and finding.tensor:
            alike[finding.id].append(finding)
    return [_first(found) for found in alike.values()]


def _first(found: list[Finding]) -> Finding:
    """The first of several findings, which says how many there are."""
    more = f"; {len(found) - 1:,} more like it, which ckptkit verify tells" if len(found) > 1 else ""
    return replace(found[0], message=found[0].message + more)
