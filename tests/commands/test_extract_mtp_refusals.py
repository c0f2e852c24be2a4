"""``ckptkit extract-mtp`` where config.json and tensors contradict each other: refused before a byte is written."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from drafts.mtp_fixtures import config_of, everything, load, model, names, settings, stored, write
from told import Told, teller

from ckptkit.cli import main
from ckptkit.errors import FOUND, OK, SOURCE
from ckptkit.files.header import Spec

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
W4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
W8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    return teller(capsys, "extract-mtp")


def ids(document: Mapping[str, Any]) -> list[str]:
    return [finding["id"] for finding in document["findings"]]


def grouped(*groups: tuple[list[str], dict[str, Any]], ignore: tuple[str, ...] = ()) -> dict[str, Any]:
    named = {f"group_{number}": {"targets": targets, "weights": of} for number, (targets, of) in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "config_groups": named, "ignore": list(ignore)}


# --- quantization --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("declared", "wrong"),
    [
        (None, {"undeclared"}),
        (FP8 | {"weight_block_size": [8, 8]}, {"bits"}),
        (FP8 | {"modules_to_not_convert": ["*layers.2*"]}, {"undeclared"}),
        (grouped((["Linear"], W4), ignore=("re:.*layers.2.*",)), {"undeclared"}),
        (grouped((["Linear"], W4)), {"dense", "format"}),
    ],
    ids=["nothing", "blocks", "listed", "ignored", "other-bits"],
)
def test_layers_stored_otherwise_than_declared_are_refused(
    tmp_path: Path, told: Told, capsys: pytest.CaptureFixture[str], declared: dict[str, Any] | None, wrong: set[str]
) -> None:
    """``verify`` says the same of what is made all the same."""
    source = model(tmp_path / "model", "deepseek-v3", quantization_config=declared)
    for options in ([], ["--renumber"], ["--dry-run"]):
        found = ids(told(source, tmp_path / "draft", *options, code=SOURCE))
        assert sorted(found) == sorted(f"config.quant-{name}" for name in wrong)
    assert not (tmp_path / "draft").exists()
    told(source, tmp_path / "draft", "--allow", ",".join(found))
    assert main(["verify", str(tmp_path / "draft"), "--quiet", "--select", ",".join(found)]) == FOUND
    assert sorted(capsys.readouterr().out.split()) == sorted(found)


@pytest.mark.parametrize("entry", ["model.layers.2", "model.layers.2.self_attn", "model.layers.2.self_attn.o_proj"])
def test_a_list_of_dense_modules_that_some_engine_takes_to_name_them(tmp_path: Path, told: Told, entry: str) -> None:
    source = model(tmp_path / "model", "deepseek-v3", quantization_config=FP8 | {"modules_to_not_convert": [entry]})
    assert ids(told(source, tmp_path / "draft", code=SOURCE)) == ["config.quant-undeclared"]
    other = model(
        tmp_path / "other", "deepseek-v3", quantization_config=FP8 | {"modules_to_not_convert": [f"{entry}0"]}
    )
    told(other, tmp_path / "draft")


def test_of_other_layers_a_config_may_say_what_it_will(tmp_path: Path, told: Told) -> None:
    """What is wrong with the target's own is the target's."""
    table = FP8 | {"modules_to_not_convert": ["*layers.0*"]}
    source = model(tmp_path / "model", "deepseek-v3", quantization_config=table)
    told(source, tmp_path / "draft")
    assert set(stored(tmp_path / "draft")) == set(names("deepseek-v3", "draft", "optional"))


def test_a_method_that_is_not_known_is_declared_as_it_was(tmp_path: Path, told: Told) -> None:
    source = model(tmp_path / "model", "deepseek-v3", quantization_config={"quant_method": "someones-own"})
    told(source, tmp_path / "draft")
    assert config_of(tmp_path / "draft")["quantization_config"] == {"quant_method": "someones-own"}


def test_a_group_of_their_own_is_theirs_whatever_they_would_be_called_elsewhere(tmp_path: Path, told: Told) -> None:
    """Behind another prefix ``re:.*language_model.*proj`` would have meant them: so it was in the source."""
    specs = []
    for spec in everything("qwen3.5").values():
        coded = spec.name.startswith("mtp.layers.") and "_proj" in spec.name
        specs.append(spec._replace(dtype="F8_E4M3") if coded else spec)
        specs += [Spec(f"{spec.name}_scale", "BF16", (spec.shape[0], 1))] if coded else []
    table = grouped((["re:.*language_model.*proj"], W4), (["re:mtp.*proj"], W8)) | {"format": "float-quantized"}
    source = write(tmp_path / "model", specs, {**load("qwen3.5")["config"], "quantization_config": table})
    told(source, tmp_path / "draft")
    groups = config_of(tmp_path / "draft")["quantization_config"]["config_groups"]
    assert groups == {"group_1": table["config_groups"]["group_1"]}


# --- where layers lie ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 3, 7])
@pytest.mark.parametrize("fixture", ["deepseek-v3", "glm-4-moe"])
def test_a_config_that_counts_other_layers_as_the_models_own(
    tmp_path: Path, told: Told, fixture: str, depth: int
) -> None:
    """The model has 2; the layer behind them is told by its name."""
    source = model(tmp_path / "model", fixture, num_hidden_layers=depth)
    (found,) = told(source, tmp_path / "draft", "--allow", "draft.config", code=SOURCE)["findings"]
    assert (found["id"], found["file"]) == ("draft.config", "config.json")
    assert found["tensor"].startswith("model.layers.2.")
    assert "num_hidden_layers" in found["hint"]


def test_what_a_layer_lacks_is_no_fault_of_the_config(tmp_path: Path, told: Told) -> None:
    """Of three layers the first has lost what tells it: it is one of them still."""
    special = [f"model.layers.2.{name}.weight" for name in ("eh_proj", "enorm", "hnorm")]
    source = model(tmp_path / "model", "step-3.5", without=special)
    found = told(source, tmp_path / "draft", code=SOURCE)["findings"]
    assert {(item["id"], item["tensor"]) for item in found} >= {("draft.missing", name) for name in special}


@pytest.mark.parametrize("prefix", ["model.mtp.", "model.language_model.mtp.", "language_model.mtp."])
def test_a_prefix_that_no_engine_knows_is_named_with_the_rename(
    tmp_path: Path, told: Told, capsys: pytest.CaptureFixture[str], prefix: str
) -> None:
    """The family is that of the config, though others have such a prefix."""
    config, specs = load("qwen3.5")["config"], everything("qwen3.5").values()
    moved = [spec._replace(name=spec.name.replace("mtp.", prefix, 1)) for spec in specs]
    source = write(tmp_path / "model", moved, config)
    (found,) = told(source, tmp_path / "draft", code=SOURCE)["findings"]
    assert found["id"] == "draft.prefix"
    assert found["tensor"].startswith(prefix)
    passed = told(source, tmp_path / "draft", "--allow", "draft.prefix")["findings"]
    assert (ids({"findings": passed}), found["hint"].startswith(passed[0]["hint"])) == (["draft.prefix"], True)
    assert settings(tmp_path / "draft")["family"] == "qwen3.5"
    assert all(line.startswith("none known") for line in settings(tmp_path / "draft")["launch"].values())
    command, _, _ = found["hint"].partition(" makes one")
    assert main(shlex.split(command)[1:]) == OK
    capsys.readouterr()
    told(f"{source}-renamed", tmp_path / "second")
    assert set(stored(tmp_path / "second")) == set(names("qwen3.5", "draft"))
