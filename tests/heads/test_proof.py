"""Digests of rows: which rows of a head are not those of their tokens in the source."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from make import checkpoint, llama, llama_config
from safetensors.torch import save_file

from ckptkit.files.checkpoint import open_checkpoint
from ckptkit.files.source import open_source
from ckptkit.heads.head import find_head
from ckptkit.heads.proof import Misplaced, digests, misplaced

VOCAB = 1009


def found(folder: Path) -> np.ndarray:
    with open_source(str(folder)) as source:
        return digests(find_head(open_checkpoint(source)).view, source, 2)


def made(folder: Path, weight: torch.Tensor) -> Path:
    return checkpoint(folder, llama(vocab=VOCAB, lm_head__weight=weight), llama_config(vocab=VOCAB))


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    return torch.randn(VOCAB, 128, generator=torch.Generator().manual_seed(3)).bfloat16()


def test_a_permuted_head_is_proved_and_any_other_is_not(tmp_path: Path, weight: torch.Tensor) -> None:
    tokens = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(4))
    mine, theirs = found(made(tmp_path / "a", weight[tokens])), found(made(tmp_path / "b", weight))
    assert misplaced(mine, theirs, tokens.int().numpy()) == []
    swapped = tokens.clone()
    swapped[[5, 900]] = tokens[[900, 5]]
    a, b = int(tokens[5]), int(tokens[900])
    assert misplaced(mine, theirs, swapped.int().numpy()) == [Misplaced(5, b, a), Misplaced(900, a, b)]


def test_a_bit_that_changed_and_the_sign_of_a_zero(tmp_path: Path, weight: torch.Tensor) -> None:
    weight = weight.clone()
    weight[3, 4] = 0.0
    other = weight.clone()
    other[3, 4] = -0.0
    other.view(torch.int16)[1008, 127] ^= 1
    wrong = misplaced(
        found(made(tmp_path / "a", other)), found(made(tmp_path / "b", weight)), np.arange(VOCAB, dtype=np.int32)
    )
    assert wrong == [Misplaced(3, 3, None), Misplaced(1008, 1008, None)]


def test_rows_that_are_equal_may_change_places(tmp_path: Path, weight: torch.Tensor) -> None:
    weight = weight.clone()
    weight[10] = weight[20]
    tokens = np.arange(VOCAB, dtype=np.int32)
    tokens[[10, 20]] = [20, 10]
    head = found(made(tmp_path / "a", weight))
    assert misplaced(head, head, tokens) == []


def test_a_single_file_without_config(tmp_path: Path, weight: torch.Tensor) -> None:
    save_file({"model.embed_tokens.weight": weight, "lm_head.weight": weight[:7].clone()}, tmp_path / "m.safetensors")
    assert found(tmp_path / "m.safetensors").shape == (7, 2)
