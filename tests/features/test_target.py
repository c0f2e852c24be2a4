"""Captured states against a target whose head reads the next token off them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from make import checkpoint

from ckptkit.errors import FOUND, SOURCE
from ckptkit.features.target import SHIFTS, misaligned

from .capture import (
    AUX,
    DSPARK,
    EAGLE3,
    HIDDEN,
    UPSTREAM,
    VOCAB,
    cache,
    head_weight,
    norm_weight,
    sample,
    store,
    target,
)
from .conftest import Told

LAST = UPSTREAM[1]


def ids(report: dict[str, Any]) -> list[str]:
    return sorted(f["id"].removeprefix("features.") for f in report["findings"])


def samples(count: int = 4, **changes: Any) -> list[dict[str, Any]]:
    return [sample(seed, **changes) for seed in range(count)]


def moved(by: int) -> list[dict[str, Any]]:
    """Each state at the place of another token."""
    return [made | {LAST: made[LAST].roll(by, 1)} for made in samples()]


@pytest.mark.parametrize("keys", [UPSTREAM, AUX], ids=["upstream", "aux"])
@pytest.mark.parametrize("rows", [VOCAB, 100])
def test_states_behind_the_norm(
    told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: tuple[str, str], rows: int
) -> None:
    """The head is read at once, or some rows at a time."""
    monkeypatch.setattr("ckptkit.features.target._HEAD_BYTES", rows * 4 * HIDDEN)
    folder = store(tmp_path / "f", *samples(keys=keys))
    report = told(folder, "--target", target(tmp_path / "t"), draft=DSPARK if keys is UPSTREAM else EAGLE3)
    assert report["findings"] == []
    assert report["level"] == "numeric"
    assert report["figures"]["next_token"]["agreement"] == 1.0


def test_states_of_a_cache(told: Told, tmp_path: Path) -> None:
    made = samples()
    assert told(cache(tmp_path / "c", made), "--target", target(tmp_path / "t"))["findings"] == []
    for one in made:
        one[LAST] = one[LAST] * 2
    report = told(cache(tmp_path / "d", made), "--target", target(tmp_path / "u"), code=FOUND)
    assert ids(report) == ["pre-norm"]


def test_states_in_front_of_the_norm(told: Told, tmp_path: Path) -> None:
    """Before the norm a state is longer, by another factor for each token, and not yet weighed."""
    made = samples()
    for one in made:
        scale = torch.rand(1, one[LAST].shape[1], 1) * 30 + 5
        one[LAST] = (one[LAST].float() / norm_weight().float() * scale).bfloat16()
    report = told(store(tmp_path / "f", *made), "--target", target(tmp_path / "t"), code=FOUND)
    assert set(ids(report)) == {"pre-norm"}
    assert report["findings"][0]["data"]["states"] == made[0][LAST].shape[1]


@pytest.mark.parametrize(("factor", "bad"), [(1.012, False), (0.988, False), (1.028, True), (0.972, True)])
def test_two_per_cent(told: Told, tmp_path: Path, factor: float, bad: bool) -> None:
    """One state among all; half a per cent is left for rounding."""
    made = samples()
    made[1][LAST][0, 17] = (made[1][LAST][0, 17].float() * factor).bfloat16()
    report = told(store(tmp_path / "f", *made), "--target", target(tmp_path / "t"), code=FOUND if bad else 0)
    assert ids(report) == ["pre-norm"] * bad
    if bad:
        assert report["findings"][0]["file"] == "rows_0-2000/data_1.ckpt"
        assert report["findings"][0]["data"]["states"] == 1
        assert report["findings"][0]["data"]["median"] == pytest.approx(factor, abs=0.005)


@pytest.mark.parametrize("by", [1, -1], ids=["late", "early"])
def test_states_that_are_shifted(told: Told, tmp_path: Path, by: int) -> None:
    report = told(store(tmp_path / "f", *moved(by)), "--target", target(tmp_path / "t"), code=FOUND)
    assert ids(report) == ["next-token"]
    shares = report["findings"][0]["data"]["by_shift"]
    assert max(shares, key=shares.get) == {1: "0", -1: "2"}[by]


def test_states_of_another_model(told: Told, tmp_path: Path) -> None:
    other = target(tmp_path / "t", lm_head__weight=head_weight().flip(0))
    assert ids(told(store(tmp_path / "f", *samples()), "--target", other, code=FOUND)) == ["next-token"]


@pytest.mark.parametrize(("share", "bad"), [(0.15, True), (0.3, False)])
def test_how_much_agreement_is_enough(share: float, bad: bool) -> None:
    assert bool(list(misaligned({0: 0.05, 1: share, 2: 0.05}, 512))) is bad


def test_a_shift_must_be_clear() -> None:
    """Text that repeats itself has its own token next as often as not."""
    assert len(SHIFTS) == 3
    assert not list(misaligned({0: 0.52, 1: 0.5, 2: 0.1}, 512))
    assert list(misaligned({0: 0.6, 1: 0.5, 2: 0.1}, 512))


def test_a_tied_head(told: Told, tmp_path: Path) -> None:
    tied = target(
        tmp_path / "t", {"tie_word_embeddings": True}, lm_head__weight=None, model__embed_tokens__weight=head_weight()
    )
    assert told(store(tmp_path / "f", *samples()), "--target", tied)["findings"] == []


def test_a_norm_that_adds_one(told: Told, tmp_path: Path) -> None:
    """In float32, as one less has not the same bits."""
    less = norm_weight().float() - 1
    gemma = target(tmp_path / "t", {"model_type": "gemma"}, model__norm__weight=less)
    assert told(store(tmp_path / "f", *samples()), "--target", gemma)["findings"] == []


def test_the_names_of_deepseek_v4(told: Told, tmp_path: Path) -> None:
    tensors = {"embed.weight": head_weight().roll(1, 0), "norm.weight": norm_weight(), "head.weight": head_weight()}
    config = {"model_type": "deepseek_v4", "hidden_size": HIDDEN, "vocab_size": VOCAB}
    folder = checkpoint(tmp_path / "t", tensors, config)
    assert told(store(tmp_path / "f", *samples()), "--target", folder)["figures"]["next_token"]["agreement"] == 1.0


# --- what cannot be compared -----------------------------------------------------------------------------------


def skipped(report: dict[str, Any]) -> list[str]:
    return [check["id"].removeprefix("features.") for check in report["checks"] if check["result"] == "skip"]


def test_another_model(told: Told, tmp_path: Path) -> None:
    other = target(tmp_path / "t", {"hidden_size": 64})
    report = told(store(tmp_path / "f", *samples()), "--target", other, code=FOUND)
    assert ids(report) == ["target"]
    assert skipped(report) == ["pre-norm", "next-token"]


@pytest.mark.parametrize(
    ("tensors", "missing"),
    [
        ({"model__norm__weight": None}, ["pre-norm"]),
        ({"model__norm__weight": torch.zeros(HIDDEN)}, ["pre-norm"]),
        ({"lm_head__weight": None}, ["next-token"]),
        ({"lm_head__weight": torch.zeros(VOCAB, HIDDEN, dtype=torch.int8)}, ["next-token"]),
    ],
    ids=["no norm", "a norm of zeros", "no head", "codes"],
)
def test_what_the_target_lacks_is_no_pass(
    told: Told, tmp_path: Path, tensors: dict[str, Any], missing: list[str]
) -> None:
    folder, other = store(tmp_path / "f", *samples()), target(tmp_path / "t", **tensors)
    assert skipped(told(folder, "--target", other, code=FOUND)) == missing
    told(folder, "--target", other, "--allow-skipped")


def test_too_few_states(told: Told, tmp_path: Path) -> None:
    folder = store(tmp_path / "f", sample(0, tokens=40))
    report = told(folder, "--target", target(tmp_path / "t"), code=FOUND)
    assert (report["findings"], skipped(report)) == ([], ["next-token"])


def test_no_last_states_at_all(told: Told, tmp_path: Path) -> None:
    draft = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "dflash_config": {"target_layer_ids": [1, 2, 3]}}
    folder = store(tmp_path / "f", sample(**{LAST: None}))
    report = told(folder, "--target", target(tmp_path / "t"), code=FOUND, draft=draft)
    assert (report["findings"], skipped(report)) == ([], ["pre-norm", "next-token"])


def test_a_target_that_is_not_there(told: Told, tmp_path: Path) -> None:
    report = told(store(tmp_path / "f", sample()), "--target", tmp_path / "none", code=SOURCE)
    assert ids(report) == ["source.missing"]
