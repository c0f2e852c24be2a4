"""The built-in recipes on the names, dtypes and shapes of real checkpoints: what each plans, or why it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import headers
import pytest

from ckptkit.errors import UserError
from ckptkit.files.checkpoint import open_checkpoint
from ckptkit.files.source import open_source
from ckptkit.planners.quantize import plan_quantize
from ckptkit.recipe.recipe import builtin_names, load

# Modules that a body recipe quantizes, of each family: counted by hand from layers x projections.
BODY = {
    "gemma-3-4b": 34 * 7,
    "llama-3.1-8b": 32 * 7,
    "llama-3.2-1b": 16 * 7,
    "llama-4-scout": 48 * (4 + 3),  # attention and the shared expert; routed experts are stacked
    "mimo-7b": 36 * 7,
    "mixtral-8x7b": 32 * (4 + 8 * 3),
    "qwen2.5-vl-7b": 28 * 7,
    "qwen3-30b-a3b": 48 * (4 + 128 * 3),
    "qwen3-4b": 36 * 7,
    "qwen3-vl-30b-a3b": 48 * 4,
    "qwen3.5-35b-a3b": 10 * 4 + 30 * 3 + 40 * 3,  # full attention; qkv, z, out of linear attention; shared expert
    "qwen3.6-27b": 16 * 4 + 48 * 3 + 64 * 3,
    "smollm2-135m": 30 * 7,
}
BODY_RECIPES = [name for name in builtin_names() if name != "lm_head-w8a16"]
# Groups of 128 do not divide these widths (576; 2,880; 10,944): the rest of a body recipe's work is refused with them.
UNEVEN = {"smollm2-135m", "gpt-oss-20b-bf16"}
QUANTIZED = ["deepseek-v4-flash-dspark", "gpt-oss-20b", "qwen3-8b-fp8", "qwen3-8b-w4a16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("headers")


def outcome(folder: Path, fixture: str, recipe: str, *sets: str) -> Any:
    path = folder / fixture
    if not path.exists():
        headers.materialize(fixture, path)
    with open_source(str(path)) as source:
        try:
            return plan_quantize(open_checkpoint(source), load(recipe, sets)).plan
        except UserError as error:
            return {finding.id for finding in error.findings}


def made(plan: Any, rule: str) -> list[str]:
    assert not isinstance(plan, set), plan
    return [module for step in plan.steps() if step.rule == rule for module in step.args["modules"]]


@pytest.mark.parametrize("fixture", BODY)
def test_bodies(fixture: str, folder: Path) -> None:
    for recipe in BODY_RECIPES:
        plan = outcome(folder, fixture, recipe, "tie=untie")
        if fixture in UNEVEN and recipe.startswith("w4a16"):
            assert plan == {"plan.divide"}
            continue
        body = made(plan, "groups.body")
        assert len(body) == BODY[fixture], recipe
        assert not [
            name for name in body if name.endswith(("lm_head", ".gate", "router")) or "vis" in name or "mtp" in name
        ]
        heads = [module.rpartition(".")[2] for module in made(plan, "groups.head")]
        assert heads == (["lm_head"] if recipe == "w4a16-lm_head-w8a16" else [])


@pytest.mark.parametrize("fixture", [*BODY, "glm-4.5-air", "gpt2", "gpt-oss-20b-bf16"])
def test_head_only(fixture: str, folder: Path) -> None:
    plan = outcome(folder, fixture, "lm_head-w8a16", "tie=untie")
    (head,) = made(plan, "groups.head")
    assert head.endswith("lm_head")
    assert sum(not shard.linked for shard in plan.shards) == 1
    tied = headers.config(fixture).get("tie_word_embeddings", False)
    written = json.loads(next(item.text for item in plan.sidecars if item.name == "config.json"))
    assert not written.get("tie_word_embeddings")
    if tied:
        assert outcome(folder, fixture, "lm_head-w8a16") == {"plan.tie"}


@pytest.mark.parametrize("fixture", QUANTIZED)
def test_what_is_quantized_already_is_refused(fixture: str, folder: Path) -> None:
    for recipe in builtin_names():
        assert "plan.existing" in outcome(folder, fixture, recipe)


def test_head_onto_a_finished_body(folder: Path) -> None:
    plan = outcome(folder, "qwen3-8b-w4a16", "lm_head-w8a16", "existing=merge")
    assert made(plan, "groups.head") == ["lm_head"]


def test_mtp_layers_told_by_number_must_be_named(folder: Path) -> None:
    assert "recipe.class-reach" in outcome(folder, "glm-4.5-air", "fp8-dynamic")
    numbered = 'ignore=["re:.*\\\\.gate$", "re:model\\\\.layers\\\\.46\\\\..*", lm_head]'
    body = made(outcome(folder, "glm-4.5-air", "fp8-dynamic", numbered), "groups.body")
    assert len(body) == 46 * 4 + 3 + 45 * (128 + 1) * 3


def test_following_the_hint_takes_all_other_layers(folder: Path) -> None:
    """GLM-4.5's layer 46 is its MTP layer; ignored by what the finding says, the 46 layers before it are the body."""
    ignore = ["lm_head", "re:.*\\.gate$"]
    sets = f"ignore={json.dumps(ignore)}"
    assert outcome(folder, "glm-4.5-air", "fp8-dynamic", sets) == {"recipe.class-reach"}
    with open_source(str(folder / "glm-4.5-air")) as source, pytest.raises(UserError) as caught:
        plan_quantize(open_checkpoint(source), load("fp8-dynamic", [sets]))
    (found,) = caught.value.findings
    assert found.data["patterns"] == [r"re:model\.layers\.46\..*"]
    again = f"ignore={json.dumps([*ignore, *found.data['patterns']])}"
    assert len(made(outcome(folder, "glm-4.5-air", "fp8-dynamic", again), "groups.body")) == 46 * 4 + 3 + 45 * 129 * 3


def test_transposed_linears_are_no_linears(folder: Path) -> None:
    assert outcome(folder, "gpt2", "fp8-dynamic") == {"recipe.target-unmatched"}
    named = outcome(folder, "gpt2", "fp8-dynamic", 'groups.body.targets=["*.c_attn"]')
    assert named == {"plan.not-linear"}


@pytest.mark.parametrize(
    ("fixture", "layout", "experts"), [("llama-4-scout", "columns", 48 * 16), ("qwen3.5-35b-a3b", "rows", 40 * 256)]
)
def test_stacked_experts(fixture: str, layout: str, experts: int, folder: Path) -> None:
    group = (
        f'groups.experts={{"targets": ["re:.*language_model.*experts[.].*"], "scheme": "MXFP4", "experts": "{layout}"}}'
    )
    ignore = 'ignore=["re:.*vis.*"]' if "llama" in fixture else "ignore=[]"
    plan = outcome(folder, fixture, "lm_head-w8a16", group, ignore)
    modules = made(plan, "groups.experts")
    assert len(modules) == experts * 3
    config = json.loads(next(item.text for item in plan.sidecars if item.name == "config.json"))["quantization_config"]
    assert len(config["config_groups"]["experts"]["targets"]) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("fixture", "body"), [("qwen3-next-80b-a3b", 12 * 4 + 36 * 2 + 48 * (512 + 1) * 3)])
def test_large(fixture: str, body: int, folder: Path) -> None:
    for recipe in BODY_RECIPES:
        assert len(made(outcome(folder, fixture, recipe), "groups.body")) == body
