"""``ckptkit checks``: what each check looks for, and what to do about what it finds."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

import click

from ..checks import Page, pages, pages_of
from ..console import Console, Table
from ..features.pages import PAGES as FEATURES
from ..options import command
from ..vocab.pages import PAGES as DRAFT_VOCAB

WIDTH = 100


@command
@click.argument("id", required=False)
def checks(console: Console, id: str | None) -> None:
    """List every check of `ckptkit verify`, `check-features` and `draft-vocab check`, or explain one.

    ID is a check's id; a family (index) or a glob (config.quant-*) lists the checks that it names.

    \b
    Examples:
      ckptkit checks
      ckptkit checks index.extra-tensor
      ckptkit checks names --json
    """
    listed = pages_of(id, all_pages()) if id else all_pages()
    if id and list(listed) == [id]:
        page = listed[id]
        console.result(page_data(page), page_lines(page), [id])
        return
    rows = [(page.id, page.level.label, page.severity, page.title) for page in listed.values()]
    data = {"checks": [page_data(page) for page in listed.values()]}
    console.result(data, [Table(("check", "level", "severity", "finds"), rows, "<<<<")], listed)


def all_pages() -> dict[str, Page]:
    """Every page by id, sorted."""
    return {page.id: page for page in sorted([*pages().values(), *FEATURES, *DRAFT_VOCAB])}


def page_data(page: Page) -> Mapping[str, str]:
    """A page as it stands in ``--json`` output."""
    return {**page._asdict(), "level": page.level.label}


def page_lines(page: Page) -> Iterator[str]:
    """A page for people."""
    yield f"{page.id}  ({page.level.label}, {page.severity})"
    yield page.title
    yield from ("", *_wrapped(page.meaning, ""))
    yield from ("", "Example:", *_wrapped(page.example, "  "))
    yield from ("", "Repair:", *_wrapped(page.repair, "  "))


def _wrapped(text: str, indent: str) -> Iterator[str]:
    """Lines that fit a terminal; those that are indented stay as they are."""
    for line in text.splitlines():
        if line.startswith(" "):
            yield line
        else:
            yield from textwrap.wrap(line, WIDTH, initial_indent=indent, subsequent_indent=indent) or [""]
