"""``ckptkit draft-vocab``: lists of draft tokens made, converted and checked, and draft heads cut by them."""

from __future__ import annotations

from collections.abc import Iterator

import click

from ..console import Console
from ..errors import Finding, fail
from ..options import command, group
from ..vocab.list_writers import FORMS
from ..vocab.lists import DraftVocab, read_list
from .draft_vocab_build import build
from .draft_vocab_check import check
from .list_output import (
    check_out,
    facts_of,
    form_of,
    form_option,
    n_vocab_option,
    offsets_option,
    overwrite_option,
    write_list,
)
from .subset_head import subset_head


@command
@click.argument("list_", metavar="LIST")
@click.argument("out")
@form_option
@offsets_option
@n_vocab_option
@click.option("--tokenizer", metavar="DIR", help="The target's folder: its vocabulary's size, and its fingerprint.")
@click.option("--size", type=click.IntRange(1), metavar="N", help="Only the first N of a list in order of rank.")
@overwrite_option
def convert(
    console: Console,
    list_: str,
    out: str,
    form: str | None,
    offsets: bool | None,
    n_vocab: int | None,
    tokenizer: str | None,
    size: int | None,
    overwrite: bool,
) -> None:
    """Write a draft vocabulary in the convention that another program reads.

    LIST is a file of any of these conventions, a checkpoint's folder with d2t in it, prefix:N or prefix:N+tail:M. Lists
    keep their order; maps and masks are of ascending tokens. A map that could hold offsets as well as tokens is refused,
    until --offsets or --absolute says which.

    \b
    text, json, pt, npy   token ids
    npy-mask              a truth value for each token of the target
    safetensors-d2t       d2t (offsets), t2d: EAGLE-3 for SGLang, vLLM and SpecForge
    trtllm-d2t            model.d2t (offsets, int32): TensorRT-LLM
    specforge-cache       d2t (offsets), t2d in a .pt file
    speculators-npy       a folder with d2t-N.npy (offsets), t2d-N.npy
    gguf-d2t              d2t (token ids): llama.cpp
    sglang-token-map      a .pt list: --speculative-token-map, FR-Spec
    vllm-token-map        token_map (token ids): vLLM's Medusa
    llamacpp-list         text, the most frequent first: --spec-draft-vocab

    \b
    Examples:
      ckptkit draft-vocab convert draft.txt map.safetensors --to safetensors-d2t --tokenizer ./Qwen3-8B
      ckptkit draft-vocab convert ./eagle3-draft hot.txt --to llamacpp-list
      ckptkit draft-vocab convert prefix:32768 hot.pt --to sglang-token-map
    """
    vocab = _read(list_, offsets, n_vocab, tokenizer)
    if size is not None:
        vocab = _first(vocab, size)
    name = form or form_of(out)
    check_out(out, overwrite)
    write_list(out, vocab, name, overwrite)
    human = [f"{out}  {len(vocab.ids):,} tokens as {name}: {FORMS[name].about}"]
    console.result(facts_of(out, vocab) | {"form": name}, human, [out], _about_rank(vocab, name))


def _read(list_: str, offsets: bool | None, n_vocab: int | None, folder: str | None) -> DraftVocab:
    """The list, with its tokenizer's fingerprint where one is named.

    Raises UserError: as ``read_list``, ``vocab.fingerprint``.
    """
    if folder is None:
        return read_list(list_, n_vocab=n_vocab, offsets=offsets)
    from ..vocab.target import target_of

    target = target_of(folder)
    vocab = read_list(list_, n_vocab=n_vocab or target.n_vocab, offsets=offsets)
    if vocab.tokenizer_sha256 not in (None, target.fingerprint):
        message = f"{list_} was made for another tokenizer than that of {folder}"
        raise fail("vocab.fingerprint", message, file=list_, hint="give the folder of the list's own target")
    return vocab._replace(tokenizer_sha256=target.fingerprint)


def _first(vocab: DraftVocab, size: int) -> DraftVocab:
    """The first ``size`` tokens. Raises UserError: ``vocab.unranked``, ``vocab.size``."""
    if not vocab.is_ranked:
        message = f"{vocab.origin} is in the order of ids: its first {size:,} are not its most frequent"
        hint = "leave out --size, or give a list in order of rank: ckptkit draft-vocab build makes one"
        raise fail("vocab.unranked", message, file=vocab.origin, hint=hint)
    if size > len(vocab.ids):
        message = f"{vocab.origin} has {len(vocab.ids):,} tokens, not {size:,}"
        raise fail("vocab.size", message, file=vocab.origin, hint="leave out --size")
    return vocab._replace(ids=vocab.ids[:size])


def _about_rank(vocab: DraftVocab, form: str) -> Iterator[Finding]:
    if FORMS[form].by_rank and not vocab.is_ranked and not vocab.origin.startswith("prefix:"):
        message = f"{vocab.origin} is in the order of ids, and programs that read {form} may take its first tokens only"
        hint = "let them take all of it, or convert a list in order of rank"
        yield Finding("vocab.unranked", message, file=vocab.origin, severity="warning", hint=hint)


@group(build, convert, check, subset_head)
def draft_vocab() -> None:
    """Make, convert and check draft vocabularies, and cut draft heads by them.

    A draft that predicts the most frequent tokens only needs a head of those rows only; what says which they are is a
    list of token ids, a map from draft ids to tokens, or a mask.

    \b
    Examples:
      ckptkit draft-vocab build draft.txt --tokenizer ./Qwen3-8B --corpus chat:en=chat.jsonl --size 32768
      ckptkit draft-vocab convert draft.txt map.safetensors --to safetensors-d2t --tokenizer ./Qwen3-8B
      ckptkit draft-vocab check draft.txt --head ./Qwen3-8B --tokenizer ./Qwen3-8B
      ckptkit draft-vocab subset-head ./Qwen3-8B ./draft-head --draft-vocab draft.txt
    """
