"""Which tensors of a trained draft still have the values of the original: those keep the original's bytes.

Quantizing anew what was dequantized need not give the first bytes: other scales may hold the same values. So a tensor
is compared with what can be made of its original, byte for byte, piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..errors import Finding
from ..files.parallel import on_threads
from ..files.reading import read_block
from ..files.source import Source, same_bytes
from ..ops import Context, NonFinite, Read, operation
from ..plan import COPY, Ref, Step

if TYPE_CHECKING:
    from ..planners.draft_steps import Comparison

_BUDGET = 4 << 20
# Bits as integers, those without the sign, and the last of them that is no NaN (of E8M0 and E4M3 one code is).
_WITH_NAN = {
    "F32": ("<u4", 0x7FFFFFFF, 0x7F800000),
    "BF16": ("<u2", 0x7FFF, 0x7F80),
    "F16": ("<u2", 0x7FFF, 0x7C00),
    "F8_E4M3": ("<u1", 0x7F, 0x7E),
    "F8_E8M0": ("<u1", 0xFF, 0xFE),
}


def same_values(comparisons: Iterable[Comparison], source: Source, jobs: int = 0) -> set[str]:
    """The names all of whose comparisons hold. ``source`` has the files of both sides; all that is compared is read."""
    same: set[str] = set()
    other: set[str] = set()
    for name, holds in on_threads((partial(_look, comparison, source) for comparison in comparisons), jobs):
        (same if holds else other).add(name)
    return same - other


def nan_in_copies(steps: Iterable[Step], source: Source, jobs: int = 0) -> list[Finding]:
    """``data.nan`` for each tensor that ``steps`` copy and that holds NaN: operations look at what they compute with."""
    refs = {step.inputs[0] for step in steps if step.op == COPY and step.inputs[0].dtype in _WITH_NAN}
    found = on_threads((partial(_nan, ref, source) for ref in refs), jobs)
    return sorted(filter(None, found), key=lambda finding: finding.tensor or "")


def _nan(ref: Ref, source: Source) -> Finding | None:
    import numpy as np

    for start in range(ref.start, ref.stop, _BUDGET):
        data = np.frombuffer(source.read(ref.file, start, min(start + _BUDGET, ref.stop)), _WITH_NAN[ref.dtype][0])
        mask, least = _WITH_NAN[ref.dtype][1:]
        if (data & mask > least).any():
            message = f"{ref.file}: {ref.name} holds NaN"
            hint = "fetch or train it again; --allow data.nan keeps it"
            return Finding("data.nan", message, file=ref.file, tensor=ref.name, hint=hint)
    return None


def _look(comparison: Comparison, source: Source) -> tuple[str, bool]:
    return comparison.name, _makes(comparison.made, comparison.refs, source)


def _makes(step: Step, refs: Sequence[Ref], source: Source) -> bool:
    """Whether ``step`` makes the bytes of ``refs``; dtypes and shapes are the same. Stops at the first difference."""
    if step.op == COPY:
        return same_bytes(source, step.inputs[0], refs[0])
    op = operation(step.op)
    for chunk in op.chunks([given.spec for given in step.inputs], step.args, _BUDGET):
        blocks = [read_block(source, step.inputs[read.tensor], read) for read in chunk.plain]
        try:
            made = op.make(blocks, chunk, step.args, None, Context(nonfinite_error=False))
        except NonFinite:
            return False
        for ref, write, part in zip(refs, chunk.writes, made, strict=True):
            if not _lies_at(source, ref, write.row, part.tobytes()):
                return False
    return True


def _lies_at(source: Source, ref: Ref, row: int, data: bytes) -> bool:
    rows = ref.shape[0] if len(ref.shape) > 1 else 1
    return read_block(source, ref, Read(0, row, row + len(data) * rows // ref.nbytes)).data == memoryview(data)
