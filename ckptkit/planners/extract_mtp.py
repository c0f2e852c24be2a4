"""``extract-mtp``: layers that predict further tokens as a checkpoint of their own; or every reason why not, at once."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple

from ..console import fmt_count
from ..declarations import CT, Declaration, declarations
from ..drafts.mtp import find, first_past, has_dspark, has_stages, like_mtp, own_layers
from ..drafts.mtp_config import declared_otherwise, launch, with_layers
from ..drafts.mtp_families import Config, Family, Layers
from ..drafts.mtp_tensors import missing
from ..errors import Finding, UserError, fail
from ..families import classifier, embedding_of, head_of, is_tied, module_of
from ..families.config import declared_drafts
from ..files.checkpoint import CONFIG, Checkpoint
from ..files.header import FLOATS
from ..naming.names import to_template
from ..plan import Plan, Ref, copy_step
from ..stored import SCALES, split_name
from .allowing import passed_over
from .block_fp8 import may_be_fp4
from .documents import json_text, no_config
from .narrowed_lists import listed, restated
from .narrowing import Became, narrowed
from .stored_weights import Weight, quantized
from .subset import plan_subset

COMMAND = "extract-mtp"
_ORIGINAL = "take it from the original of the checkpoint"
_DECLARE = f"let quantization_config in {CONFIG} of the source name these layers as they are"
_UNKNOWN = Family("unknown", "no family that the table has", ("",), "")


class Wanted(NamedTuple):
    """What is asked for: layers numbered from 0, the target's embedding and head along with them."""

    renumber: bool = False
    copy_embeddings: bool = False


class Extracted(NamedTuple):
    """A plan, what a reader should know, the layers, and how engines load the result (``{out}``: its folder)."""

    plan: Plan
    warnings: tuple[Finding, ...]
    layers: Layers
    launch: Mapping[str, str]


def plan_extract_mtp(
    checkpoint: Checkpoint, wanted: Wanted, include: Iterable[str] = (), allow: Collection[str] = ()
) -> Extracted:
    """The plan that cuts the layers which predict further tokens out of ``checkpoint``, byte for byte.

    ``include`` are file-name patterns of sidecars to take along; ``allow`` ids of refusals to pass over. Raises
    UserError with all findings: ``draft.*``, ``extract.*``, ``names.scale-without-weight``,
    ``names.weight-without-scale``, ``config.missing``, ``plan.config``.
    """
    if checkpoint.config is None:
        raise UserError(no_config(checkpoint, "what the layers are of"))
    config = checkpoint.config
    found = _layers(checkpoint, config)
    names = {name: _renumbered(found, name) if wanted.renumber else name for name in found.names}
    vocabulary = _vocabulary(checkpoint, found.family)
    shared = vocabulary if wanted.copy_embeddings else []
    taken = names | {name: name for name in [*found.reads, *shared]}
    weights = [weight for weight in quantized(checkpoint) if weight.ref.name in taken]
    documents, stale, misread = _documents(checkpoint, weights, taken)
    problems = [*_incomplete(found, config), *_halves(weights), *_refusals(found, config, wanted, shared), *misread]
    warnings = passed_over(problems, allow, lambda id: id in _FIRM)
    documents[CONFIG] = with_layers(documents[CONFIG], found, wanted.renumber)
    texts = {file: json_text(content) for file, content in documents.items()}
    steps = {
        name: copy_step(ref, _rule(name, found, name in names), taken[name]) for name, ref in _refs(checkpoint, taken)
    }
    lines = launch(found, config, bool(weights), bool(declarations(checkpoint)), wanted.renumber, bool(shared))
    settings = _settings(found, wanted, lines) | {"referenced": [name for name in vocabulary if name not in taken]}
    made = plan_subset(COMMAND, checkpoint, steps, texts, stale=stale, include=include, settings=settings)
    return Extracted(made.plan, (*made.warnings, *warnings), found, lines)


def _refs(checkpoint: Checkpoint, taken: Collection[str]) -> Iterator[tuple[str, Ref]]:
    return ((name, ref) for name, ref in checkpoint.tensors.items() if name in taken)


def _rule(name: str, found: Layers, belongs: bool) -> str:
    """Why a tensor is taken."""
    if name in found.copies:
        return f"{found.family.id}: a copy of the target's embedding or head"
    if name in found.reads:
        return f"{found.family.id}: the target's, but the draft's loader asks for it"
    if name in found.unknown:
        return "like these layers by its name"
    return f"{found.family.id}: layers" if belongs else "--embeddings copy"


def _settings(found: Layers, wanted: Wanted, lines: Mapping[str, str]) -> dict[str, Any]:
    return {
        "family": found.family.id,
        "layers": list(found.numbers),
        "renumber": wanted.renumber,
        "embeddings": "copy" if wanted.copy_embeddings else "none",
        "unknown": list(found.unknown),
        "launch": dict(lines),
    }


# --- what there is -----------------------------------------------------------------------------------------


def _layers(checkpoint: Checkpoint, config: Config) -> Layers:
    """The layers of ``checkpoint``, of a family that the table has or of none.

    Raises UserError: ``draft.config`` where they begin elsewhere than it says, ``draft.dspark``, ``draft.declared-only``,
    ``draft.none``.
    """
    tensors, uri = checkpoint.tensors, checkpoint.source.uri
    _check_depth(tensors, config)
    stages = has_stages(tensors)
    found = None if stages else find(tensors, config)
    if found:
        return found
    alike = () if stages else tuple(like_mtp(tensors, config))
    if alike:
        return Layers(_UNKNOWN, "", (), alike, unknown=alike)
    if stages or has_dspark(tensors):
        message = f"{uri} holds a DSpark draft: engines would half load it as an MTP layer, and serve"
        raise fail("draft.dspark", message, hint="ckptkit extract-dspark SRC OUT")
    declared = declared_drafts(config)
    if declared:
        key, value = next(iter(declared.items()))
        message = f"{CONFIG} declares layers that predict further tokens ({key}: {value!r}), and no tensor is theirs"
        raise fail("draft.declared-only", message, file=CONFIG, hint="extract them from the original of the checkpoint")
    hint = "ckptkit inspect SRC shows what it holds"
    raise fail("draft.none", f"{uri} has no layers that predict further tokens", hint=hint)


def _check_depth(tensors: Collection[str], config: Config) -> None:
    """Raise UserError (``draft.config``) where the config counts layers that predict further tokens as the model's own.

    Or the other way round; with fewer of them than are declared something is missing instead.
    """
    depth, found = own_layers(config), first_past(tensors)
    if depth is None or found is None or depth == found[1]:
        return
    tensor, layer = found
    if depth < layer and not _fits(tensors, config, layer):
        return
    message = f"{CONFIG} gives the model {fmt_count(depth, 'layer')} (num_hidden_layers), and {tensor} is of one"
    message += f" that predicts further tokens: the model has {layer:,}"
    hint = f'"num_hidden_layers": {layer} in {CONFIG}'
    raise fail("draft.config", message, file=CONFIG, tensor=tensor, hint=hint)


def _fits(tensors: Collection[str], config: Config, depth: int) -> bool:
    """Whether there are as many layers behind the first ``depth`` as the config declares."""
    found = find(dict.fromkeys(tensors), {**config, "num_hidden_layers": depth})
    return found is not None and declared_otherwise(found, config) is None


def _vocabulary(checkpoint: Checkpoint, family: Family) -> list[str]:
    """The tensors of the target's embedding and, if it has one, head."""
    embedding = embedding_of(checkpoint.tensors, checkpoint.config)
    head = head_of(embedding) if embedding else None
    modules = family.vocabulary or (embedding, head)
    return [name for name in checkpoint.tensors if split_name(name)[0] in modules]


def _renumbered(found: Layers, name: str) -> str:
    for new, old in enumerate(found.numbers):
        before = found.family.path(found.at, old)
        if name.startswith(before):
            return found.family.path(found.at, new) + name.removeprefix(before)
    return name


# --- refusals ----------------------------------------------------------------------------------------------

# What stands in the way of any sensible result cannot be passed over.
_FIRM = frozenset({"extract.embeddings", "extract.renumber"})


def _incomplete(found: Layers, config: Config) -> Iterator[Finding]:
    """What the layers lack (``draft.missing``), and what engines would not know of them.

    ``draft.config``: the config declares another number of them; ``draft.prefix``: names that begin as no engine knows it.
    """
    for name in missing(found, config):
        message = f"{name} is missing: layers of {found.family.name} have it, and engines serve what is in memory there"
        yield Finding("draft.missing", message, tensor=name, hint=_ORIGINAL)
    otherwise = declared_otherwise(found, config)
    if otherwise:
        key, count = otherwise
        layers = fmt_count(len(found.numbers), "layer")
        message = f"{CONFIG} declares {count:,} ({key}), and there are tensors of {layers}: {list(found.numbers)}"
        hint = "take what is missing from the original of the checkpoint"
        yield Finding("draft.config", message, file=CONFIG, hint=hint)
    known = found.family.at
    if found.at not in known:
        message = f"{found.names[0]}: engines find layers of {found.family.name} under {' or '.join(known)}"
        hint = f"ckptkit reshard SRC SRC-renamed {' '.join(_renames(found))} makes one to extract from"
        yield Finding("draft.prefix", message, tensor=found.names[0], hint=hint)


def _renames(found: Layers) -> Iterator[str]:
    """Options of ``ckptkit reshard`` that give the layers names which engines know."""
    family, known = found.family, found.family.at[0]
    for number in found.numbers if family.is_past else ():
        yield f"--rename {family.path(found.at, number)}={family.path(known, number)}"
    if not family.is_past:
        yield f"--rename {found.at}={known}"


def _halves(weights: Sequence[Weight]) -> Iterator[Finding]:
    """Quantized weights without the scales that their likes have, and scales without a weight."""
    names = {*SCALES, "weight_scale_2", "weight_global_scale"}
    alike: dict[tuple[str | None, str], list[Weight]] = defaultdict(list)
    for weight in weights:
        alike[weight.last, weight.ref.dtype].append(weight)
    for (last, _), group in alike.items():
        counts = Counter(part for weight in group for part in weight.parts if part in names)
        usual = [part for part, count in counts.items() if 2 * count > len(group)]
        for weight in group:
            if last is None:
                message = f"{weight.ref.name} is a scale without a weight"
                yield Finding("names.scale-without-weight", message, tensor=weight.ref.name, hint=_ORIGINAL)
            elif not names.intersection(weight.parts) or not weight.parts.keys() >= set(usual):
                lacking = [f"{weight.module}.{part}" for part in usual if part not in weight.parts]
                message = f"{weight.ref.name} has no {lacking[0] if lacking else 'scale'} beside it"
                tensor = lacking[0] if lacking else weight.ref.name
                yield Finding("names.weight-without-scale", message, tensor=tensor, hint=_ORIGINAL)


def _refusals(found: Layers, config: Config, wanted: Wanted, shared: Sequence[str]) -> Iterator[Finding]:
    """What can't be done (``extract.*``), and what is done without knowing what it is (``draft.unknown*``)."""
    if wanted.renumber and not found.family.is_past:
        message = f"--renumber: layers of {found.family.name} are numbered from 0 as they are"
        yield Finding("extract.renumber", message, hint="leave out --renumber")
    modules = {split_name(name)[0] for name in shared}
    if wanted.copy_embeddings and len(modules) < (1 if is_tied(config) else 2):
        message = "--embeddings copy: the source does not hold both the embedding and the head"
        yield Finding("extract.embeddings", message, hint="leave out --embeddings")
    if found.family is _UNKNOWN:
        firsts = Counter(name.partition(".")[0] for name in found.names)
        message = f"no family is known to have {found.names[0]} ({fmt_count(len(found.names), 'tensor')} like it)"
        hint = "ckptkit reshard SRC SRC-part --drop PATTERN makes a part of a checkpoint"
        yield Finding("draft.unknown-family", message, tensor=found.names[0], hint=hint, data={"prefixes": firsts})
        return
    for names in _by_template(found.unknown).values():
        message = f"{names[0]} is not known of {found.family.name}, and taken all the same"
        data = {"tensors": names}
        yield Finding("draft.unknown", message, tensor=names[0], severity="warning", data=data)


def _by_template(names: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        found[to_template(name)].append(name)
    return found


# --- what is written ---------------------------------------------------------------------------------------


def _documents(
    checkpoint: Checkpoint, weights: Sequence[Weight], taken: Mapping[str, str]
) -> tuple[dict[str, dict[str, Any]], dict[str, str], list[Finding]]:
    """config.json and other files that declare quantization, true of what is taken; files that no longer are, and why."""
    stated = declarations(checkpoint)
    made = narrowed(checkpoint.config, stated, _became(checkpoint, weights, taken))
    documents: dict[str, dict[str, Any]] = {file: json.loads(text) for file, text in made.texts.items()}
    documents.setdefault(CONFIG, deepcopy(dict(checkpoint.config or {})))
    modules = {split_name(old)[0]: split_name(new)[0] for old, new in taken.items()}
    for declaration in stated if weights else ():
        table: Any = documents.setdefault(declaration.file, deepcopy(dict(declaration.document)))
        for key in declaration.path:
            table = table[key]
        table.update(restated(table, modules))
    findings = [replace(finding, hint=_DECLARE) for finding in made.findings]
    return documents, made.stale, [*findings, *_listed_all_the_same(stated, weights)]


def _listed_all_the_same(stated: Sequence[Declaration], weights: Sequence[Weight]) -> Iterator[Finding]:
    """Quantized modules that a declaration lists as dense. compressed-tensors' list is read in one way, and needs none."""
    modules = [weight.module for weight in weights if weight.last is not None]
    for declaration in stated:
        for entry, module in listed(declaration.table, modules) if declaration.method != CT else ():
            message = f"{declaration.file} lists {entry} as dense, and {module} is quantized"
            hint = f"take {entry} off the list"
            yield Finding("config.quant-undeclared", message, file=declaration.file, tensor=module, hint=hint)


def _became(checkpoint: Checkpoint, weights: Iterable[Weight], taken: Collection[str]) -> Became:
    """The quantized modules that are left, and the dense matrices beside them."""
    kind_of = classifier(checkpoint.config)
    left = [weight for weight in weights if weight.last is not None]
    kept = {weight.module: kind_of(f"{weight.module}.weight", weight.ref.shape) for weight in left}
    dense = [
        module_of(name)
        for name, ref in _refs(checkpoint, taken)
        if ref.dtype in FLOATS and len(ref.shape) > 1 and name.endswith(".weight")
    ]
    fp4_experts = any(weight.is_experts and may_be_fp4(weight) for weight in left)
    return Became({}, kept, {}, dense, fp4_experts)
