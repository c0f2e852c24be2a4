"""``reshard``: tensors renamed, dropped, cast and put into other files; or every reason why not, at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..consumers import LINEAR_CLASS, by_compressed_tensors, matches
from ..declarations import DECLARATIONS
from ..errors import Finding, fail
from ..families import LINEAR_LIKE, classifier
from ..files.checkpoint import CONFIG, Checkpoint
from ..files.header import FLOATS
from ..naming.names import Matcher
from ..naming.patterns import pattern
from ..naming.renaming import Rename, Renamed, rename
from ..ops import operation
from ..plan import LeftOut, Plan, Ref, Shard, Step, copy_step
from ..stored import COMPANIONS, WEIGHTS, declared_quantization, split_name
from .allowing import passed_over
from .documents import json_text
from .existing import quantized_modules
from .packing import pack
from .sidecars import sidecars, with_index
from .stored_weights import ALTERNATIVES

_DTYPES = {
    "BF16": ("bf16", "bfloat16"), "F16": ("f16", "fp16", "float16"), "F32": ("f32", "fp32", "float32"),
    "F64": ("f64", "fp64", "float64"),
}  # fmt: skip


class Cast(NamedTuple):
    """A ``--cast`` rule: as it was written, its pattern on tensor names, and the dtype."""

    text: str
    pattern: str
    dtype: str


class Changes(NamedTuple):
    """What is to be changed. ``max_shard_size`` in bytes of a file; None keeps the source's layout."""

    renames: Sequence[Rename] = ()
    drops: Sequence[str] = ()
    casts: Sequence[Cast] = ()
    max_shard_size: int | None = None


class Resharded(NamedTuple):
    """A plan, and what a reader should know: refusals passed over, what the source's index has wrong."""

    plan: Plan
    warnings: tuple[Finding, ...]


def cast_rule(text: str) -> Cast:
    """``PATTERN=DTYPE``. Raises UserError ``usage.cast``, or ``recipe.pattern`` for what is no pattern."""
    name, _, wanted = text.rpartition("=")
    dtype = next((dtype for dtype, spellings in _DTYPES.items() if wanted.lower() in spellings), None)
    if not name or dtype is None:
        hint = "PATTERN=DTYPE, where DTYPE is bf16, f16, f32 or f64"
        raise fail("usage.cast", f"cast rule {text!r} names no pattern and dtype", hint=hint)
    return Cast(text, pattern(name).text, dtype)


# What stands in the way of any sensible result cannot be passed over.
_FIRM = frozenset({"usage.pattern-unmatched", "usage.rename", "plan.rename-collision", "plan.empty"})


def plan_reshard(
    checkpoint: Checkpoint, changes: Changes, include: Iterable[str] = (), allow: Collection[str] = ()
) -> Resharded:
    """The plan that makes ``changes`` to ``checkpoint``. Patterns match names as they are in the source.

    ``include`` are file-name patterns of sidecars to take along; ``allow`` ids of refusals to pass over. Raises
    UserError with all findings.
    """
    tensors, parts = checkpoint.tensors, _quantized_parts(checkpoint)
    dropped, unused_drops = _chosen(tensors, changes.drops, "--drop")
    kept = {name: ref for name, ref in tensors.items() if name not in dropped}
    renamed, misnamed = rename(kept, changes.renames)
    inside = {name for names in parts.values() for name in names}
    floats = [name for name, ref in kept.items() if _is_float(ref.dtype) or name in inside]
    cast, unused_casts = _chosen(floats, [rule.pattern for rule in changes.casts], "--cast")
    rules = {rule.pattern: rule for rule in reversed(changes.casts)}
    casts = {name: rules[first] for name, first in cast.items()}
    found = [
        *unused_drops, *misnamed, *unused_casts, *_nothing_left(kept), *_halves(checkpoint, parts, dropped),
        *_cast_quantized(casts, kept, inside), *_renamed_quantized(checkpoint, renamed, parts),
    ]  # fmt: skip
    warnings = passed_over(found, allow, _FIRM.__contains__)
    steps = {name: _step(ref, renamed[name], casts.get(name)) for name, ref in kept.items()}
    shards, notes = pack(checkpoint, steps, changes.max_shard_size)
    config = _config(checkpoint, steps, inside)
    plan = _plan(checkpoint, changes, shards, config, dropped, include, allow)
    return Resharded(plan, (*checkpoint.warnings, *notes, *warnings))


def _quantized_parts(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """By module that is quantized on disk, the tensors without which it cannot be read: codes, scales and the like."""
    quantized = quantized_modules(checkpoint)
    parts: dict[str, list[str]] = defaultdict(list)
    for name in checkpoint.tensors if quantized else ():
        module, last = split_name(name)
        if module in quantized and last in WEIGHTS | COMPANIONS:
            parts[module].append(name)
    return parts


def _chosen(names: Iterable[str], patterns: Sequence[str], option: str) -> tuple[dict[str, str], list[Finding]]:
    """Each name that a pattern matches with the first that does, and a finding for each that matches none."""
    matcher = Matcher(patterns)
    chosen: dict[str, str] = {}
    unused = dict.fromkeys(patterns)
    for name in names if patterns else ():
        matched = matcher.all(name)
        if matched:
            chosen[name] = matched[0]
            for text in matched:
                unused.pop(text, None)
    what = "float tensor" if option == "--cast" else "tensor"
    hint = "a pattern is a tensor's whole name, a glob over it, or re: and a regex"
    return chosen, [
        Finding("usage.pattern-unmatched", f"{option} {text!r} matches no {what}", hint=hint) for text in unused
    ]


def _is_float(dtype: str) -> bool:
    return dtype in FLOATS or dtype.startswith("F")


# --- refusals ----------------------------------------------------------------------------------------------


def _nothing_left(kept: Collection[str]) -> Iterator[Finding]:
    if not kept:
        yield Finding("plan.empty", "every tensor would be dropped", hint="let --drop match fewer tensors")


def _halves(checkpoint: Checkpoint, parts: Mapping[str, Sequence[str]], dropped: Collection[str]) -> Iterator[Finding]:
    """``plan.drop-partial``: modules of which a part that is dropped makes the rest unreadable."""
    needed = {
        module: _needed([checkpoint.tensors[name] for name in names], dropped)
        for module, names in parts.items()
        if any(name in dropped for name in names)
    }
    halves = [module for module, names in needed.items() if 0 < sum(name in dropped for name in names) < len(names)]
    if halves:
        gone = next(name for name in needed[halves[0]] if name in dropped)
        left = next(name for name in needed[halves[0]] if name not in dropped)
        message = f"{_counted(halves, 'quantized module')} would lose a part ({gone}) and keep another ({left})"
        hint = f"--drop '{halves[0]}.*' drops all of it"
        yield Finding("plan.drop-partial", message, tensor=gone, hint=hint, data={"modules": halves})


def _needed(refs: Sequence[Ref], dropped: Collection[str]) -> list[str]:
    """The tensors of a module without which its codes cannot be read.

    A dense weight beside them is not one, nor a part that another says too. Of a module without codes none is.
    """
    parts = {split_name(ref.name)[1]: ref for ref in refs}
    codes = [ref for part, ref in parts.items() if part in WEIGHTS and not (part == "weight" and _is_dense(ref))]
    return [ref.name for part, ref in parts.items() if not _is_spare(part, parts, dropped)] if codes else []


def _is_spare(part: str, parts: Mapping[str, Ref], dropped: Collection[str]) -> bool:
    others = [other for names in ALTERNATIVES if part in names for other in names if other != part]
    stays = any(other in parts and parts[other].name not in dropped for other in others)
    return stays or (part == "weight" and _is_dense(parts[part]))


def _is_dense(ref: Ref) -> bool:
    return ref.dtype in FLOATS


def _cast_quantized(casts: Mapping[str, Cast], kept: Mapping[str, Ref], inside: Collection[str]) -> Iterator[Finding]:
    """``plan.cast-quantized``: tensors that only mean something together with others, or by their dtype."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, rule in casts.items():
        if name in inside or kept[name].dtype not in FLOATS:
            found[rule.text].append(name)
    for text, names in found.items():
        message = f"--cast {text} reaches {_counted(names, 'tensor')} of quantized modules ({names[0]})"
        hint = "ckptkit dequantize SRC OUT makes them dense first; or let the pattern match dense tensors only"
        yield Finding("plan.cast-quantized", message, tensor=names[0], hint=hint, data={"tensors": names})


def _renamed_quantized(
    checkpoint: Checkpoint, renamed: Mapping[str, Renamed], parts: Mapping[str, Sequence[str]]
) -> Iterator[Finding]:
    """``plan.rename-quantized``: modules that a quantization config speaks of, which goes on using the old names."""
    table, _ = declared_quantization(checkpoint.config or {})
    files = [CONFIG] if table else [name for name in DECLARATIONS if name in checkpoint.source.files]
    changed = ((old, new.name) for old, new in renamed.items() if new.rules)
    is_declared = _declaring(checkpoint)
    for old, new in changed if files else ():
        if split_name(old)[0] in parts or is_declared(old, old) or is_declared(old, new):
            message = f"{files[0]} says how {split_name(old)[0]} is quantized, by that name; it would be called {new}"
            hint = "rename before quantizing; or rewrite targets and ignore lists yourself"
            yield Finding("plan.rename-quantized", message, file=files[0], tensor=old, hint=hint)
            return


def _declaring(checkpoint: Checkpoint) -> Callable[[str, str], bool]:
    """If the config decides the quantization of a tensor's module, were the tensor called by the second name."""
    table, _ = declared_quantization(checkpoint.config or {})
    kind_of = classifier(checkpoint.config)
    groups = table.declared if table else None

    def is_declared(name: str, called: str) -> bool:
        is_linear = kind_of(name, checkpoint.tensors[name].shape) in LINEAR_LIKE
        if groups is None:
            return is_linear
        module = split_name(called)[0]
        ignored = any(matches(module, ignore) for ignore in groups.ignore)
        return ignored or by_compressed_tensors(groups, module, LINEAR_CLASS if is_linear else None) is not None

    return is_declared


def _counted(things: Sequence[Any], noun: str) -> str:
    return f"{len(things):,} {noun}" + ("" if len(things) == 1 else "s")


# --- the plan ----------------------------------------------------------------------------------------------


def _step(ref: Ref, renamed: Renamed, cast: Cast | None) -> Step:
    rule = ", ".join(f"--rename {text}" for text in renamed.rules)
    if cast is None or ref.dtype not in FLOATS or ref.dtype == cast.dtype:
        return copy_step(ref, rule or "as it is", renamed.name)
    args = {"name": renamed.name, "dtype": cast.dtype}
    outputs = operation("cast@1").specs([ref.spec], args)
    return Step("cast@1", (ref,), tuple(outputs), f"--cast {cast.text}", args)


def _config(checkpoint: Checkpoint, steps: Mapping[str, Step], inside: Collection[str]) -> str | None:
    """config.json with another dtype where it states one that no dense tensor has any more; None if it stays."""
    made: dict[str, set[str]] = defaultdict(set)
    for name, step in steps.items():
        if step.inputs[0].dtype in FLOATS and name not in inside:
            made[step.inputs[0].dtype].add(step.outputs[0].dtype)
    moved = {_torch_name(old): _torch_name(min(new)) for old, new in made.items() if len(new) == 1 and old not in new}
    config = _restated(checkpoint.config, moved)
    return None if config == checkpoint.config else json_text(config)


def _torch_name(dtype: str) -> str:
    return _DTYPES[dtype][-1]


def _restated(value: Any, moved: Mapping[str, str]) -> Any:
    """``value`` with the dtypes that ``dtype`` and ``torch_dtype`` state anywhere in it replaced by others."""
    if not isinstance(value, Mapping):
        return value
    return {
        key: moved.get(item, item)
        if key in {"dtype", "torch_dtype"} and isinstance(item, str)
        else _restated(item, moved)
        for key, item in value.items()
    }


def _plan(
    checkpoint: Checkpoint, changes: Changes, shards: tuple[Shard, ...], config: str | None,
    dropped: Mapping[str, str], include: Iterable[str], allow: Collection[str],
) -> Plan:  # fmt: skip
    texts, stale = with_index(checkpoint, shards, {} if config is None else {CONFIG: config}, {})
    kept, left_out = sidecars(checkpoint, texts, stale, include)
    settings = {
        "rename": [rule.text for rule in changes.renames],
        "drop": list(changes.drops),
        "cast": [rule.text for rule in changes.casts],
        "max_shard_size": changes.max_shard_size,
        "nonfinite": "keep" if "data.overflow" in allow else "error",
    }
    gone = [LeftOut(name, f"--drop {text}") for name, text in dropped.items()]
    return Plan("reshard", shards, kept, left_out, (*gone, *_second_copies(checkpoint)), settings)


def _second_copies(checkpoint: Checkpoint) -> Iterator[LeftOut]:
    """Tensors that lie in a second file under a name that the index places elsewhere."""
    for file, header in checkpoint.shards.items():
        for entry in header.entries:
            meant = checkpoint.tensors[entry.name].file
            if meant != file:
                yield LeftOut(entry.name, f"lies in {file} too; the index names {meant}")
