"""``ckptkit inspect``: what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from shlex import quote
from typing import Any

import click

from ..console import Console, Table, fmt_bytes, fmt_count, fmt_parameters
from ..drafts.costs import amounts, costs
from ..errors import fail
from ..execute import fetched
from ..files.checkpoint import Checkpoint, open_checkpoint
from ..files.source import Source, open_source
from ..files.torch_file import open_draft
from ..inspecting.inspection import GROUPS, ModuleRow, Summary, Total, grouped, summarize
from ..naming.patterns import meant, pattern
from ..options import command
from ..plan import Ref
from .draft_page import page_data, page_lines


@command
@click.argument("src")
@click.argument("patterns", nargs=-1, metavar="[PATTERN]...")
@click.option("--tensors", "list_tensors", is_flag=True, help="List every tensor: dtype, shape, bytes, shard.")
@click.option("--group", type=click.Choice(list(GROUPS)), help="Totals by layer, module, dtype or shard instead.")
@click.option("--draft", is_flag=True, help="What its draft costs: parameters, bytes, memory, with formulas.")
@click.option("--cards", type=click.IntRange(1), default=8, help="With --draft: cards to train it on (default: 8).")
def inspect(
    console: Console,
    src: str,
    patterns: tuple[str, ...],
    list_tensors: bool,
    group: str | None,
    draft: bool,
    cards: int,
) -> None:
    """Show what a checkpoint holds, read from its headers.

    SRC is a folder, a .safetensors file, a Hub repository or a URL. A PATTERN (a tensor's name, a glob, or re: and a regex) restricts what is
    looked at to the tensors that it matches. With --group layer every layer is one line; with --group module all
    modules whose names differ in numbers only. --draft counts the layers that draft tokens: those of a target, or of a
    draft by itself.

    \b
    Examples:
      ckptkit inspect ./model
      ckptkit inspect ./model --group module
      ckptkit inspect ./model '*lm_head*' '*embed_tokens*' --tensors
      ckptkit inspect ./DeepSeek-V4-Flash-DSpark --draft --cards 16
      ckptkit inspect deepseek-ai/DeepSeek-V4-Flash
      ckptkit inspect ./model --json | jq .quantization
    """
    _check_options(patterns, **{"--tensors": list_tensors, "--group": bool(group), "--draft": draft})
    with open_source(src) as source:
        checkpoint = open_draft(source) if draft else open_checkpoint(source)
        where, title = _where(src, source)
    if draft:
        found = costs(checkpoint)
        data, human = page_data(found, cards), page_lines(title, found, cards)
        console.result({**where, **data}, human, [str(amounts(found)[0].bytes)], checkpoint.warnings)
        return
    tensors = _matching(checkpoint, patterns)
    if list_tensors:
        data = {"tensors": [_tensor_data(ref) for ref in tensors]}
        table = Table(("tensor", "dtype", "shape", "bytes", "shard"), [_tensor_row(ref) for ref in tensors], "<<<><")
        console.result({**where, **data}, [table], [ref.name for ref in tensors], checkpoint.warnings)
    elif group:
        totals = grouped(checkpoint, tensors, group)
        data = {**where, "group": group, "groups": [total._asdict() for total in totals]}
        console.result(data, [_totals_table(group, totals)], [total.key for total in totals], checkpoint.warnings)
    else:
        summary = summarize(checkpoint, tensors)
        human = summary_lines(title, summary)
        console.result({**where, **summary_data(summary)}, human, summary.architectures, summary.warnings)


def _where(src: str, source: Source) -> tuple[dict[str, Any], str]:
    """The source for programs and for people: as it was named; one on a server with its commit and what was fetched."""
    if not source.stores:
        return {"source": src}, src
    told = fetched(source)
    cost = f"{fmt_bytes(told['bytes'])} in {fmt_count(told['requests'], 'request')}"
    return {"source": src, "uri": source.uri, "revision": source.revision, "fetched": told}, f"{source.uri}  ({cost})"


def _check_options(patterns: Sequence[str], **views: bool) -> None:
    """Raises UserError (``usage.arguments``) for more than one view, or for patterns where all tensors are counted."""
    given = [option for option, wanted in views.items() if wanted]
    if len(given) > 1:
        message = f"{' and '.join(given)} exclude each other"
        raise fail("usage.arguments", message, hint="leave all but one of them out")
    if patterns and views["--draft"]:
        raise fail("usage.arguments", "--draft counts a draft as a whole: it takes no PATTERN", hint="leave it out")


def _matching(checkpoint: Checkpoint, texts: Sequence[str]) -> list[Ref]:
    """The tensors that any of the patterns matches; all without patterns. A pattern that matches none is refused."""
    if not texts:
        return list(checkpoint.tensors.values())
    found: dict[str, Ref] = {}
    for wanted in map(pattern, texts):
        matched = {name: ref for name, ref in checkpoint.tensors.items() if wanted.matches(name)}
        if not matched:
            like = meant(wanted, checkpoint.tensors)
            hint = f"ckptkit inspect {quote(checkpoint.source.uri)} {quote(like) if like else '--group module'}"
            raise fail("usage.pattern-unmatched", f"pattern {wanted.text!r} matches no tensor", hint=hint)
        found |= matched
    return list(found.values())


# --- for programs ------------------------------------------------------------------------------------------


def summary_data(summary: Summary) -> dict[str, Any]:
    """The summary as it stands in ``--json`` output."""
    declared = summary.quantization
    groups = declared.table.get("config_groups") if declared else None
    return {
        "architectures": summary.architectures,
        "model_type": summary.model_type,
        "shards": summary.shards,
        "total": summary.total._asdict(),
        "quantization": declared
        and {
            "method": declared.method,
            "format": declared.format,
            "groups": {name: declared.label(name) for name in groups} if isinstance(groups, dict) else {},
        },
        "dtypes": [total._asdict() for total in summary.dtypes],
        "modules": [row._asdict() for row in summary.modules],
        "embedding": summary.embedding,
        "heads": [head._asdict() for head in summary.heads],
        "tied": summary.tied,
        "drafts": [total._asdict() for total in summary.drafts],
        "declared_drafts": dict(summary.declared_drafts),
        "vocab_order": summary.vocab_order,
    }


def _tensor_data(ref: Ref) -> dict[str, Any]:
    return {"name": ref.name, "dtype": ref.dtype, "shape": ref.shape, "bytes": ref.nbytes, "shard": ref.file}


# --- for people --------------------------------------------------------------------------------------------


def summary_lines(src: str, summary: Summary) -> Iterator[str | Table]:
    """The summary for people."""
    total = summary.total
    yield src
    yield f"architecture  {', '.join(summary.architectures) or summary.model_type or 'not declared'}"
    yield f"quantization  {_quantization_line(summary)}"
    yield (
        f"size          {fmt_bytes(total.bytes)} in {fmt_count(total.tensors, 'tensor')}, {fmt_count(summary.shards, 'shard')};"
        f" {fmt_parameters(total.parameters)} parameters"
    )
    if summary.whole or summary.heads:
        yield f"head          {_head_line(summary)}"
    if summary.vocab_order:
        yield f"order         {_order_line(summary.vocab_order)}"
    if summary.whole or summary.drafts:
        yield f"drafts        {_drafts_line(summary)}"
    yield ""
    yield _totals_table("dtype", summary.dtypes)
    if any(row.declared or row.stored not in {"BF16", "F16", "F32", "F64"} for row in summary.modules):
        yield ""
        yield _modules_table(summary.modules)


def _order_line(facts: Mapping[str, Any]) -> str:
    """Of a head in draft-view order, which no engine loads that does not read the order."""
    slices, counts, rule = facts.get("slices"), facts.get("slice_list_rows"), facts.get("rule")
    engine = rule.get("engine") if isinstance(rule, Mapping) else None
    return f"draft-view order for {slices} slices, rule {engine}; list rows by slice {counts}; --inverse undoes it"


def _quantization_line(summary: Summary) -> str:
    declared = summary.quantization
    if declared is None:
        return "none declared"
    return f"{declared.method} ({declared.format})" if declared.format else declared.method


def _head_line(summary: Summary) -> str:
    heads = "; ".join(f"{head.module} {head.stored} {list(head.shape)}" for head in summary.heads)
    tie = f"tied to {summary.embedding}" if summary.tied else f"not tied to {summary.embedding}"
    if summary.embedding is None:
        return heads or "none"
    return f"{heads}, {tie}" if heads else tie


def _drafts_line(summary: Summary) -> str:
    parts = ", ".join(
        f"{part.key} ({fmt_count(part.tensors, 'tensor')}, {fmt_bytes(part.bytes)})" for part in summary.drafts
    )
    return parts or "none"


def _totals_table(title: str, totals: Sequence[Total]) -> Table:
    rows = [(row.key, f"{row.tensors:,}", fmt_parameters(row.parameters), fmt_bytes(row.bytes)) for row in totals]
    return Table((title, "tensors", "parameters", "bytes"), rows, "<>>>")


def _modules_table(modules: Sequence[ModuleRow]) -> Table:
    header, align = ("module", "kind", "modules", "bytes", "stored"), "<<>><"
    rows = [(row.module, row.kind, f"{row.modules:,}", fmt_bytes(row.bytes), row.stored) for row in modules]
    if not any(row.declared for row in modules):
        return Table(header, rows, align)
    declared = [row.declared or "-" for row in modules]
    return Table((*header, "declared"), [(*row, text) for row, text in zip(rows, declared, strict=True)], align + "<")


def _tensor_row(ref: Ref) -> tuple[str, ...]:
    return ref.name, ref.dtype, str(list(ref.shape)), f"{ref.nbytes:,}", ref.file
