"""FP4 weights as they lie in a checkpoint, whatever holds them, and the steps that put them elsewhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from ...errors import Finding, UserError
from ...files.checkpoint import Checkpoint
from ...files.header import DTYPE_BITS, Spec
from ...plan import Ref, Step
from ...stored import COMPANIONS, WEIGHTS, split_name

ARRANGE = "arrange@1"


class Container(NamedTuple):
    """How FP4 weights are held: the last parts of their names, the dtypes, and if all experts are in one tensor."""

    codes: str
    dtypes: tuple[str, ...]
    scale: str
    scale_dtype: str
    stacked: bool = False


# MXFP4: exponents for 32 columns. Any of them can hold what another holds.
MXFP4 = {
    "dsv4": Container("weight", ("I8", "F4"), "scale", "F8_E8M0"),
    "mxfp4-ct": Container("weight_packed", ("U8",), "weight_scale", "U8"),
    "gpt-oss": Container("blocks", ("U8",), "scales", "U8", stacked=True),
}
CONTAINERS = MXFP4 | {
    "nvfp4-ct": Container("weight_packed", ("U8",), "weight_scale", "F8_E4M3"),
    "nvfp4-modelopt": Container("weight", ("U8",), "weight_scale", "F8_E4M3"),
}


# Tensors that nothing but FP4 has, by the last part of their names and dtype.
_TELLING = frozenset(
    {
        ("weight", "I8"),
        ("weight_codes", "U8"),
        ("blocks", "U8"),
        ("codes", "U8"),
        ("scales", "U8"),
        ("scale", "F8_E8M0"),
    }
)


class Unit(NamedTuple):
    """An FP4 weight: its module, what holds it, its tensors, and if its codes are spread, one a byte."""

    module: str
    container: str
    codes: Ref
    scale: Ref
    spread: bool

    @property
    def refs(self) -> tuple[Ref, Ref]:
        return self.codes, self.scale


def units(checkpoint: Checkpoint) -> list[Unit]:
    """Every FP4 weight of the checkpoint, in the order of names. Raises UserError with all that :func:`_fault` finds."""
    modules: dict[str, dict[str, Ref]] = defaultdict(dict)
    for name, ref in checkpoint.tensors.items():
        module, last = split_name(name)
        modules[module][last] = ref
    found = {module: _unit(module, parts) for module, parts in modules.items()}
    faults = [fault for module, unit in found.items() if (fault := _fault(module, modules[module], unit))]
    if faults:
        raise UserError(faults)
    return sorted((unit for unit in found.values() if unit), key=lambda unit: unit.module)


def _fault(module: str, parts: Mapping[str, Ref], unit: Unit | None) -> Finding | None:
    """What is wrong with a module: codes without a scale, a scale without codes, or the two do not fit."""
    if unit is None:
        alone = next((ref for last, ref in parts.items() if (last, ref.dtype) in _TELLING and len(ref.shape) > 1), None)
        if alone is None or (alone.dtype == "I8" and parts.keys() & (COMPANIONS - {"weight_shape"})):
            return None
        is_scale = alone.dtype == "F8_E8M0" or alone.name.endswith("_scales")
        id, what = ("names.scale-without-weight", "weight") if is_scale else ("names.weight-without-scale", "scale")
        if what == "weight" and parts.keys() & WEIGHTS:
            return None  # of another format
        hint = "take it from the source of the checkpoint"
        return Finding(
            id, f"{alone.name} {alone.dtype} has no {what} beside it", file=alone.file, tensor=alone.name, hint=hint
        )
    group = 16 if unit.scale.dtype == "F8_E4M3" else 32
    size = prod(unit.codes.shape) * (1 if unit.spread or unit.codes.dtype == "F4" else 2)
    if prod(unit.scale.shape) * group == size and unit.scale.shape[0] == unit.codes.shape[0]:
        return None
    message = f"{unit.scale.name} {list(unit.scale.shape)} is not one scale for {group} columns of {unit.codes.name} {list(unit.codes.shape)}"
    return Finding(
        "shapes.scale", message, file=unit.scale.file, tensor=unit.scale.name, hint="take both from one checkpoint"
    )


def _unit(module: str, parts: Mapping[str, Ref]) -> Unit | None:
    for name, container in CONTAINERS.items():
        scale = parts.get(container.scale)
        if scale is None or scale.dtype != container.scale_dtype:
            continue
        if name == "nvfp4-ct" and "weight_scale_2" in parts:
            continue
        codes, spread = parts.get(container.codes), parts.get(spread_name(container))
        if codes is not None and codes.dtype in container.dtypes:
            return Unit(module, name, codes, scale, False)
        if spread is not None:
            return Unit(module, name, spread, scale, True)
    return None


def spread_name(container: Container) -> str:
    """The last part of the name of codes, one a byte."""
    return "codes" if container.stacked else "weight_codes"


def tensor_name(module: str, last: str, stacked: bool = False) -> str:
    return f"{module}_{last}" if stacked else f"{module}.{last}"


# --- codes, one a byte -------------------------------------------------------------------------------------


def spread(unit: Unit) -> Step:
    """The step that writes the codes of ``unit`` one a byte."""
    container = CONTAINERS[unit.container]
    shape = unit.codes.shape
    shape = shape if unit.codes.dtype == "F4" else (*shape[:-1], shape[-1] * 2)
    name = tensor_name(unit.module, spread_name(container), container.stacked)
    return _arranged([as_matrix(unit.codes)], Spec(name, "U8", shape), "--layout codes", codes="spread")


def packed(unit: Unit, dtype: str | None) -> Step:
    """The step that packs spread codes again, into ``dtype`` if the container knows several."""
    container = CONTAINERS[unit.container]
    kind = dtype if dtype in container.dtypes else container.dtypes[0]
    shape = unit.codes.shape if kind == "F4" else (*unit.codes.shape[:-1], unit.codes.shape[-1] // 2)
    name = tensor_name(unit.module, container.codes, container.stacked)
    return _arranged([as_matrix(unit.codes)], Spec(name, kind, shape), "--layout packed", codes="pack")


# --- from one container to another -------------------------------------------------------------------------


class Matrix(NamedTuple):
    """The FP4 weight of one Linear: module, codes and scales [rows, bytes], and which rows of those are its own."""

    module: str
    codes: Ref
    scale: Ref
    spread: bool
    take: Mapping[str, int] | None = None

    @property
    def rows(self) -> int:
        return self.take["count"] if self.take else self.codes.shape[0]

    @property
    def columns(self) -> int:
        return self.scale.shape[1] * 32


def matrices(unit: Unit, names: Sequence[str]) -> list[Matrix]:
    """The Linears in ``unit``: itself, or one for each expert. ``names`` are those of gate, up and down."""
    if not CONTAINERS[unit.container].stacked:
        return [Matrix(unit.module, as_matrix(unit.codes), as_matrix(unit.scale), unit.spread)]
    path, _, stacked = unit.module.rpartition(".")
    experts, rows = unit.codes.shape[:2]
    members = names[:2] if stacked == "gate_up_proj" else names[2:]
    count = rows // len(members)
    found = []
    for expert in range(experts):
        codes, scale = (slab(ref, expert, (rows, prod(ref.shape[2:]))) for ref in unit.refs)
        for start, member in enumerate(members):
            take = {"start": start, "step": 2, "count": count} if len(members) > 1 else None
            found.append(Matrix(f"{path}.{expert}.{member}", codes, scale, unit.spread, take))
    return found


def held_alone(matrix: Matrix, target: str, dtype: str | None) -> list[Step]:
    """The steps that put a Linear's weight into a container that holds each of them by itself."""
    container = MXFP4[target]
    kind = dtype if dtype in container.dtypes else container.dtypes[0]
    columns = matrix.columns if kind == "F4" else matrix.columns // 2
    codes = Spec(f"{matrix.module}.{container.codes}", kind, (matrix.rows, columns))
    scale = Spec(f"{matrix.module}.{container.scale}", container.scale_dtype, (matrix.rows, matrix.columns // 32))
    rule, take = f"--layout {target}", matrix.take
    return [
        _arranged([matrix.codes], codes, rule, codes="pack" if matrix.spread else None, take=take),
        _arranged([matrix.scale], scale, rule, take=take),
    ]


def held_together(path: str, experts: Sequence[Sequence[Matrix]], biases: Sequence[Sequence[Ref]]) -> Iterator[Step]:
    """The steps that stack a layer's experts, each of them gate, up and down, as gpt-oss has them."""
    for name, chosen in (("gate_up_proj", slice(0, 2)), ("down_proj", slice(2, 3))):
        found = [matrix for expert in experts for matrix in expert[chosen]]
        every, first = chosen.stop - chosen.start, found[0]
        shape = (len(experts), every * first.rows, first.columns // 32)
        codes = "pack" if first.spread else None
        blocks = Spec(f"{path}.{name}_blocks", "U8", (*shape, 16))
        scales = Spec(f"{path}.{name}_scales", "U8", shape)
        rule = "--layout gpt-oss"
        yield _arranged([matrix.codes for matrix in found], blocks, rule, codes=codes, interleave=every)
        yield _arranged([matrix.scale for matrix in found], scales, rule, interleave=every)
        if biases:
            refs = [as_column(ref) for expert in biases for ref in expert[chosen]]
            bias = Spec(f"{path}.{name}_bias", refs[0].dtype, shape[:2])
            yield _arranged(refs, bias, rule, interleave=every)


def unstacked_bias(bias: Ref, names: Sequence[str], rule: str) -> Iterator[Step]:
    """The steps that take the bias of stacked gpt-oss experts apart."""
    path, _, stacked = bias.name.removesuffix("_bias").rpartition(".")
    members = names[:2] if stacked == "gate_up_proj" else names[2:]
    experts, rows = bias.shape
    count = rows // len(members)
    for expert in range(experts):
        column = slab(bias, expert, (rows, 1))
        for start, member in enumerate(members):
            output = Spec(f"{path}.{expert}.{member}.bias", bias.dtype, (count,))
            yield _arranged([column], output, rule, take={"start": start, "step": len(members), "count": count})


# --- refs --------------------------------------------------------------------------------------------------


def as_matrix(ref: Ref) -> Ref:
    """``ref`` [rows, bytes or elements of a row], which is the last dimension; for stacked blocks the last two."""
    rows = prod(ref.shape[:2]) if len(ref.shape) > 2 else ref.shape[0]
    return slab(ref._replace(shape=(1, *ref.shape)), 0, (rows, prod(ref.shape) // rows if rows else 0))


def as_column(ref: Ref) -> Ref:
    return slab(ref._replace(shape=(1, *ref.shape)), 0, (prod(ref.shape), 1))


def slab(ref: Ref, index: int, shape: tuple[int, ...], offset: int = 0) -> Ref:
    """``shape`` of the elements of ``ref[index]``, from its element ``offset`` on."""
    first = index * prod(ref.shape[1:]) + offset
    last = first + prod(shape)
    bits = DTYPE_BITS[ref.dtype]
    return ref._replace(
        shape=shape, start=ref.start + first * bits // 8, stop=ref.start + last * bits // 8, span=(first, last)
    )


def _arranged(inputs: Iterable[Ref], output: Spec, rule: str, **args: Any) -> Step:
    given = {key: value for key, value in args.items() if value not in (None, 1)}
    return Step(ARRANGE, tuple(inputs), (output,), rule, {**output._asdict(), **given})
