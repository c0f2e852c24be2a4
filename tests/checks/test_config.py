"""config.json against the tensors."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from make import checkpoint, llama, llama_config
from quantized_parts import Tensors, found, found_in, gptq, packed, quantized, subject_of

from ckptkit.checks import config
from ckptkit.checks.stacks import runs
from ckptkit.files.checkpoint import scan
from ckptkit.files.header import Spec
from ckptkit.files.source import open_source

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
VOCAB, HIDDEN = 512, 128


def told(folder: Path) -> list[tuple[str, str]]:
    return sorted((finding.id, finding.severity) for finding in found(folder, config))


def model(folder: Path, tensors: Tensors | None = None, **changes: Any) -> Path:
    """A Llama whose config has ``changes``; None takes a key away."""
    settings = {key: value for key, value in llama_config(**changes).items() if value is not None}
    return checkpoint(folder, llama() if tensors is None else tensors, settings)


def without(*names: str) -> Tensors:
    return {name: value for name, value in llama().items() if not name.startswith(names)}


def with_rows(name: str, rows: int) -> Tensors:
    return llama() | {name: torch.zeros(rows, HIDDEN, dtype=torch.bfloat16)}


PACKED_HEAD = quantized(llama(), ("lm_head", packed(8, None)))
EXTRA_LAYER = llama(layers=3)
MTP_LAYER = EXTRA_LAYER | {
    "model.layers.2.eh_proj.weight": torch.zeros(4, 8),
    "model.layers.2.enorm.weight": torch.zeros(4),
}
REDUCED = with_rows(HEAD, 64)

GOOD: dict[str, tuple[Tensors | None, dict[str, Any]]] = {
    "untied": (None, {}),
    "tied": (without(HEAD), {"tie_word_embeddings": True}),
    "tied in the text config alone": (without(HEAD), {"tie_word_embeddings": None, "text_config": {"tie_word_embeddings": True}}),
    "tied by its type": (without(HEAD), {"tie_word_embeddings": None, "model_type": "gemma3_text"}),
    "no dtype": (None, {"torch_dtype": None}),
    "the newer key": (None, {"torch_dtype": None, "dtype": "torch.bfloat16"}),
    "dtype of the text model": (None, {"torch_dtype": "float32", "text_config": {"dtype": "bfloat16"}}),
    "norms in float32": (llama() | {"model.norm.weight": torch.ones(HIDDEN)}, {}),
    "a quantized head": (PACKED_HEAD, {}),
    "a GPTQ head": (quantized(llama(), ("lm_head", gptq())), {}),
    "a draft's head": (REDUCED, {"draft_vocab_size": 64}),
    "an encoder": (without(HEAD), {"architectures": ["LlamaModel"]}),
    "a layer that drafts": (MTP_LAYER, {"num_nextn_predict_layers": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_good_ones(name: str, tmp_path: Path) -> None:
    tensors, changes = GOOD[name]
    assert told(model(tmp_path, tensors, **changes)) == []


BAD: dict[str, tuple[Tensors | None, dict[str, Any], str, str]] = {
    "no architecture": (None, {"architectures": None}, "config.arch", "error"),
    "an empty list": (None, {"architectures": []}, "config.arch", "error"),
    "a string": (None, {"architectures": "LlamaForCausalLM"}, "config.arch", "error"),
    "another dtype": (None, {"torch_dtype": "float16"}, "config.dtype", "warning"),
    "the dtype of dense weights": (PACKED_HEAD, {"torch_dtype": "float16"}, "config.dtype", "warning"),
    "no head": (without(HEAD), {}, "config.tie", "error"),
    "tied, both stored": (None, {"tie_word_embeddings": True}, "config.tie", "warning"),
    "tied, another dtype": (llama() | {HEAD: torch.zeros(VOCAB, HIDDEN)}, {"tie_word_embeddings": True}, "config.tie", "error"),
    "tied, packed": (PACKED_HEAD, {"tie_word_embeddings": True}, "config.tie", "error"),
    "vocab_size": (None, {"vocab_size": 500}, "config.vocab", "error"),
    "padded rows": (with_rows(EMBEDDING, 576) | {HEAD: torch.zeros(576, HIDDEN, dtype=torch.bfloat16)}, {}, "config.vocab", "error"),
    "a shorter head": (REDUCED, {}, "vocab.rows", "error"),
    "a shorter GPTQ head": (quantized(REDUCED, ("lm_head", gptq())), {}, "vocab.rows", "error"),
    "too few layers": (None, {"num_hidden_layers": 5}, "config.layers", "error"),
    "too many layers": (EXTRA_LAYER, {}, "config.layers", "error"),
    "a hole in the layers": (without("model.layers.0."), {}, "config.layers", "error"),
    "a layer that drafts, undeclared": (MTP_LAYER, {}, "config.layers", "warning"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_ones(name: str, tmp_path: Path) -> None:
    tensors, changes, id, severity = BAD[name]
    assert told(model(tmp_path, tensors, **changes)) == [(id, severity)]


@pytest.mark.parametrize(
    ("files", "beyond"),
    [
        ({"tokenizer.json": {"model": {"vocab": {"a": 0, "b": 511}}}}, None),
        ({"tokenizer.json": {"model": {"vocab": {"a": 0, "b": 512}}}}, "b"),
        ({"tokenizer.json": {"model": {"vocab": [["a", 0.0]] * 513}}}, "a"),
        ({"tokenizer.json": {"added_tokens": [{"id": 511, "content": "x"}]}}, None),
        ({"tokenizer.json": {"added_tokens": [{"id": 600, "content": "x"}]}}, "x"),
        ({"tokenizer.json": {"added_tokens": [{"id": 600, "content": "x"}]}, "tokenizer_config.json": {"image_token": "x"}}, None),
        ({"tokenizer.json": {"added_tokens": [{"id": 600, "content": "x"}]}, "tokenizer_config.json": {"pad_token": "x"}}, "x"),
        ({"vocab.json": {"a": 5}, "added_tokens.json": {"y": 512}}, "y"),
        ({"tokenizer.json": [], "vocab.json": {"a": 512}}, "a"),
    ],
)  # fmt: skip
def test_tokens_without_a_row(tmp_path: Path, files: dict[str, Any], beyond: str | None) -> None:
    model(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    findings = found(tmp_path, config)
    assert [(finding.id, finding.data["tokens"]) for finding in findings] == (
        [("vocab.rows", [beyond])] if beyond else []
    )


def test_a_folder_without_config_and_one_that_cannot_be_read(tmp_path: Path) -> None:
    checkpoint(tmp_path, llama())
    assert told(tmp_path) == [("config.missing", "error")]
    (tmp_path / "config.json").write_text("{")
    assert told(tmp_path) == [("config.parse", "error")]
    assert told(tmp_path / "model.safetensors") == []


@pytest.mark.parametrize("prefix", ["model.layers", "transformer.h", "language_model.model.layers", "layers"])
def test_layers_under_any_name(prefix: str) -> None:
    specs = [Spec(f"{prefix}.{layer}.mlp.up_proj.weight", "BF16", (4, 4)) for layer in range(6)]
    specs += [Spec(f"vision_tower.layers.{layer}.mlp.up_proj.weight", "BF16", (4, 4)) for layer in range(9)]
    settings = {"architectures": ["X"], "num_hidden_layers": 8}
    (finding,) = found_in(subject_of(specs, settings), config)
    assert (finding.id, finding.tensor, finding.data["missing"]) == ("config.layers", f"{prefix}.6", [6, 7])


def test_numbers_in_few_words() -> None:
    assert runs([7, 0, 1, 2, 9, 10]) == "0-2, 7, 9-10"
    assert runs([]) == ""


@pytest.mark.parametrize(
    "text", ['{"model_type": "llama", "x": "\\ud800"}', '{"x": 1,\n"model_type": "a",\n"model_type": "b"}']
)
def test_what_other_readers_take_is_found_by_the_hint(tmp_path: Path, text: str) -> None:
    """json.tool reads both: the hint's command prints the line that is wrong."""
    json.loads(text)
    checkpoint(tmp_path / "model", llama())
    (tmp_path / "model" / "config.json").write_text(text)
    with open_source(str(tmp_path / "model")) as source:
        (finding,) = [item for item in scan(source)[1] if item.id == "config.parse"]
    words = shlex.split(str(finding.hint).removeprefix("remove one of them: ").removesuffix(" finds it"))
    printed = subprocess.run(words, cwd=tmp_path / "model", capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()
    assert all("ud800" in line or "model_type" in line for line in printed.splitlines())
