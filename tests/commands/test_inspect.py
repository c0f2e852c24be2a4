from __future__ import annotations

import json
import os
import resource
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from make import checkpoint, llama, llama_config

from ckptkit.cli import main
from ckptkit.errors import OK, SOURCE, USAGE
from ckptkit.files.header import Spec, lay_out

NAMES = list(llama())


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A small Llama in two shards."""
    names, tensors = NAMES, llama()
    parts = [{name: tensors[name] for name in half} for half in (names[:9], names[9:])]
    return str(checkpoint(tmp_path / "model", parts, llama_config()))


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = OK) -> dict[str, Any]:
    """The document that a command line prints under --json, its exit code being as expected."""
    assert main([*arguments, "--json"]) == code
    out, _ = capsys.readouterr()
    found: dict[str, Any] = json.loads(out)
    assert found["exit_code"] == code
    return found


def test_the_summary(capsys: pytest.CaptureFixture[str], model: str) -> None:
    found = told(capsys, "inspect", model)
    tensors = llama().values()
    parameters, size = sum(t.numel() for t in tensors), sum(t.nbytes for t in tensors)
    assert found["architectures"] == ["LlamaForCausalLM"]
    assert found["total"] == {"key": "total", "tensors": len(NAMES), "parameters": parameters, "bytes": size}
    assert found["dtypes"] == [found["total"] | {"key": "BF16"}]
    assert found["heads"] == [{"module": "lm_head", "stored": "BF16", "shape": [512, 128]}]
    assert (found["shards"], found["tied"], found["quantization"], found["drafts"]) == (2, False, None, [])


def test_for_people(capsys: pytest.CaptureFixture[str], model: str) -> None:
    assert main(["inspect", model]) == OK
    out, err = capsys.readouterr()
    assert err == ""
    for word in ("LlamaForCausalLM", "none declared", "2 shards", "lm_head BF16 [512, 128]", "BF16"):
        assert word in out


def test_warnings_are_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = str(checkpoint(tmp_path, llama(), llama_config(tie_word_embeddings=True)))
    assert [finding["id"] for finding in told(capsys, "inspect", folder)["findings"]] == ["config.tie"]
    assert main(["inspect", folder]) == OK
    assert capsys.readouterr().err.startswith("warning: ")


def test_every_tensor(capsys: pytest.CaptureFixture[str], model: str) -> None:
    found = told(capsys, "inspect", model, "--tensors")["tensors"]
    assert sorted(tensor["name"] for tensor in found) == sorted(NAMES)
    head = next(tensor for tensor in found if tensor["name"] == "lm_head.weight")
    shard = "model-00002-of-00002.safetensors"
    assert head == {
        "name": "lm_head.weight",
        "dtype": "BF16",
        "shape": [512, 128],
        "bytes": 512 * 128 * 2,
        "shard": shard,
    }
    assert main(["inspect", model, "--tensors", "-q"]) == OK
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(NAMES)


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["lm_head.weight"], ["lm_head.weight"]),
        (["*embed*", "lm_head.*"], ["lm_head.weight", "model.embed_tokens.weight"]),
        ([r"re:.*layers\.1\..*norm"], [n for n in sorted(NAMES) if ".1." in n and "norm" in n]),
    ],
)
def test_patterns_restrict(
    capsys: pytest.CaptureFixture[str], model: str, patterns: list[str], names: list[str]
) -> None:
    found = told(capsys, "inspect", model, *patterns, "--tensors")["tensors"]
    assert sorted(tensor["name"] for tensor in found) == names
    assert told(capsys, "inspect", model, *patterns)["total"]["tensors"] == len(names)


@pytest.mark.parametrize(
    ("by", "key", "tensors"),
    [
        ("layer", "model.layers.1", 9),
        ("layer", "lm_head", 1),
        ("module", "model.layers.#.mlp.up_proj", 2),
        ("dtype", "BF16", len(NAMES)),
        ("shard", "model-00001-of-00002.safetensors", 9),
    ],
)
def test_groups(capsys: pytest.CaptureFixture[str], model: str, by: str, key: str, tensors: int) -> None:
    found = told(capsys, "inspect", model, "--group", by)["groups"]
    assert [row["tensors"] for row in found if row["key"] == key] == [tensors]
    assert sum(row["tensors"] for row in found) == len(NAMES)


@pytest.mark.parametrize(
    ("arguments", "id"),
    [
        (["nothing*"], "usage.pattern-unmatched"),
        (["re:("], "recipe.pattern"),
        (["--tensors", "--group", "dtype"], "usage.arguments"),
    ],
)
def test_refused(capsys: pytest.CaptureFixture[str], model: str, arguments: list[str], id: str) -> None:
    assert [f["id"] for f in told(capsys, "inspect", model, *arguments, code=USAGE)["findings"]] == [id]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("lm_head", ["lm_head.weight"]),
        ("re:.*lm_head$", ["lm_head.weight"]),
        ("model.layers.1.mlp", [name for name in NAMES if name.startswith("model.layers.1.mlp.")]),
        ("*.mlp.up_proj", [name for name in NAMES if "mlp.up_proj" in name]),
        ("model.layers.1.mlp.up.weight", ["model.layers.1.mlp.up_proj.weight"]),
    ],
)
@pytest.mark.parametrize("command", ["inspect {model}", "diff {model} {model}"])
def test_a_pattern_that_matches_nothing_is_answered_with_one_that_does(
    capsys: pytest.CaptureFixture[str], model: str, command: str, pattern: str, names: list[str]
) -> None:
    arguments = command.format(model=model).split()
    (finding,) = told(capsys, *arguments, pattern, code=USAGE)["findings"]
    meant = shlex.split(finding["hint"].removesuffix(" in its place"))[-1]
    found = told(capsys, "inspect", model, meant, "--tensors")["tensors"]
    assert sorted(tensor["name"] for tensor in found) == sorted(names)


def test_what_is_not_looked_at_is_not_told(capsys: pytest.CaptureFixture[str], model: str) -> None:
    assert main(["inspect", model, "*mlp*"]) == OK
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("head ", "drafts "))]
    assert heads == []
    assert main(["inspect", model]) == OK
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("head ", "drafts "))]
    assert len(heads) == 2


def test_a_broken_source_is_told_with_all_its_faults(capsys: pytest.CaptureFixture[str], model: str) -> None:
    first, second = sorted(Path(model).glob("*.safetensors"))
    os.truncate(first, first.stat().st_size - 41)
    second.unlink()
    found = told(capsys, "inspect", model, code=SOURCE)["findings"]
    assert {finding["id"] for finding in found} >= {"layout.truncated", "index.missing-shard"}
    assert main(["inspect", model]) == SOURCE
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err


def test_a_missing_source(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = told(capsys, "inspect", str(tmp_path / "none"), code=SOURCE)["findings"]
    assert [finding["id"] for finding in found] == ["source.missing"]


def test_a_single_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    checkpoint(tmp_path, {"a.weight": torch.zeros(3, 5)})
    found = told(capsys, "inspect", str(tmp_path / "model.safetensors"))
    assert found["total"] == {"key": "total", "tensors": 1, "parameters": 15, "bytes": 60}
    assert found["architectures"] == []


SHARDS, EXPERTS, LAYERS = 1000, 400, 64


@pytest.mark.slow
def test_a_thousand_shards_are_inspected_in_about_two_seconds(tmp_path: Path) -> None:
    parts = (("weight_packed", "I32", (64, 8)), ("weight_scale", "BF16", (64, 1)), ("weight_shape", "I64", (2,)))
    specs = [
        Spec(f"model.layers.{layer}.mlp.experts.{expert}.{projection}.{part}", dtype, shape)
        for layer in range(LAYERS)
        for expert in range(EXPERTS)
        for projection in ("gate_proj", "up_proj", "down_proj")
        for part, dtype, shape in parts
    ]
    weight_map = {}
    for shard in range(SHARDS):
        name = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        held = specs[shard * len(specs) // SHARDS : (shard + 1) * len(specs) // SHARDS]
        header, layout = lay_out(held, {"format": "pt"})
        (tmp_path / name).write_bytes(header)
        os.truncate(tmp_path / name, layout.file_size)
        weight_map |= dict.fromkeys((spec.name for spec in held), name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert len(weight_map) == 230_400
    command = [sys.executable, "-m", "ckptkit", "inspect", str(tmp_path), "--json"]
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        ended = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=120)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert json.loads(ended.stdout)["total"]["tensors"] == 230_400
    assert min(seconds) < 4, "CPU seconds; a quiet machine of 2026 needs about two"
