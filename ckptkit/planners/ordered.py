"""A checkpoint whose head has an order of its own: what other commands may do with it.

They carry head, order, config and the originals along as they are, or they do nothing: of all else ``--inverse`` would give back
what is no longer so, and what computes with the head would take its rows for those of other tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import Finding
from ..files.checkpoint import CONFIG, VOCAB_ORDER, Checkpoint
from ..plan import COPY, Plan
from ..vocab.marks import is_declared
from ..vocab.order_file import read_facts

_OWN = "reorder-vocab"


def not_carried(checkpoint: Checkpoint, plan: Plan) -> Iterator[Finding]:
    """``vocab.ordered`` where ``plan`` does not carry the order of a source's head along unchanged."""
    if plan.command == _OWN:
        return
    source = checkpoint.source
    for key in source.others:
        if f"{key}:{VOCAB_ORDER}" in source.files:
            yield _finding(f"the head of {source.others[key].uri} has an order of its own", source.others[key].uri)
    facts = read_facts(source)
    if facts is None:
        if is_declared(checkpoint.config):
            yield _finding(f"{CONFIG} says that the head's rows have an order of their own, which is gone", source.uri)
        return
    head = f"{facts['head']['called']}."
    planned = {step.inputs[0].name: step for step in plan.steps() if step.op == COPY}
    for name in (name for name in checkpoint.tensors if name.startswith(head)):
        if name not in planned or planned[name].outputs[0].name != name:
            yield _finding(f"{name} has rows in an order of their own, and {plan.command} would change it", source.uri)
            return
    copied = {item.name for item in plan.sidecars if item.text is None}
    kept = [CONFIG, VOCAB_ORDER, *(kept for kept in facts["originals"].values() if kept in source.files)]
    for name in (name for name in kept if name not in copied):
        what = f"{name} says in which order the head's rows are, and {plan.command} would not take it along as it is"
        yield _finding(what, source.uri)
        return


def _finding(message: str, uri: str) -> Finding:
    hint = f"ckptkit reorder-vocab {uri} PLAIN --inverse first"
    return Finding("vocab.ordered", message, file=VOCAB_ORDER, hint=hint)
