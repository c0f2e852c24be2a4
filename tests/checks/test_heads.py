"""Logit fidelity of heads: figures against whole logits computed by torch, and rows that were damaged or moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make import checkpoint, llama, llama_config
from safetensors.torch import load_file

from ckptkit.checks import Sample, Subject, heads
from ckptkit.checks.bounds import bound
from ckptkit.checks.fidelity import agreements
from ckptkit.cli import main
from ckptkit.files.checkpoint import open_checkpoint
from ckptkit.files.source import open_source

from .subjects import edit, findings, outcome, quantize, results, stored

HEAD = "lm_head.weight_packed"
W3 = "groups: {head: {targets: ['re:.*lm_head$'], scheme: {format: pack-quantized, weights: {type: int, num_bits: 3, symmetric: true, strategy: channel}}}}\n"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head of three of the chunks in which it is looked at, the last one cut short."""
    return checkpoint(tmp_path_factory.mktemp("heads") / "source", llama(vocab=2500), llama_config(vocab=2500))


def figures(found: Any, tensor: str = HEAD) -> dict[str, dict[str, Any]]:
    kinds: dict[str, dict[str, Any]] = found.figures["heads"][tensor]
    return kinds


def test_a_sound_head(source: Path, tmp_path: Path) -> None:
    found = outcome(quantize(source, tmp_path / "out", "lm_head-w8a16"), source)
    assert found.findings == []
    assert results(found)["numeric.head"] == "ok"
    assert {kind: line["states"] for kind, line in figures(found).items()} == {
        "noise": 32,
        "rows": 64,
        "embeddings": 32,
    }
    assert all(line["top1"] >= 0.9 and line["kl"] < 1e-4 for line in figures(found).values())
    assert figures(found)["rows"]["flips"] == 0


def test_figures_are_those_of_whole_logits(source: Path, tmp_path: Path) -> None:
    out = quantize(source, tmp_path / "out", W3)
    states = torch.randn(40, 128, generator=torch.Generator().manual_seed(0))
    with open_source(str(out)) as made, open_source(str(source)) as against:
        subject = Subject(open_checkpoint(made), against=open_checkpoint(against))
        (pair,) = [pair for pair in subject.matched.pairs if pair.made.name == HEAD]
        limits = bound(pair.made.stored, pair.source.stored)
        found = agreements(pair, made, against, limits, {"given": states.numpy()})["given"]
    weight = load_file(source / "model.safetensors")["lm_head.weight"].double()
    tensors = load_file(out / "model.safetensors")
    codes = torch.tensor(unpacked(tensors[HEAD], 3, 128)) - 4
    theirs, mine = states.double() @ weight.T, states.double() @ (codes * tensors["lm_head.weight_scale"].double()).T
    p, q = theirs.log_softmax(1), mine.log_softmax(1)
    assert found.kl == pytest.approx(float((p.exp() * (p - q)).sum(1).mean()), rel=1e-3)
    assert found.kl_reverse == pytest.approx(float((q.exp() * (q - p)).sum(1).mean()), rel=1e-3)
    assert found.max_abs == pytest.approx(float((theirs - mine).abs().max()), rel=1e-4)
    assert found.mean_abs == pytest.approx(float((theirs - mine).abs().mean()), rel=1e-4)
    for count, share in ((1, found.top1), (5, found.top5), (10, found.top10)):
        a, b = theirs.topk(count, 1).indices, mine.topk(count, 1).indices
        assert share == pytest.approx(float((a[:, :, None] == b[:, None, :]).any(2).double().mean()))
    assert found.flips == int((theirs.argmax(1) != mine.argmax(1)).sum()) > 0
    assert found.beyond == 0


def unpacked(words: torch.Tensor, bits: int, cols: int) -> list[list[int]]:
    """Numbers bit by bit out of little-endian words."""
    rows = words.numpy().view(np.uint32)
    text = ["".join(f"{word:032b}"[::-1] for word in row) for row in rows]
    return [[int(row[bits * c : bits * (c + 1)][::-1], 2) for c in range(cols)] for row in text]


def test_rows_that_were_exchanged(source: Path, tmp_path: Path) -> None:
    out = quantize(source, tmp_path / "out", "lm_head-w8a16")
    codes, row = bytearray(stored(out, HEAD)), 128
    codes[:row], codes[-row:] = codes[-row:], codes[:row]
    edit(out, HEAD, 0, bytes(codes))
    found = [f for f in findings(out, source) if f.id == "numeric.head"]
    assert [(f.severity, f.tensor, f.data["kind"]) for f in found] == [("error", HEAD, "rows")]
    assert found[0].data["beyond"] == 2  # the first row and the last are among the probes
    assert set(found[0].data["worst"]) == {0, 2499}


def test_one_scale_that_grew(source: Path, tmp_path: Path) -> None:
    """Its token wins everywhere."""
    out = quantize(source, tmp_path / "out", "lm_head-w8a16")
    scale = bytearray(stored(out, "lm_head.weight_scale"))
    scale[2 * 1234 + 1] += 2  # 16 times as large
    edit(out, "lm_head.weight_scale", 0, bytes(scale))
    found = [f for f in findings(out, source) if f.id == "numeric.head"]
    assert {f.data["kind"] for f in found} >= {"noise", "embeddings"}
    assert all(f.data["worst"][1] == 1234 for f in found)


def test_a_tied_embedding_that_became_a_head(tmp_path: Path) -> None:
    tensors = llama(lm_head__weight=None)
    source = checkpoint(tmp_path / "source", tensors, llama_config(tie_word_embeddings=True))
    found = outcome(quantize(source, tmp_path / "out", "lm_head-w8a16", "--set", "tie=untie"), source)
    assert found.findings == []
    assert results(found)["numeric.head"] == "ok"


def test_when_there_is_nothing_to_do(source: Path, tmp_path: Path) -> None:
    """No head was converted, or only a sample is looked at: not a check that failed to run."""
    body = quantize(source, tmp_path / "body", "w4a16")
    assert results(outcome(body, source))["numeric.head"] == "skip"
    head = quantize(source, tmp_path / "head", "lm_head-w8a16")
    assert results(outcome(head, source, sample=Sample(1, 3)))["numeric.head"] == "skip"


def test_a_norm_that_adds_one(tmp_path: Path) -> None:
    """Gemma's norms are stored less one: a weight of zeros passes states on."""
    tensors = llama() | {"model.norm.weight": torch.zeros(128, dtype=torch.bfloat16)}
    source = checkpoint(tmp_path / "source", tensors, llama_config(model_type="gemma"))
    with open_source(str(source)) as against:
        assert np.array_equal(heads.final_norm(open_checkpoint(against), 128), np.ones(128, np.float32))


def test_a_quantized_head_in_another_order_agrees_as_it_did_before(source: Path, tmp_path: Path) -> None:
    """Moving rows changes no figure: those of the head before it was reordered are the oracle."""
    made = quantize(source, tmp_path / "made", W3)
    ordered = tmp_path / "ordered"
    command = ["reorder-vocab", str(made), str(ordered), "--draft-vocab", "prefix:700", "--slices", "3"]
    assert main([*command, "--engine", "sglang", "-q", "--no-progress"]) == 0
    before, after = figures(outcome(made, source)), figures(outcome(ordered, source), "lm_head.rows.weight_packed")
    assert before["noise"]["flips"] > 0
    assert {kind: {**line, "mean_abs": 0} for kind, line in after.items()} == {
        kind: {**line, "mean_abs": 0} for kind, line in before.items()
    }


def test_a_reordered_head_whose_rows_moved_again(source: Path, tmp_path: Path) -> None:
    ordered = tmp_path / "ordered"
    command = ["reorder-vocab", str(source), str(ordered), "--draft-vocab", "prefix:700", "--slices", "1"]
    assert main([*command, "-q", "--no-progress"]) == 0
    name, row = "lm_head.rows.weight", 256
    first, last = stored(ordered, name)[:row], stored(ordered, name)[-row:]
    edit(ordered, name, 0, last)
    edit(ordered, name, 2499 * row, first)
    found = [f for f in findings(ordered, source) if f.id == "numeric.head"]
    assert [(f.tensor, f.data["kind"], f.data["beyond"]) for f in found] == [(name, "rows", 2)]


def test_states_of_a_file(source: Path, tmp_path: Path) -> None:
    """Those of a file stand beside the others; of states that are rows of the head their own tokens win."""
    states = load_file(source / "model.safetensors")["lm_head.weight"][:90].float() * 40
    np.save(tmp_path / "states.npy", states.numpy())
    found = outcome(quantize(source, tmp_path / "out", "lm_head-w8a16"), source, hidden=str(tmp_path / "states.npy"))
    assert figures(found)["hidden"]["states"] == 90
    assert figures(found)["hidden"]["flips"] == 0
