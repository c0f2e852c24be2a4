"""The head that is found in a checkpoint, and its logits against torch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make import checkpoint, llama, llama_config

from ckptkit.errors import UserError
from ckptkit.files.checkpoint import open_checkpoint
from ckptkit.files.source import open_source
from ckptkit.heads.head import find_head, logits

VOCAB = 1009
STATES = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).bfloat16()


def made(folder: Path, tensors: dict[str, Any] | None = None, **config: Any) -> Path:
    tensors = llama(vocab=VOCAB, **(tensors or {}))
    return checkpoint(folder, tensors, llama_config(vocab=VOCAB, **config))


def computed(folder: Path, start: int = 0, stop: int = VOCAB, dtype: str | None = None) -> tuple[torch.Tensor, str]:
    with open_source(str(folder)) as source:
        found = open_checkpoint(source)
        head = find_head(found)
        return torch.from_numpy(logits(head, found, STATES.float().numpy(), start, stop, dtype)), head.dtype


def products(weight: torch.Tensor) -> torch.Tensor:
    return STATES.double() @ weight.double().T


def test_logits_are_rounded_once_and_capped(tmp_path: Path) -> None:
    folder = made(tmp_path / "m", final_logit_softcapping=0.5)
    exact = products(llama(vocab=VOCAB)["lm_head.weight"]).float()
    found, dtype = computed(folder)
    assert dtype == "BF16"
    assert torch.equal(found, found.bfloat16().float())
    capped = ((exact.bfloat16().float() / 0.5).tanh() * 0.5).bfloat16().float()
    assert (found - capped).abs().max() <= 2.0**-9  # one step of bfloat16 below one half
    assert (found == capped).float().mean() > 0.99
    plain, _ = computed(folder, dtype="F32")
    assert torch.allclose(plain, (exact / 0.5).tanh() * 0.5, atol=1e-6)


def test_a_slice_and_a_bias(tmp_path: Path) -> None:
    bias = torch.randn(VOCAB, generator=torch.Generator().manual_seed(2))
    folder = made(tmp_path / "m", {"lm_head__bias": bias}, torch_dtype="float32")
    found, dtype = computed(folder, 700, VOCAB)
    assert dtype == "F32"
    exact = (products(llama(vocab=VOCAB)["lm_head.weight"]) + bias.double())[:, 700:]
    assert torch.allclose(found, exact.float(), atol=1e-5)


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    folder = made(tmp_path / "m", {"lm_head__weight": None}, tie_word_embeddings=True, torch_dtype="float32")
    exact = products(llama(vocab=VOCAB)["model.embed_tokens.weight"])
    assert torch.allclose(computed(folder)[0], exact.float(), atol=1e-5)


def test_no_head(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        computed(made(tmp_path / "m", {"lm_head__weight": None}))
    assert [finding.id for finding in refused.value.findings] == ["source.head"]


@pytest.mark.parametrize("bias", [torch.arange(VOCAB), torch.ones(VOCAB - 1), torch.ones(1, VOCAB)])
def test_a_bias_that_is_none(tmp_path: Path, bias: torch.Tensor) -> None:
    with pytest.raises(UserError) as refused:
        computed(made(tmp_path / "m", {"lm_head__bias": bias}))
    assert [finding.id for finding in refused.value.findings] == ["decode.format"]


@pytest.mark.parametrize("cap", [None, 0, -1.0, True, "30"])
def test_a_cap_that_is_none(tmp_path: Path, cap: Any) -> None:
    with open_source(str(made(tmp_path / "m", final_logit_softcapping=cap))) as source:
        assert find_head(open_checkpoint(source)).softcap is None


def test_bits_do_not_depend_on_where_rows_lie(tmp_path: Path) -> None:
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))
    weight = llama(vocab=VOCAB)["lm_head.weight"]
    found, _ = computed(made(tmp_path / "m"))
    moved, _ = computed(made(tmp_path / "n", {"lm_head__weight": weight[order]}))
    assert np.array_equal(found[:, order].numpy(), moved.numpy())
