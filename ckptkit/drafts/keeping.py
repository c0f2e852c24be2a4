"""Which tensors of a trained draft still have the values of the original: those keep the original's bytes.

Quantizing anew what was dequantized need not give the first bytes: other scales may hold the same values. So a tensor
is compared with what can be made of its original, byte for byte, piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from ..ops import Context, Read, operation
from ..parallel import on_threads
from ..plan import COPY, Ref, Step
from ..reading import read_block
from ..source import Source, same_bytes

if TYPE_CHECKING:
    from ..planners.draft_steps import Comparison

_BUDGET = 4 << 20


def same_values(comparisons: Iterable[Comparison], source: Source, jobs: int = 0) -> set[str]:
    """The names all of whose comparisons hold. ``source`` has the files of both sides; all that is compared is read."""
    same: set[str] = set()
    other: set[str] = set()
    for name, holds in on_threads((partial(_look, comparison, source) for comparison in comparisons), jobs):
        (same if holds else other).add(name)
    return same - other


def _look(comparison: Comparison, source: Source) -> tuple[str, bool]:
    return comparison.name, _makes(comparison.made, comparison.ref, source)


def _makes(step: Step, ref: Ref, source: Source) -> bool:
    """Whether ``step`` makes the bytes of ``ref``; dtype and shape are the same. Stops at the first difference."""
    if step.op == COPY:
        return same_bytes(source, step.inputs[0], ref)
    op = operation(step.op)
    rows = ref.shape[0] if len(ref.shape) > 1 else 1
    for chunk in op.chunks([given.spec for given in step.inputs], step.args, _BUDGET):
        blocks = [read_block(source, step.inputs[read.tensor], read) for read in chunk.reads]
        made = op.make(blocks, chunk, step.args, None, Context(nonfinite_error=False))[0].tobytes()
        row = chunk.writes[0].row
        if read_block(source, ref, Read(0, row, row + len(made) * rows // ref.nbytes)).data != made:
            return False
    return True
