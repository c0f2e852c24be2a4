from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckptkit.cli import main
from ckptkit.errors import OK, USAGE

FILES = {path.stem: path.read_text() for path in (Path(__file__).parents[2] / "recipes").glob("*.yaml")}


def test_every_recipe_is_listed_with_its_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--json"]) == OK
    found = json.loads(capsys.readouterr().out)["recipes"]
    assert found == [
        {"name": name, "summary": text.splitlines()[0].removeprefix("# ")} for name, text in sorted(FILES.items())
    ]
    assert main(["recipes", "-q"]) == OK
    assert capsys.readouterr().out.splitlines() == sorted(FILES)
    assert main(["recipes"]) == OK
    out = capsys.readouterr().out
    assert all(f"\n{name} " in out for name in FILES)


@pytest.mark.parametrize("name", FILES)
def test_a_recipe_is_printed_as_it_stands(capsys: pytest.CaptureFixture[str], name: str) -> None:
    for arguments in (["recipes", name], ["recipes", name, "--quiet"]):
        assert main(arguments) == OK
        assert capsys.readouterr().out == FILES[name]
    assert main(["recipes", name, "--json"]) == OK
    assert json.loads(capsys.readouterr().out)["text"] == FILES[name]


def test_an_unknown_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "w4a61", "--json"]) == USAGE
    assert [finding["id"] for finding in json.loads(capsys.readouterr().out)["findings"]] == ["recipe.not-found"]
