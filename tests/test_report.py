from __future__ import annotations

import json
import math
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import reporting
import torch
from make import checkpoint, llama, llama_config

from ckptkit.checks import Subject
from ckptkit.errors import FOUND, OK, Finding
from ckptkit.files.checkpoint import Checkpoint, open_checkpoint, scan
from ckptkit.files.source import open_source
from ckptkit.reports.model import TensorError
from ckptkit.reports.report import json_schema, place_of, stats_of, to_dict, to_json
from ckptkit.reports.summary import SEGMENTS_SHOWN, SHARDS_SHOWN, numeric_of, plain


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return reporting.load("mixtral-8x7b", tmp_path_factory.mktemp("mixtral") / "model")


def missing(number: int, **changes: object) -> Finding:
    return Finding("index.missing-tensor", "absent", file="a.safetensors", tensor=f"t{number}", **changes)  # type: ignore[arg-type]


# --- the document ------------------------------------------------------------------------------------------


def test_the_json_is_what_the_schema_says(mixtral: Checkpoint) -> None:
    numeric = {"tensors": [{"tensor": "lm_head.weight", "rel_rms": 0.01, "max_abs": 0.1, "cos": 0.9, "bound": 0.02}]}
    heads = {"lm_head.weight": {"noise": reporting.AGREEMENT}}
    skipped = {"numeric.head": "no source"}
    outcome = reporting.outcome([missing(0)], skipped, numeric=numeric, heads=heads, other={"share": 0.1})
    document = json.loads(to_json(reporting.report(outcome, mixtral, mixtral)))
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(document, schema)
    assert document["heads"] == [{"tensor": "lm_head.weight", "kind": "noise"} | reporting.AGREEMENT]
    assert document["figures"] == {"other": {"share": 0.1}}
    for broken in ({"schema": 2}, {"ok": "yes"}, {"findings": [{"id": "x"}]}, {"checks": None}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(document | broken, schema)


def test_the_json_holds_what_went_in(mixtral: Checkpoint) -> None:
    finding = missing(7, hint="do this", data={"expected": (1, 2)})
    report = reporting.report(reporting.outcome([finding], {"numeric.head": "no source"}), mixtral)
    document = json.loads(to_json(report))
    assert document == to_dict(report)
    assert (document["schema"], document["ok"], document["exit_code"]) == (1, False, FOUND)
    assert (document["started"], document["seconds"]) == ("2026-11-29T20:31:07Z", 12.346)
    assert document["findings"] == [finding.as_dict() | {"data": {"expected": [1, 2]}, "allowed": False}]
    assert {check["id"]: check["result"] for check in document["checks"]} == {
        "index.missing-tensor": "fail",
        "layout.header": "ok",
        "data.nan": "ok",
        "numeric.head": "skip",
    }
    assert document["counts"] == {"errors": 1, "warnings": 0, "skipped": 1}
    assert document["environment"] == reporting.ENVIRONMENT
    assert document["numeric"] is None


def test_findings_are_capped_for_each_id_and_said_to_be(mixtral: Checkpoint) -> None:
    findings = [missing(n, severity="warning") for n in range(5)] + [missing(9), Finding("config.arch", "unknown")]
    report = reporting.report(reporting.outcome(findings), mixtral, max_findings=3)
    assert [(found.id, found.tensor) for found in report.findings] == [
        ("index.missing-tensor", "t9"),
        ("config.arch", None),
        ("index.missing-tensor", "t0"),
        ("index.missing-tensor", "t1"),
    ]
    assert {check.id: (check.findings, check.truncated) for check in report.checks if check.findings} == {
        "index.missing-tensor": (6, True),
        "config.arch": (1, False),
    }
    assert report.truncated
    assert (report.counts.errors, report.counts.warnings) == (2, 5)
    assert not reporting.report(reporting.outcome(findings), mixtral, max_findings=6).truncated


def test_allowed_findings_are_warnings(mixtral: Checkpoint) -> None:
    outcome = reporting.outcome([missing(0), Finding("config.arch", "unknown")])
    report = reporting.report(outcome, mixtral, allowed={"config.arch"}, exit_code=FOUND)
    assert {found.id: (found.severity, found.allowed) for found in report.findings} == {
        "index.missing-tensor": ("error", False),
        "config.arch": ("warning", True),
    }
    results = {check.id: check.result for check in report.checks}
    assert (results["config.arch"], results["index.missing-tensor"]) == ("warn", "fail")
    assert report.allowed == ["config.arch"]


def test_names_and_numbers_that_json_cannot_hold(mixtral: Checkpoint) -> None:
    odd = Finding("names.orphan", "odd \udcff", tensor="a\x00\ud800", data={"x": math.nan, "n": np.int64(3), 4: {"y"}})
    report = reporting.report(reporting.outcome([odd]), mixtral)
    (found,) = json.loads(to_json(report))["findings"]
    assert (found["message"], found["tensor"]) == ("odd \\udcff", "a\x00\\ud800")
    assert found["data"] == {"x": None, "n": 3, "4": ["y"]}
    assert plain([np.float32(0.5), float("inf"), True, None]) == [0.5, None, True, None]


# --- places and totals -------------------------------------------------------------------------------------


def test_a_place_knows_its_manifest_and_the_hubs_revision(tmp_path: Path) -> None:
    revision = "0123456789abcdef" * 2 + "01234567"
    folder = checkpoint(tmp_path / "models--org--name" / "snapshots" / revision, llama(), llama_config())
    assert place_of(open_source(str(folder))).model_dump() == {
        "uri": str(folder),
        "revision": revision,
        "manifest_sha256": None,
    }
    (folder / "ckptkit.json").write_text("abc")
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # of "abc", FIPS 180-4
    assert place_of(open_source(str(folder))).manifest_sha256 == digest


def test_totals_are_those_of_the_files(tmp_path: Path) -> None:
    tensors = llama()
    found = open_checkpoint(open_source(str(checkpoint(tmp_path / "model", [tensors], llama_config()))))
    stats = stats_of(Subject(found, against=found), [])
    parameters = sum(tensor.numel() for tensor in tensors.values())
    assert (stats.tensors, stats.parameters, stats.bytes) == (len(tensors), parameters, 2 * parameters)
    assert stats.by_dtype == {"BF16": 2 * parameters}
    assert stats.against is not None
    assert stats.against.model_dump() == stats.model_dump(include=set(type(stats.against).model_fields))
    (bar,) = stats.shard_map
    assert (bar.file, bar.bytes, bar.faulty) == ("model.safetensors", 2 * parameters, False)
    assert sum(segment.tensors for segment in bar.segments) == len(tensors)
    assert sum(segment.bytes for segment in bar.segments) == bar.bytes


def test_the_shard_map_shows_what_findings_name(tmp_path: Path) -> None:
    whole = llama(vocab=64)
    halves = [dict(list(whole.items())[:10]), dict(list(whole.items())[10:])]
    folder = checkpoint(tmp_path / "model", halves, llama_config(vocab=64))
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"broken")
    found, findings = scan(open_source(str(folder)))
    findings.append(Finding("data.nan", "has NaN", tensor="model.norm.weight"))  # in the unreadable shard
    findings.append(Finding("data.nan", "many", data={"examples": ["model.layers.0.mlp.up_proj.weight"]}))
    findings.append(Finding("data.inf", "meant", tensor="model.embed_tokens.weight", severity="warning"))
    first, second = stats_of(Subject(found), findings).shard_map
    assert [(segment.name, segment.tensors) for segment in first.segments if segment.faulty] == [
        ("model.layers.0.mlp.up_proj.weight", 1)
    ]
    assert first.faulty
    assert (second.file, second.segments, second.faulty) == ("model-00002-of-00002.safetensors", [], True)


def test_a_large_checkpoint_shows_its_faulty_shards(tmp_path: Path) -> None:
    small = [{f"t{shard}": torch.zeros(8)} for shard in range(SHARDS_SHOWN + 5)]
    many = {f"m{number}": torch.zeros(8) for number in range(5 * SEGMENTS_SHOWN)}
    found = open_checkpoint(open_source(str(checkpoint(tmp_path / "model", [*small, many], {}))))
    faulty = found.tensors[f"t{SHARDS_SHOWN + 4}"].file
    stats = stats_of(Subject(found), [Finding("index.shard-count", "wrong", file=faulty)])
    assert (stats.shards, len(stats.shard_map)) == (SHARDS_SHOWN + 6, SHARDS_SHOWN)
    assert [bar.file for bar in stats.shard_map if bar.faulty] == [faulty]
    last = found.tensors["m0"].file
    (bar,) = [bar for bar in stats_of(Subject(found), [Finding("a.b", "", file=last)]).shard_map if bar.file == last]
    assert len(bar.segments) == SEGMENTS_SHOWN
    assert sum(segment.tensors for segment in bar.segments) == len(many)
    assert sum(segment.bytes for segment in bar.segments) == bar.bytes == 32 * len(many)


# --- errors ------------------------------------------------------------------------------------------------


def errors(**by_name: float | None) -> list[TensorError]:
    """Errors by tensor, with a bound of 0.1."""
    beyond = {name: 3 if error and error > 0.1 else 0 for name, error in by_name.items()}
    return [
        TensorError(tensor=name, rel_rms=error, max_abs=0.0, bound=0.1, beyond=beyond[name])
        for name, error in by_name.items()
    ]


def test_errors_by_layer_module_and_expert() -> None:
    prefix = "model.layers"
    numeric = numeric_of(
        errors(
            **{
                f"{prefix}.10.mlp.experts.0.up_proj.weight": 0.05,
                f"{prefix}.10.mlp.experts.3.up_proj.weight_packed": 0.07,
                f"{prefix}.10.mlp.experts.3.down_proj.weight": 0.02,
                f"{prefix}.2.self_attn.q_proj.weight": 0.2,
                f"{prefix}.2.self_attn.k_proj.weight": None,
                "lm_head.weight": 0.0,
            }
        )
    )
    assert [(c.stack, c.layer, c.module, c.rel_rms, c.tensors, c.beyond) for c in numeric.cells] == [
        ("", None, "lm_head", 0.0, 1, False),
        (prefix, 2, "self_attn.q_proj", 0.2, 1, True),
        (prefix, 2, "self_attn.k_proj", None, 1, True),
        (prefix, 10, "mlp.experts.#.up_proj", 0.07, 2, False),
        (prefix, 10, "mlp.experts.#.down_proj", 0.02, 1, False),
    ]
    assert [(row.layer, row.rel_rms) for row in numeric.experts] == [(10, [0.05, None, None, 0.07])]
    assert [(layer.layer, layer.rel_rms) for layer in numeric.per_layer] == [(2, None), (10, 0.07)]
    assert [tensor.rel_rms for tensor in numeric.worst] == [None, 0.2, 0.07, 0.05, 0.02, 0.0]
    assert (numeric.tensors, numeric.median) == (6, 0.06)


def test_the_histogram_counts_every_finite_error_once() -> None:
    values = np.geomspace(1e-6, 0.9, 500)
    numeric = numeric_of(errors(**{f"t{n}": float(value) for n, value in enumerate(values)}, exact=0.0, nan=None))
    histogram = numeric.histogram
    assert histogram is not None
    expected, _ = np.histogram(values, histogram.edges)
    assert sum(histogram.counts) == len(values)
    # Edges are rounded to four digits, so a value may fall on either side of one.
    assert np.abs(np.array(histogram.counts) - expected).max() <= 1
    assert np.allclose(np.diff(np.log10(histogram.edges)), 0.05, atol=1e-3)
    assert (histogram.exact, histogram.bounds) == (1, [(0.1, 0.1)])


def test_bounds_are_told_in_clusters() -> None:
    bounds = [0.14, None, 0.012, 0.19, 0.13, 0.0125, math.nan]
    tensors = [TensorError(tensor="t", rel_rms=0.01, max_abs=0.1, bound=plain(bound)) for bound in bounds]
    histogram = numeric_of(tensors).histogram
    assert histogram is not None
    assert histogram.bounds == [(0.012, 0.0125), (0.13, 0.19)]


def test_comparisons_without_errors() -> None:
    exact = numeric_of(errors(a=0.0, b=0.0))
    assert exact.histogram is not None
    assert (exact.histogram.counts, exact.histogram.exact, exact.median) == ([], 2, 0.0)
    nothing = numeric_of([])
    assert (nothing.histogram, nothing.median, nothing.cells, nothing.tensors) == (None, None, [], 0)
    assert numeric_of(errors(a=1e-300)).histogram is not None
    assert len(numeric_of(errors(**{"l.0.experts.999999999.w.weight": 0.1})).experts) == 0


def test_a_clean_run_is_ok(mixtral: Checkpoint) -> None:
    report = reporting.report(reporting.outcome(), mixtral)
    assert (report.ok, report.exit_code, report.findings) == (True, OK, [])
