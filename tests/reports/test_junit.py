"""The XML is read back by junitparser, as a pipeline would."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest
import reporting
from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from ckptkit.errors import Finding
from ckptkit.files.checkpoint import Checkpoint
from ckptkit.reports.junit import junit


@pytest.fixture(scope="module")
def smol(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return reporting.load("smollm2-135m", tmp_path_factory.mktemp("smol") / "model")


def suites(
    smol: Checkpoint, findings: Iterable[Finding], skipped: Mapping[str, str] | None = None, **changes: object
) -> dict[str, TestSuite]:
    text = junit(reporting.report(reporting.outcome(findings, skipped), smol, **changes))
    return {suite.name: suite for suite in JUnitXml.fromstring(text.encode())}


def cases(suite: TestSuite) -> dict[str, TestCase]:
    return {case.name: case for case in suite}


def test_a_suite_for_each_level_and_a_case_for_each_check(smol: Checkpoint) -> None:
    findings = [Finding("index.missing-tensor", "absent", tensor=f"t{n}") for n in range(30)]
    findings.append(Finding("config.arch", "unknown", severity="warning"))
    found = suites(smol, findings, {"numeric.head": "no source"})
    assert {name: sorted(cases(suite)) for name, suite in found.items()} == {
        "ckptkit.static": ["config.arch", "index.missing-tensor", "layout.header"],
        "ckptkit.data": ["data.nan"],
        "ckptkit.numeric": ["numeric.head"],
    }
    static = found["ckptkit.static"]
    assert (static.tests, static.failures, static.skipped, static.errors) == (3, 1, 0, 0)
    assert [type(result) for result in cases(static)["index.missing-tensor"].result] == [Failure]
    assert not cases(static)["layout.header"].result
    assert not cases(static)["config.arch"].result
    assert "unknown" in cases(static)["config.arch"].system_out
    (skip,) = cases(found["ckptkit.numeric"])["numeric.head"].result
    assert (type(skip), skip.message) == (Skipped, "no source")
    assert all(case.classname == name for name, suite in found.items() for case in suite)
    assert not any(isinstance(result, Error) for suite in found.values() for case in suite for result in case.result)


def test_a_failure_names_the_first_twenty_subjects(smol: Checkpoint) -> None:
    findings = [Finding("index.missing-tensor", "absent", tensor=f"t{n}") for n in range(30)]
    (failure,) = cases(suites(smol, findings)["ckptkit.static"])["index.missing-tensor"].result
    lines = failure.text.splitlines()
    assert failure.message == "30 findings"
    assert len(lines) == 21
    assert all(f"t{n}: absent" in line for n, line in enumerate(lines[:20]))
    assert "10" in lines[20]


def test_the_properties_say_what_was_checked(smol: Checkpoint, tmp_path: Path) -> None:
    for suite in suites(smol, [], allowed=["config.arch", "a.b"]).values():
        found = {item.name: item.value for item in suite.properties()}
        assert found["target"] == smol.source.uri
        assert found["allowed"] == "a.b,config.arch"
        assert "revision" not in found
    place = {"uri": "x", "revision": "3f1c", "manifest_sha256": "ab" * 32}
    suite = suites(smol, [], target=place)["ckptkit.static"]
    found = {item.name: item.value for item in suite.properties()}
    assert (found["revision"], found["manifest_sha256"]) == ("3f1c", "ab" * 32)


def test_any_name_makes_legal_xml(smol: Checkpoint) -> None:
    name = "".join(map(chr, range(0x20))) + "<&\"']]>\x7f\ufffe\udcff é 𝒳"
    findings = [Finding("names.orphan", f"odd {name}", file=name, tensor=name, hint=name)]
    text = junit(reporting.report(reporting.outcome(findings, {"numeric.head": name}), smol))
    root = ElementTree.fromstring(text)
    (failure,) = root.iter("failure")
    assert failure.text is not None
    for part in ("\\x00", "\\x1f", "<&\"']]>", "\\ufffe", "\\udcff", "é 𝒳"):
        assert part in failure.text
    (skipped,) = root.iter("skipped")
    assert "<&\"']]>" in skipped.attrib["message"]
