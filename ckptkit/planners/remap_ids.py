"""``reorder-vocab --remap-ids``: rows and ids in another order together, so that any engine serves the result.

Every table that goes by token ids is permuted, and every place that holds an id holds the new one. What may be such a
table or such a place, and is not known to be, is refused.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from ..errors import Finding, UserError, fail
from ..families.config import config_value
from ..families.ties import head_of
from ..files.checkpoint import INDEX_SUFFIX, Checkpoint
from ..ops import operation
from ..plan import Plan, Ref, Shard, Step, copy_step
from ..stored import split_name
from ..vocab.conventions import tokens_of
from ..vocab.fingerprint import TOKENIZER, tokenizer_fingerprint, tokenizer_size
from ..vocab.lists import list_sha256
from ..vocab.order import Order
from ..vocab.remap_files import FILE, UNKNOWN, remapped_files
from ..vocab.tables import MAPS, embedding, mask_of, tables
from .adapters import adapters_on
from .allowing import passed_over
from .head_rows import Rows, parts_of, row_steps
from .sidecars import OWN, sidecars, with_index

RECORD = "vocab_remap.json"
TABLE = "vocab.table"
_POLICY = frozenset({UNKNOWN, FILE, TABLE})
_LINES = "vocab.txt"
_INTEGERS = {"I32": "<i4", "I64": "<i8"}


class Remapped(NamedTuple):
    """A plan, what a reader should know, and what is told before it."""

    plan: Plan
    warnings: tuple[Finding, ...]
    told: tuple[str, ...]


class _Given(NamedTuple):
    """What is permuted, and by what: ``rows`` gives each row's token, ``ids`` each token's row."""

    checkpoint: Checkpoint
    order: Order
    rows: Rows
    ids: Rows


def vocabulary_rows(checkpoint: Checkpoint) -> int:
    """How many token ids a checkpoint has room for: rows of its input embedding, or of a draft's map of its target.

    Raises UserError (``vocab.table``) for one that has neither.
    """
    found, mask = embedding(checkpoint), mask_of(checkpoint)
    if found is not None:
        return parts_of(checkpoint, found).n_rows
    if mask is not None:
        return mask.shape[0]
    message = f"{checkpoint.source.uri} has no token embedding, and no map of draft tokens"
    raise fail(TABLE, message, hint=f"ckptkit inspect {checkpoint.source.uri} shows what it has")


def row_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of a row of the head, with its scales; of the embedding where that is the head. 0 for a draft without either."""
    found = embedding(checkpoint)
    head = found and head_of(found)
    stored = [module for module in (head, found) if module and _is_stored(checkpoint, module)]
    if not stored:
        return 0
    parts = parts_of(checkpoint, stored[0])
    return sum(ref.nbytes for ref in parts.refs.values()) // parts.n_rows


def _is_stored(checkpoint: Checkpoint, module: str) -> bool:
    return any(split_name(name)[0] == module for name in checkpoint.tensors)


def plan_remap(
    checkpoint: Checkpoint, order: Order, rows: Rows, allow: Collection[str] = (), include: Iterable[str] = ()
) -> Remapped:
    """The plan that gives the tokens of ``checkpoint`` the ids that are their rows in ``order``.

    The order's tables lie beside the checkpoint; ``rows`` is ``row_to_token``. Raises UserError with all findings:
    ``vocab.adapter``, ``vocab.table``, ``vocab.format``, ``vocab.block-fp8``, ``vocab.unknown-ids``, ``vocab.tokenizer-file``,
    ``vocab.tokenizer``, ``vocab.remap``, ``vocab.mapping``, ``vocab.ambiguous``.
    """
    _check_first(checkpoint)
    ids = Rows(rows.ref._replace(**_place_of_ids(checkpoint, rows)), list_sha256(order.token_to_row), rows.rule)
    given = _Given(checkpoint, order, rows, ids)
    replaced, findings = _replaced(given)
    files = _files(checkpoint, order)
    told = passed_over([*findings, *files.findings], allow, lambda id: _is_firm(id, checkpoint))
    shards = tuple(_shards(checkpoint, replaced))
    written = {**files.texts, RECORD: _record(checkpoint, order)}
    texts, stale = with_index(checkpoint, shards, written, files.stale)
    kept, left_out = sidecars(checkpoint, texts, stale, include)
    kept = tuple(item for item in kept if item.name.partition(":")[0] not in checkpoint.others)
    left_out = tuple(item for item in left_out if item.name.partition(":")[0] not in checkpoint.others)
    settings = {
        "remap_ids": True,
        "engine": order.engine,
        "slices": order.slices,
        "list_sha256": list_sha256(order.list),
    }
    plan = Plan("reorder-vocab", shards, kept, left_out, settings=settings)
    return Remapped(plan, (*checkpoint.warnings, *told), _told(order, files.texts))


def _check_first(checkpoint: Checkpoint) -> None:
    if RECORD in checkpoint.source.files:
        message = f"{checkpoint.source.uri} was renumbered before: nothing would say which ids it had at first"
        raise fail("vocab.remap", message, file=RECORD, hint="renumber the checkpoint that it was made from")


def _is_firm(id: str, checkpoint: Checkpoint) -> bool:
    return id not in _POLICY or (id == FILE and TOKENIZER not in checkpoint.source.files)


def _place_of_ids(checkpoint: Checkpoint, rows: Rows) -> dict[str, Any]:
    """Where ``token_to_row`` lies: in the file that ``row_to_token`` lies in."""
    table = next(
        other.tensors["token_to_row"] for other in checkpoint.others.values() if "token_to_row" in other.tensors
    )
    return {"file": rows.ref.file, "name": table.name, "start": table.start, "stop": table.stop}


# --- tensors -----------------------------------------------------------------------------------------------


def _replaced(given: _Given) -> tuple[dict[str, list[Step]], list[Finding]]:
    """By tensor, the steps that permute it; and what cannot be permuted."""
    found = tables(given.checkpoint, given.order.n_rows)
    steps: dict[str, list[Step]] = {}
    findings = [_strange(ref) for ref in found.strange]
    if found.hashed:
        ref = found.hashed[0]
        message = f"{ref.name} is of an embedding that computes with token ids: others would mean other rows there"
        findings.append(Finding("vocab.remap", message, ref.file, ref.name))
    heads = [head for module in found.modules if (head := head_of(module))]
    findings += adapters_on(given.checkpoint.source, [*found.modules, *heads])
    for module in found.modules:
        try:
            steps |= row_steps(given.checkpoint, module, _rows_of(given, module), lambda name: name)
        except UserError as error:
            findings += error.findings
    for ref in found.maps:
        try:
            steps[ref.name] = [_map(given, ref)]
        except UserError as error:
            findings += error.findings
    for ref in found.numbers:
        is_vector = ref.shape[-1] == given.order.n_rows
        steps[ref.name] = [_step("columns@1" if is_vector else "rows@1", ref, given.rows, {})]
    return steps, findings


def _rows_of(given: _Given, module: str) -> Rows:
    """The order of a module's rows; of one that has fewer than there are ids, its part.

    Raises UserError (``vocab.table``) where that part isn't one.
    """
    parts, rows = parts_of(given.checkpoint, module), given.rows
    count = parts.n_rows
    if count == given.order.n_rows:
        return rows
    first = given.order.row_to_token[:count]
    if count > given.order.n_rows or int(first.max(initial=-1)) >= count:
        message = f"{module} has {count:,} rows and the embedding {given.order.n_rows:,}: rows would have to leave it"
        raise fail(
            TABLE, message, file=parts.weight.file, tensor=parts.weight.name, hint="--slices 1, or a shorter list"
        )
    ref = rows.ref._replace(shape=(count,), stop=rows.ref.start + 4 * count, span=(0, count))
    return Rows(ref, list_sha256(first), rows.rule)


def _map(given: _Given, ref: Ref) -> Step:
    """The step for a map of draft tokens. Raises UserError: ``vocab.ambiguous``, ``vocab.mapping``."""
    import numpy as np

    checkpoint = given.checkpoint
    if ref.dtype not in _INTEGERS or len(ref.shape) != 1:
        message = f"{ref.name} is {ref.dtype} {list(ref.shape)}, no map of draft tokens"
        raise fail("vocab.mapping", message, file=ref.file, tensor=ref.name)
    mask = mask_of(checkpoint)
    marked = mask and np.frombuffer(checkpoint.source.read(mask.file, mask.start, mask.stop), np.bool_)
    values = np.frombuffer(checkpoint.source.read(ref.file, ref.start, ref.stop), _INTEGERS[ref.dtype])
    try:
        tokens = tokens_of(values, marked, given.order.n_rows, MAPS[split_name(ref.name)[1]], ref.file)
    except UserError as error:
        hint = "take the draft with both d2t and t2d, as it was trained: t2d tells what d2t means"
        raise UserError(replace(finding, tensor=ref.name, hint=hint) for finding in error.findings) from None
    return _step("renumber@1", ref, given.ids, {"offsets": not np.array_equal(tokens, values)})


def _step(op: str, ref: Ref, rows: Rows, more: dict[str, Any]) -> Step:
    args = {"name": ref.name, "rows": rows.sha256, **more}
    inputs = (ref, rows.ref)
    return Step(op, inputs, tuple(operation(op).specs([item.spec for item in inputs], args)), rows.rule, args)


def _strange(ref: Ref) -> Finding:
    message = (
        f"{ref.name} has shape {list(ref.shape)}, a row for each token, and is no table that is known to go by them"
    )
    hint = f"--allow {TABLE} keeps it as it is, if it does not"
    return Finding(TABLE, message, ref.file, ref.name, hint)


def _shards(checkpoint: Checkpoint, replaced: dict[str, list[Step]]) -> Iterator[Shard]:
    for name, header in checkpoint.shards.items():
        refs = checkpoint.shard_tensors(name)
        steps = tuple(step for ref in refs for step in replaced.get(ref.name, [copy_step(ref, "goes by no token")]))
        yield Shard(name, name, header.metadata, steps, replaced.keys().isdisjoint(ref.name for ref in refs))


# --- files -------------------------------------------------------------------------------------------------


def _files(checkpoint: Checkpoint, order: Order) -> Any:
    source = checkpoint.source
    names = [name for name in source.files if name.partition(":")[0] not in checkpoint.others]
    texts = {name: source.text(name) for name in names if _may_hold_ids(name)}
    sizes = {order.n_rows, config_value(checkpoint.config, "vocab_size"), tokenizer_size(source)}
    return remapped_files(texts, names, order.token_to_row, {size for size in sizes if type(size) is int})


def _may_hold_ids(name: str) -> bool:
    base = name.rpartition("/")[2]
    return (base.endswith(".json") and not base.endswith(INDEX_SUFFIX) and base not in {*OWN, RECORD}) or base == _LINES


def _record(checkpoint: Checkpoint, order: Order) -> str:
    """What became of the ids, for whoever has stored some: ``row_to_token`` gives the old id by the new one."""
    content = {
        "version": 1,
        "engine": order.engine,
        "slice_rows": list(order.slice_rows),
        "slice_list_rows": list(order.slice_list_rows),
        "list_sha256": list_sha256(order.list),
        "source_tokenizer_sha256": tokenizer_fingerprint(checkpoint.source),
        "row_to_token": order.row_to_token.tolist(),
    }
    return json.dumps(content, separators=(",", ":")) + "\n"


def _told(order: Order, texts: Collection[str]) -> tuple[str, ...]:
    moved = sum(row != token for row, token in enumerate(order.row_to_token.tolist()))
    return (
        f"ids     {moved:,} of {order.n_rows:,} tokens get another id; {RECORD} has the old one of each",
        f"files   {', '.join(sorted(texts)) or 'none'} renumbered",
        "stored token ids, logit biases and a client's own ids must be renumbered too; sampling with a seed differs",
    )
