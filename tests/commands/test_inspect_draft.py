"""``inspect --draft`` against published figures of official drafts, and for drafts of other kinds and by themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dsv4 import make
from headers import materialize
from make import checkpoint, llama, llama_config

from ckptkit.cli import main
from ckptkit.errors import OK, SOURCE, USAGE


def told(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = OK) -> dict[str, Any]:
    assert main(["inspect", "--draft", *map(str, arguments), "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def amounts(found: dict[str, Any]) -> dict[str, int]:
    return {figure["what"]: figure["amount"] for figure in found["amounts"]}


def memory(found: dict[str, Any]) -> dict[str, int]:
    return {figure["what"]: figure["bytes"] for figure in found["memory"]}


def ids(found: dict[str, Any]) -> list[str]:
    return [finding["id"] for finding in found["findings"]]


def test_the_official_flash_draft(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = told(capsys, materialize("deepseek-v4-flash-dspark", tmp_path))
    assert amounts(found) == {
        "parameters": 19_845_850_983,
        "active per token": 19_845_850_983 - 3 * 250 * 3 * 4096 * 2048,
        "as stored": 10_862_838_300,
        "in FP4": 10_862_838_300,
        "in FP8": 19_327_352_832 + 1_179_648 + (10_862_838_300 - 10_267_656_192),
        "in BF16": 39_696_553_884,
    }
    assert [row["stored"] for row in found["stages"]] == [3_610_287_448, 3_559_944_536, 3_692_606_316]
    assert memory(found)["beside the target"] == 166_878_536_440
    assert memory(found)["one card"] == 16 * 19_845_850_983
    assert all(figure["formula"] for figure in [*found["amounts"], *found["memory"]])


def test_the_official_pro_draft(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = amounts(told(capsys, materialize("deepseek-v4-pro-dspark", tmp_path)))
    assert (found["parameters"], found["as stored"]) == (77_498_408_103, 41_979_375_900)


def test_each_figure_is_shown_with_its_formula(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = materialize("deepseek-v4-flash-dspark", tmp_path)
    assert main(["inspect", str(folder), "--draft", "--cards", "16"]) == OK
    out, _ = capsys.readouterr()
    for text in ("19,845,850,983", "10,862,838,300", "6/256 of 19,327,352,832", "16 B × 19,845,850,983 / 16"):
        assert text in out


@pytest.mark.parametrize(
    ("variant", "kind"), [({"draft": "nextn"}, "NextN"), ({"v41": True}, "DSpark of DeepSeek-V4.1")]
)
def test_other_drafts_of_the_family(
    variant: dict[str, Any], kind: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    made = make(tmp_path, **variant)
    found = told(capsys, tmp_path)
    there = sum(_bytes(spec) for name, spec in made.shapes.items() if name.startswith("mtp."))
    assert (found["kind"], amounts(found)["as stored"]) == (kind, there)


def test_multi_token_prediction_of_another_family(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = told(capsys, materialize("qwen3-next-80b-a3b", tmp_path))
    one = sum(row["parameters"] for row in found["parts"] if row["part"] == "routed experts")
    assert one == 512 * 3 * 512 * 2048
    assert amounts(found)["active per token"] == amounts(found)["parameters"] - one + one * 10 // 512


def test_a_dense_draft_by_itself(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tensors = {"fc.weight": torch.zeros(8, 24, dtype=torch.bfloat16), "norm.weight": torch.zeros(8)}
    found = told(capsys, checkpoint(tmp_path / "draft", tensors, {"architectures": ["Qwen3DSparkModel"]}))
    assert amounts(found)["parameters"] == amounts(found)["active per token"] == 8 * 24 + 8
    assert memory(found)["draft alone"] == 8 * 24 * 2 + 8 * 4
    assert "beside the target" not in memory(found)


def test_no_draft(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", llama(), llama_config())
    assert ids(told(capsys, folder, code=SOURCE)) == ["draft.none"]
    make(tmp_path / "declared", draft="declared")
    assert ids(told(capsys, tmp_path / "declared", code=SOURCE)) == ["draft.declared-only"]


def test_a_trainers_state_is_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tensors = {"fc.weight": torch.zeros(8, 24, dtype=torch.bfloat16), "norm.weight": torch.zeros(8)}
    torch.save({"draft_state_dict": tensors, "strategy": "dspark"}, tmp_path / "training_state.pt")
    (tmp_path / "config.json").write_text('{"architectures": ["DSparkDraftModel"]}')
    assert amounts(told(capsys, tmp_path))["parameters"] == 8 * 24 + 8


@pytest.mark.parametrize("other", [["--tensors"], ["--group", "layer"], ["mtp.*"]])
def test_it_counts_a_draft_as_a_whole(other: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    make(tmp_path)
    assert ids(told(capsys, tmp_path, *other, code=USAGE)) == ["usage.arguments"]


def _bytes(spec: tuple[str, tuple[int, ...]]) -> int:
    return torch.Size(spec[1]).numel() * {"F32": 4, "BF16": 2, "I64": 8}.get(spec[0], 1)
