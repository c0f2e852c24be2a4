"""Heads against their source: what the conversion does to the logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..decode import Encoded, dense
from ..errors import Finding
from ..families import Kind, classifier, config_value, embedding_of
from ..files.checkpoint import Checkpoint
from ..files.header import FLOATS
from ..heads.head import find_head
from ..stored import split_name
from ..vocab.order_file import read_order
from . import Level, Page, Probe, Seen, Subject
from .bounds import bound
from .matching import Pair
from .numeric import arithmetic_of

if TYPE_CHECKING:
    from ..decode.numbers import Floats
    from ..vocab.order import Order
    from .fidelity import Agreement

# Names of the final norm beside the embedding, and model types whose norms add one to their weight.
_NORMS = ("norm", "final_layernorm", "ln_f", "norm_f", "final_norm")
_CENTERED = frozenset({"gemma", "gemma2", "gemma3", "gemma3_text", "qwen3_next", "qwen3_5", "qwen3_5_moe"})


class Converted(NamedTuple):
    """A head and its source. ``order``: how its rows were put in another order, where they were."""

    pair: Pair
    order: Order | None = None


def _heads(subject: Subject) -> list[Converted]:
    """The heads that were converted, but for those that lie transposed in one of the two; or the reordered one."""
    if subject.against is None:
        return []
    order = read_order(subject.checkpoint.source)
    if order is not None:
        pair = Pair(find_head(subject.checkpoint).view, find_head(subject.against).view)
        comparable = pair.made.shape == pair.source.shape and order.n_rows == pair.made.rows
        return [Converted(pair, order)] if comparable and read_order(subject.against.source) is None else []
    classify = classifier(subject.config)
    return [
        Converted(pair)
        for pair in subject.matched.pairs
        if classify(f"{split_name(pair.made.name)[0]}.weight", (1, 1)) is Kind.HEAD
        and not (pair.made.turned or pair.source.turned)
    ]


def _fidelity(subject: Subject) -> Seen:
    findings: list[Finding] = []
    figures: dict[str, Any] = {}
    for head in _heads(subject):
        name = head.pair.made.name
        found = _agreements(head, subject)
        figures[name] = {kind: agreement._asdict() for kind, agreement in found.items()}
        findings += [_finding(head.pair, kind, agreement) for kind, agreement in found.items() if agreement.beyond]
    states = sum(kind["states"] for kinds in figures.values() for kind in kinds.values())
    return Seen(findings, states, {"heads": figures})


def _agreements(head: Converted, subject: Subject) -> Mapping[str, Agreement]:
    from ..heads.states import kinds_of
    from .fidelity import agreements

    assert subject.against is not None
    pair, source = head.pair, subject.against.source
    kinds = kinds_of(subject.against, pair.source, subject.options.get("hidden"))
    limit = bound(pair.made.stored, pair.source.stored, arithmetic_of(subject.manifest))
    rows = head.order and head.order.token_to_row
    return agreements(pair, subject.checkpoint.source, source, limit, kinds, rows)


def embedding(source: Checkpoint) -> Encoded | None:
    """The token embedding, if it is dense."""
    module = embedding_of(source.tensors, source.config)
    ref = source.tensors.get(f"{module}.weight")
    return dense(ref) if ref is not None and ref.dtype in FLOATS else None


def final_norm(source: Checkpoint, width: int) -> Floats | None:
    """What the norm before the head multiplies by, float32 [width]; None where it is not found under a known name."""
    import numpy as np

    from ..decode.rows import decode
    from .viewing import read

    parent = (embedding_of(source.tensors, source.config) or "").rpartition(".")[0]
    names = (f"{parent}.{name}.weight".lstrip(".") for name in _NORMS)
    ref = next((ref for name in names if (ref := source.tensors.get(name)) and ref.shape == (width,)), None)
    if ref is None or ref.dtype not in FLOATS:
        return None
    weight = dense(ref)
    norm: Floats = decode(weight, 0, 1, read(weight, source.source, 0, 1))[0]
    centered = config_value(source.config, "model_type") in _CENTERED
    return np.add(norm, np.float32(centered))


def _finding(pair: Pair, kind: str, found: Agreement) -> Finding:
    assert found.worst is not None
    before, after = found.worst
    message = (
        f"{pair.made.name}: for {found.beyond:,} of {found.states:,} hidden states ({kind}) another token comes first than"
        f" with the source's head, by more than rounding explains; token {after:,} for {before:,}, say"
    )
    data = {"kind": kind, **found._asdict()}
    return Finding("numeric.head", message, file=pair.made.stored.codes.file, tensor=pair.made.name, data=data)


def _unfit(subject: Subject) -> str | None:
    if subject.against is None:
        return "no --against"
    if subject.unknown:
        return subject.unknown
    if subject.sample.of > 1:
        return "concerns whole heads, not samples"
    return None if _heads(subject) else "concerns heads that were converted, and none was"


PROBES = (Probe(("numeric.head",), Level.NUMERIC, _fidelity, _unfit),)

PAGES = (
    Page(
        "numeric.head", Level.NUMERIC, "error", "A converted head prefers other tokens",
        "Logits of the source's head and of the converted one are compared for hidden states that need no run of the "
        "model: normal noise through the final norm (nearly flat logits, the severe test), rows of the head itself "
        "(their own token must win, so rows that were lost or moved show), and rows of the embedding through the final "
        "norm. No model is run: states of real text are those of --hidden FILE. A head whose rows were put in another "
        "order is compared token by token. The report gives for each kind how often the first, and how many of the "
        "first five and ten tokens agree, the KL divergence both ways in nats, the mean and the "
        "largest difference of a logit, and how often the first token flips. A flip is a near-tie if the margin in the "
        "source is within 8 standard deviations of what independent rounding errors within the format's bound do to "
        "the two logits; beyond that it is an error.",
        "lm_head.weight_packed: for 3 of 64 hidden states (rows) another token comes first than with the source's head",
        "Look at numeric.error of the same tensor: rows or scales are damaged or moved. Quantize the head again.",
    ),
)  # fmt: skip
