"""A DSpark draft as it is found in a checkpoint: its tensors by serving name, its config, and all that is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from shlex import quote
from typing import Any, NamedTuple

from ..drafts.completeness import CONFIDENCE, check, stored_form
from ..drafts.configs import SERVING_CONFIG, merged, serving_of, settle
from ..drafts.declaration import declare, untrue
from ..drafts.fingerprint import ID as TARGET_MISMATCH
from ..drafts.identify import MOST_STAGES, Draft, Fact, Kind, Layout, disagreements, facts, identify, resolved
from ..drafts.tables import Config, Form, dspark, form_of, lacking
from ..errors import Finding, UserError, fail
from ..families.config import config_value, declared_drafts
from ..files.checkpoint import CONFIG, Checkpoint, parse_json

_LAYER = re.compile(r"layers\.(\d{1,4})\.")
CONFIDENCE_OFF = "draft.confidence-off"
# What --allow passes over: a draft that is whole but for a head some engines do without, a config that is set right, an
# original that was trained on since.
POLICY = frozenset({CONFIDENCE, "draft.config", TARGET_MISMATCH, "data.nan"})
# Names that training scripts and other tools give to what lies under mtp. in an official checkpoint.
_ELSEWHERE = (re.compile(r"((?:\w+\.)+mtp)\.\d+\."), re.compile(r"((?:\w+\.)*(?:draft_model|draft|midlayer))\."))
_NO_DRAFT = frozenset({"draft.none", "draft.declared-only", "draft.nextn"})


class Found(NamedTuple):
    """A draft, the serving config it has or stands for, how it is stored, who says what of it, and what is wrong.

    ``bias`` is the name of a confidence bias of zeros, which the model does not have.
    """

    draft: Draft
    config: dict[str, Any]
    form: Form
    facts: list[Fact]
    findings: list[Finding]
    bias: str | None


def find_draft(checkpoint: Checkpoint, config: Config | None = None) -> Found:
    """The DSpark draft of DeepSeek-V4 or V4.1 in ``checkpoint``; ``config`` stands in for one that has none.

    Reads the confidence bias, if there is one, and no other tensor. Raises UserError where there is no such draft:
    ``draft.none``, ``draft.declared-only``, ``draft.nextn``, ``config.missing``; and for a config that gives no sizes.
    """
    own = checkpoint.config or config
    if own is None:
        message = f"{checkpoint.source.uri} has no {CONFIG}: the draft's widths, taps and block size are not known"
        hint = "--base ORIGINAL takes it from the checkpoint that the draft was cut from"
        raise fail("config.missing", message, file=CONFIG, hint=hint)
    draft = identify(checkpoint.tensors, own)
    _refuse_others(checkpoint, draft, own)
    serving = _beside(checkpoint) if draft.layout is not Layout.SERVING else None
    serving = serving or serving_of(own, draft.layout)
    draft = _with_last(draft, serving)
    both = merged(own, serving)
    findings = [*disagreements(draft, both), *lacking({**serving, **resolved(draft, both)})]
    if any(finding.id.startswith("config.") for finding in findings):
        raise UserError(findings)
    form = stored_form(draft.tensors, form_of(serving))
    findings += _declared_form(form, serving, draft) if checkpoint.config else ()
    said = facts(draft, both)
    settle(serving, resolved(draft, both))
    declare(serving, draft.stages, form)
    bias, about_bias = _bias(checkpoint, draft)
    left = draft._replace(tensors={name: ref for name, ref in draft.tensors.items() if name != bias})
    findings += [*check(left, dspark(serving, draft.stages, form)), *about_bias, *_confidence(left, both)]
    findings += _tapped(draft, both)
    return Found(left, serving, form, said, [_runnable(item, checkpoint.source.uri) for item in findings], bias)


def _with_last(draft: Draft, config: Config) -> Draft:
    """The draft with as many stages as are declared, where what only the last stage has is missing with that stage."""
    declared = config_value(config, "n_mtp_layers")
    layers = config_value(config, "dspark_target_layer_ids")
    stages = declared or (len(layers) if isinstance(layers, list) and draft.layout is Layout.SERVING else 0)
    if type(stages) is not int or not draft.stages < stages <= MOST_STAGES:
        return draft
    is_cut = f"mtp.{draft.stages - 1}.norm.weight" not in draft.tensors
    return draft._replace(stages=stages) if is_cut else draft


def _runnable(finding: Finding, uri: str) -> Finding:
    """The finding with the checkpoint of the draft by name in a hint that mends it."""
    if not finding.hint:
        return finding
    places = f"reshard {quote(uri)} {quote(uri.rstrip('/') + '-mended')}"
    return replace(finding, hint=finding.hint.replace("reshard SRC OUT", places))


def _beside(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The serving config beside that of a trainer."""
    if SERVING_CONFIG not in checkpoint.source.files:
        return None
    found = parse_json(checkpoint.source.text(SERVING_CONFIG), SERVING_CONFIG, "config.parse")
    return found if isinstance(found, dict) else None


def _refuse_others(checkpoint: Checkpoint, draft: Draft, config: Config) -> None:
    uri = checkpoint.source.uri
    match draft.kind:
        case Kind.NONE:
            message = f"{uri} holds no DSpark draft: no tensor of one, and no dspark_* key in {CONFIG}"
            inner, about = _elsewhere(uri, draft)
            hint = about[1] or f"ckptkit inspect {quote(uri)} shows what it holds"
            raise fail("draft.none", f"{message}{about[0]}", tensor=inner, hint=hint)
        case Kind.DECLARED:
            keys = sorted(path for path in declared_drafts(config) if "dspark_" in path)
            message = f"{uri} only declares a draft ({', '.join(keys)}): it holds no tensor of one"
            inner, about = _elsewhere(uri, draft)
            hint = (
                f"ckptkit attach-dspark {quote(uri)} DRAFT OUT puts one back, cut from the original with extract-dspark"
            )
            details: dict[str, Any] = {"tensor": inner, "data": {"keys": keys}}
            raise fail("draft.declared-only", f"{message}{about[0]}", file=CONFIG, hint=about[1] or hint, **details)
        case Kind.NEXTN:
            message = f"mtp.0 of {uri} is a NextN layer, not a DSpark draft"
            tensor = next(iter(draft.tensors))
            hint = f"ckptkit extract-mtp {quote(uri)} OUT cuts it out; a DSpark draft is another model"
            raise fail("draft.nextn", message, tensor=tensor, hint=hint)


def _elsewhere(uri: str, draft: Draft) -> tuple[str | None, tuple[str, str]]:
    """A tensor that may be one of a draft by another name, what to say of it, and how it gets the official one."""
    for pattern in _ELSEWHERE:
        found = {name: match[1] for name in draft.others if (match := pattern.match(name))}
        if found:
            name, prefix = next(iter(found.items()))
            said = f"; {len(found):,} tensors begin with {prefix}. ({name}), and official names with mtp."
            rule = quote(f"{prefix}.=mtp.")
            mended = f"ckptkit reshard {quote(uri)} {quote(uri.rstrip('/') + '-mended')} --rename {rule}"
            return name, (said, mended)
    return None, ("", "")


@contextmanager
def asked_for(argument: str) -> Iterator[None]:
    """Where there is no draft, have the hint say what ``argument`` is to name."""
    try:
        yield
    except UserError as error:
        hint = f"{argument} names a checkpoint that holds a DSpark draft"
        found = [replace(item, hint=hint) if item.id in _NO_DRAFT else item for item in error.findings]
        raise UserError(found) from None


def _bias(checkpoint: Checkpoint, draft: Draft) -> tuple[str | None, list[Finding]]:
    """A confidence bias of zeros by name, and a finding for one of other values: engines build V4's head without."""
    name = f"mtp.{draft.stages - 1}.confidence_head.proj.bias"
    ref = draft.tensors.get(name)
    if ref is None:
        return None, []
    data = checkpoint.source.read(ref.file, ref.start, ref.stop)
    if not int.from_bytes(data, "little") % (1 << 8 * len(data) - 1):  # one number of any dtype, zero of either sign
        return name, []
    message = f"{name} is not zero, and DeepSeek-V4's confidence head has no bias: engines would leave it out"
    hint = "train the head without a bias"
    return name, [Finding("draft.confidence-bias", message, file=ref.file, tensor=name, hint=hint)]


def _confidence(draft: Draft, config: Config) -> Iterator[Finding]:
    """``draft.confidence-off``: SGLang looks whether ``enable_confidence_head`` is there, not at what it says."""
    own = config.get("dflash_config")
    stated = [config_value(config, "enable_confidence_head")]
    stated += [own.get("enable_confidence_head")] if isinstance(own, dict) else []
    name = f"mtp.{draft.stages - 1}.confidence_head.proj.weight"
    if False in stated and name in draft.tensors:
        message = f"{CONFIG} says enable_confidence_head: false, and {name} is there"
        hint = "take the key out of config.json, if the head is trained"
        yield Finding(CONFIDENCE_OFF, message, file=CONFIG, tensor=name, hint=hint, severity="warning")


def _declared_form(form: Form, config: Config, draft: Draft) -> Iterator[Finding]:
    """``draft.form``, a warning: the config written says how the draft is stored, whatever the source's said."""
    said = untrue(config, draft.stages, form)
    if said and draft.layout is Layout.SERVING:  # what lies beside a trainer's config says how floats go back
        hint = f"the {CONFIG} that is written says what is stored"
        yield Finding("draft.form", f"{CONFIG}: {said}", file=CONFIG, severity="warning", hint=hint)


def _tapped(draft: Draft, config: Config) -> Iterator[Finding]:
    """``draft.target-tensor``, a warning: some of the target's layers beside a draft, as if taps were its weights."""
    found = {int(match[1]) for name in draft.others if (match := _LAYER.match(name))}
    layers = config_value(config, "num_hidden_layers")
    if found and type(layers) is int and len(found) < layers:
        listed = ", ".join(map(str, sorted(found)[:8]))
        message = (
            f"layers {listed} of the target lie beside the draft: taps are read there, no weight of theirs is its own"
        )
        hint = "nothing is missing without them; they are left out"
        yield Finding("draft.target-tensor", message, tensor=f"layers.{min(found)}", hint=hint, severity="warning")


def raise_errors(findings: Iterable[Finding], allow: Collection[str]) -> list[Finding]:
    """The warnings, allowed errors among them. Raises UserError with all other errors."""
    found = list(findings)
    errors = [finding for finding in found if finding.severity == "error" and not is_allowed(finding, allow)]
    if errors:
        raise UserError(errors)
    return [passed(finding) for finding in found]


def is_allowed(finding: Finding, allow: Collection[str]) -> bool:
    """Whether ``--allow`` passes this one over: of ``draft.config`` what the tensors decide."""
    return finding.id in POLICY.intersection(allow) and not finding.data.get("firm")


def passed(finding: Finding) -> Finding:
    """The finding as a warning; one that was passed over needs no advice to do so."""
    return finding if finding.severity == "warning" else replace(finding.as_warning(), hint=None)
