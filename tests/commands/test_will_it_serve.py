"""``ckptkit will-it-serve``: what is known of engine versions, told of headers and config alone."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from make import checkpoint, llama, llama_config
from told import Told, teller

from ckptkit.errors import FOUND, SOURCE, USAGE

PACKED = {
    "lm_head__weight": None,
    "lm_head__weight_packed": torch.zeros(512, 32, dtype=torch.int32),
    "lm_head__weight_scale": torch.ones(512, 1, dtype=torch.bfloat16),
    "lm_head__weight_shape": torch.tensor([512, 128]),
}
TABLE = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "head": {
            "targets": ["re:.*lm_head$"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
        }
    },
    "ignore": ["re:.*(self_attn|mlp).*"],
}


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    return teller(capsys, "will-it-serve")


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "w8", llama(**PACKED), llama_config(quantization_config=TABLE))


def test_the_first_version_that_works_is_named(told: Told, packed: Path) -> None:
    # 0.5.17 was measured to drop packed heads; the support came with 0.5.19.
    document = told(packed, "--engine", "sglang==0.5.17", code=FOUND)
    assert not document["serves"]
    assert document["works_with"][0] == "0.5.19"
    assert [f["id"] for f in document["findings"] if f["severity"] == "error"] == ["lint.sglang-quantized-head-dropped"]
    assert told(packed, "--engine", "sglang==0.5.19")["serves"]
    assert told(packed, "--engine", "sglang")["version"] == "0.5.23"


def test_no_version_may_work(told: Told, packed: Path) -> None:
    document = told(packed, "--engine", "sglang==0.5.23", "--speculative", "nextn", code=FOUND)
    assert document["speculative"] == ["NEXTN"]
    assert document["works_with"] == []


def test_a_finding_can_be_allowed(told: Told, packed: Path) -> None:
    document = told(packed, "--engine", "sglang==0.5.17", "--allow", "lint.sglang-quantized-head-dropped")
    assert document["serves"]


def test_rules_of_ones_own_take_the_place_of_those_that_are_packaged(tmp_path: Path, told: Told, packed: Path) -> None:
    text = (files("ckptkit") / "data" / "engines" / "sglang.yaml").read_text("utf-8")
    (tmp_path / "mine.yaml").write_text(text.replace('versions: "<0.5.19"', 'versions: "<0.5.21"'))
    document = told(packed, "--engine", "sglang==0.5.20", "--lint-data", tmp_path / "mine.yaml", code=FOUND)
    assert document["works_with"][0] == "0.5.21"
    assert told(packed, "--engine", "sglang==0.5.20")["serves"]


@pytest.mark.parametrize(
    "text",
    ["a: [", "[]", "label: x", 'label: X\nversions: "1"\nnewest: 1\nspeculative: []\nrules: []\n',
     'label: X\nversions: ">=1"\nnewest: 1\nspeculative: []\nrules: [{id: lint.x}]\n', "\xff"],
)  # fmt: skip
def test_a_file_that_holds_no_rules_is_told(tmp_path: Path, told: Told, packed: Path, text: str) -> None:
    (tmp_path / "bad.yaml").write_bytes(text.encode("latin-1"))
    document = told(packed, "--engine", "sglang", "--lint-data", tmp_path / "bad.yaml", code=USAGE)
    assert [finding["id"] for finding in document["findings"]] == ["usage.lint-data"]


@pytest.mark.parametrize(
    ("engine", "old", "new"),
    [
        ("sglang", "severity: error", "severity: fatal"),  # which would forbid nothing
        ("sglang", "when: {head: {parts:", "when: {head: {part:"),
        ("sglang", "when:", "if:"),
        ("vllm", "", ""),  # of another engine
    ],
)
def test_rules_that_say_what_no_rule_says_are_told(
    tmp_path: Path, told: Told, packed: Path, engine: str, old: str, new: str
) -> None:
    text = (files("ckptkit") / "data" / "engines" / f"{engine}.yaml").read_text("utf-8")
    (tmp_path / "bad.yaml").write_text(text.replace(old, new, 1))
    document = told(packed, "--engine", "sglang", "--lint-data", tmp_path / "bad.yaml", code=USAGE)
    assert [finding["id"] for finding in document["findings"]] == ["usage.lint-data"]


def test_a_draft_is_looked_at_too(tmp_path: Path, told: Told, packed: Path) -> None:
    dense = checkpoint(tmp_path / "dense", llama(), llama_config())
    assert told(dense, "--engine", "sglang==0.5.17")["serves"]
    document = told(dense, "--draft", packed, "--engine", "sglang==0.5.17", code=FOUND)
    assert "lint.sglang-quantized-head-dropped" in [finding["id"] for finding in document["findings"]]
    wide = checkpoint(tmp_path / "wide", llama(hidden=256), llama_config(hidden=256))
    document = told(dense, "--draft", wide, "--engine", "sglang", code=FOUND)
    assert "attach.widths" in [finding["id"] for finding in document["findings"]]


def test_what_cannot_be_read_is_no_yes(tmp_path: Path, told: Told, packed: Path) -> None:
    told(tmp_path / "none", "--engine", "sglang", code=SOURCE)
    (packed / "config.json").unlink()
    told(packed, "--engine", "sglang", code=SOURCE)
    (packed / "model.safetensors").write_bytes(b"{}")
    told(packed, "--engine", "sglang", code=SOURCE)
    told(packed, "--engine", "sglang==7", code=USAGE)
    told(packed, "--engine", "sglang", "--speculative", "magic", code=USAGE)


def test_it_imports_no_torch(packed: Path) -> None:
    program = "import sys; from ckptkit.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    run = [sys.executable, "-c", program, "will-it-serve", str(packed), "--engine", "vllm"]
    assert subprocess.run(run, capture_output=True, check=False).returncode == 0
