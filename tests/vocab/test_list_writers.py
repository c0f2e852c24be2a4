"""Every convention, written and read by those who define it: torch, numpy, safetensors, the gguf package."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from safetensors.numpy import load

from ckptkit.errors import UserError
from ckptkit.vocab.list_writers import FORMS, encoded
from ckptkit.vocab.lists import DraftVocab, read_list

RANKED = DraftVocab(np.array([5, 0, 11, 1, 7], np.int32), True, 12, "ranked.txt", "ab" * 32)
IDS, OFFSETS = [0, 1, 5, 7, 11], [0, 0, 3, 4, 7]
MASK = [id in IDS for id in range(12)]
ENDINGS = {
    "pt": ".pt",
    "sglang-token-map": ".pt",
    "specforge-cache": ".pt",
    "npy": ".npy",
    "npy-mask": ".npy",
    "json": ".json",
}
KEEP_THE_ORDER = {"text", "json", "pt", "npy", "sglang-token-map", "vllm-token-map", "llamacpp-list"}


def only(form: str, vocab: DraftVocab = RANKED) -> bytes:
    files = encoded(vocab, form)
    assert list(files) == [""]
    return files[""]


@pytest.mark.parametrize("form", ["text", "llamacpp-list"])
def test_text(form: str) -> None:
    """As the forks of llama.cpp read it: what stands before ``#``, cut at whitespace."""
    lines = only(form).decode().splitlines()
    assert [int(word) for line in lines for word in line.partition("#")[0].split()] == RANKED.ids.tolist()
    many = RANKED._replace(ids=np.arange(100, dtype=np.int32), n_vocab=None, is_ranked=False)
    assert len(only("llamacpp-list", many).splitlines()) == 1 + 7
    assert len(only("text", many).splitlines()) == 1 + 100


def test_plain_lists() -> None:
    assert json.loads(only("json")) == RANKED.ids.tolist()
    array = np.load(io.BytesIO(only("npy")))
    assert (array.tolist(), array.dtype) == (RANKED.ids.tolist(), np.int64)
    tensor = torch.load(io.BytesIO(only("pt")), weights_only=True)
    assert (tensor.tolist(), tensor.dtype) == (RANKED.ids.tolist(), torch.int64)


def test_sglang_takes_the_token_map() -> None:
    """``hot_token_id = torch.tensor(torch.load(path, weights_only=True), dtype=torch.int64)`` in its load_token_map."""
    loaded = torch.tensor(torch.load(io.BytesIO(only("sglang-token-map")), weights_only=True), dtype=torch.int64)
    head = torch.arange(12.0)[:, None]
    assert head[loaded][:, 0].tolist() == RANKED.ids.tolist()


def test_maps_give_the_tokens_in_the_engines_own_way() -> None:
    eagle = load(only("safetensors-d2t"))
    assert (eagle["d2t"].dtype, eagle["t2d"].dtype) == (np.int64, np.bool_)
    assert (np.arange(5) + eagle["d2t"]).tolist() == np.flatnonzero(eagle["t2d"]).tolist() == IDS
    assert eagle["d2t"].tolist() == OFFSETS
    trtllm = load(only("trtllm-d2t"))
    assert list(trtllm) == ["model.d2t"]
    assert (trtllm["model.d2t"].dtype, trtllm["model.d2t"].tolist()) == (np.int32, OFFSETS)
    cache = torch.load(io.BytesIO(only("specforge-cache")), weights_only=True)
    assert (cache["d2t"].tolist(), cache["t2d"].tolist(), cache["t2d"].dtype) == (OFFSETS, MASK, torch.bool)
    medusa = load(only("vllm-token-map"))
    assert (medusa["token_map"].tolist(), medusa["token_map"].dtype) == (RANKED.ids.tolist(), np.int64)
    assert np.load(io.BytesIO(only("npy-mask"))).tolist() == MASK


def test_speculators_files() -> None:
    files = encoded(RANKED, "speculators-npy")
    assert sorted(files) == ["d2t-5.npy", "t2d-5.npy"]
    assert np.load(io.BytesIO(files["d2t-5.npy"])).tolist() == OFFSETS
    assert np.load(io.BytesIO(files["t2d-5.npy"])).tolist() == MASK


def test_the_gguf_package_reads_token_ids(tmp_path: Path) -> None:
    path = tmp_path / "d2t.gguf"
    path.write_bytes(only("gguf-d2t"))
    reader = GGUFReader(path)
    [tensor] = reader.tensors
    assert (tensor.name, tensor.data.dtype, tensor.data.tolist()) == ("d2t", np.int64, IDS)
    assert reader.get_field("ckptkit.tokenizer_sha256").contents() == "ab" * 32
    assert reader.get_field("ckptkit.n_vocab").contents() == 12


@pytest.mark.parametrize("form", [form for form in FORMS if form != "speculators-npy"])
def test_what_was_written_is_read_again(tmp_path: Path, form: str) -> None:
    ending = ENDINGS.get(form, ".gguf" if "gguf" in form else ".txt" if form in KEEP_THE_ORDER else ".safetensors")
    path = tmp_path / f"list{'.safetensors' if form == 'vllm-token-map' else ending}"
    path.write_bytes(only(form))
    found = read_list(path, n_vocab=12)
    assert found.ids.tolist() == (RANKED.ids.tolist() if form in KEEP_THE_ORDER else IDS)
    assert found.tokenizer_sha256 in (None, "ab" * 32)
    if path.suffix in {".txt", ".safetensors", ".gguf"}:
        assert found.tokenizer_sha256


@pytest.mark.parametrize("form", FORMS)
def test_a_token_twice_is_never_written(form: str) -> None:
    with pytest.raises(UserError) as caught:
        encoded(RANKED._replace(ids=np.array([1, 1], np.int32)), form)
    assert caught.value.findings[0].id == "vocab.duplicate"


@pytest.mark.parametrize("form", ["safetensors-d2t", "specforge-cache", "npy-mask", "speculators-npy"])
def test_a_mask_needs_the_size(form: str) -> None:
    with pytest.raises(UserError) as caught:
        encoded(RANKED._replace(n_vocab=None), form)
    assert caught.value.findings[0].id == "vocab.size"
