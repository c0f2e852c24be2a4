"""The steps that bring a draft's tensors into another form and layout: copied, dequantized, put back as they were.

A draft is a mapping from serving names to tensors; its form says how matrices are stored (see
:mod:`ckptkit.drafts.tables`). Which form a tensor is to have, its dtype and whether it has a scale, an expected table of
that form says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from ..drafts.layouts import Place, to_hf
from ..drafts.tables import Expected, Form, Table
from ..errors import fail
from ..files.header import FLOATS, Spec
from ..ops import operation
from ..plan import Ref, Step, copy_step

FP4_DTYPES = frozenset({"I8", "U8", "F4"})
UNCHANGED = "unchanged: as the original has it"
AS_IT_IS = "as it is"


class Original(NamedTuple):
    """The draft that a trained one was made of: its tensors, and the names of those whose values are still the same."""

    tensors: Mapping[str, Ref]
    same: Collection[str] = ()


class Pair(NamedTuple):
    """A matrix or plain tensor, and its scale if it has one."""

    weight: Ref
    scale: Ref | None

    @property
    def is_fp4(self) -> bool:
        return self.scale is not None and self.weight.dtype in FP4_DTYPES


def pair_of(tensors: Mapping[str, Ref], name: str) -> Pair:
    return Pair(tensors[name], tensors.get(_scale(name)) if name.endswith(".weight") else None)


def converted(tensors: Mapping[str, Ref], wanted: Table, form: Form, original: Original | None) -> Iterator[Step]:
    """A step for each tensor of ``wanted`` that is there, under the same name, in the dtype that it says.

    Raises UserError (``draft.form``) for FP8 that is to be FP4.
    """
    for name, expected in wanted.items():
        if name in tensors and not _is_scale(name, wanted):
            yield from _converted(name, pair_of(tensors, name), expected, wanted.get(_scale(name)), form, original)


def _is_scale(name: str, wanted: Table) -> bool:
    return name.endswith(".scale") and f"{name.removesuffix('scale')}weight" in wanted


def _scale(name: str) -> str:
    return f"{name.removesuffix('weight')}scale"


def _converted(
    name: str, mine: Pair, expected: Expected, scale: Expected | None, form: Form, original: Original | None
) -> Iterator[Step]:
    if original and name in original.same:
        theirs = pair_of(original.tensors, name)
        yield copy_step(theirs.weight, UNCHANGED, name)
        if theirs.scale:
            yield copy_step(theirs.scale, UNCHANGED, _scale(name))
    elif (mine.scale is None) == (scale is None) and mine.weight.dtype in expected.dtypes:
        yield _plain(name, mine.weight, original)
        if mine.scale:
            yield copy_step(mine.scale, AS_IT_IS, _scale(name))
    elif scale is None:
        yield dense(name, mine, form.block, expected.dtypes[0])
    elif mine.scale is None:
        yield _requantized(name, mine.weight, expected, form)
    elif mine.is_fp4:
        yield _recast(name, mine)
    else:
        message = f"{name} is FP8 with scales, and is to be FP4: that would round it a second time"
        hint = "leave out --base, or take the draft in BF16"
        raise fail("extract.form", message, file=mine.weight.file, tensor=name, hint=hint)


def _plain(name: str, ref: Ref, original: Original | None) -> Step:
    """A copy; a float that was trained in a wider dtype goes back into the one it had."""
    was = original.tensors[name].dtype if original and name in original.tensors else ref.dtype
    if was == ref.dtype or was not in FLOATS:
        return copy_step(ref, AS_IT_IS, name)
    return cast(name, ref, was, f"{was} as the original has it")


def cast(name: str, ref: Ref, dtype: str, rule: str) -> Step:
    return Step("cast@1", (ref,), (Spec(name, dtype, ref.shape),), rule, {"name": name, "dtype": dtype})


def dense(name: str, pair: Pair, block: tuple[int, int], dtype: str = "BF16") -> Step:
    """The step that makes a tensor of floats."""
    if pair.scale is None:
        return cast(name, pair.weight, dtype, f"{dtype}: {pair.weight.dtype}")
    shape = dense_shape(pair)
    args = {"name": name, "dtype": dtype, "shape": list(shape), **_reading(pair, block)}
    return Step("dequantize@1", _inputs(pair), (Spec(name, dtype, shape),), f"{dtype}: {_stored(pair)}", args)


def dense_shape(pair: Pair) -> tuple[int, ...]:
    *rows, columns = pair.weight.shape
    return (*rows, 2 * columns) if pair.weight.dtype in FP4_DTYPES - {"F4"} else pair.weight.shape


def _reading(pair: Pair, block: tuple[int, int]) -> dict[str, Any]:
    of_blocks = None if pair.is_fp4 else list(block)
    return {"roles": ["weight", "scale"], "bits": None, "block": of_blocks, "cols": 0, "layout": {}}


def _inputs(pair: Pair) -> tuple[Ref, ...]:
    return (pair.weight, pair.scale) if pair.scale else (pair.weight,)


def _stored(pair: Pair) -> str:
    return "FP4" if pair.is_fp4 else "FP8" if pair.scale else pair.weight.dtype


def _recast(name: str, pair: Pair, inexact: str = "error") -> Step:
    args = {"names": [name, _scale(name)], "scale_dtype": "F8_E8M0", "inexact": inexact}
    inputs = _inputs(pair)
    outputs = operation("fp4_to_fp8_block@1").specs([ref.spec for ref in inputs], args)
    return Step("fp4_to_fp8_block@1", inputs, tuple(outputs), "FP8: FP4", args)


def _requantized(name: str, ref: Ref, expected: Expected, form: Form) -> Step:
    args: dict[str, Any] = {"names": [name, _scale(name)]}
    is_fp4 = expected.dtypes[0] in FP4_DTYPES
    op = "dsv4_fp4@1" if is_fp4 else "dsv4_fp8@1"
    args |= {} if is_fp4 else {"block": list(form.block)}
    outputs = operation(op).specs([ref.spec], args)
    return Step(op, (ref,), tuple(outputs), f"quantized anew: {'FP4' if is_fp4 else 'FP8'}", args)


# --- the hf layout -----------------------------------------------------------------------------------------


def to_native(tensors: Mapping[str, Ref], wanted: Table, form: Form) -> Iterator[tuple[str, Step]]:
    """The steps that make the hf layout of a draft, all in floats, each by a serving name of what it is made of."""
    stacks: dict[str, dict[tuple[int, int], str]] = defaultdict(dict)
    for name in (name for name in wanted if name in tensors):
        place = to_hf(name)
        assert place is not None, f"{name} has no place in the hf layout"
        if place.order is not None:
            stacks[place.name][place.order] = name
            continue
        pair = pair_of(tensors, name)
        yield name, dense(place.name, pair, form.block) if pair.scale else copy_step(pair.weight, AS_IT_IS, place.name)
    for stack, members in stacks.items():
        names = [members[order] for order in sorted(members)]
        yield names[0], _stack(Place(stack, max(members)), [pair_of(tensors, name) for name in names], form)


def _stack(place: Place, pairs: list[Pair], form: Form) -> Step:
    """Experts' matrices, one after another: of each its members' rows."""
    assert place.order is not None
    rows, columns = dense_shape(pairs[0])
    shape = (place.order[0] + 1, rows * (place.order[1] + 1), columns)
    is_plain = pairs[0].scale is None
    dtype = pairs[0].weight.dtype if is_plain else "BF16"
    odd = next((pair.weight for pair in pairs if (pair.scale is None) != is_plain or _is_odd(pair, dtype)), None)
    if odd:
        message = f"{odd.name} is {odd.dtype}, others of its stack are not"
        raise fail(
            "extract.form", message, file=odd.file, tensor=odd.name, hint="--layout specforge keeps each as it is"
        )
    args: dict[str, Any] = {"name": place.name, "dtype": dtype, "shape": list(shape)}
    args |= {} if is_plain else {"matrix": [rows, columns], **_reading(pairs[0], form.block)}
    inputs = tuple(ref for pair in pairs for ref in _inputs(pair))
    rule = f"{dtype} stack of experts: {_stored(pairs[0])}"
    op = "arrange@1" if is_plain else "dense_stack@1"
    return Step(op, inputs, (Spec(place.name, dtype, shape),), rule, args)


def _is_odd(pair: Pair, dtype: str) -> bool:
    return pair.scale is None and pair.weight.dtype != dtype


# --- what the original still has ---------------------------------------------------------------------------


class Comparison(NamedTuple):
    """Tensors of a draft, and the step that makes the same of its original: unchanged if their bytes are equal."""

    name: str
    made: Step
    refs: tuple[Ref, ...]


def comparisons(
    tensors: Mapping[str, Ref], original: Mapping[str, Ref], block: tuple[int, int]
) -> Iterator[Comparison]:
    """What to compare: floats of the draft whose original is quantized or of another dtype, FP8 whose original is FP4."""
    for name, ref in tensors.items():
        if name not in original:
            continue
        mine, theirs = pair_of(tensors, name), pair_of(original, name)
        if dense_shape(theirs) != ref.shape or ref.dtype == "F64":
            continue
        if mine.scale and theirs.is_fp4 and ref.dtype == "F8_E4M3":
            made = _recast(name, theirs, "round")
            if [spec.shape for spec in made.outputs] == [ref.shape, mine.scale.shape]:
                yield Comparison(name, made, (ref, mine.scale))
        elif ref.dtype not in FLOATS:
            continue
        elif theirs.scale:
            yield Comparison(name, dense(name, theirs, block, ref.dtype), (ref,))
        elif theirs.weight.dtype != ref.dtype and theirs.weight.dtype in FLOATS:
            yield Comparison(name, cast(name, theirs.weight, ref.dtype, "compare"), (ref,))
