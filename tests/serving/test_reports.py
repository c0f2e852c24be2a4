"""The reports of real runs in docs/serving, and the tables that are made of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "serving"
# Of a chain of three, a block of four, and a draft of nonsense; SGLang's n-grams are its own.
ACCEPTED = {"mtp": 4, "draft": 4, "eagle3": 4, "dspark": 5, "dflash": 1}


def cells() -> list[Any]:
    reports = [json.loads(path.read_text("utf-8")) for path in sorted(FOLDER.glob("*/*.json"))]
    return [cell for report in reports for cell in report["figures"]["serve"]["cells"]]


def test_the_tables_are_what_the_reports_say() -> None:
    program = [sys.executable, ROOT / "scripts" / "engines" / "table.py", FOLDER]
    said = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    assert said.strip() in (FOLDER / "README.md").read_text("utf-8")


def test_every_broken_checkpoint_fails() -> None:
    broken = [cell for cell in cells() if cell["checkpoint"].startswith("bad-")]
    assert len({cell["checkpoint"].removesuffix("-linear") for cell in broken}) == 11
    assert {cell["verdict"] for cell in broken} == {"FAIL"}


def test_what_serves_is_as_exact_as_bfloat16_and_decodes_the_same() -> None:
    served = [cell for cell in cells() if cell["verdict"] == "yes"]
    assert len(served) == 66
    assert max(cell["stored"]["mean"] for cell in served) < 0.02
    assert max(cell["stored"]["largest"] for cell in served) < 0.08
    assert all(cell["equal"] == [4, 4] for cell in served)


def test_accept_lengths_are_those_of_the_construction() -> None:
    measured = [cell for cell in cells() if cell["speculated"] and cell["speculation"] in ACCEPTED]
    assert {cell["speculation"] for cell in measured} == set(ACCEPTED)
    for cell in measured:
        assert cell["speculated"]["accept_length"] == pytest.approx(ACCEPTED[cell["speculation"]])
