"""``reorder-vocab``: the rows of a head in an order of which a draft head is a view."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import Finding, UserError, fail
from ..families import Kind, classifier, embedding_of, head_of, is_tied
from ..files.checkpoint import VOCAB_ORDER, Checkpoint
from ..files.header import lay_out, row_view
from ..plan import Plan, Shard, Step, copy_step
from ..stored import WEIGHTS, split_name
from ..vocab.marks import KEY, REORDERED
from ..vocab.order import Order
from .adapters import adapters_on
from .documents import no_config
from .head_rows import Parts, Rows, parts_of, row_steps
from .ordered_config import kept_as, written
from .sidecars import sidecars, with_index

BESIDE = "order"  # the key of the file that holds the order, among the checkpoints that a plan reads


class Head(NamedTuple):
    """The head to reorder: what it is called, what its rows are taken from, and whether that is the tied embedding."""

    module: str
    parts: Parts
    untied: bool

    @property
    def called(self) -> str:
        return f"{self.module}.{REORDERED}"


class Reordered(NamedTuple):
    """A plan, and what a reader should know."""

    plan: Plan
    warnings: tuple[Finding, ...]


# --- the head ----------------------------------------------------------------------------------------------


def find_head(checkpoint: Checkpoint, untie: bool) -> Head:
    """The head of the language model. Raises UserError: ``vocab.head``, ``vocab.tied``, ``vocab.adapter``, ``vocab.format``.

    ``untie``: of a tied one that is not stored, the embedding's rows become the head's.
    """
    if checkpoint.config is None:
        raise UserError(no_config(checkpoint, "the order of the head"))
    embedding = embedding_of(checkpoint.tensors, checkpoint.config)
    module = _stored_head(checkpoint, embedding)
    adapters = list(adapters_on(checkpoint.source, [module or (embedding and head_of(embedding)) or "lm_head"]))
    if adapters:
        raise UserError(adapters)
    tied = is_tied(checkpoint.config)
    if tied and not untie:
        message = f"the head is tied to {embedding or 'the embedding'}: in another order it would be one of its own"
        raise fail("vocab.tied", message, hint="--untie makes it a tensor of its own, as large as the embedding")
    if module is not None:
        return Head(module, parts_of(checkpoint, module), untied=False)
    if tied and embedding and (head := head_of(embedding)):
        return Head(head, parts_of(checkpoint, embedding), untied=True)
    hint = "ckptkit inspect SRC shows the heads that are stored"
    raise fail("vocab.head", f"{checkpoint.source.uri} has no output head that is known, or several", hint=hint)


def _stored_head(checkpoint: Checkpoint, embedding: str | None) -> str | None:
    kind_of = classifier(checkpoint.config)
    found = {
        module: None
        for module, last in map(split_name, checkpoint.tensors)
        if last in WEIGHTS and kind_of(f"{module}.weight", (1, 1)) is Kind.HEAD
    }
    expected = head_of(embedding) if embedding else None
    if expected in found:
        return expected
    return next(iter(found)) if len(found) == 1 else None


# --- there -------------------------------------------------------------------------------------------------


def facts_of_head(checkpoint: Checkpoint, head: Head, expand_blocks: bool) -> dict[str, Any]:
    """What is recorded of the head and of the files whose originals are kept. Raises UserError ``vocab.original``."""
    parts = head.parts
    index = [checkpoint.index.file] if checkpoint.index else []
    originals = {name: kept_as(name) for name in [*written(checkpoint, {}, head.module, head.called), *index]}
    taken = next((kept for kept in originals.values() if kept in checkpoint.source.files), None)
    if taken:
        message = f"{taken} is there already, and is what an original would be kept as"
        raise fail("vocab.original", message, file=taken, hint=f"move {taken} out of SRC")
    of_head = {
        "module": head.module,
        "called": head.called,
        "untied": head.untied,
        "bias": "bias" in parts.refs,
        "dtype": parts.weight.dtype,
        "shape": list(parts.weight.shape),
        "layout": parts.layout,
        "bits": parts.bits,
        "expanded_blocks": parts.block if expand_blocks else 0,
        "fingerprint": fingerprint(checkpoint, parts),
    }
    return {"head": of_head, "originals": originals}


def headers_to_keep(checkpoint: Checkpoint, head: Head) -> dict[str, str]:
    """By shard that is written anew, the text of its header, where it is not laid out as the way back would."""
    kept = {}
    for file in sorted({ref.file for ref in head.parts.refs.values()}):
        header = checkpoint.shards[file]
        text = checkpoint.source.read(file, 0, header.data_start)
        if lay_out((entry.spec for entry in header.entries), header.metadata or None)[0] != text:
            kept[file] = text[8:].decode()
    return kept


def plan_reorder(
    checkpoint: Checkpoint,
    tables: Checkpoint,
    head: Head,
    rows: Rows,
    facts: Mapping[str, Any],
    expand_blocks: bool = False,
    include: Iterable[str] = (),
) -> Reordered:
    """The plan that gives ``head`` the order ``rows``, one of the ``tables`` that lie beside ``checkpoint``.

    ``facts`` are all that is recorded of it, in config.json too. Raises UserError: ``vocab.block-fp8``, ``vocab.format``.
    """
    source_module = head.parts.module
    steps = row_steps(
        checkpoint, source_module, rows, lambda name: head.called + name.removeprefix(source_module), expand_blocks
    )
    shards = [_shard(checkpoint, name, steps, head.untied, rows.sha256) for name in checkpoint.shards]
    texts = written(checkpoint, facts, head.module, head.called)
    texts, stale = with_index(checkpoint, shards, texts, {})
    originals = {kept: checkpoint.source.text(name) for name, kept in facts["originals"].items()}
    kept, left_out = sidecars(checkpoint, {**texts, **originals}, stale, include)
    beside = Shard(
        VOCAB_ORDER, None, next(iter(tables.shards.values())).metadata,
        tuple(copy_step(ref, "the order") for ref in tables.tensors.values()),
    )  # fmt: skip
    settings = {KEY: {"row_to_token_sha256": rows.sha256, "list_sha256": facts["list_sha256"]}}
    plan = Plan("reorder-vocab", (*shards, beside), kept, left_out, settings=settings)
    return Reordered(plan, checkpoint.warnings)


def _shard(checkpoint: Checkpoint, name: str, steps: Mapping[str, Sequence[Step]], added: bool, digest: str) -> Shard:
    """A shard with the steps in place of the tensors that they are of, or (``added``) beside them."""
    header = checkpoint.shards[name]
    made: list[Step] = []
    for ref in checkpoint.shard_tensors(name):
        mine = steps.get(ref.name, ())
        made += [copy_step(ref, "not the head"), *mine] if added or not mine else mine
    if len(made) == len(header.entries) and all(entry.name not in steps for entry in header.entries):
        return Shard(name, name, header.metadata, tuple(made), linked=True)
    return Shard(name, name, {**(header.metadata or {}), KEY: digest}, tuple(made))


def fingerprint(checkpoint: Checkpoint, parts: Parts, order: Order | None = None) -> str | None:
    """A digest of 16 of the head's rows, at even distances by token; None where rows do not lie in one piece.

    ``order`` is the one that the rows have, None for that of tokens.
    """
    import xxhash

    ref = parts.weight
    if parts.layout != "rows":
        return None
    count, width = row_view(ref.dtype, ref.shape)
    digest = xxhash.xxh3_128()
    for token in sorted({count * step // 16 for step in range(16)}):
        row = token if order is None else int(order.token_to_row[token])
        digest.update(checkpoint.source.read(ref.file, ref.start + row * width, ref.start + (row + 1) * width))
    return digest.hexdigest()
