"""``ckptkit bench``: that every operation is timed and every winner right; not how fast they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from ckptkit.cli import main
from ckptkit.errors import ENGINE, FOUND, OK, USAGE
from ckptkit.heads import bench

CASES = [(640, 2, 1), (640, 2, 8)]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "cases", lambda: CASES)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["bench", "topk", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_choices_on_a_processor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot, data = tmp_path / "a.svg", tmp_path / "a.json"
    code, found = run(capsys, "--device", "cpu", "--replays", "3", "--report", str(plot), "--report", str(data))
    assert (code, found["device"], found["exchanges"]) == (OK, "cpu", None)
    operations = ["topk", "tie-safe topk", "tie-safe topk, reordered"]
    assert [(line["what"], line["rows"], line["states"], line["k"]) for line in found["choices"]] == [
        *((what, 640, 2, 1) for what in [*operations, "max"]),
        *((what, 640, 2, 8) for what in operations),
    ]
    assert all(0 < line["low"] <= line["median"] <= line["high"] for line in found["choices"])
    assert json.loads(data.read_text())["choices"] == found["choices"]
    texts = {element.text for element in ElementTree.parse(plot).iter("{http://www.w3.org/2000/svg}text")}
    assert {*operations, "max", "640 x 2 tokens, k 8"} <= texts


@pytest.mark.slow
def test_exchanges_between_processes(capsys: pytest.CaptureFixture[str]) -> None:
    """Winners on each of the ranks in turn, and on all of them."""
    code, found = run(capsys, "--device", "cpu", "--ranks", "3", "--replays", "3")
    assert code == OK
    assert [(line["what"], line["k"], line["right"]) for line in found["exchanges"]] == [
        (what, k, True) for _, _, k in CASES for what in ("candidates", "dense gather")
    ]


def test_a_wrong_winner_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    line = {
        "what": "candidates",
        "rows": 640,
        "states": 2,
        "k": 1,
        "median": 1.0,
        "low": 1.0,
        "high": 1.0,
        "right": False,
    }
    monkeypatch.setattr(bench, "exchanges", lambda *arguments: [line])
    assert run(capsys, "--device", "cpu", "--ranks", "2", "--replays", "3")[0] == FOUND


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_without_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run(capsys)
    assert (code, [finding["id"] for finding in found["findings"]]) == (ENGINE, ["engine.device"])


def test_a_report_of_no_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--device", "cpu", "--report", "a.png")[0] == USAGE
