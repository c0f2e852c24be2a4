"""``--remap-ids`` on GGUF files: by each token's text, everything that the file says of it is what it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from ckptkit.cli import main
from ckptkit.errors import OK, SOURCE, USAGE
from vocab.gguf_made import ROWS, TOKENS, TYPES, bytes_of, model, value
from vocab.tokenizers_made import made

U32, ARRAY = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.ARRAY
Told = Callable[..., tuple[int, dict[str, Any]]]
LIST = [3, 95, 40, 41, 7, 60]


def options(folder: Path) -> list[str]:
    (folder / "list.txt").write_text(" ".join(map(str, LIST)))
    return ["--draft-vocab", str(folder / "list.txt"), "--slices", "2", "--engine", "llama.cpp", "--remap-ids"]


def remapped(source: Path) -> Path:
    out = source.with_name("out.gguf")
    assert main(["reorder-vocab", str(source), str(out), *options(source.parent)]) == OK
    return out


def said(path: Path) -> dict[str, tuple[Any, ...]]:
    """By token: score, type, and its rows of both tables."""
    tables = bytes_of(path)
    rows = (tables["token_embd.weight"], tables.get("output.weight", tables["token_embd.weight"]))
    keys = ("tokens", "scores", "token_type")
    tokens, scores, types = (value(path, f"tokenizer.ggml.{key}") for key in keys)
    return {token: (scores[id], types[id], *(table[id].tobytes() for table in rows)) for id, token in enumerate(tokens)}


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("tied", [False, True])
def test_each_token_is_what_it_was(kind: Any, tied: bool, tmp_path: Path) -> None:
    source = model(tmp_path / "source.gguf", kind=kind, tied=tied)
    out = remapped(source)
    assert said(out) == said(source)
    before, after = bytes_of(source), bytes_of(out)
    others = before.keys() - {"token_embd.weight", "output.weight"}
    assert all(np.array_equal(before[name], after[name]) for name in others)
    assert before.keys() == after.keys()
    assert value(out, "general.architecture") == "llama"
    tokens = value(out, "tokenizer.ggml.tokens")
    assert tokens != TOKENS
    assert tokens[:3] == [TOKENS[id] for id in sorted(LIST)[:3]]
    assert tokens[48:51] == [TOKENS[id] for id in sorted(LIST)[3:]]
    assert [TOKENS[id] for id in value(out, "ckptkit.vocab_remap.row_to_token")] == tokens
    assert value(out, "tokenizer.ggml.merges") == value(source, "tokenizer.ggml.merges")


def test_ids_in_fields(tmp_path: Path) -> None:
    fields = {
        "tokenizer.ggml.bos_token_id": (41, U32),
        "tokenizer.ggml.padding_token_id": (0xFFFFFFFF, U32),
        "tokenizer.ggml.suppress_tokens": ([3, 5], ARRAY),
        "llama.decoder_start_token_id": (95, U32),
        "llama.adapters.token_ids_activate": ([1, 2], ARRAY),
        "llama.attention.layers": ([1, 2], ARRAY),
    }
    out = remapped(model(tmp_path / "source.gguf", fields=fields))
    new = np.argsort(value(out, "ckptkit.vocab_remap.row_to_token")).tolist()
    found = {key: value(out, key) for key in (*fields, "tokenizer.ggml.eos_token_id")}
    assert found == {
        "tokenizer.ggml.bos_token_id": new[41],
        "tokenizer.ggml.padding_token_id": 0xFFFFFFFF,
        "tokenizer.ggml.suppress_tokens": [new[3], new[5]],
        "llama.decoder_start_token_id": new[95],
        "llama.adapters.token_ids_activate": [new[1], new[2]],
        "llama.attention.layers": [1, 2],
        "tokenizer.ggml.eos_token_id": new[7],
    }


def test_defaults_of_llama_cpp_are_written_out(tmp_path: Path) -> None:
    """Of "llama" it takes 1 and 0 for bos and unknown where the file has none: those tokens, not those ids."""
    out = remapped(model(tmp_path / "source.gguf"))
    tokens = value(out, "tokenizer.ggml.tokens")
    assert tokens[value(out, "tokenizer.ggml.bos_token_id")] == "tok1"
    assert tokens[value(out, "tokenizer.ggml.unknown_token_id")] == "tok0"
    assert tokens[value(out, "tokenizer.ggml.eos_token_id")] == "tok7"


@pytest.mark.parametrize("offsets", [False, True])
def test_a_drafts_map(offsets: bool, tmp_path: Path) -> None:
    """Token ids as llama.cpp has them; or offsets, which these can only be, since some are equal."""
    tokens = np.array([90, 2, 3, 5] if not offsets else [2, 3, 4, 40], np.int64)
    stored = tokens - np.arange(4) if offsets else tokens
    more = {
        "d2t": stored,
        "markov_w1.weight": np.arange(ROWS * 2, dtype=np.float32).reshape(ROWS, 2),
        "blk.0.ffn_gate_tid2eid.weight": np.arange(ROWS * 3, dtype=np.int32).reshape(ROWS, 3),
        "output.bias": np.arange(ROWS, dtype=np.float32),
    }
    out = remapped(model(tmp_path / "source.gguf", tensors=more))
    order = np.array(value(out, "ckptkit.vocab_remap.row_to_token"))
    found = bytes_of(out)
    given = found["d2t"].view(np.int64)[0] + (np.arange(4) if offsets else 0)
    assert order[given].tolist() == tokens.tolist()
    assert np.array_equal(found["markov_w1.weight"].view(np.float32), more["markov_w1.weight"][order])
    assert np.array_equal(
        found["blk.0.ffn_gate_tid2eid.weight"].view(np.int32), more["blk.0.ffn_gate_tid2eid.weight"][order]
    )
    assert np.array_equal(found["output.bias"].view(np.float32)[0], order)


def test_a_tokenizer_json_within(tmp_path: Path) -> None:
    tokenizer = made("wordlevel")
    names = [tokenizer.id_to_token(id) or f"unused{id}" for id in range(ROWS)]
    fields = {"tokenizer.huggingface.json": (tokenizer.to_str(), gguf.GGUFValueType.STRING)}
    out = remapped(model(tmp_path / "source.gguf", fields=fields, tokens=names, tokenizer="gpt2"))
    vocabulary = json.loads(value(out, "tokenizer.huggingface.json"))["model"]["vocab"]
    tokens = value(out, "tokenizer.ggml.tokens")
    assert vocabulary == {token: id for id, token in enumerate(tokens) if not token.startswith("unused")}


@pytest.mark.parametrize(
    ("made_with", "id", "allowed"),
    [
        ({"tensors": {"strange.weight": np.zeros((ROWS, 32), np.float32)}}, "vocab.table", True),
        ({"fields": {"tokenizer.ggml.odd": ([1, 2], ARRAY)}}, "vocab.unknown-ids", True),
        ({"fields": {"tokenizer.ggml.odd": (list(range(ROWS)), ARRAY)}}, "vocab.unknown-ids", True),
        ({"fields": {"llama.ple.ngram_size": (2, U32)}}, "vocab.remap", False),
        ({"tokenizer": "unheard-of"}, "vocab.remap", False),
        ({"tokens": [*TOKENS, "one", "two"]}, "vocab.remap", False),
        ({"tokens": TOKENS[:95]}, "vocab.range", False),
        ({"tensors": {"d2t": np.zeros(4, np.float32)}}, "vocab.mapping", False),
    ],
)
def test_refused(made_with: dict[str, Any], id: str, allowed: bool, tmp_path: Path, told: Told) -> None:
    source = model(tmp_path / "source.gguf", **made_with)
    given = ["reorder-vocab", source, tmp_path / "out.gguf", *options(tmp_path)]
    code, document = told(*given)
    assert (code in (USAGE, SOURCE), [finding["id"] for finding in document["findings"]]) == (True, [id])
    assert not (tmp_path / "out.gguf").exists()
    assert (told(*given, "--allow", id)[0] == OK) == allowed


def test_what_was_renumbered_is_not_renumbered_again(tmp_path: Path, told: Told) -> None:
    out = remapped(model(tmp_path / "source.gguf"))
    code, document = told("reorder-vocab", out, tmp_path / "again.gguf", *options(tmp_path))
    assert (code, [finding["id"] for finding in document["findings"]]) == (USAGE, ["vocab.remap"])
