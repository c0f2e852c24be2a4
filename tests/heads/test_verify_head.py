"""``ckptkit verify --head``: heads under real processes, good ones and broken ones, told by ids and exit codes."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import junitparser
import numpy as np
import pytest
import torch
from make import checkpoint, llama, llama_config
from safetensors.torch import load_file, save_file

from ckptkit.cli import main
from ckptkit.errors import ENGINE, FOUND, OK, SOURCE, USAGE
from ckptkit.heads import ranks

VOCAB, HIDDEN = 1009, 128
EXACT = ("--select", "head.slices,head.order")


def head() -> torch.Tensor:
    """Rows of which many are equal, near and far from each other."""
    weight = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5))
    weight[700:800] = weight[5:105]
    weight[1:100:7] = weight[0]
    return weight.bfloat16()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("headed") / "source"
    tensors = llama(vocab=VOCAB, layers=1, lm_head__weight=head())
    return checkpoint(folder, tensors, llama_config(vocab=VOCAB, layers=1, final_logit_softcapping=30.0))


@pytest.fixture(scope="module")
def ordered(source: Path) -> Path:
    """Its head for two slices of vLLM's: 512 and 497 rows."""
    listed = source.with_name("list.txt")
    listed.write_text("\n".join(map(str, range(4, VOCAB, 3))))
    out = source.with_name("ordered")
    options = ["--draft-vocab", str(listed), "--slices", "2", "--engine", "vllm", "-q", "--no-progress"]
    assert main(["reorder-vocab", str(source), str(out), *options]) == OK
    return out


def verify(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["verify", *map(str, arguments), "--json", "--no-progress"])
    return code, json.loads(capsys.readouterr().out)


def ids(report: dict[str, Any], family: str = "head.") -> list[str]:
    return sorted(found["id"] for found in report["findings"] if found["id"].startswith(family))


def results(report: dict[str, Any]) -> dict[str, str]:
    return {check["id"]: check["result"] for check in report["checks"]}


def place(folder: Path, tensor: str) -> tuple[Path, int]:
    """The file that holds a tensor, and where its bytes begin."""
    for path in folder.glob("model*.safetensors"):
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        entry = json.loads(content[8 : 8 + length]).get(tensor)
        if entry:
            return path, 8 + length + entry["data_offsets"][0]
    raise KeyError(tensor)


def copied(folder: Path, to: Path) -> Path:
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


# --- sound heads -------------------------------------------------------------------------------------------


def test_three_uneven_slices_with_ties_and_a_soft_cap(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    states = np.random.default_rng(0).standard_normal((300, 2, HIDDEN)).astype(np.float32)
    np.save(tmp_path / "hidden.npy", states)
    page, junit = tmp_path / "report.html", tmp_path / "junit.xml"
    code, report = verify(
        capsys, source, "--head", "--slices", 3, "--engine", "vllm", "--hidden", tmp_path / "hidden.npy",
        "--against", source, "--report", page, "--junit", junit,
    )  # fmt: skip
    assert (code, ids(report)) == (OK, [])
    assert {results(report)[f"head.{name}"] for name in ("order", "greedy", "candidates", "logits", "nan")} == {"ok"}
    found = report["figures"]["head"]
    assert (found["slice_rows"], found["held"], found["candidates"]) == ([384, 384, 241], [384, 384, 384], 128)
    assert (found["softcap"], found["logits"], found["backend"]) == (30.0, "BF16", "gloo")
    assert {kind: line["states"] for kind, line in found["kinds"].items()} == {
        "noise": 32, "rows": 66, "embeddings": 32, "hidden": 256,
    }  # fmt: skip
    for line in found["kinds"].values():
        assert (line["equal"], line["recall"]) == (line["states"], 1.0)
        assert sum(line["winners"]) == line["states"]
        assert all(line["winners"])
    assert found["kinds"]["rows"]["tied_across"] > 0
    assert found["kinds"]["rows"]["tied"] > found["kinds"]["rows"]["tied_across"]
    assert found["received"] == {"candidates": 2 * 128 * 8, "dense": 2 * 384 * 2}
    assert found["one_device"]["of"] == "source"
    assert "vocabulary-parallel" in page.read_text("utf-8")
    cases = [case for suite in junitparser.JUnitXml.fromfile(str(junit)) for case in suite]
    assert "head.greedy" in {case.name for case in cases}


@pytest.mark.slow
def test_a_head_in_another_order(source: Path, ordered: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = verify(capsys, ordered, "--head", "--against", source, "--topk", 1, "--logits", "fp32")
    assert (code, ids(report)) == (OK, [])
    assert {check: result for check, result in results(report).items() if check.startswith(("head.", "numeric."))} == {
        "head.order": "ok", "head.slices": "ok", "head.greedy": "ok", "head.candidates": "ok", "head.logits": "ok",
        "head.nan": "ok", "numeric.head": "ok",
    }  # fmt: skip
    found = report["figures"]["head"]
    assert (found["ranks"], found["engine"], found["candidates"]) == (2, "vllm", 1)
    assert found["order"] == {"engine": "vllm", "slices": 2}
    assert found["kinds"]["rows"]["equal"] == found["kinds"]["rows"]["states"]
    assert all(line["flips"] == 0 and line["top10"] == 1.0 for line in report["heads"])


def test_without_a_source_the_rows_are_not_proved(ordered: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = verify(capsys, ordered, "--head", "--ignore", "head.greedy,head.candidates,head.logits,head.nan")
    assert code == OK
    assert "head.order" not in results(report)
    assert results(report)["head.slices"] == "ok"


def test_only_what_is_asked_for_runs(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--head reads no other tensor's bytes, and verify without it runs no ranks."""
    code, report = verify(capsys, source, "--head", "--engine", "vllm", "--ignore", "head")
    assert code == OK
    assert {check["level"] for check in report["checks"]} == {"static"}
    _, report = verify(capsys, source, "--against", source)
    assert not [id for id in results(report) if id.startswith("head.")]


def test_a_head_in_another_order_is_compared_unasked(
    source: Path, ordered: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = verify(capsys, ordered, "--against", source)
    assert (code, {check for check, result in results(report).items() if result == "fail"}) == (OK, set())
    assert results(report)["head.order"] == "ok"
    broken = copied(ordered, tmp_path / "broken")
    path, start = place(broken, "lm_head.rows.weight")
    content = bytearray(path.read_bytes())
    content[start] ^= 1
    path.write_bytes(content)
    code, report = verify(capsys, broken, "--against", source)
    assert (code, ids(report)) == (FOUND, ["head.order"])


@pytest.mark.parametrize("options", [(), pytest.param(("--head", "--topk", "4"), marks=pytest.mark.slow)])
def test_both_or_only_the_source_in_another_order(
    source: Path, ordered: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    for made, against in ((ordered, ordered), (source, ordered)):
        slices = ("--ranks", "2", "--engine", "vllm") if options else ()
        code, report = verify(capsys, made, "--against", against, *options, *slices)
        assert (code, {check for check, result in results(report).items() if result == "fail"}) == (OK, set())
        assert ("head.order" in results(report)) == (bool(options) or made == source)


def test_only_marks_of_the_order_may_differ_in_the_config(
    source: Path, ordered: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edited = copied(ordered, tmp_path / "edited")
    config = json.loads((edited / "config.json").read_text())
    (edited / "config.json").write_text(json.dumps(config | {"final_logit_softcapping": 50.0}))
    code, report = verify(capsys, edited, "--against", source, "--select", "config.differs")
    assert (code, [found["data"]["key"] for found in report["findings"]]) == (FOUND, ["final_logit_softcapping"])


# --- broken heads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (EXACT, ["head.order"]),
        pytest.param(("--topk", "8"), ["head.logits", "head.order"], marks=pytest.mark.slow),
    ],
)
def test_rows_that_changed_places(
    source: Path,
    ordered: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    found: list[str],
) -> None:
    broken = copied(ordered, tmp_path / "broken")
    path, start = place(broken, "lm_head.rows.weight")
    content, size = bytearray(path.read_bytes()), 2 * HIDDEN
    first, last = slice(start, start + size), slice(start + 511 * size, start + 512 * size)
    content[first], content[last] = content[last], content[first]
    path.write_bytes(content)
    code, report = verify(capsys, broken, "--head", "--against", source, *options)
    assert (code, ids(report)) == (FOUND, found)
    (order,) = (line for line in report["findings"] if line["id"] == "head.order")
    assert order["data"]["rows"] == 2
    # Row 0 is token 4's, the first of the list; row 511 is of the rest.
    assert order["data"]["first"][0][:2] == [0, 4]
    assert [other for _, _, other in order["data"]["first"]] == [t for _, t, _ in reversed(order["data"]["first"])]


@pytest.mark.slow
def test_a_nan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weight = head()
    weight[77, 3] = float("nan")
    tensors = llama(vocab=VOCAB, layers=1, lm_head__weight=weight)
    folder = checkpoint(tmp_path / "m", tensors, llama_config(vocab=VOCAB, layers=1))
    code, report = verify(capsys, folder, "--head", "--engine", "lightllm")
    assert (code, ids(report)) == (FOUND, ["head.nan"])
    assert [found["data"]["tokens"] for found in report["findings"] if found["id"] == "head.nan"] == [1]


def test_an_order_for_other_slices(ordered: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ids(verify(capsys, ordered, "--head", "--ranks", 2, *EXACT)[1]) == []
    code, report = verify(capsys, ordered, "--head", "--ranks", 3, *EXACT)
    assert (code, ids(report)) == (FOUND, ["head.slices"])
    assert ids(verify(capsys, ordered, "--head", "--engine", "lightllm", *EXACT)[1]) == ["head.slices"]


def test_another_model(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = checkpoint(tmp_path / "other", llama(vocab=VOCAB, layers=1), llama_config(vocab=VOCAB, layers=1))
    code, report = verify(capsys, source, "--head", "--against", other, *EXACT)
    assert (code, ids(report)) == (FOUND, ["head.order"])
    smaller = checkpoint(tmp_path / "smaller", llama(layers=1), llama_config(layers=1))
    assert ids(verify(capsys, source, "--head", "--against", smaller, *EXACT)[1]) == ["head.order"]


def test_a_bias_in_the_old_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    biases = (torch.arange(512.0), torch.arange(512.0).flip(0), None)
    a, b, c = (
        checkpoint(tmp_path / str(number), llama(layers=1, lm_head__bias=bias), llama_config(layers=1))
        for number, bias in enumerate(biases)
    )
    assert ids(verify(capsys, a, "--head", "--against", a, *EXACT)[1]) == []
    assert ids(verify(capsys, a, "--head", "--against", b, *EXACT)[1]) == ["head.order"]
    assert ids(verify(capsys, a, "--head", "--against", c, *EXACT)[1]) == ["head.order"]


def test_an_order_of_another_length(ordered: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = copied(ordered, tmp_path / "broken")
    for path in broken.glob("model*.safetensors"):
        tensors = load_file(path)
        if "lm_head.rows.weight" in tensors:
            save_file(tensors | {"lm_head.rows.weight": tensors["lm_head.rows.weight"][:900].clone()}, path)
    code, report = verify(capsys, broken, "--head", "--select", "head")
    assert code == FOUND
    assert ids(report) == ["head.order"]


# --- what cannot be run ------------------------------------------------------------------------------------


def test_a_rank_that_ends(source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "PROGRAM", "ckptkit.no_such_rank")
    code, report = verify(capsys, source, "--head", "--engine", "vllm", "--ranks", 2)
    assert (code, ids(report, "engine.")) == (ENGINE, ["engine.ranks"])


@pytest.mark.parametrize(
    ("options", "id"),
    [
        (["--ranks", "2"], "usage.arguments"),
        (["--topk", "2"], "usage.arguments"),
        (["--logits", "bf16"], "usage.arguments"),
        (["--hidden", "states.npy"], "usage.arguments"),
        (["--head", "--serve"], "usage.arguments"),
        (["--head", "--level", "data"], "usage.arguments"),
        (["--head", "--sample", "2%"], "usage.arguments"),
        (["--head", "--engine", "transformers"], "usage.arguments"),
        (["--head", "--ranks", "2"], "usage.engine"),
        (["--head", "--ranks", "0"], "usage.arguments"),
        (["--head", "--ranks", "1010", "--engine", "lightllm"], "usage.slices"),
        (["--head", "--engine", "vllm", "--hidden", "no.npy"], "usage.hidden"),
    ],
)
def test_what_is_refused(source: Path, capsys: pytest.CaptureFixture[str], options: list[str], id: str) -> None:
    code, report = verify(capsys, source, *options)
    assert (code, ids(report, "usage.")) == (USAGE, [id])


def test_no_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoint(tmp_path / "m", llama(layers=1, lm_head__weight=None), llama_config(layers=1))
    code, report = verify(capsys, folder, "--head", "--select", "head")
    assert (code, ids(report, "source.")) == (SOURCE, ["source.head"])
