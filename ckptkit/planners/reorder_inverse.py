"""``reorder-vocab --inverse``: a checkpoint whose head has an order of its own, as it was before."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import fail
from ..files.checkpoint import VOCAB_ORDER, Checkpoint
from ..plan import LeftOut, Plan, Shard, Step, copy_step
from ..vocab.marks import KEY
from ..vocab.order import Order
from .head_rows import Rows, parts_of, row_steps
from .reorder_vocab import Reordered, fingerprint
from .sidecars import sidecars, with_index


def plan_inverse(
    checkpoint: Checkpoint,
    tables: Checkpoint,
    order: Order,
    facts: Mapping[str, Any],
    headers: Mapping[str, str],
    include: Iterable[str],
) -> Reordered:
    """The plan that undoes :func:`~.reorder_vocab.plan_reorder` by the ``tables`` beside ``checkpoint``: names, bytes, config, index and the layout of files as they were.

    Raises UserError: ``source.vocab-order`` where the head is not the one whose order is recorded.
    """
    head = facts["head"]
    called, module = head["called"], head["module"]
    parts = parts_of(checkpoint, called)
    if fingerprint(checkpoint, parts, order) != head["fingerprint"]:
        message = f"{parts.weight.name} is not the head whose order {VOCAB_ORDER} holds"
        hint = "take both from the result of one reorder-vocab"
        raise fail("source.vocab-order", message, file=parts.weight.file, tensor=parts.weight.name, hint=hint)
    ref = tables.tensors["token_to_row"]
    rows = Rows(ref, facts["token_to_row_sha256"], "--inverse")
    steps = row_steps(
        checkpoint, called, rows, lambda name: module + name.removeprefix(called), collapse=head["expanded_blocks"]
    )
    replaced: dict[str, Sequence[Step]] = dict.fromkeys(steps, ()) if head["untied"] else dict(steps)
    shards = [_restored(checkpoint, name, replaced, headers) for name in checkpoint.shards]
    texts, stale = _originals(checkpoint, shards, facts["originals"])
    kept, left_out = sidecars(checkpoint, texts, stale, include)
    dropped = tuple(LeftOut(name, "the head is the embedding again") for name in steps) if head["untied"] else ()
    plan = Plan("reorder-vocab", tuple(shards), kept, left_out, dropped, {"inverse": True})
    return Reordered(plan, checkpoint.warnings)


def _restored(
    checkpoint: Checkpoint, name: str, replaced: Mapping[str, Sequence[Step]], headers: Mapping[str, str]
) -> Shard:
    header, refs = checkpoint.shards[name], checkpoint.shard_tensors(name)
    if replaced.keys().isdisjoint(ref.name for ref in refs):
        return Shard(name, name, header.metadata, tuple(copy_step(ref, "not the head") for ref in refs), linked=True)
    steps = [step for ref in refs for step in replaced.get(ref.name, [copy_step(ref, "not the head")])]
    metadata = {key: value for key, value in (header.metadata or {}).items() if key != KEY} or None
    made = Shard(name, name, metadata, tuple(steps))
    text = headers.get(name)
    return (
        made if text is None or not _fits(text, made) else Shard(name, name, _metadata(text), made.steps, header=text)
    )


def _fits(text: str, shard: Shard) -> bool:
    """Whether the header is of these tensors: a file may have been split since."""
    table = json.loads(text)
    specs = {spec.name: (spec.dtype, list(spec.shape)) for step in shard.steps for spec in step.outputs}
    return specs == {name: (at["dtype"], at["shape"]) for name, at in table.items() if name != "__metadata__"}


def _metadata(text: str) -> dict[str, str] | None:
    found: dict[str, str] | None = json.loads(text).get("__metadata__")
    return found


def _originals(
    checkpoint: Checkpoint, shards: Sequence[Shard], originals: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """The files as they were, and which are no longer needed. Raises UserError ``source.vocab-order`` for one that is gone."""
    files = checkpoint.source.files
    gone = [kept for kept in originals.values() if kept not in files]
    if gone:
        message = f"{gone[0]} is gone, and with it what the checkpoint was before"
        raise fail("source.vocab-order", message, file=gone[0], hint="take it from the result of reorder-vocab")
    texts = {name: checkpoint.source.text(kept) for name, kept in originals.items()}
    stale = dict.fromkeys([VOCAB_ORDER, *originals.values()], "of the order that is undone")
    index = checkpoint.index.file if checkpoint.index else None
    if index in texts and _weight_map(texts[index]) == _weight_map_of(shards):
        return texts, stale
    others = {name: text for name, text in texts.items() if name != index}
    return with_index(checkpoint, shards, others, stale)


def _weight_map(text: str) -> Any:
    return json.loads(text).get("weight_map")


def _weight_map_of(shards: Iterable[Shard]) -> dict[str, str]:
    return {spec.name: shard.name for shard in shards for step in shard.steps for spec in step.outputs}
