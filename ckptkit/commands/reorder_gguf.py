"""``ckptkit reorder-vocab`` on a GGUF file: one file in, one file out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from ..console import Console, Table
from ..errors import fail
from ..execute.one_file import digest_of, mapped
from ..files.gguf import Gguf, Tensor, parse, type_name
from ..planners.gguf_order import check_unordered, plan_inverse, plan_reorder, source_digest
from ..planners.gguf_plan import (
    EMBEDDING,
    HEAD,
    check_whole,
    head_of,
    layers_of,
    tokenizer_fingerprint,
    tokens_of,
)
from ..planners.gguf_remap import plan_remap, vocabulary_rows
from ..vocab.lists import list_sha256, read_list, sorted_unique
from ..vocab.order import Order, order_rows
from ..vocab.slices import rule_of
from ..vocab.view import llama_cpp_line, view_lines
from .making import How
from .making_gguf import Job, check_options, make_gguf

_DIGEST = "0" * 32  # in place of a digest that only a run has a use for
_GARBLED = (
    "this file is in its final order: a llama.cpp that reorders the head itself when it loads (--spec-draft-vocab) must be "
    "given the original, or the rows would be moved twice"
)

_RENUMBERED = (
    "a list for this file has the new ids: the first rows of each slice; ids that are stored must be renumbered too"
)


class Wanted(NamedTuple):
    """What the options of ``reorder-vocab`` ask for."""

    draft_vocab: str
    slices: int
    engine: str | None
    align: int
    untie: bool
    expand_blocks: bool
    remap_ids: bool
    offsets: bool | None = None


def reorder_gguf(
    console: Console,
    src: str,
    out: str | None,
    how: How,
    wanted: Wanted | None,
) -> None:
    """Reorder the head of the GGUF file ``src`` or renumber its vocabulary; without ``wanted`` undo it."""
    check_options(how, {"--untie": wanted and wanted.untie, "--expand-blocks": wanted and wanted.expand_blocks})
    buffer = mapped(Path(src))
    before = os.stat(src)
    gguf = parse(buffer, src)
    check_whole(gguf, src)
    if wanted is None:
        plan = plan_inverse(gguf, buffer, src)
        job = Job(plan, {"inverse": True}, [], expected=source_digest(gguf) if how.options.verify else None)
    else:
        order = _order(gguf, src, wanted)
        job = (_remapped if wanted.remap_ids else _reordered)(gguf, buffer, order, src, how)
    make_gguf(console, "reorder-vocab", src, out, how, job, buffer, before)


def _order(gguf: Gguf, src: str, wanted: Wanted) -> Order:
    check_unordered(gguf, src)
    rows = vocabulary_rows(gguf, src) if wanted.remap_ids else head_of(gguf, src).rows
    found, tokenizer = read_list(wanted.draft_vocab, n_vocab=rows, offsets=wanted.offsets), tokenizer_fingerprint(gguf)
    if found.tokenizer_sha256 and tokenizer and found.tokenizer_sha256 != tokenizer:
        message = f"{wanted.draft_vocab} was made for another tokenizer than that of {src}"
        raise fail("vocab.fingerprint", message, file=wanted.draft_vocab, hint="make the list with this tokenizer")
    n_tokenizer = len(tokens_of(gguf)) or None
    listed = sorted_unique(found, min(rows, n_tokenizer or rows))
    rule = rule_of(wanted.engine, rows, wanted.slices)
    return order_rows(listed, rows, wanted.slices, rule, wanted.align, layers_of(gguf), n_tokenizer)


def _reordered(gguf: Gguf, buffer: memoryview, order: Order, src: str, how: How) -> Job:
    digest = _DIGEST if how.dry_run else digest_of(buffer)
    head = head_of(gguf, src)
    plan = plan_reorder(gguf, order, digest, src)
    told: list[str | Table] = [*view_lines(order, head.row_bytes), llama_cpp_line(_own(gguf)), _GARBLED]
    return Job(plan, _facts(order, head), told)


def _remapped(gguf: Gguf, buffer: memoryview, order: Order, src: str, how: How) -> Job:
    made = plan_remap(gguf, buffer, order, src, how.allow)
    head = gguf.tensors.get(HEAD) or gguf.tensors.get(EMBEDDING)
    lines = view_lines(order, head.row_bytes) if head else []
    told: list[str | Table] = [*lines, llama_cpp_line(_own(gguf)), _RENUMBERED]
    return Job(made.plan, _facts(order, head), told, made.warnings)


def _facts(order: Order, head: Tensor | None) -> dict[str, Any]:
    return {
        "engine": order.engine,
        "slice_rows": list(order.slice_rows),
        "slice_list_rows": list(order.slice_list_rows),
        "list_sha256": list_sha256(order.list),
        "copy_bytes": len(order.list) * head.row_bytes if head else None,
        "view_bytes": 0,
    }


def _own(gguf: Gguf) -> str | None:
    """What the head is, where it is a tensor of its own."""
    head = gguf.tensors.get(HEAD)
    return head and f"{HEAD} is a tensor of its own, {type_name(head.type)}, rows of {head.row_bytes:,} bytes"
