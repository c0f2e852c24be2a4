from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from headers import materialize
from make import checkpoint, llama, llama_config

from ckptkit.cli import main
from ckptkit.errors import OK, USAGE, UserError
from ckptkit.files.header import DTYPE_BITS
from ckptkit.recipe.recipe import load, load_text
from ckptkit.recipe.rules import POLICIES
from ckptkit.recipe.schemes import FIELDS, PARTS, usable
from ckptkit.reports.report import json_schema

RECIPES = {path.stem: path.read_text() for path in (Path(__file__).parents[2] / "recipes").glob("*.yaml")}


def schema(document: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["schema", document]) == OK
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("document", ["report", "recipe", "plan"])
def test_every_form_of_output_holds_the_same_valid_schema(capsys: pytest.CaptureFixture[str], document: str) -> None:
    found = schema(document, capsys)
    jsonschema.Draft202012Validator.check_schema(found)
    assert found["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert main(["schema", document, "-q"]) == OK
    assert json.loads(capsys.readouterr().out) == found
    assert main(["schema", document, "--json"]) == OK
    assert json.loads(capsys.readouterr().out)["json_schema"] == found


def test_the_report_schema_is_that_of_its_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert schema("report", capsys) == json_schema()


def test_an_unknown_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "recipes", "--json"]) == USAGE
    assert [finding["id"] for finding in json.loads(capsys.readouterr().out)["findings"]] == ["usage.arguments"]


# --- recipes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_built_in_recipes_and_what_manifests_record_of_them_are_valid(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    found = schema("recipe", capsys)
    jsonschema.validate(yaml.safe_load(RECIPES[name]), found)
    jsonschema.validate(load(name).as_dict()["recipe"], found)


def test_keys_and_choices_are_those_of_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    found = schema("recipe", capsys)
    definitions = found["$defs"]
    assert {key: (*found["properties"][key]["enum"],) for key in POLICIES} == POLICIES
    assert {key: found["properties"][key]["default"] for key in POLICIES} == {key: c[0] for key, c in POLICIES.items()}
    assert definitions["arguments"]["properties"].keys() == FIELDS
    assert definitions["scheme"]["properties"].keys() == PARTS
    assert definitions["group"]["properties"].keys() == FIELDS | {"targets", "scheme", "experts"}
    assert definitions["group"]["properties"]["scheme"]["oneOf"][0]["examples"] == list(usable())


GOOD: dict[str, Any] = {
    "schema": 1,
    "groups": {
        "head": {"targets": ["re:.*lm_head$"], "scheme": "W8A16", "strategy": "channel"},
        "body": {"targets": ["Linear"], "scheme": {"weights": {"num_bits": 4, "group_size": 128}}},
    },
}

CHANGES: list[tuple[bool, str, Any]] = [
    (True, "name", "mine"),
    (True, "source", None),
    (True, "output", "./out"),
    (True, "ignore", ["a.b", {"pattern": "re:.*mtp.*", "optional": True}]),
    (True, "groups.head.experts", "rows"),
    (True, "groups.head.scheme", {"weights": {"type": "float", "block_structure": "128x128", "strategy": "block"}}),
    (True, "groups.body.scheme.input_activations", None),
    (True, "groups.body.symmetric", False),
    (True, "groups.body.observer", "memoryless_minmax"),
    (True, "arithmetic", "float32"),
    (False, "schema", 2),
    (False, "name", 3),
    (False, "groups", {}),
    (False, "group", {}),
    (False, "ignore", "a.b"),
    (False, "ignore", [{"optional": True}]),
    (False, "ignore", [""]),
    (False, "tie", "yes"),
    (False, "existing", None),
    (False, "groups.head.targets", []),
    (False, "groups.head.targets", "lm_head"),
    (False, "groups.head.experts", "diagonal"),
    (False, "groups.head.num_bits", 9),
    (False, "groups.head.num_bits", "4"),
    (False, "groups.head.actorder", "group"),
    (False, "groups.head.zp_dtype", "torch.int4"),
    (False, "groups.head.kv_cache", {}),
    (False, "groups.body.scheme", {"weights": {"num_bits": 4, "bits": 4}}),
    (False, "groups.body.scheme", {"input_activations": None}),
    (False, "groups.body.scheme", {"weights": {"observer": "mse"}}),
]


@pytest.mark.parametrize(("good", "key", "value"), CHANGES)
def test_the_schema_and_the_reader_of_recipes_agree(
    capsys: pytest.CaptureFixture[str], good: bool, key: str, value: Any
) -> None:
    recipe = deepcopy(GOOD)
    *path, last = key.split(".")
    table = recipe
    for part in path:
        table = table[part]
    table[last] = value
    assert _is_valid(recipe, schema("recipe", capsys)) == good
    if good:
        load_text(yaml.safe_dump(recipe), "test")
    else:
        with pytest.raises(UserError):
            load_text(yaml.safe_dump(recipe), "test")


def _is_valid(document: Any, found: Mapping[str, Any]) -> bool:
    return jsonschema.Draft202012Validator(found).is_valid(document)


# --- plans -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """The lines of two plan files: of a small model whose head is quantized, and of one whose experts are stacked."""
    folder = tmp_path_factory.mktemp("plans")
    small = checkpoint(folder / "small", llama(), llama_config())
    stacked = materialize("gpt-oss-20b-bf16", folder / "stacked")
    recipe = folder / "experts.yaml"
    recipe.write_text(
        "schema: 1\ngroups: {e: {targets: ['re:.*experts.*'], scheme: W8A16, strategy: channel, experts: columns}}\n"
    )
    return [list(_plan(small, "lm_head-w8a16", folder)), list(_plan(stacked, str(recipe), folder))]


def _plan(source: Path, recipe: str, folder: Path) -> Iterator[dict[str, Any]]:
    file = folder / f"{source.name}.jsonl"
    out = str(folder / "out")
    assert main(["quantize", str(source), out, "--recipe", recipe, "--dry-run", "-q", "--plan", str(file)]) == OK
    return map(json.loads, file.read_text().splitlines())


def test_real_plan_files_are_valid(plans: list[list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]) -> None:
    found = schema("plan", capsys)
    header_only = {**found, "oneOf": found["oneOf"][:1]}
    step_only = {**found, "oneOf": found["oneOf"][1:]}
    assert any(span for _, *steps in plans for step in steps for *_, span in step["inputs"])
    for header, *steps in plans:
        assert _is_valid(header, header_only)
        validator = jsonschema.Draft202012Validator(step_only)
        assert all(validator.is_valid(step) for step in steps[:200])
        for key in header.keys() - {"version"}:
            assert not _is_valid({k: v for k, v in header.items() if k != key}, found)
        for key in steps[0].keys() - {"args"}:
            assert not _is_valid({k: v for k, v in steps[0].items() if k != key}, found)


def test_a_plan_names_dtypes_as_headers_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert schema("plan", capsys)["$defs"]["dtype"]["enum"] == list(DTYPE_BITS)
