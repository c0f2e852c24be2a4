"""A config that a consumer would misread is refused: one finding a module, whoever misreads it under whichever name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from make import checkpoint, llama_config

from ckptkit.consumers import by_compressed_tensors, declared
from ckptkit.errors import Finding, UserError
from ckptkit.files.checkpoint import open_checkpoint
from ckptkit.files.source import open_source
from ckptkit.planners.quantize import plan_quantize
from ckptkit.recipe.recipe import load_text

LAYER = ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate_proj"]
# Another model in the checkpoint, whose names end in those of the first and are tried after them.
OTHER = [f"other.{name}" for name in LAYER]
QKV = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]


def refused(folder: Path, names: list[str], groups: str, *allow: str) -> list[Finding]:
    weights = {f"{name}.weight": torch.zeros(128, 128, dtype=torch.bfloat16) for name in names}
    checkpoint(folder, weights, llama_config())
    recipe = load_text(f"schema: 1\nname: test\ngroups: {{{groups}}}\n", "test.yaml")
    with open_source(str(folder)) as source, pytest.raises(UserError) as caught:
        plan_quantize(open_checkpoint(source), recipe, allow=allow)
    return list(caught.value.findings)


@pytest.mark.parametrize("rest", ["", ", b: {targets: ['re:^model.*'], scheme: FP8_DYNAMIC}"])
def test_names_that_end_alike_and_are_not_alike(rest: str, tmp_path: Path) -> None:
    findings = refused(tmp_path / "src", LAYER + OTHER, "a: {targets: ['re:^other.*'], scheme: W8A16}" + rest)
    assert {finding.id for finding in findings} == {"plan.config"}
    assert sorted(str(finding.tensor) for finding in findings) == sorted(OTHER)
    assert all(" a;" in finding.message for finding in findings)


def test_what_the_hint_says_helps(tmp_path: Path) -> None:
    """Both in one group: the plan is made, and its config says of each what it is."""
    weights = {f"{name}.weight": torch.zeros(128, 128, dtype=torch.bfloat16) for name in LAYER + OTHER}
    checkpoint(tmp_path / "src", weights, llama_config())
    recipe = load_text("schema: 1\nname: test\ngroups: {a: {targets: ['re:.*mlp.*'], scheme: W8A16}}\n", "test.yaml")
    with open_source(str(tmp_path / "src")) as source:
        checked = open_checkpoint(source)
        plan = plan_quantize(checked, recipe).plan
    (text,) = [item.text for item in plan.sidecars if item.name == "config.json"]
    config = declared(json.loads(str(text))["quantization_config"])
    assert {by_compressed_tensors(config, name) for name in LAYER + OTHER} == {"a"}


def test_a_fused_layer_of_which_a_part_is_ignored(tmp_path: Path) -> None:
    groups = "a: {targets: ['re:.*q_proj'], scheme: W8A16}"
    (finding,) = refused(tmp_path / "src", QKV, groups, "recipe.fused-differ")
    assert (finding.id, finding.tensor) == ("plan.config", QKV[0])
    assert "qkv_proj" in str(finding.hint)
