"""Checks of declared against stored quantization, module by module and in both directions.

What a config declares is read as engines read it (:mod:`.groups` for compressed-tensors, :mod:`.methods` for other
methods), what is stored is told by headers (:mod:`.forms`), and :mod:`.expected` compares the two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain

from ..consumers import declared
from ..declarations import AWQ, CT, FP8, MODELOPT
from ..errors import Finding
from ..families import Kind, embedding_of, fused_set, head_of, is_tied
from ..files.checkpoint import CONFIG
from ..inspecting.survey import Key, keyed
from ..naming.names import unwrapped
from ..plan import Ref
from ..stored import Quantization
from . import Level, Probe, Seen, Subject, forms
from . import group_checks as checks
from .architecture import inputs_of
from .declarations import Declaration, declarations, excluded, excluded_entries
from .expected import disagreement
from .forms import form_of, misfits, shown
from .group_checks import Judged
from .group_syntax import kv_cache, unparsable
from .groups import Groups, distinct
from .method_syntax import refused
from .methods import Reading, reader
from .named import Modules
from .quantization_pages import PAGES
from .weights import Fault, Place, Weight, place_of, tell, weights

UNDECLARED, DENSE, FUSED = "config.quant-undeclared", "config.quant-dense", "config.quant-fused"
EMBEDDING, ROUTER, CONSUMERS = "config.quant-embedding", "config.quant-router", "config.quant-consumers"
_TABLES = frozenset({Kind.EMBEDDING, Kind.POSITION})
_DEQUANTIZE = "ckptkit dequantize SRC OUT makes it dense"


def _run(subject: Subject) -> Seen:
    found = weights(subject)
    said, findings = declarations(subject)
    number = sum(weight.number for weight in found if weight.quantized)
    faults: Iterator[Fault] = _fused(found)
    if not said:
        faults = chain(faults, map(_undeclared, filter(_is_quantized, found)))
    elif said[0].method == CT:
        more, about_config = _by_groups(subject, found, number)
        faults, findings = chain(faults, more), findings + about_config
    else:
        faults = chain(faults, _by_method(subject, said[0], found))
        findings += _about_method(subject, said[0], found, number)
    findings += [*tell(faults), *(finding for item in said for finding in refused(item)), *_contradictions(said)]
    return Seen(findings, sum(weight.number for weight in found))


def _is_quantized(weight: Weight) -> bool:
    return weight.quantized


def _undeclared(weight: Weight) -> Fault:
    hint = "take the config.json that belongs to these weights, or add its quantization_config"
    return Fault(UNDECLARED, weight, f"is stored {_stored(weight)}, and nothing declares any quantization", None, hint)


def _stored(weight: Weight) -> str:
    form = form_of(weight)
    return (
        f"quantized ({form.name if form else weight.ref.dtype})" if weight.quantized else f"dense ({weight.ref.dtype})"
    )


# --- one weight --------------------------------------------------------------------------------------------


def _judge(weight: Weight, reading: Reading, named: bool, subject: Subject) -> Iterator[Fault]:
    """What is wrong with a weight, given how its declaration reads it; ``named``: something in the config names it."""
    if not weight.quantized:
        if reading.quantized:
            hint = f"add {weight.name} to the list of modules left dense, or quantize it"
            yield Fault(DENSE, weight, f"is stored {_stored(weight)}, and {reading.why}", None, hint)
        return
    if weight.kind in _TABLES:
        severity = "error" if reading.quantized is False else "warning"
        text = f"is an embedding stored {_stored(weight)}: few engines load one"
        yield Fault(EMBEDDING, weight, text, None, _DEQUANTIZE, severity)
    elif weight.kind is Kind.ROUTER:
        text = f"is a router stored {_stored(weight)}: engines make routers dense"
        yield Fault(ROUTER, weight, text, None, _DEQUANTIZE, "warning" if named else "error")
    elif reading.quantized is False:
        hint = f"add {weight.name} to the targets of a group, or take the entry that excludes it out of its list"
        yield Fault(UNDECLARED, weight, f"is stored {_stored(weight)}, and {reading.why}", None, hint)
    if reading.quantized:
        yield from _contradicted(weight, reading, subject)


def _contradicted(weight: Weight, reading: Reading, subject: Subject) -> Iterator[Fault]:
    """Where the tensors fit none of the schemes that readers may take; faulty shapes are told elsewhere."""
    form = form_of(weight)
    odd = weight.part == "qweight" if form is None else any(misfits(weight, form))
    if odd or not reading.expected:
        return
    inputs = inputs_of(weight.template, subject.config)
    wrong = [disagreement(weight, form, expected, inputs) for expected in reading.expected]
    if all(wrong) and wrong[0] is not None:
        hint = "correct the scheme in the config, or take the config that belongs to these weights"
        yield Fault(wrong[0].id, weight, wrong[0].text, None, hint, wrong[0].severity)


# --- compressed-tensors ------------------------------------------------------------------------------------


def _by_groups(subject: Subject, found: Sequence[Weight], number: int) -> tuple[list[Fault], list[Finding]]:
    quantization = subject.quantization
    if quantization is None:
        return [], []
    findings = [*unparsable(quantization.table), *checks.formats(quantization.table, number)]
    groups = _groups(quantization)
    if groups is None:
        return [], findings
    judged = list(_judged(subject, groups, found))
    faults = [*checks.dead_by_ignore(groups, judged)]
    dead = {fault.weight.name for fault in faults}
    for weight, seen in judged:
        if weight.name not in dead:
            faults += _judge(weight, groups.reading(weight, seen), bool(seen.named_by), subject)
    faults += [*checks.disagreements(groups, judged), *checks.fused_disagreements(groups, judged)]
    faults += [*checks.mixed_experts(groups, judged), *checks.drafts(judged)]
    modules = Modules(subject.survey, subject.checkpoint.tensors)
    findings += checks.unmatched_targets(groups, modules, judged)
    findings += _unmatched_ignores(subject, groups.declared.ignore, found)
    findings += [*checks.status(quantization.table, number), *kv_cache(quantization.table, subject.survey)]
    return faults, findings


def _groups(quantization: Quantization) -> Groups | None:
    """The config's groups, if they can be read: the survey's reader also gives up where an ignore is no regex."""
    return None if quantization.declared is None else Groups(quantization, declared(quantization.table))


def _judged(subject: Subject, groups: Groups, found: Sequence[Weight]) -> Iterator[Judged]:
    """Each weight with how the config finds it; experts that the config tells apart by name are looked at by name."""
    apart = {weight.template: groups.tells_apart(weight.template) for weight in found if weight.number > 1}
    members = _members(subject, [weight for weight in found if apart.get(weight.template)])
    for weight in found:
        if apart.get(weight.template):
            yield from (Judged(*item) for item in distinct(groups, weight, members[_key(weight)]))
        else:
            yield Judged(weight, groups.seen(weight))


def _members(subject: Subject, wanted: Sequence[Weight]) -> dict[Key, list[Ref]]:
    """The tensors of all modules that each of the weights stands for, by their cells."""
    keys = set(map(_key, wanted))
    members: dict[Key, list[Ref]] = defaultdict(list)
    for ref, key in keyed(subject.survey.tensors) if keys else ():
        if key in keys:
            members[key].append(ref)
    return members


def _key(weight: Weight) -> Key:
    return next(key for _, key in keyed([weight.ref]))


def _unmatched_ignores(
    subject: Subject, entries: Sequence[str], found: Sequence[Weight], file: str | None = None
) -> list[Finding]:
    """Entries of a list of dense modules that find none. A head may go by its bare name, and a tied one has no tensors.

    ``file``: where the list stands, if its entries are globs and substrings; None for compressed-tensors'.
    """
    tensors = subject.checkpoint.tensors
    heads = [unwrapped(weight.name) for weight in found if weight.kind is Kind.HEAD]
    embedding = embedding_of(tensors) if is_tied(subject.config) else None
    heads += filter(None, ("lm_head", head_of(embedding))) if embedding else ()
    modules = Modules(subject.survey, tensors, tuple(heads))

    def finds(entry: str) -> bool:
        return modules.has(entry) or any(map(excluded((entry,)).loosely, modules.firsts))

    if file is None:
        return list(checks.unmatched_ignores(entries, partial(checks.named, modules), modules, CONFIG))
    return list(checks.unmatched_ignores(entries, finds, modules, file))


# --- other methods -----------------------------------------------------------------------------------------


def _by_method(subject: Subject, declaration: Declaration, found: Sequence[Weight]) -> Iterator[Fault]:
    quantized = {weight.template for weight in found if weight.quantized}
    read = reader(declaration, subject.config, quantized)
    if read is None or not quantized:
        return
    entries = excluded_entries(declaration)
    strictly = excluded(entries).strictly
    for weight in found:
        reading = read(weight)
        yield from _judge(weight, reading, False, subject)
        if weight.kind is Kind.HEAD and weight.quantized and declaration.method == FP8 and reading.quantized:
            text = f"is a head stored {_stored(weight)}: under quant_method fp8 vLLM and SGLang make heads dense"
            yield Fault(checks.CLASS_HEAD, weight, text, None, _DEQUANTIZE)
        if (
            weight.quantized
            and reading.quantized
            and declaration.method in (MODELOPT, AWQ)
            and not strictly(weight.name)
        ):
            entry = next((entry for entry in entries if entry in weight.name), None)
            if entry is not None:
                text = f"is left dense by vLLM, which finds {entry!r} of {declaration.file} in its name; others quantize it"
                yield Fault(CONSUMERS, weight, text, None, f"write {entry!r} as a glob of whole names")


def _about_method(
    subject: Subject, declaration: Declaration, found: Sequence[Weight], number: int
) -> Iterator[Finding]:
    if reader(declaration, subject.config, ()) is None:
        return
    file = declaration.file
    if not number:
        message = f"{file} declares {declaration.method}, and nothing on disk is quantized"
        hint = f"take the declaration out of {file}, or the weights that belong to it"
        yield Finding(DENSE, message, file=file, hint=hint)
    yield from _unmatched_ignores(subject, excluded_entries(declaration), found, file)


def _contradictions(said: Sequence[Declaration]) -> Iterator[Finding]:
    """Files beside the declaration that engines go by, which say something else."""
    for other in said[1:]:
        differing = [f"method {said[0].method}, {other.method}"] if other.method != said[0].method else []
        for keys in _SAME if not differing else ():
            values = [
                next((table[key] for key in keys if key in table), None) for table in (said[0].table, other.table)
            ]
            if None not in values and _norm(values[0]) != _norm(values[1]):
                differing.append(f"{keys[0]} {values[0]!r}, {values[1]!r}")
        if differing:
            message = f"{said[0].file} and {other.file} disagree: {differing[0]}"
            hint = f"correct {other.file}, or remove it: most engines go by {said[0].file}"
            yield Finding(CONSUMERS, message, file=other.file, hint=hint, data={"differing": differing})


# Fields that say the same in the tables of one method.
_SAME = (
    ("quant_algo",),
    ("bits", "w_bit"),
    ("group_size", "q_group_size"),
    ("desc_act",),
    ("sym",),
    ("zero_point",),
    ("exclude_modules", "ignore", "modules_to_not_convert"),
)


def _norm(value: object) -> object:
    return sorted(map(str, value)) if isinstance(value, list) else value.upper() if isinstance(value, str) else value


# --- fused layers ------------------------------------------------------------------------------------------


def _fused(found: Sequence[Weight]) -> Iterator[Fault]:
    """Modules that engines load into one layer, stored in different ways."""
    by_place: dict[Place, list[Weight]] = defaultdict(list)
    for weight in found:
        by_place[place_of(weight.name)].append(weight)
    for weight in found:
        layer, members = fused_set(weight.name) or ("", ())
        if members[:1] == (weight.name,):
            parts = [part for member in members for part in by_place.get(place_of(member), ())]
            yield from _different(
                [part for part in parts if _is_sound(part)], f"goes into {layer.rpartition('.')[2]} with its siblings"
            )


def _is_sound(weight: Weight) -> bool:
    """Whether it is dense, or has parts that fit each other: others are told of where their parts are looked at."""
    form = form_of(weight)
    return not weight.quantized if form is None else shown(weight, form) is not None and not any(misfits(weight, form))


def _different(parts: Sequence[Weight], why: str) -> Iterator[Fault]:
    ways = {way: part for part in reversed(parts) for way in [_way(part)]}
    if len(ways) > 1:
        first, *others = sorted(ways.values(), key=lambda part: part.name)
        text = (
            f"{why}, of which {others[0].name.rpartition('.')[2]} is stored {_stored(others[0])}, it {_stored(first)}"
        )
        hint = "give all of them one scheme, or leave all of them dense"
        yield Fault(FUSED, first, text, None, hint)


def _way(weight: Weight) -> tuple[object, ...]:
    """How a weight is stored, as far as its siblings must be stored alike."""
    form = form_of(weight)
    if form is None:
        return (weight.quantized,)
    found = shown(weight, form)
    words = weight.ref.shape[0] if form is forms.GPTQ else 0 if form is forms.AWQ else weight.ref.shape[-1]
    if found is None or found.strategy == "block" or (weight.scale is not None and weight.scale.shape == (1, 1)):
        return form.name, words, found is None
    return form.name, words, found.strategy, found.columns, found.zero


IDS = tuple(page.id for page in PAGES)
PROBES = (Probe(IDS, Level.STATIC, _run),)

__all__ = ["PAGES", "PROBES"]
