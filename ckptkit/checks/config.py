"""Checks of config.json against the tensors: architecture, dtype, tie, vocabulary, layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from math import prod
from typing import Any

from ..errors import Finding
from ..families import Kind, config_value, declared_drafts, embedding_of, head_of, is_tied
from ..families.config import text_configs
from ..files.checkpoint import CONFIG
from ..files.header import FLOATS
from ..inspecting.survey import Module
from ..layout_config import KEY, fault
from . import Level, Probe, Seen, Subject
from .config_pages import PAGES
from .folding import fold
from .sidecars import Token, tokens
from .stacks import Stack, absent, declared_depth, lost_tensors, runs, stacks, text_stack

__all__ = ["PAGES", "PROBES"]

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "half": "F16", "float32": "F32", "float": "F32", "float64": "F64"}
_GENERATES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
# In tokenizer_config.json: tokens that stand for an image, a video or sound and never come from text.
_FOREIGN = ("image", "video", "audio")

_error = partial(Finding, file=CONFIG)
_warning = partial(_error, severity="warning")


def generates(config: Mapping[str, Any]) -> bool:
    """Whether the config is that of a whole language model, not of a draft, an encoder or a reward model."""
    names = config.get("architectures")
    return isinstance(names, list) and any(str(name).endswith(_GENERATES) for name in names)


# --- the config itself -------------------------------------------------------------------------------------


def _read(subject: Subject) -> Seen:
    found = [finding for finding in subject.found if finding.id == "config.parse" and finding.file == CONFIG]
    if subject.checkpoint.config is None and not found:
        message = f"there is no {CONFIG}: no engine knows what to make of the tensors"
        return Seen([_error("config.missing", message, hint=f"hf download ORG/NAME {CONFIG} --local-dir DIR")], 1)
    return Seen(found, 1)


def _architecture(subject: Subject) -> Seen:
    names = subject.config.get("architectures")
    if isinstance(names, list) and names and all(isinstance(name, str) and name for name in names):
        return Seen((), 1)
    message = f"architectures is {names!r}, not a list of model classes"
    hint = f'write the model\'s class into {CONFIG}: "architectures": ["LlamaForCausalLM"], say'
    return Seen([_error("config.arch", message, hint=hint)], 1)


def _layout(subject: Subject) -> Seen:
    wrong = fault(subject.config)
    return Seen([_error("config.layout", f"{CONFIG}: {wrong}")] if wrong else (), int(KEY in subject.config))


def _dtype(subject: Subject) -> Seen:
    """The dtype of most dense weights, by their elements, against every dtype that is stated."""
    stored: Counter[str] = Counter()
    for module in subject.survey.modules:
        ref = module.weight.first
        if ref.dtype in FLOATS and len(ref.shape) > 1:
            stored[ref.dtype] += prod(ref.shape) * module.weight.number
    stated = {
        str(found[key]).removeprefix("torch.")
        for _, found in text_configs(subject.config)
        for key in ("dtype", "torch_dtype")
        if found.get(key) is not None
    }
    known = {_DTYPES[name] for name in stated if name in _DTYPES}
    most = next((dtype for dtype, _ in stored.most_common(1)), None)
    if not known or most is None or most in known:
        return Seen((), len(stated))
    message = f"{CONFIG} states dtype {', '.join(sorted(stated))}; most dense weights are {most}"
    data = {"stated": sorted(stated), "stored": dict(stored)}
    hint = f"set \"dtype\" to what is stored, or ckptkit reshard SRC OUT --cast '*={min(known).lower()}'"
    return Seen([_warning("config.dtype", message, hint=hint, data=data)], len(stated))


# --- head and embedding ------------------------------------------------------------------------------------


def tied_pair(subject: Subject) -> tuple[Module | None, str | None, Module | None]:
    """The token embedding, the name of the head that it can feed, and that head if it is stored."""
    modules = {module.name: module for module in subject.survey.modules}
    name = embedding_of((f"{module}.weight" for module in modules), subject.config)
    head = head_of(name) if name else None
    return modules.get(name or ""), head, modules.get(head or "")


def _tie(subject: Subject) -> Seen:
    embedding, name, head = tied_pair(subject)
    if embedding is None or name is None:
        return Seen((), 0)
    tied = is_tied(subject.config)
    if head is not None and tied:
        return Seen([_tied_and_stored(embedding, head)], 1)
    has_other = any(module.kind is Kind.HEAD for module in subject.survey.modules)
    lost = any(tensor.startswith(f"{name}.") for tensor in lost_tensors(subject))
    if head is None and not tied and not has_other and not lost and generates(subject.config):
        message = f"{CONFIG} does not tie {name} to {embedding.name}, yet there is no {name}"
        hint = f'if the head is the embedding: "tie_word_embeddings": true in {CONFIG}'
        return Seen([_error("config.tie", message, tensor=name, hint=hint)], 1)
    return Seen((), 1)


def _tied_and_stored(embedding: Module, head: Module) -> Finding:
    here, there = head.weight.first, embedding.weight.first
    message = f"{CONFIG} ties {head.name} to {embedding.name}, yet {here.name} is stored too"
    if (here.dtype, here.shape) == (there.dtype, there.shape):
        message += ": engines leave it out or load it, each as it likes"
        hint = f'"tie_word_embeddings": false in {CONFIG} if the stored head is meant; else --drop {here.name}'
        return _warning("config.tie", message, tensor=here.name, hint=hint)
    message += f", as {here.dtype} {list(here.shape)}, which the embedding ({there.dtype} {list(there.shape)}) is not"
    hint = f'"tie_word_embeddings": false in {CONFIG}, at the top and in text_config'
    return _error("config.tie", message, tensor=here.name, hint=hint)


def _rows(module: Module) -> int:
    """The number of rows that a module has: output features, tokens of a head or an embedding."""
    ref, at = module.weight.first, 0
    if ref.name.endswith(".qweight") and "scales" in module.companions:  # GPTQ and AWQ: scales are [groups, out]
        ref, at = module.companions["scales"].first, -1
    return ref.shape[at] if ref.shape else 0


def _vocabulary(subject: Subject) -> Seen:
    embedding, _, head = tied_pair(subject)
    if embedding is None:
        return Seen((), 0)
    rows = _rows(embedding)
    stated = {found["vocab_size"] for _, found in text_configs(subject.config) if type(found.get("vocab_size")) is int}
    findings: list[Finding] = []
    if stated and rows not in stated:
        message = f"{CONFIG} states vocab_size {max(stated):,}; {embedding.name} has {rows:,} rows"
        data = {"stated": sorted(stated), "rows": rows}
        hint = f'"vocab_size": {rows} in {CONFIG}, if the rows are right'
        findings.append(_error("config.vocab", message, tensor=embedding.weight.first.name, hint=hint, data=data))
    if head is not None and _rows(head) not in (rows, config_value(subject.config, "draft_vocab_size")):
        message = f"{head.name} has {_rows(head):,} rows, {embedding.name} has {rows:,}"
        ref, data = head.weight.first, {"head": _rows(head), "embedding": rows}
        findings.append(Finding("vocab.rows", message, file=ref.file, tensor=ref.name, data=data))
    beyond = list(_beyond(subject, rows))
    if beyond:
        findings.append(_out_of_range(embedding, rows, beyond))
    return Seen(findings, 1)


def _beyond(subject: Subject, rows: int) -> Iterator[Token]:
    """Tokens that have no row, but those that only other modalities make."""
    settings = subject.sidecars.table("tokenizer_config.json")
    foreign = {text for key, text in settings.items() if key.startswith(_FOREIGN) and isinstance(text, str)}
    return (token for token in tokens(subject.sidecars) if token.id >= rows and token.text not in foreign)


def _out_of_range(embedding: Module, rows: int, beyond: list[Token]) -> Finding:
    last = max(beyond)
    message = f"the tokenizer gives {last.text!r} the id {last.id:,}; {embedding.name} has {rows:,} rows"
    data = {"rows": rows, "count": len(beyond), "tokens": [token.text for token in beyond[:5]]}
    hint = "resize the embedding to the tokenizer, or take the added tokens out of tokenizer.json"
    ref = embedding.weight.first
    return Finding("vocab.rows", message, file=ref.file, tensor=ref.name, hint=hint, data=data)


# --- layers ------------------------------------------------------------------------------------------------


def _layers(subject: Subject) -> Seen:
    depth, found = declared_depth(subject.config), stacks(subject)
    own = text_stack(found)
    if depth is None or own is None or subject.config.get("is_encoder_decoder"):
        return Seen((), 0)
    return Seen(fold(chain(_absent(own, depth), _undeclared(own, found, depth, subject.config))), depth)


def _absent(own: Stack, depth: int) -> Iterator[Finding]:
    missing = absent(own.layers, depth)
    if missing:
        message = f"{CONFIG} has {depth} layers; of {own.prefix} {runs(missing)} nothing is stored"
        hint = "fetch the shards that hold them, or correct num_hidden_layers"
        data = {"declared": depth, "missing": missing}
        yield _error("config.layers", message, tensor=f"{own.prefix}.{missing[0]}", hint=hint, data=data)


def _undeclared(own: Stack, found: list[Stack], depth: int, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Layers past the last one that neither the depth nor a draft key declares."""
    layers = {
        n: held for stack in found if stack.prefix == own.prefix for n, held in stack.layers.items() if n >= depth
    }
    if not layers or declared_drafts(config):
        return
    usual = {frozenset(held) for number, held in own.layers.items() if number < depth}
    message = f"{CONFIG} has {depth} layers, yet {own.prefix} goes on with {runs(layers)}: engines leave them out"
    data = {"declared": depth, "beyond": sorted(layers)}
    # Layers with parts of their own are for drafting: leaving them out changes no text.
    plain = any(frozenset(held) in usual for held in layers.values())
    tell = _error if plain else _warning
    hint = "correct num_hidden_layers" if plain else f"declare them in {CONFIG}: num_nextn_predict_layers, say"
    yield tell("config.layers", message, tensor=f"{own.prefix}.{min(layers)}", hint=hint, data=data)


# --- probes ------------------------------------------------------------------------------------------------


def _without_folder(subject: Subject) -> str | None:
    return "a single file has no config.json" if subject.checkpoint.source.is_single_file else None


def _without_config(subject: Subject) -> str | None:
    return _without_folder(subject) or (None if subject.checkpoint.config is not None else f"no {CONFIG} to go by")


def _without_either(subject: Subject) -> str | None:
    return _without_config(subject) or subject.unknown


PROBES = (
    Probe(("config.parse", "config.missing"), Level.STATIC, _read, _without_folder),
    Probe(("config.layout",), Level.STATIC, _layout, _without_config),
    Probe(("config.arch",), Level.STATIC, _architecture, _without_config),
    Probe(("config.dtype",), Level.STATIC, _dtype, _without_either),
    Probe(("config.tie",), Level.STATIC, _tie, _without_either),
    Probe(("config.vocab", "vocab.rows"), Level.STATIC, _vocabulary, _without_either),
    Probe(("config.layers",), Level.STATIC, _layers, _without_either),
)
