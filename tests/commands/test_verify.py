"""``ckptkit verify`` as a user runs it: exit codes, levels, which checks run, what is written where."""

from __future__ import annotations

import json
import os
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


def quantize(model: Path, *options: str) -> Path:
    recipe, out = model.parent / "recipe.yaml", model.with_name("quantized")
    recipe.write_text(RECIPE)
    assert main(["quantize", str(model), str(out), "-r", str(recipe), "-q", "--no-progress", *options]) == OK
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
        (["{model}", "--allow", "config.tie,index"], USAGE, "usage.pattern-unmatched"),
        (["{model}", "--select", "nothing"], USAGE, "usage.pattern-unmatched"),
        (["{model}", "--ignore", "index.missing"[:-1]], USAGE, "usage.pattern-unmatched"),
        (["{model}", "--recipe", "w4a16"], USAGE, "usage.arguments"),
        (["{model}", "--against", "{model}", "--set", "tie=untie"], USAGE, "usage.arguments"),
        (["{model}", "--against", "{model}", "-r", "w4a16", "--set", "tie"], USAGE, "recipe.set"),
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
    assert ids(told(model, "--level", "numeric", code=FOUND)) == []
    assert ids(told(model, "--level", "numeric", "--allow-skipped")) == []
    assert ids(told(model, "--select", "config.recipe", code=FOUND)) == []
    assert ids(told(model, "--select", "lint", code=FOUND)) == []
    assert ids(told(model, "--select", "config,lint")) == []


def test_the_checks_that_were_not_run_are_named_to_shells(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(model), "--level", "numeric", "-q"]) == FOUND
    named = capsys.readouterr().out.split()
    assert {"numeric.exact", "numeric.error"} <= set(named)
    assert len(named) == len(set(named))


def test_bytes_without_a_recorded_digest_are_no_failure_unless_proof_is_asked_for(model: Path, told: Told) -> None:
    report = told(model, "--level", "data")
    (digest,) = [check for check in report["checks"] if check["id"] == "data.digest"]
    assert (digest["result"], bool(digest["reason"]), ids(report)) == ("skip", True, [])
    told(model, "--level", "data", "--strict", code=FOUND)
    told(model, "--select", "data.digest", code=FOUND)
    told(model, "--select", "data.digest", "--allow-skipped")
    assert main(["hash", str(model), "-q", "--no-progress"]) == OK
    assert levels(told(model, "--level", "data", "--strict")) == {"static", "data"}
    (model / "SHA256SUMS").write_bytes(b"\xff")
    assert ids(told(model, "--level", "data", code=FOUND)) == ["data.digest"]


def test_linked_shards_have_no_digest_and_are_proved_by_their_source(model: Path, told: Told) -> None:
    out = quantize(model, "--link", "hard")
    assert ids(told(out, "--level", "data")) == []
    assert ids(told(out, "--against", model, "--strict")) == []


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


def test_a_recipe_with_the_keys_that_it_was_made_with(model: Path, told: Told) -> None:
    changed = ("--set", "groups.head.scheme=W8A8")
    out, recipe = quantize(model, *changed), model.parent / "recipe.yaml"
    given = (out, "--against", model, "--recipe", recipe, "--level", "static")
    assert ids(told(*given, *changed)) == []
    assert set(ids(told(*given, code=FOUND))) == {"config.recipe"}


# --- whatever the files say ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
     "ckptkit.json", "ckptkit.digests.json", "hf_quant_config.json", "chat_template.json", "vocab.json"],
)  # fmt: skip
@pytest.mark.parametrize(
    "half", [r'"\ud800"', r'{"\udfff": "\udfff"}', r'{"schema": 1, "auto_map": {"a": "\ud800.b"}}']
)
def test_half_a_character_in_any_file_is_reported(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, half: str
) -> None:
    if name != "ckptkit.digests.json":
        (model / name).open("a").close()
    assert main(["hash", str(model), "--per-tensor", "-q", "--no-progress"]) == OK
    (model / name).write_text(half)
    reports = (
        "--report",
        str(tmp_path / "r.html"),
        "--report",
        str(tmp_path / "r.json"),
        "--junit",
        str(tmp_path / "j"),
    )
    for options in (("--level", "data", *reports), ("--format", "github"), ("--format", "json"), ("-q",)):
        assert main(["verify", str(model), "--no-progress", *options]) in {OK, FOUND}
    capsys.readouterr()
    assert main(["verify", str(model), "--level", "data", "-q", "--no-progress"]) in {OK, FOUND}
    assert "data.digest" in capsys.readouterr().out


def test_a_name_that_is_no_text(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model / os.fsdecode(b"\xff.safetensors")).write_bytes(b"<html>")
    for options in (("--junit", str(tmp_path / "j"), "--report", str(tmp_path / "r.html")), ("--format", "github"), ()):
        assert main(["verify", str(model), "--no-progress", *options]) == OK
    capsys.readouterr()
    assert main(["verify", str(model), "-q"]) == OK
    assert capsys.readouterr().out == "index.stray-shard\n"


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


def test_one_engine_at_a_time(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(model), "--engine", "vllm", "--engine", "sglang", "--json"]) == USAGE
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["id"] == "usage.arguments"
