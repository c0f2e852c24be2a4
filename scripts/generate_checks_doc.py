"""Write docs/checks.md from the pages of the checks: python scripts/generate_checks_doc.py"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from textwrap import wrap

from ckptkit.checks import Level, Page, pages
from ckptkit.features.pages import PAGES as FEATURES
from ckptkit.vocab.pages import PAGES as DRAFT_VOCAB

DOCUMENT = Path(__file__).parents[1] / "docs" / "checks.md"
WIDTH = 120
BEGINNING = """# Checks

What `ckptkit verify` looks for and, at the end, `check-features` and `draft-vocab check`. `ckptkit checks ID` prints one of
these pages; `--select` and `--ignore` of `verify` take an id, a family (`index`) or a glob (`config.quant-*`); `--allow ID` counts its
errors as warnings. This file is generated: `python scripts/generate_checks_doc.py`.
"""
LEVELS = {
    Level.STATIC: "Headers, index and config: no tensor byte is read.",
    Level.DATA: "Every byte of the tensors, or a sample of them (`--sample`).",
    Level.NUMERIC: "Values against those of the source (`--against`).",
    Level.SERVE: "What an engine decodes (`--serve`, [serving.md](serving.md)).",
}
ABOUT_FEATURES = (
    "Hidden states of a target, captured to train a draft: `ckptkit check-features` ([features.md](features.md))."
)
ABOUT_DRAFT_VOCAB = (
    "Lists of draft tokens, maps and masks: `ckptkit draft-vocab check` ([draft-vocab.md](draft-vocab.md))."
)


def document() -> str:
    """The whole file."""
    found = sorted(pages().values(), key=lambda page: (page.level, page.id))
    parts = [BEGINNING]
    for level, group in groupby(found, key=lambda page: page.level):
        listed = list(group)
        parts += [f"## Level {level.label}\n\n{LEVELS[level]}\n", _table(listed), *map(_section, listed)]
    parts += [f"## Captured features\n\n{ABOUT_FEATURES}\n", _table(list(FEATURES)), *map(_section, FEATURES)]
    parts += [f"## Draft vocabularies\n\n{ABOUT_DRAFT_VOCAB}\n", _table(list(DRAFT_VOCAB)), *map(_section, DRAFT_VOCAB)]
    return "\n".join(parts)


def _table(listed: list[Page]) -> str:
    rows = (f"| [`{page.id}`](#{_anchor(page.id)}) | {page.severity} | {page.title} |\n" for page in listed)
    return "| check | severity | finds |\n|---|---|---|\n" + "".join(rows)


def _anchor(id: str) -> str:
    """The anchor that GitHub gives the heading of a check: its letters, digits and hyphens."""
    return "".join(letter for letter in id if letter.isalnum() or letter == "-")


def _section(page: Page) -> str:
    example = "".join(f"    {line}\n" for line in page.example.splitlines())
    return f"### `{page.id}`\n\n**{page.title}**\n\n{_text(page.meaning)}\n{example}\n{_text(page.repair)}"


def _text(text: str) -> str:
    return "\n".join(map(_paragraph, text.split("\n\n")))


def _paragraph(text: str) -> str:
    """A paragraph of plain text as Markdown; one with indented lines is kept as it stands."""
    if "\n " in text:
        return f"```text\n{text}\n```\n"
    # A single asterisk is one; two would be emphasis.
    escaped = text.replace("*", r"\*") if text.count("*") > 1 else text
    return "".join(f"{line}\n" for line in wrap(escaped, WIDTH, break_long_words=False, break_on_hyphens=False))


if __name__ == "__main__":
    DOCUMENT.write_text(document(), "utf-8")
