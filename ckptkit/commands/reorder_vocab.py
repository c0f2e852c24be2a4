"""``ckptkit reorder-vocab``."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ..console import Console, Table
from ..errors import fail
from ..families import config_value, is_tied
from ..files.checkpoint import VOCAB_ORDER, Checkpoint, joined, open_checkpoint
from ..files.gguf import is_gguf
from ..files.source import open_source, same_bytes
from ..options import command
from ..planners.head_rows import Rows
from ..planners.remap_ids import Remapped, plan_remap, row_bytes, vocabulary_rows
from ..planners.reorder_inverse import plan_inverse
from ..planners.reorder_vocab import BESIDE, Reordered, facts_of_head, find_head, headers_to_keep, plan_reorder
from ..planners.selection import tied_head
from ..vocab.fingerprint import tokenizer_fingerprint, tokenizer_size
from ..vocab.list_writers import tensors_file
from ..vocab.lists import read_list, sorted_unique
from ..vocab.marks import is_declared
from ..vocab.order import Order, order_rows
from ..vocab.order_file import (
    facts_of,
    metadata_of,
    read_facts,
    read_headers,
    read_order,
    tables_of,
)
from ..vocab.slices import ENGINES, rule_of
from ..vocab.view import llama_cpp_line, view_lines
from .list_output import offsets_option
from .making import How, make, make_options, output_problems_too
from .places import keep, table_place
from .reorder_gguf import Wanted, reorder_gguf

_FOR_LLAMA_CPP = (
    "llama.cpp reads GGUF files: reorder the one made of SRC; one that reorders when it loads (--spec-draft-vocab) takes that file "
    "as it was, or rows would be moved twice"
)


@command
@click.argument("src")
@click.argument("out", required=False)
@click.option("--draft-vocab", metavar="LIST", help="The draft vocabulary: a file of token ids, prefix:N …")
@offsets_option
@click.option("--slices", type=click.IntRange(1), metavar="N", help="Among how many devices the head is cut.")
@click.option("--engine", type=click.Choice(ENGINES), help="By whose rule; needed where engines' rules differ.")
@click.option(
    "--align", type=click.IntRange(1), default=1, metavar="A", help="Round each slice's list rows up to A's multiple."
)
@click.option("--inverse", is_flag=True, help="Put the rows back: SRC is a result of reorder-vocab.")
@click.option("--untie", is_flag=True, help="Give a head that is tied to the embedding rows of its own.")
@click.option("--expand-blocks", is_flag=True, help="FP8 in blocks: give each row the scales of its block.")
@click.option("--remap-ids", is_flag=True, help="Renumber the tokens too, so that any engine serves the result.")
@click.option("--streaming", is_flag=True, help="Read the head once from beginning to end, for remote files.")
@make_options
def reorder_vocab(
    console: Console,
    src: str,
    out: str | None,
    draft_vocab: str | None,
    offsets: bool | None,
    slices: int | None,
    engine: str | None,
    align: int,
    inverse: bool,
    untie: bool,
    expand_blocks: bool,
    remap_ids: bool,
    streaming: bool,
    how: How,
) -> None:
    """Write a head's rows in draft-view order: in every device's slice those of a draft vocabulary come first.

    A draft head over that vocabulary is then a view of the target's head, and takes no memory. Rows are moved, not
    computed with, in every format; vocab_order.safetensors holds the order, and --inverse restores the checkpoint byte for byte.

    No engine serves the result unless it reads that order, so it is made to be refused: an unknown model_type in config.json
    (the original is config.original.json), and the head's tensors are called lm_head.rows.*. --remap-ids makes what any engine
    serves: embeddings, heads and every place that holds a token id are renumbered together.

    SRC may be a GGUF file; OUT is one then.

    \b
    Examples:
      ckptkit reorder-vocab ./model ./ordered --draft-vocab draft.txt --slices 2 --dry-run
      ckptkit reorder-vocab ./model ./ordered --draft-vocab prefix:32768 --slices 3 --engine sglang
      ckptkit reorder-vocab ./model ./ordered --draft-vocab draft.txt --slices 4 --align 64 --link hard
      ckptkit reorder-vocab ./ordered ./model-again --inverse
      ckptkit reorder-vocab ./model ./renumbered --draft-vocab draft.txt --slices 2 --remap-ids
      ckptkit reorder-vocab model.gguf renumbered.gguf --draft-vocab draft.txt --slices 1 --remap-ids
    """
    how = how._replace(options=replace(how.options, streaming=streaming))
    wanted = None if inverse else _wanted(draft_vocab, slices, engine, align, untie, expand_blocks, remap_ids, offsets)
    others = draft_vocab or slices or engine or align > 1 or untie or expand_blocks or remap_ids
    if inverse and (others or offsets is not None):
        message = "--inverse undoes what the source says of itself: it takes no list, slices or engine"
        raise fail("usage.arguments", message, hint="ckptkit reorder-vocab SRC OUT --inverse")
    if is_gguf(src):
        reorder_gguf(console, src, out, how, wanted)
        return
    with open_source(src) as source, ExitStack() as stack:
        with output_problems_too(source, out, how.options):
            checkpoint = open_checkpoint(source)
            if wanted is None:
                joint, made, told = _back(checkpoint, how, stack)
            else:
                place = stack.enter_context(table_place(out, how, VOCAB_ORDER))
                there = _renumbered if wanted.remap_ids else _there
                joint, made, told = there(checkpoint, wanted, place, how, stack)
        make(console, joint, made.plan, Path(out) if out else None, how, made.warnings, told)


def _wanted(
    draft_vocab: str | None,
    slices: int | None,
    engine: str | None,
    align: int,
    untie: bool,
    expand_blocks: bool,
    remap_ids: bool,
    offsets: bool | None,
) -> Wanted:
    if draft_vocab is None or slices is None:
        missing = "--draft-vocab" if draft_vocab is None else "--slices"
        hint = "ckptkit reorder-vocab SRC OUT --draft-vocab LIST --slices N"
        raise fail("usage.arguments", f"{missing} is missing", hint=hint)
    if remap_ids and (untie or expand_blocks):
        message = "--remap-ids moves embedding and head together: it takes neither --untie nor --expand-blocks"
        raise fail("usage.arguments", message, hint="leave them out")
    return Wanted(draft_vocab, slices, engine, align, untie, expand_blocks, remap_ids, offsets)


Planned = tuple[Checkpoint, Reordered | Remapped, list[str | Table]]


def _there(checkpoint: Checkpoint, wanted: Wanted, place: Path, how: How, stack: ExitStack) -> Planned:
    _check_unordered(checkpoint)
    head = find_head(checkpoint, wanted.untie)
    if wanted.untie and not head.untied:
        _check_stored(checkpoint)
    order, facts = _ordered(checkpoint, head.parts.n_rows, wanted)
    facts |= facts_of_head(checkpoint, head, wanted.expand_blocks)
    metadata = metadata_of(facts, headers_to_keep(checkpoint, head))
    place = keep(place, tensors_file(tables_of(order), metadata))
    joint = _beside(checkpoint, place, stack)
    rows = Rows(joint.others[BESIDE].tensors["row_to_token"], facts["row_to_token_sha256"], "--draft-vocab")
    made = plan_reorder(checkpoint, joint.others[BESIDE], head, rows, facts, wanted.expand_blocks, how.include)
    row_bytes = sum(ref.nbytes for ref in head.parts.refs.values()) // order.n_rows
    own = None if head.untied else f"{head.module} is a tensor of its own, and will be in a GGUF file made of SRC"
    return joint, made, [*view_lines(order, row_bytes), llama_cpp_line(own), _FOR_LLAMA_CPP]


def _renumbered(checkpoint: Checkpoint, wanted: Wanted, place: Path, how: How, stack: ExitStack) -> Planned:
    _check_unordered(checkpoint)
    order, facts = _ordered(checkpoint, vocabulary_rows(checkpoint), wanted)
    joint = _beside(checkpoint, keep(place, tensors_file(tables_of(order), None)), stack)
    rows = Rows(joint.others[BESIDE].tensors["row_to_token"], facts["row_to_token_sha256"], "--draft-vocab")
    made = plan_remap(joint, order, rows, how.allow, how.include)
    own = None if is_tied(checkpoint.config) else "the head is a tensor of its own"
    return joint, made, [*view_lines(order, row_bytes(checkpoint)), llama_cpp_line(own), *made.told]


def _check_unordered(checkpoint: Checkpoint) -> None:
    if VOCAB_ORDER in checkpoint.source.files or is_declared(checkpoint.config):
        message = f"the head of {checkpoint.source.uri} has an order of its own already"
        raise fail("vocab.ordered", message, file=VOCAB_ORDER, hint="ckptkit reorder-vocab SRC PLAIN --inverse first")


def _ordered(checkpoint: Checkpoint, n_rows: int, wanted: Wanted) -> tuple[Order, dict[str, Any]]:
    """The order, and what is recorded of it. Raises UserError: ``vocab.*``, ``usage.engine``."""
    source = checkpoint.source
    n_tokenizer, tokenizer = tokenizer_size(source), tokenizer_fingerprint(source)
    found = read_list(wanted.draft_vocab, n_vocab=n_rows, offsets=wanted.offsets)
    if found.tokenizer_sha256 and tokenizer and found.tokenizer_sha256 != tokenizer:
        message = f"{wanted.draft_vocab} was made for another tokenizer than that of {source.uri}"
        raise fail("vocab.fingerprint", message, file=wanted.draft_vocab, hint="make the list with this tokenizer")
    n_real = min(n_rows, n_tokenizer or n_rows)
    listed = sorted_unique(found, n_real)
    rule = rule_of(wanted.engine, n_rows, wanted.slices)
    layers = config_value(checkpoint.config, "num_hidden_layers")
    n_layer = layers if type(layers) is int else 0
    order = order_rows(listed, n_rows, wanted.slices, rule, wanted.align, n_layer, n_tokenizer)
    stated = config_value(checkpoint.config, "vocab_size")
    return order, facts_of(order) | {
        "n_vocab": stated if type(stated) is int else n_rows,
        "tokenizer_sha256": tokenizer,
    }


def _check_stored(checkpoint: Checkpoint) -> None:
    """``vocab.tied`` where a head that is to be untied is stored too, and is not the embedding's bytes."""
    tied = tied_head(checkpoint)
    stored = checkpoint.tensors.get(f"{tied[0]}.weight") if tied else None
    if tied is None or stored is None or same_bytes(checkpoint.source, stored, tied[1]):
        return
    message = f"the config ties {stored.name} to {tied[1].name}, yet both are stored and they differ"
    hint = "decide which one is meant: set tie_word_embeddings to false in config.json if it is the stored head"
    raise fail("vocab.tied", message, file=stored.file, tensor=stored.name, hint=hint)


def _back(checkpoint: Checkpoint, how: How, stack: ExitStack) -> Planned:
    source = checkpoint.source
    order, facts = read_order(source), read_facts(source)
    if order is None or facts is None:
        message = f"{source.uri} has no {VOCAB_ORDER}: its head is in the order of tokens"
        raise fail("vocab.not-ordered", message, hint="--inverse is for a result of reorder-vocab")
    headers = read_headers(source)
    joint = _beside(checkpoint, source.files[VOCAB_ORDER].path, stack)
    return joint, plan_inverse(checkpoint, joint.others[BESIDE], order, facts, headers, how.include), []


def _beside(checkpoint: Checkpoint, path: Path, stack: ExitStack) -> Checkpoint:
    return joined(checkpoint, {BESIDE: open_checkpoint(stack.enter_context(open_source(str(path))))})
