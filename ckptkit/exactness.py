"""What a plan would round: FP4 whose scales within a block lie too far apart for block FP8, told before anything is made.

The scales are read, 1/17 of FP4; codes only of weights whose scales alone leave it open.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from .errors import Finding
from .files.parallel import on_threads
from .files.reading import read_block
from .files.source import Source
from .ops import Context, Inexact, NonFinite, operation
from .plan import Plan, Step

OPERATION = "fp4_to_fp8_block@1"
_SPREAD = 14  # binades between the largest scale of a block and the least that is sure to be held exactly
_NAN = 255
_BUDGET = 4 << 20


def inexact(plan: Plan, source: Source, jobs: int = 0) -> list[Finding]:
    """A finding for each weight that would not keep its values: ``dequantize.inexact``, or ``data.nan`` for its scale."""
    steps = (step for step in plan.steps() if step.op == OPERATION)
    found = on_threads((partial(_look, step, source) for step in steps), jobs)
    return [finding for finding in found if finding is not None]


def _look(step: Step, source: Source) -> Finding | None:
    import numpy as np

    codes, scale = step.inputs
    exponents = np.frombuffer(source.read(scale.file, scale.start, scale.stop), np.uint8)
    largest, least = int(exponents.max(initial=0)), int(exponents.min(initial=_NAN))
    if largest < _NAN and largest - least <= _SPREAD:
        return None
    if largest == _NAN:
        message = f"{scale.file}: {scale.name} holds NaN"
        hint = "fetch the file again; --dtype bf16 --allow data.nan keeps it"
        return Finding("data.nan", message, file=scale.file, tensor=scale.name, hint=hint)
    if all(_fits(step, source)):
        return None
    message = (
        f"{codes.name} has values that FP8 with a scale for each 128 x 128 cannot hold: its scales lie too far apart"
    )
    hint = "--inexact round rounds the least of them; --dtype bf16 holds all"
    data_of = {"binades": largest - least}
    return Finding("dequantize.inexact", message, file=codes.file, tensor=codes.name, hint=hint, data=data_of)


def _fits(step: Step, source: Source) -> Iterator[bool]:
    """For each piece of the weight, whether the operation makes it without a loss."""
    op, args = operation(step.op), {**step.args, "inexact": "error"}
    for chunk in op.chunks([ref.spec for ref in step.inputs], args, _BUDGET):
        blocks = [read_block(source, step.inputs[read.tensor], read) for read in chunk.plain]
        try:
            op.make(blocks, chunk, args, None, Context())
        except (Inexact, NonFinite):
            yield False
        else:
            yield True
