"""``ckptkit draft-vocab build``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from ..console import Console, Table
from ..errors import Finding
from ..options import command
from ..vocab.lists import DraftVocab
from .list_output import check_out, facts_of, form_of, form_option, n_vocab_option, overwrite_option, write_list

if TYPE_CHECKING:
    from ..vocab.corpus import File
    from ..vocab.counting import Counting, Counts


@dataclass(frozen=True, slots=True)
class Asked:
    """All options as they were given."""

    tokenizer: str
    corpus: tuple[str, ...]
    size: int
    form: str | None
    force_special: bool
    roles: tuple[str, ...]
    held_out: float
    n_vocab: int | None
    overwrite: bool
    jobs: int


@command
@click.argument("out")
@click.option("--tokenizer", required=True, metavar="DIR", help="The target's folder, or one with its tokenizer.json.")
@click.option("--corpus", required=True, multiple=True, metavar="[KIND[:LANG]=]FILE", help="Text; may be repeated.")
@click.option("--size", required=True, type=click.IntRange(1), metavar="N", help="Tokens of the list.")
@form_option
@click.option("--force-special", is_flag=True, help="Put all special tokens first, whatever their count.")
@click.option("--role", "roles", multiple=True, metavar="ROLE", help="Of conversations count what these say only.")
@click.option("--held-out", type=click.FloatRange(0, 0.9), default=0.1, metavar="P", help="Share kept to measure with.")
@n_vocab_option
@overwrite_option
@click.option("-j", "--jobs", type=click.IntRange(0), default=0, metavar="N", help="Processes (default: up to 4).")
def build(console: Console, out: str, **given: Any) -> None:
    """Rank a target's tokens by how often they occur in a corpus, and write the first N as OUT.

    A share of the documents (0.1) is held out, and says what the list covers, by kind of text and language. Corpus files
    are UTF-8 text, .jsonl (text, messages or input_ids), .npy or .ids (token ids). They are read in pieces by several
    processes; the result does not depend on how many.

    \b
    Examples:
      ckptkit draft-vocab build draft.txt --tokenizer ./Qwen3-8B --size 32768 --corpus chat:en=chat.jsonl --corpus c=all.c
      ckptkit draft-vocab build hot.pt --to sglang-token-map --tokenizer ./Qwen3-8B --size 32768 --corpus log.jsonl
    """
    from ..vocab.corpus import corpus
    from ..vocab.counting import Counting
    from ..vocab.coverage import coverage, coverage_table
    from ..vocab.target import target_of

    asked = Asked(**given)
    target = target_of(asked.tokenizer)
    n_vocab = asked.n_vocab or target.n_vocab
    files = corpus(asked.corpus)
    check_out(out, asked.overwrite)
    counts = counted(console, files, Counting(target.path, n_vocab, asked.held_out, asked.roles), asked.jobs)
    forced = [id for id in target.specials if asked.force_special and id < n_vocab]
    vocab = _list(counts, asked.size, forced, target.fingerprint, out)
    write_list(out, vocab, asked.form or form_of(out), asked.overwrite)
    rows = coverage(vocab.ids, counts.held_out)
    unseen = int((counts.ranked[vocab.ids] == 0).sum() - (counts.ranked[forced] == 0).sum())
    data = {
        **facts_of(out, vocab),
        "documents": counts.documents,
        "documents_held_out": counts.documents_held_out,
        "tokens_counted": int(counts.ranked.sum()),
        "never_seen": unseen,
        "special": forced,
        "coverage": [row.as_dict() for row in rows],
    }
    human: list[str | Table] = [f"{out}  {len(vocab.ids):,} of {n_vocab:,} tokens, {unseen:,} of them never seen"]
    human.append(coverage_table(rows))
    console.result(data, human, [out], _warnings(counts, unseen, asked.held_out))


def counted(console: Console, files: Sequence[File], how: Counting, jobs: int) -> Counts:
    """Count the tokens of ``files``, with progress."""
    from ..vocab.counting import count_tokens

    with console.progress("draft-vocab") as progress:
        progress.start(0, sum(file.size for file in files))
        counts = count_tokens(files, how, jobs or min(4, os.cpu_count() or 1), progress.advance)
        progress.done()
    return counts


def _list(counts: Counts, size: int, forced: Sequence[int], fingerprint: str, out: str) -> DraftVocab:
    import numpy as np

    from ..vocab.coverage import most_frequent

    ids = most_frequent(counts.ranked, size, np.array(forced, np.int64))
    return DraftVocab(ids, bool((np.diff(ids) < 0).any()), len(counts.ranked), out, fingerprint)


def _warnings(counts: Counts, unseen: int, share: float) -> Iterator[Finding]:
    """``vocab.corpus``: what too small a corpus leaves open."""
    if share and not counts.documents_held_out:
        message = "no document was held out: what the list covers was not measured"
        yield Finding("vocab.corpus", message, severity="warning", hint="add text, or raise --held-out")
    if unseen:
        message = f"{unseen:,} tokens of the list never occur in the corpus, and stand there by their ids"
        yield Finding("vocab.corpus", message, severity="warning", hint="add text, or lower --size")
