"""``ckptkit checks``, and the document that is generated from the same pages."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from ckptkit.cli import main
from ckptkit.commands.checks import all_pages
from ckptkit.errors import OK, USAGE

ROOT = Path(__file__).parents[2]
PAGES = all_pages()


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = OK) -> dict[str, Any]:
    assert main(["checks", *arguments, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_every_check_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    listed = told(capsys)["checks"]
    assert [check["id"] for check in listed] == sorted(PAGES)
    assert {check["level"] for check in listed} == {"static", "data", "numeric", "serve"}
    assert main(["checks", "-q"]) == OK
    assert capsys.readouterr().out.split() == sorted(PAGES)
    assert main(["checks"]) == OK
    assert len(capsys.readouterr().out.splitlines()) == len(PAGES) + 1


@pytest.mark.parametrize("id", ["index.extra-tensor", "names.incomplete-layer", "vocab.rows"])
def test_a_page(capsys: pytest.CaptureFixture[str], id: str) -> None:
    found = told(capsys, id)
    assert (found["id"], found["severity"], found["level"]) == (id, "error", "static")
    assert all(found[part] for part in ("title", "meaning", "example", "repair"))
    assert main(["checks", id]) == OK
    out = capsys.readouterr().out
    assert out.startswith(id)
    assert found["example"].split()[0] in out


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("index", [id for id in sorted(PAGES) if id.startswith("index.")]),
        ("vocab.ro*", ["vocab.rows"]),
        ("*.missing-*", ["index.missing-shard", "index.missing-tensor", "serve.missing-tensors"]),
    ],
)
def test_several_pages(capsys: pytest.CaptureFixture[str], text: str, ids: list[str]) -> None:
    listed = [check["id"] for check in told(capsys, text)["checks"]]
    assert [id for id in listed if not id.startswith("lint.")] == ids


def test_a_name_that_no_check_has(capsys: pytest.CaptureFixture[str]) -> None:
    (finding,) = told(capsys, "index.extra-tensr", code=USAGE)["findings"]
    assert (finding["id"], finding["hint"]) == ("usage.pattern-unmatched", "ckptkit checks index.extra-tensor")


@pytest.mark.parametrize("id", PAGES)
def test_pages_are_whole(id: str) -> None:
    page = PAGES[id]
    assert page.severity in {"error", "warning"}
    assert all(text.strip() == text and text for text in page[3:])
    assert not page.title.endswith(".")
    assert "\n" not in page.title


def test_the_document_is_current() -> None:
    made = runpy.run_path(str(ROOT / "scripts" / "generate_checks_doc.py"))
    assert (ROOT / "docs" / "checks.md").read_text("utf-8") == made["document"]()
