"""The plan: what will be made, as pure data. No I/O, no torch.

A :class:`Plan` lists, for every output shard, the :class:`Step`\\ s that fill it; each step names a pure operation
(:mod:`ckptkit.ops`), small JSON arguments, the source tensors it reads and the tensors it makes. Output specs
follow from input specs, so every output header is known before a tensor byte is read. No step reads another
step's output.

The digest covers everything that decides the bytes made, and no path and no time. It is taken shard by shard, so
a journal can tell a finished shard from one that another plan made.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from .files.header import Header, Spec, lay_out, nbytes, read_header

COPY = "copy@1"


class Ref(NamedTuple):
    """A tensor of the source, or a contiguous part of one, and its bytes [start, stop) in the file it lies in.

    ``span`` is None for a whole tensor, else the elements [a, b) of the flattened tensor that the part holds;
    ``shape`` is then the part's own shape.
    """

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    span: tuple[int, int] | None = None

    @property
    def spec(self) -> Spec:
        return Spec(self.name, self.dtype, self.shape)

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class Step(NamedTuple):
    """One operation on whole tensors of the source, making whole tensors of one output shard.

    ``rule`` says, in the recipe's or the option's own words, why this step is there.
    """

    op: str
    inputs: tuple[Ref, ...]
    outputs: tuple[Spec, ...]
    rule: str
    args: Mapping[str, Any] = MappingProxyType({})

    @property
    def bytes_read(self) -> int:
        return sum([ref.stop - ref.start for ref in self.inputs])

    @property
    def bytes_written(self) -> int:
        if self.op == COPY:
            return self.bytes_read
        return sum([nbytes(spec.dtype, spec.shape) for spec in self.outputs])


@dataclass(frozen=True)
class Shard:
    """One safetensors file to make. ``source`` is the file whose mode and ``__metadata__`` it keeps, if any.

    ``linked`` shards are the source file as it stands: every step copies, and none is missing or moved. ``header`` is the text
    of its header where that is not to be as :func:`~.files.header.lay_out` has it, but as a file had it before.
    """

    name: str
    source: str | None
    metadata: Mapping[str, str] | None
    steps: tuple[Step, ...]
    linked: bool = False
    header: str | None = None

    @cached_property
    def layout(self) -> tuple[bytes, Header]:
        """Header bytes and layout of the file to be written; not for linked shards, which keep their own."""
        if self.header is not None:
            text = self.header.encode()
            head = len(text).to_bytes(8, "little") + text
            return head, read_header(lambda start, stop: head[start:stop], len(head) + self.nbytes, self.name)
        return lay_out((spec for step in self.steps for spec in step.outputs), self.metadata)

    @cached_property
    def nbytes(self) -> int:
        """Tensor bytes (the header is not counted)."""
        return sum([step.bytes_written for step in self.steps])

    @cached_property
    def digest(self) -> str:
        metadata = None if self.metadata is None else dict(self.metadata)
        if self.linked:
            tensors = [(ref.name, ref.dtype, ref.shape) for step in self.steps for ref in step.inputs]
            return _sha256([self.name, metadata, self.source, tensors])
        header = [] if self.header is None else [self.header]
        return _sha256([self.name, metadata, [_step_key(step) for step in self.steps], *header])


@dataclass(frozen=True, slots=True)
class Sidecar:
    """A file beside the shards: copied from the source as it is, or written from ``text``."""

    name: str
    text: str | None = None


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A file or tensor of the source that the result will not have, and the rule that says so."""

    name: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """Everything that a command will make. ``command`` is its name; ``settings`` what decided the plan, for readers."""

    command: str
    shards: tuple[Shard, ...]
    sidecars: tuple[Sidecar, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    dropped: tuple[LeftOut, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) of what decides the result's bytes: shards, sidecars, names left out; no path, no time."""
        sidecars = [[item.name, item.text] for item in self.sidecars]
        return _sha256([self.command, [shard.digest for shard in self.shards], sidecars])

    def steps(self) -> Iterator[Step]:
        return (step for shard in self.shards for step in shard.steps)

    def summary(self) -> list[RuleTotal]:
        """Per rule and operation: tensors and bytes read and written, in the order of first use."""
        totals: dict[tuple[str, str], list[int]] = {}
        for step in self.steps():
            row = totals.setdefault((step.rule, step.op), [0, 0, 0, 0])
            row[0] += len(step.inputs)
            row[1] += len(step.outputs)
            row[2] += step.bytes_read
            row[3] += step.bytes_written
        return [RuleTotal(rule, op, *row) for (rule, op), row in totals.items()]


class RuleTotal(NamedTuple):
    """A line of the plan's summary."""

    rule: str
    op: str
    tensors_read: int
    tensors_written: int
    bytes_read: int
    bytes_written: int


def copy_step(ref: Ref, rule: str, name: str | None = None) -> Step:
    """A step that copies ``ref`` byte for byte, under another name if one is given."""
    return Step(COPY, (ref,), (Spec(name or ref.name, ref.dtype, ref.shape),), rule)


def canonical(value: Any) -> str:
    """JSON that is equal for equal values: what digests are taken of."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True, ensure_ascii=False)


def _step_key(step: Step) -> list[Any]:
    inputs = [(ref.file, ref.name, ref.dtype, ref.shape, ref.span) for ref in step.inputs]
    return [step.op, dict(step.args), inputs, step.outputs]


def _sha256(value: Any) -> str:
    return hashlib.sha256(canonical(value).encode("utf-8", "surrogatepass")).hexdigest()


__all__ = [
    "COPY",
    "LeftOut",
    "Plan",
    "Ref",
    "RuleTotal",
    "Shard",
    "Sidecar",
    "Step",
    "canonical",
    "copy_step",
    "nbytes",
]
