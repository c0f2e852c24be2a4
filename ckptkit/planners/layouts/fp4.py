"""FP4 weights brought into another container, or their codes spread to a byte each and packed again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain

from ...errors import Finding
from ...families import experts_of
from ...files.checkpoint import Checkpoint
from ...layout_config import PROJECTIONS, W_NAMES, Facts
from ...plan import Step
from .containers import (
    CONTAINERS,
    MXFP4,
    Unit,
    held_alone,
    held_together,
    matrices,
    packed,
    spread,
    units,
    unstacked_bias,
)
from .rearranged import Rearranged


def to_codes(checkpoint: Checkpoint, layout: str, facts: Facts) -> Rearranged:
    """Every FP4 weight that is not so yet, one code a byte."""
    found = [unit for unit in units(checkpoint) if not unit.spread]
    return _told(found, {unit.codes.name: [spread(unit)] for unit in found}, _codes_of(_held(found)), facts)


def to_packed(checkpoint: Checkpoint, layout: str, facts: Facts) -> Rearranged:
    """Codes packed again, each into the container that its scales show."""
    found = [unit for unit in units(checkpoint) if unit.spread]
    return _told(found, {unit.codes.name: [packed(unit, facts.fp4)] for unit in found}, _held(found), facts)


def to_alone(checkpoint: Checkpoint, layout: str, facts: Facts) -> Rearranged:
    """Every MXFP4 weight in ``layout``, a container that holds Linears one by one."""
    found = [unit for unit in units(checkpoint) if unit.container in MXFP4]
    found = [unit for unit in found if unit.container != layout or unit.spread]
    steps: dict[str, list[Step]] = defaultdict(list)
    for unit in found:
        for matrix in matrices(unit, facts.names):
            codes, scale = held_alone(matrix, layout, facts.fp4)
            steps[unit.codes.name].append(codes)
            steps[unit.scale.name].append(scale)
        bias = checkpoint.tensors.get(f"{unit.module}_bias")
        if CONTAINERS[unit.container].stacked and bias is not None:
            steps[bias.name] = list(unstacked_bias(bias, facts.names, f"--layout {layout}"))
    return _told(found, steps, layout, facts)


def to_together(checkpoint: Checkpoint, layout: str, facts: Facts) -> Rearranged:
    """Every MXFP4 weight as gpt-oss has them: all experts of a layer in one tensor."""
    found = [unit for unit in units(checkpoint) if unit.container in MXFP4]
    found = [unit for unit in found if unit.container != layout or unit.spread]
    stacked = [unit for unit in found if unit.container == layout]
    alone = {unit.module: unit for unit in found if unit.container != layout}
    steps: dict[str, list[Step]] = {unit.codes.name: [packed(unit, None)] for unit in stacked}
    problems: list[Finding] = []
    for path, modules in _by_experts(alone).items():
        names = W_NAMES if modules[0].endswith(W_NAMES) else PROJECTIONS
        facts = facts._replace(names=names)
        experts = [[f"{path}.{number}.{name}" for name in names] for number in range(-(-len(modules) // 3))]
        why = _why_not_together(path, modules, experts)
        if why is None:
            steps |= _stacked(checkpoint, path, [[alone[module] for module in expert] for expert in experts])
        else:
            problems.append(why)
    told = _told(found, steps, layout, facts)
    return told._replace(problems=[*told.problems, *problems])


def _stacked(checkpoint: Checkpoint, path: str, experts: Sequence[Sequence[Unit]]) -> dict[str, list[Step]]:
    """The steps of one layer: all with the first expert's codes, nothing in place of the others."""
    cut = [[matrices(unit, ())[0] for unit in expert] for expert in experts]
    biases = [[checkpoint.tensors.get(f"{unit.module}.bias") for unit in expert] for expert in experts]
    there = [[ref for ref in expert if ref is not None] for expert in biases]
    replaced = [ref for expert in experts for unit in expert for ref in unit.refs] + list(chain.from_iterable(there))
    steps: dict[str, list[Step]] = {ref.name: [] for ref in replaced}
    steps[experts[0][0].codes.name] = list(held_together(path, cut, there if there[0] else []))
    return steps


def _by_experts(modules: Iterable[str]) -> dict[str, list[str]]:
    """Modules by the path of the experts they belong to; "" for those that are no expert's."""
    found: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        found[experts_of(module) or ""].append(module)
    return found


def _why_not_together(path: str, modules: Sequence[str], experts: Sequence[Sequence[str]]) -> Finding | None:
    if not path:
        message = f"{modules[0]} is no expert: gpt-oss' layout holds experts only"
        return Finding("unpack.layout", message, tensor=modules[0], hint="--layout mxfp4-ct holds any Linear")
    odd = set(modules) ^ set(chain.from_iterable(experts))
    if not odd:
        return None
    message = f"{path}: not every expert has gate, up and down (first: {min(odd)})"
    return Finding("unpack.layout", message, tensor=min(odd), hint="ckptkit verify SRC says what is missing")


def _held(found: Sequence[Unit]) -> str:
    """What holds the codes of ``found``."""
    return " and ".join(sorted({unit.container for unit in found}))


def _codes_of(held: str) -> str:
    return f"codes of {held}"


def _told(found: Sequence[Unit], steps: dict[str, list[Step]], made: str, facts: Facts) -> Rearranged:
    """What was done to ``found``, with their layout and, for the way back, the dtype that holds their codes."""
    spread_ones = [unit for unit in found if unit.spread]
    as_held = _held([unit for unit in found if not unit.spread])
    origin = " and ".join(filter(None, [as_held, _codes_of(_held(spread_ones)) if spread_ones else None]))
    dtypes = {unit.codes.dtype for unit in found if unit.container == "dsv4" and not unit.spread}
    problems = []
    if len(dtypes) > 1:
        one = next(unit.codes.name for unit in found if unit.codes.dtype == "F4")
        message = f"some FP4 weights are I8 and others F4 ({one}): the way back could not tell which"
        problems = [Finding("unpack.layout", message, tensor=one, hint="change them into the same dtype first")]
    facts = facts._replace(fp4=min(dtypes, default=facts.fp4))
    return Rearranged(steps, origin, made, facts, problems)
