"""``ckptkit draft-vocab subset-head``: rows against those that safetensors, compressed-tensors and dequantize give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import quantize
from make import checkpoint, llama, llama_config
from safetensors import safe_open
from safetensors.torch import load_file

from ckptkit.cli import main
from ckptkit.errors import OK, OUTPUT, SOURCE, USAGE
from tests.vocab.heads import FORMATS, tensors_of

IDS = [0, 3, 4, 17, 130, 131, 200, 201, 255]
V, H = 256, 128


def run(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = OK) -> dict[str, Any]:
    assert main([*map(str, arguments), "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def ids_of(found: dict[str, Any]) -> set[str]:
    return {finding["id"] for finding in found["findings"]}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "model", llama(1, H, 128, V), llama_config(1, H, 128, V))


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """The list, in another order than that of ids."""
    (tmp_path / "list.txt").write_text(" ".join(map(str, IDS[::-1])))
    return tmp_path / "list.txt"


def subset(
    capsys: pytest.CaptureFixture[str], model: Path, listed: Path, *more: object, code: int = OK
) -> dict[str, Any]:
    out = listed.parent / "head"
    return run(capsys, "draft-vocab", "subset-head", model, out, "--draft-vocab", listed, *more, code=code)


# What the loaders of each engine look for, and what they make of it.
NAMES = {
    "eagle3": ("d2t", torch.int64, True),
    "specforge": ("d2t", torch.int64, True),
    "sglang-eagle3": ("d2t", torch.int64, False),
    "vllm": ("d2t", torch.int64, False),
    "trtllm": ("model.d2t", torch.int32, False),
}


@pytest.mark.parametrize("layout", NAMES)
def test_the_head_and_its_map(capsys: pytest.CaptureFixture[str], model: Path, listed: Path, layout: str) -> None:
    subset(capsys, model, listed, "--layout", layout)
    found = load_file(listed.parent / "head" / "model.safetensors")
    d2t, dtype, has_mask = NAMES[layout]
    assert set(found) == {"lm_head.weight", d2t, *(["t2d"] if has_mask else [])}
    targets = torch.arange(len(IDS)) + found[d2t]
    assert (found[d2t].dtype, targets.tolist()) == (dtype, IDS)
    whole = load_file(model / "model.safetensors")["lm_head.weight"]
    assert torch.equal(found["lm_head.weight"], whole[targets])
    if has_mask:
        assert found["t2d"].dtype == torch.bool
        assert found["t2d"].nonzero()[:, 0].tolist() == IDS
    config = json.loads((listed.parent / "head" / "config.json").read_text())
    assert (config["vocab_size"], config["draft_vocab_size"], config["hidden_size"]) == (V, len(IDS), H)


def test_the_draft_logits_are_those_of_the_target(
    capsys: pytest.CaptureFixture[str], model: Path, listed: Path
) -> None:
    subset(capsys, model, listed)
    found = load_file(listed.parent / "head" / "model.safetensors")
    whole = load_file(model / "model.safetensors")["lm_head.weight"].float()
    states = torch.randn(8, H, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(len(IDS)) + found["d2t"]
    scattered = torch.full((8, V), -torch.inf)
    scattered[:, targets] = states @ found["lm_head.weight"].float().T
    torch.testing.assert_close(scattered[:, IDS], (states @ whole.T)[:, IDS], rtol=0, atol=2e-6)
    assert scattered.argmax(1).tolist() == [IDS[i] for i in (states @ whole.T)[:, IDS].argmax(1).tolist()]


def test_the_result_is_checked_by_its_own_means_and_served_by_none(
    capsys: pytest.CaptureFixture[str], model: Path, listed: Path
) -> None:
    subset(capsys, model, listed)
    head = listed.parent / "head"
    assert run(capsys, "draft-vocab", "check", head, "--head", head, "--strict")["findings"] == []
    assert run(capsys, "verify", head)["counts"]["errors"] == 0
    from transformers import AutoConfig

    with pytest.raises(ValueError, match="ckptkit_draft_head"):
        AutoConfig.from_pretrained(head)


def test_a_tied_head_is_the_embeddings_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path, listed: Path) -> None:
    tensors = llama(1, H, 128, V, lm_head__weight=None)
    tied = checkpoint(tmp_path / "tied", tensors, llama_config(1, H, 128, V, tie_word_embeddings=True))
    subset(capsys, tied, listed)
    found = load_file(tmp_path / "head" / "model.safetensors")
    assert torch.equal(found["lm_head.weight"], tensors["model.embed_tokens.weight"][IDS])


RECIPES = {
    "w8a16": "{scheme: W8A16, strategy: channel}",
    "w4a16": "{scheme: W4A16, group_size: 32}",
    "asym": "{scheme: W4A16_ASYM, group_size: 32}",
    "nvfp4": "{scheme: NVFP4A16}",
    "mxfp4": "{scheme: MXFP4A16}",
    "fp8": "{scheme: FP8_DYNAMIC}",
}


@pytest.mark.parametrize("name", RECIPES)
def test_quantized_heads_keep_their_values(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path, listed: Path, name: str
) -> None:
    group = RECIPES[name].replace("{", "{targets: ['re:.*lm_head$'], ", 1)
    (tmp_path / "r.yaml").write_text(f"schema: 1\nname: {name}\ngroups:\n  head: {group}\n")
    run(capsys, "quantize", model, tmp_path / "q", "--recipe", tmp_path / "r.yaml")
    subset(capsys, tmp_path / "q", listed)
    run(capsys, "dequantize", tmp_path / "q", tmp_path / "q-dense")
    run(capsys, "dequantize", tmp_path / "head", tmp_path / "head-dense")
    whole = load_file(tmp_path / "q-dense" / "model.safetensors")["lm_head.weight"]
    found = load_file(tmp_path / "head-dense" / "model.safetensors")
    assert torch.equal(found["lm_head.weight"], whole[IDS])
    with safe_open(tmp_path / "head" / "model.safetensors", "pt") as file:
        if "lm_head.weight_shape" in file.keys():  # noqa: SIM118
            assert file.get_tensor("lm_head.weight_shape").tolist() == [len(IDS), H]


def test_the_plan_can_be_kept_and_run_later(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path, listed: Path
) -> None:
    planned = subset(capsys, model, listed, "--dry-run")
    assert not (tmp_path / "head").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("head")] == []
    subset(capsys, model, listed, "--plan", tmp_path / "plan.jsonl", "--dry-run")
    made = run(capsys, "apply", tmp_path / "plan.jsonl", tmp_path / "applied")
    assert made["plan"]["digest"] == planned["plan"]["digest"]
    subset(capsys, model, listed)
    assert (tmp_path / "applied" / "model.safetensors").read_bytes() == (
        tmp_path / "head" / "model.safetensors"
    ).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(("head", ".head"))) == ["head"]


def test_refusals(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path, listed: Path) -> None:
    def refused(content: str, source: Path = model, code: int = USAGE) -> set[str]:
        listed.write_text(content)
        found = ids_of(subset(capsys, source, listed, code=code))
        assert not (tmp_path / "head").exists()
        return found

    assert refused(f"0 {V}") == {"vocab.range"}
    assert refused("3 3") == {"vocab.duplicate"}
    assert refused("three") == {"vocab.list"}
    headless = checkpoint(tmp_path / "body", llama(1, H, 128, V, lm_head__weight=None), llama_config(1, H, 128, V))
    assert refused("1 2", headless) == {"vocab.head"}
    without = checkpoint(tmp_path / "bare", llama(1, H, 128, V))
    assert refused("1 2", without, SOURCE) == {"config.missing"}
    run(capsys, "reorder-vocab", model, tmp_path / "ordered", "--draft-vocab", "prefix:9", "--slices", 1)
    assert refused("1 2", tmp_path / "ordered") == {"vocab.ordered"}


# --- GGUF --------------------------------------------------------------------------------------------------


def gguf_model(path: Path, kind: GGMLQuantizationType, head: str = "output.weight") -> tuple[np.ndarray, Path]:
    """A model with a head [256, 256] of ``kind``: its rows as bytes, and the file, written by the ``gguf`` package."""
    values = np.random.default_rng(0).standard_normal((V, 256)).astype(np.float32)
    rows = quantize(values, kind)
    writer = GGUFWriter(path, "llama")
    writer.add_token_list([f"t{id}" for id in range(V)])
    writer.add_tensor("token_embd.weight" if head != "token_embd.weight" else "other.weight", values)
    writer.add_tensor(head, rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return rows.view(np.uint8).reshape(V, -1), path


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
@pytest.mark.parametrize("head", ["output.weight", "token_embd.weight"])
def test_a_gguf_head(capsys: pytest.CaptureFixture[str], tmp_path: Path, listed: Path, kind: str, head: str) -> None:
    rows, model = gguf_model(tmp_path / "model.gguf", GGMLQuantizationType[kind], head)
    out = tmp_path / "head.gguf"
    given = ["draft-vocab", "subset-head", model, out, "--draft-vocab", listed, "--layout", "llama.cpp"]
    run(capsys, *given, "--dry-run")
    assert not out.exists()
    run(capsys, *given)
    reader = GGUFReader(out)
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert set(found) == {"output.weight", "d2t"}
    assert found["output.weight"].tensor_type.name == kind
    assert found["output.weight"].data.view(np.uint8).reshape(len(IDS), -1).tolist() == rows[IDS].tolist()
    assert (found["d2t"].data.dtype, found["d2t"].data.tolist()) == (np.int64, IDS)
    run(capsys, *given, code=OUTPUT)
    checked = run(capsys, "draft-vocab", "check", out, "--strict")
    assert checked["findings"] == []


def test_a_dense_head_as_gguf(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path, listed: Path) -> None:
    out = tmp_path / "head.gguf"
    run(capsys, "draft-vocab", "subset-head", model, out, "--draft-vocab", listed, "--layout", "llama.cpp")
    [head, map_] = GGUFReader(out).tensors
    whole = load_file(model / "model.safetensors")["lm_head.weight"]
    assert head.tensor_type is GGMLQuantizationType.BF16
    assert head.data.tobytes() == whole[IDS].contiguous().view(torch.uint8).numpy().tobytes()
    assert map_.data.tolist() == IDS


def test_gguf_refusals(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path, listed: Path) -> None:
    _, whole = gguf_model(tmp_path / "model.gguf", GGMLQuantizationType.F16)
    out = tmp_path / "head.gguf"
    given = ["draft-vocab", "subset-head", whole, out, "--draft-vocab", listed]
    assert ids_of(run(capsys, *given, code=USAGE)) == {"usage.arguments"}
    assert ids_of(run(capsys, *given, "--layout", "llama.cpp", "--plan", "p", code=USAGE)) == {"usage.arguments"}
    whole.write_bytes(whole.read_bytes()[:1000])
    assert ids_of(run(capsys, *given, "--layout", "llama.cpp", code=SOURCE)) == {"layout.truncated"}
    run(capsys, "quantize", model, tmp_path / "q", "--recipe", "lm_head-w8a16")
    given[2] = tmp_path / "q"
    assert ids_of(run(capsys, *given, "--layout", "llama.cpp", code=USAGE)) == {"vocab.format"}
    assert not out.exists()


def test_awq_holds_whole_words_of_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    awq = FORMATS["awq"]
    tensors = llama(layers=1, hidden=128, vocab=64, lm_head__weight=None)
    config = llama_config(layers=1, hidden=128, vocab=64, quantization_config=awq.table)
    source = checkpoint(tmp_path / "awq", [tensors, tensors_of(awq, 64)], config)
    for count, code, ids in ((11, USAGE, {"vocab.format"}), (16, OK, set())):
        line = ["draft-vocab", "subset-head", source, tmp_path / f"{count}", "--draft-vocab", f"prefix:{count}"]
        assert ids_of(run(capsys, *line, code=code)) & {"vocab.format", "output.verify"} == ids
