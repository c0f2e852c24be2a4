"""``ckptkit draft-vocab subset-head``."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import click

from ..console import Console, Table, fmt_bytes
from ..errors import fail
from ..execute.one_file import mapped
from ..files.checkpoint import joined, open_checkpoint
from ..files.gguf import is_gguf, parse
from ..files.source import open_source
from ..options import command
from ..planners.gguf_plan import tokenizer_fingerprint as gguf_fingerprint
from ..planners.head_rows import Rows
from ..planners.reorder_vocab import find_head
from ..planners.subset_gguf import HeadRows, plan_subset_gguf, rows_in_gguf, rows_in_safetensors
from ..planners.subset_head import BESIDE, COMMAND, LAYOUTS, TABLES, check_source, plan_subset_head, tables_of
from ..vocab.fingerprint import tokenizer_fingerprint
from ..vocab.list_writers import facts_of, tensors_file
from ..vocab.lists import DraftVocab, list_sha256, read_list, sorted_unique
from .list_output import offsets_option
from .making import How, make, make_options, output_problems_too
from .making_gguf import Job, check_options, make_gguf
from .places import keep, table_place

GGUF = "llama.cpp"


@command
@click.argument("src")
@click.argument("out", required=False)
@click.option(
    "--draft-vocab", required=True, metavar="LIST", help="The draft vocabulary: a file of token ids, prefix:N …"
)
@click.option("--layout", type=click.Choice([*LAYOUTS, GGUF]), default="eagle3", help="Whose names (default: eagle3).")
@offsets_option
@make_options
def subset_head(
    console: Console, src: str, out: str | None, draft_vocab: str, layout: str, offsets: bool | None, how: How
) -> None:
    """Take the rows of a draft vocabulary out of a head, as a head of its own with its map d2t.

    Rows lie in ascending order of tokens and are stored as they were, in every format but FP8 in blocks. A tied head is
    the embedding's rows. config.json says the sizes and the quantization, under a model_type that no engine knows: OUT is
    a part to be put into a draft.

    \b
    eagle3, specforge   lm_head.*, d2t (offsets, int64), t2d
    sglang-eagle3, vllm lm_head.*, d2t (offsets, int64)
    trtllm              lm_head.*, model.d2t (offsets, int32)
    llama.cpp           OUT is a GGUF file: output.weight, d2t (token ids, int64); SRC a GGUF file, or a dense head

    \b
    Examples:
      ckptkit draft-vocab subset-head ./Qwen3-8B ./draft-head --draft-vocab draft.txt --dry-run
      ckptkit draft-vocab subset-head ./Qwen3-8B ./draft-head --draft-vocab draft.txt --layout trtllm
      ckptkit draft-vocab subset-head model.gguf head.gguf --draft-vocab draft.txt --layout llama.cpp
    """
    if is_gguf(src) or layout == GGUF:
        _as_gguf(console, src, out, draft_vocab, layout, offsets, how)
        return
    with open_source(src) as source, ExitStack() as stack:
        with output_problems_too(source, out, how.options):
            checkpoint = open_checkpoint(source)
            check_source(checkpoint)
            head = find_head(checkpoint, untie=True)
            fingerprint = tokenizer_fingerprint(source)
            vocab = _list(draft_vocab, head.parts.n_rows, offsets, fingerprint, src)
            place = stack.enter_context(table_place(out, how, TABLES))
            tables = tables_of(vocab.ids, head.parts.n_rows, LAYOUTS[layout])
            place = keep(place, tensors_file(tables, None))
            joint = joined(checkpoint, {BESIDE: open_checkpoint(stack.enter_context(open_source(str(place))))})
            beside = joint.others[BESIDE]
            rows = Rows(beside.tensors["rows"], list_sha256(vocab.ids), "--draft-vocab")
            plan = plan_subset_head(checkpoint, beside, head, rows, LAYOUTS[layout], facts_of(vocab), how.include)
        row_bytes = sum(ref.nbytes for ref in head.parts.refs.values()) // head.parts.n_rows
        told = _told(head.parts.weight.name, len(vocab.ids), head.parts.n_rows, row_bytes)
        make(console, joint, plan, Path(out) if out else None, how, checkpoint.warnings, [told])


def _as_gguf(
    console: Console, src: str, out: str | None, draft_vocab: str, layout: str, offsets: bool | None, how: How
) -> None:
    """The head as a GGUF file, of a GGUF file or of a checkpoint whose head is dense."""
    check_options(how)
    if layout != GGUF:
        message = f"{src} is a GGUF file, and --layout {layout} is of safetensors"
        raise fail("usage.arguments", message, hint=f"--layout {GGUF}")
    file, head, fingerprint = _gguf_source(src) if is_gguf(src) else _dense_source(src)
    vocab = _list(draft_vocab, head.number, offsets, fingerprint, src)
    buffer, before = mapped(Path(file)), os.stat(file)
    plan = plan_subset_gguf(head, vocab.ids, facts_of(vocab))
    told: list[str | Table] = [_told("the head", len(vocab.ids), head.number, head.row_bytes)]
    job = Job(plan, {"tokens": len(vocab.ids), "list_sha256": list_sha256(vocab.ids)}, told)
    make_gguf(console, COMMAND, file, out, how, job, buffer, before)


def _gguf_source(src: str) -> tuple[str, HeadRows, str | None]:
    found = parse(mapped(Path(src)), src)
    return src, rows_in_gguf(found, src), gguf_fingerprint(found)


def _dense_source(src: str) -> tuple[str, HeadRows, str | None]:
    with open_source(src) as source:
        checkpoint = open_checkpoint(source)
        check_source(checkpoint)
        parts = find_head(checkpoint, untie=True).parts
        return str(source.files[parts.weight.file].path), rows_in_safetensors(parts), tokenizer_fingerprint(source)


def _told(what: str, count: int, of: int, row_bytes: int) -> str:
    return f"head  {count:,} of {of:,} rows of {what}, {fmt_bytes(count * row_bytes)} of {fmt_bytes(of * row_bytes)}"


def _list(name: str, n_rows: int, offsets: bool | None, fingerprint: str | None, src: str) -> DraftVocab:
    """The list in ascending order, for a head of ``n_rows`` rows with a tokenizer of that fingerprint beside it.

    Raises UserError: as ``read_list`` and ``sorted_unique``, ``vocab.fingerprint``.
    """
    vocab = read_list(name, n_vocab=n_rows, offsets=offsets)
    if fingerprint and vocab.tokenizer_sha256 not in (None, fingerprint):
        message = f"{name} was made for another tokenizer than that of {src}"
        raise fail("vocab.fingerprint", message, file=name, hint="give the list of this target")
    ids = sorted_unique(vocab, n_rows)
    return vocab._replace(
        ids=ids, is_ranked=False, n_vocab=n_rows, tokenizer_sha256=fingerprint or vocab.tokenizer_sha256
    )
