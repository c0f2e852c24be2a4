"""``ckptkit verify`` as a user runs it: exit codes, levels, which checks run, what is written where."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from make import checkpoint, llama, llama_config

from ckptkit.checks import Sample
from ckptkit.cli import main
from ckptkit.commands.verify import sample_of
from ckptkit.errors import FOUND, OK, OUTPUT, SOURCE, USAGE, UserError

Told = Callable[..., dict[str, Any]]
SHARD = "model-00002-of-00002.safetensors"
RECIPE = "schema: 1\nname: head\ngroups: {head: {targets: ['re:.*lm_head$'], scheme: W8A16, strategy: channel}}\n"


def write(folder: Path, **changes: Any) -> Path:
    """A small Llama in two shards with a tokenizer; the config has ``changes``."""
    tensors = llama()
    held = list(tensors)
    checkpoint(folder, [{n: tensors[n] for n in half} for half in (held[:9], held[9:])], llama_config(**changes))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model")


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    """The report that ``verify`` prints under --json, its exit code being as expected."""

    def call(*arguments: object, code: int = OK) -> dict[str, Any]:
        assert main(["verify", *map(str, arguments), "--json", "--no-progress"]) == code
        out, err = capsys.readouterr()
        report: dict[str, Any] = json.loads(out.splitlines()[-1])  # quantize has told its own before
        assert (report["schema"], report["command"], report["exit_code"], report["ok"]) == (
            1,
            "verify",
            code,
            code == OK,
        )
        assert "Traceback" not in err
        return report

    return call


def ids(report: dict[str, Any]) -> list[str]:
    return [finding["id"] for finding in report["findings"]]


def levels(report: dict[str, Any]) -> set[str]:
    return {check["level"] for check in report["checks"]}


def quantize(model: Path) -> Path:
    (model.parent / "recipe.yaml").write_text(RECIPE)
    out = model.with_name("quantized")
    assert (
        main(["quantize", str(model), str(out), "-r", str(model.parent / "recipe.yaml"), "-q", "--no-progress"]) == OK
    )
    return out


# --- exit codes --------------------------------------------------------------------------------------------


def test_a_good_one(model: Path, told: Told) -> None:
    report = told(model)
    assert ids(report) == []
    assert {check["result"] for check in report["checks"]} == {"ok"}
    assert (report["level"], levels(report), report["stats"]["tensors"]) == ("static", {"static"}, len(llama()))


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ([], FOUND),
        (["--exit-zero"], OK),
        (["--allow", "config.tie"], OK),
        (["--allow", "config.vocab, config.tie"], OK),
        (["--allow", "config.tie", "--strict"], FOUND),
        (["--ignore", "config.tie"], OK),
        (["--ignore", "config"], OK),
        (["--select", "layout,index"], OK),
        (["--select", "config.t*"], FOUND),
    ],
)
def test_errors(tmp_path: Path, told: Told, options: list[str], code: int) -> None:
    tensors = llama(lm_head__weight=None)
    checkpoint(tmp_path, tensors, llama_config())
    (tmp_path / "tokenizer.json").write_text("{}")
    report = told(tmp_path, *options, code=code)
    assert ("config.tie" in ids(report)) == (
        not any(option in {"--ignore", "--select"} for option in options) or code == FOUND
    )


def test_an_allowed_error_is_a_warning_that_the_report_keeps(tmp_path: Path, told: Told) -> None:
    report = told(write(tmp_path, vocab_size=9), "--allow", "config.vocab")
    (finding,) = report["findings"]
    assert (finding["severity"], finding["allowed"], report["allowed"]) == ("warning", True, ["config.vocab"])


@pytest.mark.parametrize(("options", "code"), [([], OK), (["--strict"], FOUND)])
def test_warnings(tmp_path: Path, told: Told, options: list[str], code: int) -> None:
    assert ids(told(write(tmp_path, torch_dtype="float16"), *options, code=code)) == ["config.dtype"]


def test_a_broken_checkpoint_is_told_with_all_its_faults(model: Path, told: Told) -> None:
    (model / SHARD).write_bytes((model / SHARD).read_bytes()[:-1])
    (model / "generation_config.json").write_text("{")
    report = told(model, code=FOUND)
    assert sorted(ids(report)) == ["files.generation", "layout.truncated"]
    skipped = [check for check in report["checks"] if check["result"] == "skip"]
    assert "names.incomplete-layer" in {check["id"] for check in skipped}
    assert all("layout.truncated" in check["reason"] for check in skipped)


@pytest.mark.parametrize(
    ("arguments", "code", "id"),
    [
        (["{tmp}/none"], SOURCE, "source.missing"),
        (["{tmp}"], SOURCE, "source.empty"),
        (["{model}", "--against", "{tmp}/none"], SOURCE, "source.missing"),
        (["{model}", "--sample", "0%"], USAGE, "usage.arguments"),
        (["{model}", "--level", "static", "--sample", "2%"], USAGE, "usage.arguments"),
        (["{model}", "--level", "static", "--select", "data.nan"], USAGE, "usage.arguments"),
        (["{model}", "--select", "nothing"], USAGE, "usage.pattern-unmatched"),
        (["{model}", "--ignore", "index.missing"[:-1]], USAGE, "usage.pattern-unmatched"),
        (["{model}", "--recipe", "w4a16"], USAGE, "usage.arguments"),
        (["{model}", "--speculative", "NEXTN"], USAGE, "usage.arguments"),
        (["{model}", "--engine", "nothing"], USAGE, "usage.engine"),
        (["{model}", "--report", "report.pdf"], USAGE, "usage.arguments"),
        (["{model}", "--junit", "{tmp}/none/junit.xml"], OUTPUT, "output.write"),
    ],
)
def test_what_cannot_be_run(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, id: str
) -> None:
    (tmp_path / "empty").mkdir()
    given = [text.format(tmp=tmp_path / "empty", model=model) for text in arguments]
    assert main(["verify", *given, "--json"]) == code
    assert ids(json.loads(capsys.readouterr().out)) == [id]


def test_the_current_folder(model: Path, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model)
    assert told()["target"]["uri"] == "."
    monkeypatch.chdir(model.parent)
    assert ids(told(code=USAGE)) == ["usage.arguments"]


# --- levels and samples ------------------------------------------------------------------------------------


def test_a_check_that_was_asked_for_and_did_not_run_is_no_pass(model: Path, told: Told) -> None:
    assert ids(told(model, "--level", "data", code=FOUND)) == []
    assert ids(told(model, "--level", "data", "--allow-skipped")) == []
    assert ids(told(model, "--level", "data", "--ignore", "data.digest")) == []
    assert main(["hash", str(model), "-q", "--no-progress"]) == OK
    assert levels(told(model, "--level", "data")) == {"static", "data"}
    assert ids(told(model, "--level", "numeric", code=FOUND)) == []
    assert ids(told(model, "--select", "config.recipe", code=FOUND)) == []
    assert ids(told(model, "--select", "lint", code=FOUND)) == []
    assert ids(told(model, "--select", "config,lint")) == []


def test_what_is_asked_for_decides_the_level(model: Path, told: Told) -> None:
    out = quantize(model)
    assert told(out, "--against", model)["level"] == "numeric"
    assert told(out, "--against", model, "--level", "static")["level"] == "static"
    assert told(model, "--sample", "1/3", "--allow-skipped")["level"] == "data"
    report = told(model, "--select", "data.nan")
    assert (report["level"], {check["id"] for check in report["checks"]}) == ("data", {"data.nan"})


def test_values_that_are_off_are_found_against_the_source(model: Path, told: Told) -> None:
    out = quantize(model)
    other = checkpoint(model.with_name("other"), llama(seed=1), llama_config())
    assert ids(told(out, "--against", model)) == []
    assert "numeric.error" in ids(told(out, "--against", other, code=FOUND))


@pytest.mark.parametrize(
    ("text", "sample"),
    [
        ("2%", Sample(1, 50)),
        ("100%", Sample(1, 1)),
        ("0.5%", Sample(1, 200)),
        ("3/20", Sample(3, 20)),
        ("1/1", Sample()),
    ],
)
def test_samples(text: str, sample: Sample) -> None:
    assert sample_of(text) == sample


@pytest.mark.parametrize("text", ["", "2", "%", "0%", "101%", "-1%", "0/3", "4/3", "1/0", "a/b", "1/2/3"])
def test_no_samples(text: str) -> None:
    with pytest.raises(UserError) as error:
        sample_of(text)
    assert [finding.id for finding in error.value.findings] == ["usage.arguments"]


def test_static_checks_import_no_torch(model: Path) -> None:
    arguments = ["verify", str(model), "--engine", "sglang", "--junit", str(model / "junit.xml")]
    code = (
        f"import sys; from ckptkit.cli import main; assert main({arguments!r}) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- the recipe --------------------------------------------------------------------------------------------


def test_what_a_recipe_makes(model: Path, told: Told) -> None:
    out = quantize(model)
    recipe = model.parent / "recipe.yaml"
    assert ids(told(out, "--against", model, "--recipe", recipe)) == []
    assert ids(told(model, "--against", model, "--recipe", recipe, code=FOUND)) == ["config.recipe"] * 4
    other = told(out, "--against", model, "--recipe", "fp8-dynamic", "--level", "static", code=FOUND)
    assert set(ids(other)) == {"config.recipe"}
    refused = told(out, "--against", out, "--recipe", recipe, "--level", "static", code=FOUND)
    assert "config.recipe" in ids(refused)


# --- what is told ------------------------------------------------------------------------------------------


def test_for_people(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(model)]) == OK
    out, err = capsys.readouterr()
    assert err == ""
    assert len(out.splitlines()) < 15
    assert main(["verify", str(model), "-v"]) == OK
    assert "index.missing-shard" in capsys.readouterr().out
    shutil.copy(model / SHARD, model / "model.safetensors")
    assert main(["verify", str(model)]) == FOUND
    out, err = capsys.readouterr()
    assert "FAIL" in out
    assert err.splitlines()[0].startswith("error: ")
    assert main(["verify", str(model), "-q"]) == FOUND
    assert capsys.readouterr().out == "index.stray-shard\n"


def test_github_annotations(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(model / SHARD, model / "model.safetensors")
    assert main(["verify", str(model), "--format", "github"]) == FOUND
    out, err = capsys.readouterr()
    assert err == ""
    assert sum(line.startswith("::error ") for line in out.splitlines()) == 1
    assert "title=index.stray-shard" in out


def test_the_format_json_is_the_option_json(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(model), "--format", "json"]) == OK
    assert json.loads(capsys.readouterr().out)["command"] == "verify"
    assert main(["verify", str(model.parent / "none.safetensors"), "--format", "json"]) == SOURCE
    assert json.loads(capsys.readouterr().out)["exit_code"] == SOURCE


def test_reports(model: Path, told: Told, tmp_path: Path) -> None:
    page, document, junit = (tmp_path / name for name in ("report.html", "report.json", "junit.xml"))
    report = told(model, "--report", page, "--report", document, "--junit", junit)
    assert json.loads(document.read_text()) == report
    assert "</html>" in page.read_text()
    cases = ElementTree.parse(junit).getroot().iter("testcase")
    assert {case.get("name") for case in cases} == {check["id"] for check in report["checks"]}


def test_many_findings_are_cut_short(tmp_path: Path, told: Told) -> None:
    tensors = {f"{letter}.weight": torch.zeros(2, dtype=torch.int8) for letter in "abcdefgh"}
    checkpoint(tmp_path, tensors, llama_config())
    select = ("--select", "names.weight-without-scale")
    assert len(told(tmp_path, *select, code=FOUND)["findings"]) == len(tensors)
    report = told(tmp_path, *select, "--max-findings", "3", code=FOUND)
    assert (len(report["findings"]), report["truncated"], report["checks"][0]["findings"]) == (3, True, len(tensors))


# --- results are checked before they are published ---------------------------------------------------------


@pytest.mark.parametrize("options", [["--allow", "config.tie"], ["--no-verify"]])
def test_a_result_with_a_fault_of_its_own_is_not_published(
    model: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    out = model.with_name("out")
    command = ["reshard", str(model), str(out), "--drop", "lm_head.weight", "--json", "--no-progress"]
    assert main(command) == OUTPUT
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["id"], finding["data"]["finding"]["id"]) == ("output.verify", "config.tie")
    assert not out.exists()
    assert main([*command, "--resume", *options]) == OK
    told = json.loads(capsys.readouterr().out)
    assert ("config.tie" in ids(told)) == (options[0] == "--allow")
    assert (out / "ckptkit.json").exists()


def test_what_is_wrong_with_the_source_already_is_inherited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "model", num_hidden_layers=5)
    assert (
        main(["reshard", str(source), str(tmp_path / "out"), "--max-shard-size", "200kB", "--json", "--no-progress"])
        == OK
    )
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [(f["id"], f["severity"], f["data"]["inherited"]) for f in findings] == [("config.layers", "warning", True)]
