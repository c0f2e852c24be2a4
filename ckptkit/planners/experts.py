"""Stacked 3-D experts as per-expert slices of the source: what a quantizing step reads, and the biases beside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from ..errors import Finding, UserError
from ..families import Piece, expert_projections
from ..files.checkpoint import Checkpoint
from ..files.header import DTYPE_BITS, Spec
from ..plan import COPY, Ref, Step
from ..recipe.recipe import Group
from .selection import Choice

TAKE = "take@1"


class Slice(NamedTuple):
    """A weight to quantize: the module it becomes, the bytes it lies in, and its columns if it lies transposed."""

    module: str
    ref: Ref
    shape: tuple[int, ...]
    columns: dict[str, int] | None = None


def cut(choices: Iterable[Choice], config: Mapping[str, Any] | None) -> tuple[dict[str, list[Slice]], list[Finding]]:
    """The weights that each module to be quantized is made of, by module, and the experts that do not lie as said."""
    found: dict[str, list[Slice]] = {}
    problems: list[Finding] = []
    for choice in choices:
        if choice.group is None:
            continue
        for module, ref in choice.modules.items():
            try:
                whole = [Slice(module, ref, ref.shape)]
                found[module] = _slices(ref, choice.group, config) if choice.is_experts else whole
            except UserError as error:
                problems += error.findings
    return found, problems


def _slices(ref: Ref, group: Group, config: Mapping[str, Any] | None) -> list[Slice]:
    """The projections of every expert; none for a group that does not say how they lie, which is a finding of its own."""
    if group.experts is None:
        return []
    pieces = expert_projections(ref.name, ref.shape, group.experts, config)
    return [Slice(piece.module, _part(ref, piece), piece.shape, _columns(piece)) for piece in pieces]


def bias_steps(module: str, choice: Choice, checkpoint: Checkpoint) -> dict[str, list[Step]]:
    """Steps that take the bias of the stacked weight ``module`` apart, by the bias tensor they replace."""
    bias = checkpoint.tensors.get(f"{module}_bias")
    if bias is None or choice.group is None or choice.group.experts is None:
        return {}
    pieces = expert_projections(bias.name, bias.shape, choice.group.experts, checkpoint.config)
    return {bias.name: [_bias_step(bias, piece, choice.rule) for piece in pieces]} if pieces else {}


def _bias_step(bias: Ref, piece: Piece, rule: str) -> Step:
    output = Spec(f"{piece.module}.bias", bias.dtype, piece.shape)
    if piece.columns is None:
        return Step(COPY, (_part(bias, piece),), (output,), rule)
    return Step(TAKE, (_part(bias, piece),), (output,), rule, {"name": output.name, **asdict(piece.columns)})


def _part(ref: Ref, piece: Piece) -> Ref:
    size = DTYPE_BITS[ref.dtype] // 8
    first, last = piece.span
    return Ref(ref.file, ref.name, ref.dtype, piece.view, ref.start + first * size, ref.start + last * size, piece.span)


def _columns(piece: Piece) -> dict[str, int] | None:
    return None if piece.columns is None else asdict(piece.columns)
