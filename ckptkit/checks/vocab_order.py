"""A head whose rows are in an order of their own: is that order there, whole, and the one that config.json speaks of?"""

from __future__ import annotations

from ..errors import Finding, UserError
from ..files.checkpoint import CONFIG, VOCAB_ORDER
from ..vocab.marks import KEY, is_declared
from ..vocab.order_file import read_facts, read_order
from . import Level, Page, Probe, Seen, Subject

ID = "vocab.order-file"


def _order(subject: Subject) -> Seen:
    source, config = subject.checkpoint.source, subject.config
    try:
        facts = read_facts(source)
        read_order(source)
    except UserError as error:
        return Seen([_finding(error.findings[0].message)], 1)
    if facts is None:
        what = f"{CONFIG} says that the head's rows are in an order of their own, and there is no {VOCAB_ORDER}"
        return Seen([_finding(what)] if is_declared(config) else (), int(is_declared(config)))
    head = f"{facts.get('head', {}).get('called')}."
    if config.get(KEY) != facts:
        return Seen([_finding(f"{CONFIG} and {VOCAB_ORDER} say different things of the order")], 1)
    if not any(name.startswith(head) for name in subject.checkpoint.tensors):
        return Seen([_finding(f"there is no tensor {head}*, whose order {VOCAB_ORDER} holds")], 1)
    return Seen((), 1)


def _finding(message: str) -> Finding:
    return Finding(ID, message, file=VOCAB_ORDER)


def _unfit(subject: Subject) -> str | None:
    return subject.unknown


PROBES = (Probe((ID,), Level.STATIC, _order, _unfit),)

PAGES = (
    Page(
        ID,
        Level.STATIC,
        "error",
        "The order of the head's rows is not there, or not that of this head",
        "ckptkit reorder-vocab writes a head's rows in another order than that of tokens, and which one into "
        "vocab_order.safetensors and config.json. Without it, or with another one, no row of the head can be told to be "
        "any token's: the logits are garbage, and so is what --inverse would make.",
        '"model_type": "ckptkit_vocab_order" in config.json, and no vocab_order.safetensors beside it',
        "Take config.json, vocab_order.safetensors and the shard with the head from the result of one ckptkit reorder-vocab, or "
        "make it again.",
    ),
)
