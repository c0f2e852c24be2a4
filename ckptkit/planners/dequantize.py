"""``dequantize``: quantized weights as dense ones, tensor by tensor; or every reason why not, at once."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from shlex import quote
from typing import Any, NamedTuple

from ..declarations import Declaration, Packing, declarations, packing_of
from ..decode import Coding, Encoded
from ..errors import Finding, UserError, fail
from ..families import Kind, classifier, module_of
from ..files.checkpoint import Checkpoint
from ..files.header import FLOATS, Spec
from ..naming.names import Matcher
from ..naming.patterns import nearest
from ..plan import LeftOut, Plan, Ref, Step, copy_step
from ..stored import split_name, stored_format
from .allowing import passed_over
from .block_fp8 import check_container, may_be_fp4, recast
from .narrowing import Became, narrowed
from .packing import pack
from .sidecars import sidecars, with_index
from .stored_weights import OF_ACTIVATIONS, ONLY_OTHERS, Weight, quantized, read

DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
FP8 = "fp8"
_FEW = 4  # modules that an option names one by one
_HOW_TO_READ = "only said how to read codes"
_OF_INPUTS = "says how activations are quantized: they are no longer"


class Wanted(NamedTuple):
    """What is asked for: the dtype (one of :data:`DTYPES`, or ``fp8``), of which weights, and what to do in doubt.

    Without ``only`` (patterns of tensor names) and ``experts`` (the routed ones) all weights are meant.
    """

    dtype: str = "bf16"
    only: Sequence[str] = ()
    experts: bool = False
    missing_scale: str = "error"
    inexact: str = "error"

    @property
    def is_partial(self) -> bool:
        return bool(self.only) or self.experts


class Dequantized(NamedTuple):
    """A plan, and what a reader should know."""

    plan: Plan
    warnings: tuple[Finding, ...]


class Form(NamedTuple):
    """How weights that are alike are stored, in words and for the operation, and the shape of the dense weight.

    ``roles``: the parts that are read, by the last parts of their names, the codes first. ``layout``: what else the
    operation is to know of the format.
    """

    label: str
    shape: tuple[int, ...]
    roles: tuple[str, ...]
    columns: int
    layout: Mapping[str, Any]


class Job(NamedTuple):
    """A weight that is to be converted, and the option that says so."""

    weight: Weight
    packing: Packing
    form: Form
    rule: str


# The only findings that can be passed over: a result that some engine misreads may be meant for another.
_POLICY = frozenset({"plan.config", "dequantize.transform"})
_NOT_FINITE = frozenset({"data.nan", "data.inf", "data.overflow"})


def plan_dequantize(
    checkpoint: Checkpoint, wanted: Wanted, include: Iterable[str] = (), allow: Collection[str] = ()
) -> Dequantized:
    """The plan that makes the weights ``wanted`` dense, or block FP8.

    ``include`` are file-name patterns of sidecars to take along; ``allow`` ids of refusals to pass over. Raises
    UserError with all findings. Of tensors only ``weight_shape`` is read.
    """
    stated, weights = declarations(checkpoint), quantized(checkpoint)
    chosen, unmatched = choose(weights, wanted)
    jobs, faults = _jobs(checkpoint, chosen, stated, wanted)
    refused = [*unmatched, *_nothing(checkpoint, weights, stated, wanted), *faults, *_transforms(stated, jobs, wanted)]
    warnings = passed_over(refused, allow, lambda id: id not in _POLICY)
    became = _became(checkpoint, weights, jobs, wanted)
    config = narrowed(checkpoint.config, stated, became, _dtype_of_most(checkpoint, jobs, wanted))
    warnings += passed_over(config.findings, allow, lambda id: id not in _POLICY)
    dropped = dict(_dropped(checkpoint, jobs, everything=not (became.kept or became.recast)))
    steps = dict(_steps(checkpoint, weights, jobs, dropped, wanted))
    shards, notes = pack(checkpoint, steps, None)
    texts, stale = with_index(checkpoint, shards, config.texts, config.stale)
    kept, left_out = sidecars(checkpoint, texts, stale, include)
    gone = tuple(LeftOut(name, reason) for name, reason in dropped.items())
    plan = Plan("dequantize", shards, kept, left_out, gone, settings=_settings(wanted, allow))
    return Dequantized(plan, (*checkpoint.warnings, *notes, *warnings))


def _settings(wanted: Wanted, allow: Collection[str]) -> dict[str, Any]:
    nonfinite = "error" if _NOT_FINITE.isdisjoint(allow) else "keep"
    return {**wanted._asdict(), "only": list(wanted.only), "nonfinite": nonfinite}


# --- which weights -----------------------------------------------------------------------------------------


def choose(weights: Iterable[Weight], wanted: Wanted) -> tuple[list[tuple[Weight, str]], list[Finding]]:
    """The weights that are meant, each with the option that says so, and a finding for each option that means none.

    A pattern means a weight by the name of any of its tensors, or of the dense one.
    """
    matcher = Matcher(wanted.only)
    unused = dict.fromkeys([*wanted.only, *(["--experts"] if wanted.experts else [])])
    chosen: list[tuple[Weight, str]] = []
    candidates = [weight for weight in weights if wanted.dtype != FP8 or may_be_fp4(weight)]
    for weight in candidates:
        rules = _options(weight, matcher, wanted)
        if rules:
            chosen.append((weight, rules[0]))
        for rule in rules:
            unused.pop(rule, None)
    what = "FP4 weight with power-of-two scales" if wanted.dtype == FP8 else "quantized weight"
    return chosen, [_unmatched(option, what, candidates) for option in unused]


def _options(weight: Weight, matcher: Matcher, wanted: Wanted) -> list[str]:
    if not wanted.is_partial:
        return [f"--dtype {wanted.dtype}"]
    names = [ref.name for ref in weight.parts.values()]
    matched = {text: None for name in dict.fromkeys([*names, weight.dense_name]) for text in matcher.all(name)}
    return [*matched, *(["--experts"] if wanted.experts and weight.is_experts else [])]


def _unmatched(option: str, what: str, weights: Sequence[Weight]) -> Finding:
    close = None if option == "--experts" else nearest(option, (weight.dense_name for weight in weights))
    text = option if option == "--experts" else f"--only {option!r}"
    hint = f"did you mean {close}?" if close else "ckptkit inspect SRC shows what is quantized, and how"
    return Finding("usage.pattern-unmatched", f"{text} matches no {what}", hint=hint, data={"option": option})


def _nothing(
    checkpoint: Checkpoint, weights: Sequence[Weight], stated: Sequence[Declaration], wanted: Wanted
) -> Iterator[Finding]:
    """``dequantize.nothing``; a declaration of quantization that is nowhere can still be taken away."""
    some = any(map(may_be_fp4, weights)) if wanted.dtype == FP8 else bool(weights or stated)
    if some or wanted.is_partial:
        return
    what = "no FP4 weight with power-of-two scales" if wanted.dtype == FP8 else "no quantized weight"
    hint = f"ckptkit inspect {checkpoint.source.uri} shows how its weights are stored"
    yield Finding("dequantize.nothing", f"{checkpoint.source.uri} has {what}", hint=hint)


def _transforms(stated: Sequence[Declaration], jobs: Sequence[Job], wanted: Wanted) -> Iterator[Finding]:
    """``dequantize.transform``: weights were turned, and engines turn their inputs by what the declaration says."""
    for item in stated if jobs and wanted.dtype != FP8 else ():
        transforms = item.table.get("transform_config")
        groups = transforms.get("config_groups") if isinstance(transforms, Mapping) else None
        if groups:
            message = f"{item.file}: transform_config says that inputs or outputs of weights are transformed"
            message += f" ({', '.join(map(str, groups))}): without it, the weights alone are another model"
            yield Finding("dequantize.transform", message, file=item.file)


# --- how they are stored -----------------------------------------------------------------------------------


def _jobs(
    checkpoint: Checkpoint, chosen: Iterable[tuple[Weight, str]], stated: Sequence[Declaration], wanted: Wanted
) -> tuple[list[Job], list[Finding]]:
    """A job for each weight that can be converted, a finding for each that cannot. Weights that are alike are read once."""
    known: dict[object, Form] = {}
    jobs: list[Job] = []
    found: dict[str, list[Finding]] = {}
    packing_for = packing_of(stated)
    for weight, rule in chosen:
        packing = packing_for(weight.module)
        try:
            columns = _columns(checkpoint, weight, packing)
            key = weight.last, packing, columns, tuple([(part, r.dtype, r.shape) for part, r in weight.parts.items()])
            if weight.others or key not in known:
                form = _form(weight, packing, columns, unscaled=wanted.missing_scale == "one")
                if wanted.dtype == FP8:
                    check_container(weight, packing, stated)
                known[key] = form
            jobs.append(Job(weight, packing, known[key], rule))
        except UserError as error:
            found.setdefault(weight.module, []).extend(error.findings)
    others = _all_but(found) if jobs else None
    return jobs, [_with_others(finding, others) for findings in found.values() for finding in findings]


def _all_but(modules: Collection[str]) -> str | None:
    """The option that leaves modules out, if they are few."""
    pattern = rf"re:(?!(?:{'|'.join(map(re.escape, modules))})\.)"
    return f"--only {quote(pattern)}" if len(modules) <= _FEW else None


def _with_others(finding: Finding, others: str | None) -> Finding:
    if ONLY_OTHERS not in (finding.hint or ""):
        return finding
    return replace(finding, hint=others and str(finding.hint).replace(ONLY_OTHERS, others))


def _columns(checkpoint: Checkpoint, weight: Weight, packing: Packing) -> int:
    """The columns of a weight packed into words, of which the last need not be full; 0 where nothing states them.

    Raises UserError (``data.weight-shape``) where ``weight_shape`` cannot be the shape of what is packed.
    """
    ref = weight.parts.get("weight_shape")
    if ref is None or weight.last != "weight_packed" or weight.ref.dtype != "I32" or not packing.bits:
        return 0
    data = checkpoint.source.read(ref.file, ref.start, ref.stop)
    size = len(data) // max(len(weight.ref.shape), 1)
    shape = [int.from_bytes(data[at : at + size], "little", signed=True) for at in range(0, len(data), size or 1)]
    *rows, words = weight.ref.shape
    if shape[:-1] != rows or -(-shape[-1] * packing.bits // 32) != words:
        message = f"{ref.name} says {shape}, which {weight.ref.name} {list(weight.ref.shape)} cannot hold"
        hint = "take both from the source of the checkpoint"
        raise fail("data.weight-shape", message, file=ref.file, tensor=ref.name, hint=hint)
    return shape[-1]


def _form(weight: Weight, packing: Packing, columns: int, unscaled: bool) -> Form:
    last = weight.last or ""
    try:
        found = read(weight, packing, columns, unscaled)
    except UserError as error:
        raise UserError([_with_option(finding, weight) for finding in error.findings]) from None
    layout: dict[str, Any] = {"gptq": packing.gptq} if found.coding is Coding.GPTQ else {}
    if found.scale is None:
        layout["unscaled"] = True
    return Form(_label(weight, packing), _shape(found, weight, last), _roles(found, weight), columns, layout)


def _with_option(finding: Finding, weight: Weight) -> Finding:
    if finding.id == "names.weight-without-scale" and weight.ref.dtype.startswith("F8"):
        return replace(finding, hint="--missing-scale one takes the numbers as they are")
    if finding.hint is None and finding.id == "decode.format":
        return replace(finding, hint=f"{ONLY_OTHERS} dequantizes all others")
    return finding


def _label(weight: Weight, packing: Packing) -> str:
    beside = {last: ref for last, ref in weight.parts.items() if last != weight.last}
    return stored_format(weight.last or "", weight.ref, beside, packing.bits, packing.block).label


def _shape(found: Encoded, weight: Weight, last: str) -> tuple[int, ...]:
    """The dense weight's: as stored, or the transpose of each matrix of a stack."""
    lead = weight.ref.shape[: -3 if last == "blocks" else -2]
    matrix = (found.stack, found.cols)
    return (*lead, *(matrix[::-1] if found.transposed else matrix))[-len(weight.ref.shape) :]


def _roles(found: Encoded, weight: Weight) -> tuple[str, ...]:
    names = {ref.name: last for last, ref in weight.parts.items()}
    return tuple(names[ref.name] for ref in found.parts.values())


# --- what becomes of the tensors ---------------------------------------------------------------------------


def _steps(
    checkpoint: Checkpoint, weights: Iterable[Weight], jobs: Sequence[Job], dropped: Collection[str], wanted: Wanted
) -> Iterator[tuple[str, Step]]:
    """A step for each tensor that is not read with another or dropped, by its name."""
    made = {job.weight.ref.name: job for job in jobs}
    read_too = {job.weight.parts[role].name for job in jobs for role in job.form.roles}
    quantized = {ref.name for weight in weights for ref in weight.parts.values()}
    for name, ref in checkpoint.tensors.items():
        if name in made:
            yield name, _step(made[name], wanted)
        elif name not in read_too and name not in dropped:
            yield name, copy_step(ref, "stays quantized" if name in quantized else "not quantized")


def _step(job: Job, wanted: Wanted) -> Step:
    rule = f"{job.rule}: {job.form.label}"
    return recast(job.weight, wanted.inexact, rule) if wanted.dtype == FP8 else _dense(job, DTYPES[wanted.dtype], rule)


def _dense(job: Job, dtype: str, rule: str) -> Step:
    weight, packing, form = job.weight, job.packing, job.form
    args = {
        "name": weight.dense_name,
        "dtype": dtype,
        "shape": list(form.shape),
        "roles": list(form.roles),
        "bits": packing.bits,
        "block": packing.block and list(packing.block),
        "cols": form.columns,
        "layout": dict(form.layout),
    }
    inputs = tuple([_flat(weight.parts[role]) if role == "blocks" else weight.parts[role] for role in form.roles])
    output = Spec(weight.dense_name, dtype, form.shape)
    return Step("dequantize@1", inputs, (output,), rule, args)


def _flat(blocks: Ref) -> Ref:
    """Blocks of 16 bytes side by side: a row of codes for a row of the weight."""
    *lead, count, size = blocks.shape
    return blocks._replace(shape=(*lead, count * size), span=(0, math.prod(blocks.shape)))


def _dropped(checkpoint: Checkpoint, jobs: Iterable[Job], everything: bool) -> Iterator[tuple[str, str]]:
    """Tensors that the result does not have, and why: parts that only said how to read codes, scales of activations.

    Those of the attention's cache are gone with the last declaration.
    """
    for job in jobs:
        for part, ref in job.weight.parts.items():
            if part not in job.form.roles:
                yield ref.name, _OF_INPUTS if OF_ACTIVATIONS.fullmatch(part) else _HOW_TO_READ
    for name in checkpoint.tensors if everything else ():
        if OF_ACTIVATIONS.fullmatch(split_name(name)[1]):
            yield name, _OF_INPUTS


def _became(checkpoint: Checkpoint, weights: Iterable[Weight], jobs: Iterable[Job], wanted: Wanted) -> Became:
    """What the modules are in the result."""
    kind_of = classifier(checkpoint.config)
    done = {job.weight.module: kind_of(job.weight.dense_name, job.form.shape) for job in jobs}
    left = [weight for weight in weights if weight.last is not None and weight.module not in done]
    kept = {weight.module: kind_of(f"{weight.module}.weight", weight.ref.shape) for weight in left}
    others = [module_of(name) for name, ref in checkpoint.tensors.items() if _is_dense_matrix(ref)]
    made: dict[str, Kind] = {}
    dense, now_fp8 = (made, done) if wanted.dtype == FP8 else (done, made)
    fp4_experts = any(weight.is_experts and may_be_fp4(weight) for weight in left)
    return Became(dense, kept, now_fp8, others, fp4_experts)


def _dtype_of_most(checkpoint: Checkpoint, jobs: Sequence[Job], wanted: Wanted) -> str | None:
    """``wanted.dtype`` as safetensors has it, if most numbers of dense matrices have it in the result."""
    if wanted.dtype == FP8 or not jobs:
        return None
    sizes = Counter({DTYPES[wanted.dtype]: sum(math.prod(job.form.shape) for job in jobs)})
    for ref in filter(_is_dense_matrix, checkpoint.tensors.values()):
        sizes[ref.dtype] += math.prod(ref.shape)
    [(most, _)] = sizes.most_common(1)
    return most if most == DTYPES[wanted.dtype] else None


def _is_dense_matrix(ref: Ref) -> bool:
    return ref.dtype in FLOATS and len(ref.shape) >= 2 and ref.name.endswith(".weight")
