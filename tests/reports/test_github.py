"""The lines are read back by a parser written from the runner's rules, not by the code that writes them."""

from __future__ import annotations

import re

import pytest
import reporting

from ckptkit.errors import Finding
from ckptkit.files.checkpoint import Checkpoint
from ckptkit.reports.github import github


@pytest.fixture(scope="module")
def smol(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return reporting.load("smollm2-135m", tmp_path_factory.mktemp("smol") / "model")


def parse(line: str) -> tuple[str, dict[str, str], str]:
    """As the runner does: the command up to the first space, properties at commas, the message after ``::``."""
    found = re.fullmatch(r"::(\w+) ([^\r\n]*?)::([^\r\n]*)", line)
    assert found, line
    properties = dict(item.split("=", 1) for item in found[2].split(","))
    return found[1], {key: _unescape(value) for key, value in properties.items()}, _unescape(found[3])


def _unescape(text: str) -> str:
    for code, character in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
        text = text.replace(code, character)
    return text


def test_a_line_for_each_finding_errors_first(smol: Checkpoint) -> None:
    findings = [
        Finding("config.arch", "unknown", file="config.json", severity="warning"),
        Finding("data.nan", "has NaN", file="model.safetensors", tensor="lm_head.weight", hint="ckptkit inspect x"),
    ]
    lines = [parse(line) for line in github(reporting.report(reporting.outcome(findings), smol))]
    uri = smol.source.uri
    assert [(name, properties) for name, properties, _ in lines] == [
        ("error", {"file": f"{uri}/model.safetensors", "title": "data.nan"}),
        ("warning", {"file": f"{uri}/config.json", "title": "config.arch"}),
        ("notice", {"file": uri, "title": "ckptkit verify"}),
    ]
    assert lines[0][2] == "model.safetensors: lm_head.weight: has NaN\nhint: ckptkit inspect x"


def test_any_text_survives(smol: Checkpoint) -> None:
    text = "100%: a,b::error file=x::\r\n%0A %25 é"
    finding = Finding("names.orphan", text, file=text, hint=text)
    line, *_ = github(reporting.report(reporting.outcome([finding]), smol))
    name, properties, message = parse(line)
    assert (name, properties["title"]) == ("error", "names.orphan")
    assert properties["file"] == f"{smol.source.uri}/{text}"
    assert message == f"{text}\nhint: {text}"


def test_findings_that_are_left_out_are_counted(smol: Checkpoint) -> None:
    findings = [Finding("data.nan", "has NaN", tensor=f"t{n}") for n in range(7)]
    lines = [parse(line) for line in github(reporting.report(reporting.outcome(findings), smol, max_findings=2))]
    assert [name for name, *_ in lines] == ["error", "error", "notice", "notice"]
    assert lines[2][1] == {"title": "data.nan"}
    assert lines[2][2].startswith("5 ")


def test_a_checkpoint_that_is_one_file_is_that_file(smol: Checkpoint) -> None:
    findings = [Finding("data.nan", "has NaN", file="model.safetensors"), Finding("config.arch", "none")]
    place = {"uri": "./x/model.safetensors"}
    lines = [parse(line) for line in github(reporting.report(reporting.outcome(findings), smol, target=place))]
    assert {properties["file"] for _, properties, _ in lines} == {"./x/model.safetensors"}
