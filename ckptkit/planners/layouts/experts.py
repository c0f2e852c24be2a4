"""Experts of floats, or of FP8 with block scales: stacked in one tensor, or each projection by itself."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from ...errors import Finding
from ...families import config_value, draft_part
from ...families.experts import declared_experts
from ...files.checkpoint import Checkpoint
from ...files.header import FLOATS, Spec
from ...layout_config import PROJECTIONS, W_NAMES, Facts
from ...plan import COPY, Ref, Step
from .containers import ARRANGE, as_column, as_matrix, slab
from .rearranged import Rearranged

_ONE = re.compile(r"((?:.*\.)?experts)\.(\d+)\.(\w+)\.(weight|bias|weight_scale_inv)")
_FP4 = re.compile(r"((?:.*\.)?experts)\.(?:gate_up_proj|down_proj)_(?:blocks|codes)")
_STACKED = re.compile(r"((?:.*\.)?experts)\.(gate_up_proj|down_proj)(_bias|_scale_inv|\.weight|)")
_ONE_OF = re.compile(r"((?:.*\.)?experts)\.(\d+)\.")
_ANY_STACKED = re.compile(r"((?:.*\.)?experts)\.(?:gate_up_proj|down_proj)")
_FP8 = frozenset({"F8_E4M3", "F8_E5M2"})


def miscounted(checkpoint: Checkpoint) -> Iterator[Finding]:
    """``names.incomplete-experts``: layers whose experts, stacked or one by one, are not as many as the config says."""
    declared, part_of = declared_experts(checkpoint.config), draft_part(checkpoint.config)
    counts: dict[str, tuple[int, Ref]] = {}
    for ref in checkpoint.tensors.values():
        alone, stacked = _ONE_OF.match(ref.name), _ANY_STACKED.match(ref.name)
        if stacked and ref.shape:
            counts[stacked[1]] = ref.shape[0], ref
        elif alone:
            counts[alone[1]] = max(counts.get(alone[1], (0, ref)), (int(alone[2]) + 1, ref))
    for path, (count, ref) in counts.items():
        if declared and count not in declared and part_of(ref.name) is None:
            message = f"{path} are {count} experts, and config.json declares {max(declared)}"
            hint = "correct the number of experts in config.json, or take them from the source"
            yield Finding("names.incomplete-experts", message, file=ref.file, tensor=ref.name, hint=hint)


# --- one by one --------------------------------------------------------------------------------------------


def split(checkpoint: Checkpoint, layout: str, facts: Facts) -> Rearranged:
    """Every stacked tensor taken apart, or why it cannot be."""
    steps: dict[str, list[Step]] = {}
    problems: list[Finding] = []
    hidden = config_value(checkpoint.config, "hidden_size")
    layers: dict[str, dict[tuple[str, str], Ref]] = defaultdict(dict)
    blocks: dict[str, Ref] = {}  # FP4 in place of them
    for ref in checkpoint.tensors.values():
        found, fp4 = _STACKED.fullmatch(ref.name), _FP4.fullmatch(ref.name)
        if fp4:
            blocks.setdefault(fp4[1], ref)
        elif found:
            layers[found[1]][found[2], found[3]] = ref
    for path, ref in blocks.items():
        message = f"{ref.name} {ref.dtype} holds FP4 codes: --layout per-expert takes floats and FP8 apart"
        problems.append(
            Finding("unpack.layout", message, file=ref.file, tensor=ref.name, hint="--layout mxfp4-ct takes FP4 apart")
        )
        layers.pop(path, None)
    for path, parts in layers.items():
        weights = {name: ref for (name, end), ref in parts.items() if end in ("", ".weight") and len(ref.shape) == 3}
        columns = _orientation(weights, hidden)
        why = _why_not_split(parts, columns, facts)
        if why:
            hint = "only floats and FP8 with block scales are taken apart here; FP4 blocks: --layout mxfp4-ct"
            problems.append(Finding("unpack.layout", f"{path}: {why}", file=_first(parts).file, hint=hint))
            continue
        suffix = ".weight" if any(end == ".weight" for _, end in parts) else ""
        facts = facts._replace(columns=bool(columns), suffix=suffix)
        for (name, end), ref in parts.items():
            steps[ref.name] = list(_split_one(ref, path, name, end, facts))
    return Rearranged(steps, "fused", layout, facts, problems)


def _orientation(weights: Mapping[str, Ref], hidden: Any) -> bool | None:
    """Whether stacked weights lie transposed, [E, in, out]; None where their shapes do not tell."""
    told = set()
    for name, ref in weights.items():
        _, second, third = ref.shape
        if second != third and hidden in (second, third):
            told.add((second == hidden) == (name == "gate_up_proj"))
    return told.pop() if len(told) == 1 else None


def _why_not_split(parts: Mapping[tuple[str, str], Ref], columns: bool | None, facts: Facts) -> str | None:
    weights = [ref for (_, end), ref in parts.items() if end in ("", ".weight")]
    odd = next((ref for ref in weights if len(ref.shape) != 3 or ref.dtype not in FLOATS | _FP8), None)
    if odd:
        return f"{odd.name} {odd.dtype} {list(odd.shape)} is no stacked weight of floats or FP8"
    if not weights:
        return f"there is no stacked weight beside {_first(parts).name}"
    if columns is None:
        return "hidden_size of config.json does not tell which side of the stacked weights is the input"
    if any(end == "_scale_inv" for _, end in parts) and (columns or facts.alternate):
        return "block scales of transposed or alternating projections cannot be taken apart"
    for (name, end), ref in parts.items():
        side = 2 if columns and end in ("", ".weight") else 1
        if name == "gate_up_proj" and ref.shape[side] % 2:
            return f"{ref.name} {list(ref.shape)} cannot be halved into gate and up"
    weight, scale = parts.get(("gate_up_proj", facts.suffix)), parts.get(("gate_up_proj", "_scale_inv"))
    if weight and scale and weight.shape[1] // 2 % (1 << ((weight.shape[1] // scale.shape[1] - 1).bit_length())):
        return f"a block of {scale.name} covers rows of both gate and up"
    return None


def _first(parts: Mapping[tuple[str, str], Ref]) -> Ref:
    return next(iter(parts.values()))


_ENDS = {"": "weight", ".weight": "weight", "_bias": "bias", "_scale_inv": "weight_scale_inv"}


def _split_one(ref: Ref, path: str, name: str, end: str, facts: Facts) -> Iterator[Step]:
    members = facts.names[:2] if name == "gate_up_proj" else facts.names[2:]
    every = len(members)
    for expert in range(ref.shape[0]):
        for at, member in enumerate(members):
            yield _taken(ref, expert, at, every, f"{path}.{expert}.{member}.{_ENDS[end]}", facts)


def _taken(ref: Ref, expert: int, at: int, every: int, name: str, facts: Facts) -> Step:
    """The step that makes ``name``, member ``at`` of ``every`` of an expert."""
    rule, shape = "--layout per-expert", ref.shape[1:]
    if len(shape) == 2 and facts.columns:
        count = shape[1] // every
        alternate = facts.alternate and every > 1
        columns = {"start": at if alternate else at * count, "step": every if alternate else 1, "count": count}
        spec = Spec(name, ref.dtype, (count, shape[0]))
        return Step("transpose@1", (slab(ref, expert, shape),), (spec,), rule, {"name": name, "columns": columns})
    count = shape[0] // every
    spec = Spec(name, ref.dtype, (count, *shape[1:]))
    if facts.alternate and every > 1:
        take = {"start": at, "step": every, "count": count}
        part = slab(ref, expert, (shape[0], prod(shape[1:])))
        return Step(ARRANGE, (part,), (spec,), rule, {**spec._asdict(), "take": take})
    return Step(COPY, (slab(ref, expert, spec.shape, at * prod(spec.shape)),), (spec,), rule)


# --- stacked -----------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """A layer's experts: by expert, the tensors of gate, up and down that end alike."""

    path: str
    names: tuple[str, ...]
    experts: list[dict[str, Ref]]

    def refs(self, end: str, chosen: slice) -> list[Ref]:
        """Gate and up, or down, of every expert in turn; empty if the first has none that ends so."""
        wanted = [expert.get(f"{name}.{end}") for expert in self.experts for name in self.names[chosen]]
        return [ref for ref in wanted if ref is not None]


def _layers(refs: Iterable[Ref]) -> Iterator[Layer]:
    """The layers that have experts one by one. Experts and projections that are missing are missing in them too."""
    found: dict[str, dict[int, dict[str, Ref]]] = defaultdict(lambda: defaultdict(dict))
    for ref in refs:
        named = _ONE.fullmatch(ref.name)
        if named:
            found[named[1]][int(named[2])][f"{named[3]}.{named[4]}"] = ref
    for path, experts in found.items():
        stems = {key.partition(".")[0] for expert in experts.values() for key in expert}
        names = W_NAMES if stems <= set(W_NAMES) else PROJECTIONS
        yield Layer(path, names, [experts.get(number, {}) for number in range(max(experts) + 1)])


def join(checkpoint: Checkpoint, layout: str, facts: Facts) -> Rearranged:
    """As :func:`split`, the other way: each tensor that goes into a stacked one is replaced, the first by the step."""
    steps: dict[str, list[Step]] = {}
    problems: list[Finding] = []
    for layer in _layers(checkpoint.tensors.values()):
        facts = facts._replace(names=layer.names)
        why = _why_not_joined(layer, facts)
        if why:
            hint = (
                "experts are stacked where all of them have the same projections of floats, or of FP8 with block scales"
            )
            file = next(ref.file for expert in layer.experts for ref in expert.values())
            problems.append(Finding("unpack.layout", f"{layer.path}: {why}", file=file, hint=hint))
            continue
        for expert in layer.experts:
            steps |= {ref.name: [] for ref in expert.values()}
        for name, chosen in (("gate_up_proj", slice(0, 2)), ("down_proj", slice(2, 3))):
            for end in ("weight", "bias", "weight_scale_inv"):
                refs = layer.refs(end, chosen)
                if refs:
                    steps[refs[0].name].append(_joined(refs, f"{layer.path}.{name}", end, facts))
    return Rearranged(steps, "per-expert", layout, facts, problems)


def _why_not_joined(layer: Layer, facts: Facts) -> str | None:
    first = layer.experts[0]
    for number, expert in enumerate(layer.experts):
        missing = (first.keys() | {f"{name}.weight" for name in layer.names}) - expert.keys()
        odd = expert.keys() - first.keys()
        if missing or odd:
            return f"expert {number} has {'no ' + min(missing) if missing else min(odd) + ', unlike expert 0'}"
        if any((ref.dtype, ref.shape) != (first[key].dtype, first[key].shape) for key, ref in expert.items()):
            return f"expert {number} differs from expert 0 in dtype or shape"
    gate, up = (first[f"{name}.weight"] for name in layer.names[:2])
    if (gate.dtype, gate.shape) != (up.dtype, up.shape):
        return f"{gate.name} and {up.name} differ in dtype or shape"
    if gate.dtype not in FLOATS | _FP8 or (gate.dtype in _FP8 and f"{layer.names[0]}.weight_scale_inv" not in first):
        return f"{gate.name} is {gate.dtype}"
    if f"{layer.names[0]}.weight_scale_inv" in first and (facts.columns or facts.alternate):
        return "block scales of transposed or alternating projections cannot be stacked"
    return None


def _joined(refs: Sequence[Ref], stem: str, end: str, facts: Facts) -> Step:
    every = 2 if stem.endswith("gate_up_proj") else 1
    alternate = facts.alternate and every > 1
    name = stem + {"weight": facts.suffix, "bias": "_bias", "weight_scale_inv": "_scale_inv"}[end]
    experts, rule = len(refs) // every, "--layout fused"
    if end == "weight" and facts.columns:
        rows, columns = refs[0].shape
        spec = Spec(name, refs[0].dtype, (experts, columns, every * rows))
        args = {"name": name, "shape": spec.shape, "members": every, "alternate": alternate}
        return Step("stack_transposed@1", tuple(refs), (spec,), rule, args)
    spec = Spec(name, refs[0].dtype, (experts, every * refs[0].shape[0], *refs[0].shape[1:]))
    inputs = tuple(as_column(ref) if len(ref.shape) == 1 else as_matrix(ref) for ref in refs)
    args = spec._asdict() | ({"interleave": every} if alternate else {})
    return Step(ARRANGE, inputs, (spec,), rule, args)
