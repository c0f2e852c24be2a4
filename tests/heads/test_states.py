"""Hidden states of files, and what is refused of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ckptkit.errors import UserError
from ckptkit.heads.states import hidden, spread

STATES = torch.randn(10, 16, generator=torch.Generator().manual_seed(0)).bfloat16()


def test_states_of_each_kind_of_file(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", STATES.float().reshape(2, 5, 16).numpy())
    save_file({"anything": STATES}, tmp_path / "b.safetensors")
    save_file({"input_ids": torch.arange(10), "hidden_states": STATES}, tmp_path / "c.safetensors")
    for name in ("a.npy", "b.safetensors", "c.safetensors"):
        assert np.array_equal(hidden(str(tmp_path / name), 16), STATES.float().numpy())


def test_of_many_some_are_taken_evenly(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.repeat(np.arange(1000, dtype=np.float16)[:, None], 4, axis=1))
    found = hidden(str(tmp_path / "a.npy"), 4)[:, 0]
    assert (len(found), found[0], found[-1]) == (256, 0, 999)
    assert set(np.diff(found)) == {3.0, 4.0}


@pytest.mark.parametrize(
    ("length", "most", "places"), [(1, 4, [0]), (3, 4, [0, 1, 2]), (10, 4, [0, 3, 6, 9]), (5, 1, [0])]
)
def test_spread(length: int, most: int, places: list[int]) -> None:
    assert spread(length, most) == places


@pytest.mark.parametrize(
    "content",
    [
        np.zeros((4, 15), np.float32),
        np.zeros(16, np.float32),
        np.zeros((0, 16), np.float32),
        np.zeros((4, 16), np.int64),
        np.full((4, 16), np.nan, np.float32),
        np.full((4, 16), np.inf, np.float32),
        np.array([{"a": 1}], object),
        b"\x93NUMPY",
        b"",
    ],
    ids=str,
)
def test_arrays_that_are_refused(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "states.npy"
    path.write_bytes(content) if isinstance(content, bytes) else np.save(path, content, allow_pickle=True)
    with pytest.raises(UserError) as refused:
        hidden(str(path), 16)
    assert [finding.id for finding in refused.value.findings] == ["usage.hidden"]


@pytest.mark.parametrize(
    "tensors",
    [{"a": STATES, "b": STATES[:2].clone()}, {"a": torch.arange(16)}, {"hidden_states": torch.arange(32).view(2, 16)}],
)
def test_tensors_that_are_refused(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, tmp_path / "states.safetensors")
    with pytest.raises(UserError) as refused:
        hidden(str(tmp_path / "states.safetensors"), 16)
    assert [finding.id for finding in refused.value.findings] == ["usage.hidden"]


def test_a_file_that_is_cut_off(tmp_path: Path) -> None:
    save_file({"a": STATES}, tmp_path / "states.safetensors")
    content = (tmp_path / "states.safetensors").read_bytes()
    (tmp_path / "states.safetensors").write_bytes(content[:-8])
    with pytest.raises(UserError) as refused:
        hidden(str(tmp_path / "states.safetensors"), 16)
    assert refused.value.findings[0].id.startswith("layout.")
