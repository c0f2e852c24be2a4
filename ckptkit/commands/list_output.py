"""What the commands that write a draft vocabulary share: the form, the file, what is told of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from ..errors import fail
from ..execute.files import output_faults, sync_folder, write_file
from ..vocab.list_writers import FORMS, encoded
from ..vocab.lists import DraftVocab, list_sha256

FORM = click.Choice(list(FORMS))
form_option = click.option("--to", "form", type=FORM, help="What to write (default: by the ending of OUT, else text).")
n_vocab_option = click.option("--n-vocab", type=click.IntRange(1), metavar="V", help="Rows of the target's head.")
offsets_option = click.option(
    "--offsets/--absolute", default=None, help="What a map d2t holds: token = i + d2t[i], or tokens."
)
overwrite_option = click.option("--overwrite", is_flag=True, help="Replace OUT.")
_BY_ENDING = {".json": "json", ".pt": "pt", ".npy": "npy", ".safetensors": "safetensors-d2t", ".gguf": "gguf-d2t"}


def form_of(out: str) -> str:
    """The form that the ending of a name stands for."""
    return _BY_ENDING.get(Path(out).suffix, "text")


def check_out(out: str, overwrite: bool) -> None:
    """Raises UserError ``output.exists``."""
    if os.path.lexists(out) and not overwrite:
        raise fail("output.exists", f"{out} exists", file=out, hint="--overwrite replaces it")


def write_list(out: str, vocab: DraftVocab, form: str, overwrite: bool) -> None:
    """Write ``vocab`` as ``out``, each file whole or not at all. Raises UserError: ``output.*``, ``vocab.*``."""
    files = encoded(vocab, form)
    check_out(out, overwrite)
    with output_faults(Path(out), "the same command"):
        for name, content in files.items():
            path = Path(out, name) if name else Path(out)
            fresh = path.with_name(f".{path.name}.new")
            write_file(fresh, content)
            os.replace(fresh, path)
            sync_folder(path.parent)


def facts_of(out: str, vocab: DraftVocab) -> dict[str, Any]:
    """What is told of a list in JSON."""
    return {
        "output": out,
        "tokens": len(vocab.ids),
        "n_vocab": vocab.n_vocab,
        "ranked": vocab.is_ranked,
        "list_sha256": list_sha256(vocab.ids),
        "tokenizer_sha256": vocab.tokenizer_sha256,
    }
