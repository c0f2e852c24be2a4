"""What reshard plans: every refusal by id and exit code, which files are made of what, and what config.json says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from make import Tensors, checkpoint, llama, llama_config

from ckptkit.errors import USAGE, UserError
from ckptkit.files.checkpoint import INDEX
from ckptkit.files.mending import open_mended
from ckptkit.files.source import open_source
from ckptkit.naming.renaming import rename_rule
from ckptkit.plan import COPY, Plan, Shard
from ckptkit.planners.reshard import Changes, Resharded, cast_rule, plan_reshard


def reshard(
    folder: Path,
    renames: Sequence[str] = (),
    drops: Sequence[str] = (),
    casts: Sequence[str] = (),
    limit: int | None = None,
    allow: Sequence[str] = (),
) -> Resharded:
    changes = Changes([*map(rename_rule, renames)], drops, [*map(cast_rule, casts)], limit)
    with open_source(str(folder)) as source:
        return plan_reshard(open_mended(source), changes, allow=allow)


def plan(folder: Path, **changes: Any) -> Plan:
    return reshard(folder, **changes).plan


def refused(folder: Path, **changes: Any) -> set[str]:
    with pytest.raises(UserError) as caught:
        reshard(folder, **changes)
    assert caught.value.exit_code == USAGE
    for finding in caught.value.findings:
        assert "\n" not in finding.message
        assert finding.hint, finding
    return {finding.id for finding in caught.value.findings}


def names(shard: Shard) -> list[str]:
    return [spec.name for step in shard.steps for spec in step.outputs]


def text(made: Plan, name: str) -> str | None:
    (found,) = [item.text for item in made.sidecars if item.name == name]
    return found


def sharded(tmp_path: Path, tensors: Tensors, count: int, config: dict[str, Any] | None = None) -> Path:
    parts = [dict(list(tensors.items())[number::count]) for number in range(count)]
    return checkpoint(tmp_path / "model", parts, llama_config() if config is None else config)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Llama in three shards."""
    return sharded(tmp_path, llama(), 3)


# --- refusals ----------------------------------------------------------------------------------------------

WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
CT = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["re:.*up_proj$"], "weights": WEIGHTS}},
    "ignore": ["lm_head"],
}
UP = "model.layers.0.mlp.up_proj"


def quantized_tensors() -> dict[str, torch.Tensor]:
    up = {
        f"{UP}.weight_packed": torch.ones(256, 16, dtype=torch.int32),
        f"{UP}.weight_scale": torch.ones(256, 4, dtype=torch.bfloat16),
        f"{UP}.weight_shape": torch.tensor([256, 128]),
    }
    return {name: value for name, value in llama(layers=1).items() if name != f"{UP}.weight"} | up


@pytest.fixture
def quantized(tmp_path: Path) -> Path:
    """A Llama with one module packed to four bits, declared as compressed-tensors does."""
    return checkpoint(tmp_path / "quantized", quantized_tensors(), llama_config(layers=1, quantization_config=CT))


@pytest.mark.parametrize(
    ("changes", "ids"),
    [
        ({"drops": ["lm_haed*"]}, {"usage.pattern-unmatched"}),
        ({"casts": ["lm_haed*=f32"]}, {"usage.pattern-unmatched"}),
        ({"renames": ["lm_haed=x"]}, {"usage.pattern-unmatched"}),
        ({"renames": ["lm_head=x"], "drops": ["lm_head*"]}, {"usage.pattern-unmatched"}),
        ({"casts": ["lm_head*=f32"], "drops": ["lm_head*"]}, {"usage.pattern-unmatched"}),
        ({"renames": [r"re:layers\.\d+=layers.0"]}, {"plan.rename-collision"}),
        ({"renames": ["lm_head=model.embed_tokens"]}, {"plan.rename-collision"}),
        ({"renames": ["re:^.*norm.*$="]}, {"usage.rename", "plan.rename-collision"}),
        ({"drops": ["*"]}, {"plan.empty"}),
        ({"drops": ["no"], "renames": ["no=x"], "casts": ["no=f32"]}, {"usage.pattern-unmatched"}),
    ],
)
def test_refusals(model: Path, changes: dict[str, Any], ids: set[str]) -> None:
    assert refused(model, **changes) == ids
    assert refused(model, **changes, allow=sorted(ids)) == ids


@pytest.mark.parametrize(
    ("changes", "id"),
    [
        ({"drops": [f"{UP}.weight_scale"]}, "plan.drop-partial"),
        ({"drops": ["*_packed"]}, "plan.drop-partial"),
        ({"casts": ["*=f32"]}, "plan.cast-quantized"),
        ({"casts": [f"{UP}.weight_scale=f32"]}, "plan.cast-quantized"),
        ({"casts": [f"{UP}.weight_packed=f32"]}, "plan.cast-quantized"),
        ({"renames": ["model.=language_model."]}, "plan.rename-quantized"),
        ({"renames": [f"{UP}=x"]}, "plan.rename-quantized"),
        ({"renames": ["lm_head=output"]}, "plan.rename-quantized"),
        ({"renames": ["model.layers.0.mlp.gate_proj=up_proj"]}, "plan.rename-quantized"),
    ],
)
def test_quantized_modules_are_kept_whole_unless_allowed(quantized: Path, changes: dict[str, Any], id: str) -> None:
    assert refused(quantized, **changes) == {id}
    assert id in {finding.id for finding in reshard(quantized, **changes, allow=[id]).warnings}


@pytest.mark.parametrize(
    "changes",
    [
        {"drops": [f"{UP}.*"]},
        {"casts": ["lm_head.weight=f32", "*norm*=f32"]},
        {"renames": ["model.norm=model.final_norm"]},
        {"renames": ["model.layers.0.mlp.gate_proj=model.layers.0.mlp.w1"]},
    ],
)
def test_what_leaves_quantized_modules_as_they_are_is_no_matter(quantized: Path, changes: dict[str, Any]) -> None:
    assert not reshard(quantized, **changes).warnings


@pytest.mark.parametrize("declared", ["config.json", "hf_quant_config.json"])
def test_foreign_formats_declare_every_linear(tmp_path: Path, declared: str) -> None:
    fp8 = {"lm_head.weight": torch.ones(512, 128), "model.norm.weight": torch.ones(128)}
    table = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    folder = checkpoint(tmp_path, fp8, {"quantization_config": table} if declared == "config.json" else {})
    if declared != "config.json":
        (folder / declared).write_text(json.dumps({"quantization": table}))
    assert refused(folder, renames=["lm_head=x"]) == {"plan.rename-quantized"}
    assert not reshard(folder, renames=["model.norm=x"]).warnings


def test_without_a_config_quantized_modules_are_renamed_freely(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, quantized_tensors(), llama_config())
    assert f"x.{UP}.weight_packed" in names(plan(folder, renames=["=x."]).shards[0])


def test_fp8_is_not_cast(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, {"a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn)}, {})
    assert refused(folder, casts=["a.weight=bf16"]) == {"plan.cast-quantized"}


def test_integers_are_no_floats(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, {"a.weight": torch.ones(4, 4), "ids": torch.arange(4)}, {})
    assert refused(folder, casts=["ids=bf16"]) == {"usage.pattern-unmatched"}
    steps = plan(folder, casts=["*=bf16"]).shards[0].steps
    assert {step.inputs[0].name: step.op for step in steps} == {"a.weight": "cast@1", "ids": COPY}


@pytest.mark.parametrize("rule", ["lm_head", "lm_head=", "=bf16", "lm_head=int8", "lm_head=fp8"])
def test_cast_rules_that_make_no_sense(rule: str) -> None:
    with pytest.raises(UserError) as caught:
        cast_rule(rule)
    assert ([finding.id for finding in caught.value.findings], caught.value.exit_code) == (["usage.cast"], USAGE)


# --- files -------------------------------------------------------------------------------------------------


def test_without_changes_every_file_is_linked(model: Path) -> None:
    made = plan(model)
    assert all(shard.linked and shard.name == shard.source for shard in made.shards)
    assert len(made.shards) == 3
    index = json.loads((model / INDEX).read_text())
    assert json.loads(text(made, INDEX) or "") == index


def test_only_files_with_a_change_are_written(model: Path) -> None:
    for changes in ({"drops": ["lm_head.weight"]}, {"renames": ["lm_head=x"]}, {"casts": ["lm_head.*=f32"]}):
        linked = [shard.linked for shard in plan(model, **changes).shards]
        assert sorted(linked) == [False, True, True]


def test_a_file_that_nothing_is_left_in_is_gone_and_the_others_are_counted_anew(model: Path) -> None:
    first, *others = plan(model).shards
    made = plan(model, drops=names(first))
    assert [shard.name for shard in made.shards] == [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert [(shard.source, shard.linked) for shard in made.shards] == [(shard.name, True) for shard in others]
    assert {item.name for item in made.dropped} == set(names(first))
    assert set(json.loads(text(made, INDEX) or "")["weight_map"].values()) == {shard.name for shard in made.shards}


def test_a_single_file_that_is_left_has_no_index(model: Path) -> None:
    kept = plan(model).shards[0]
    made = plan(model, drops=[name for shard in plan(model).shards[1:] for name in names(shard)])
    assert [(shard.name, shard.source, shard.linked) for shard in made.shards] == [
        ("model.safetensors", kept.name, True)
    ]
    assert INDEX not in {item.name for item in made.sidecars}
    assert INDEX in {item.name for item in made.left_out}


def test_other_names_than_numbers_are_kept(tmp_path: Path, model: Path) -> None:
    index = json.loads((model / INDEX).read_text())
    for number in (1, 2, 3):
        (model / f"model-0000{number}-of-00003.safetensors").rename(model / f"part{number}.safetensors")
    places = {name: f"part{shard[10]}.safetensors" for name, shard in index["weight_map"].items()}
    (model / INDEX).write_text(json.dumps(index | {"weight_map": places}))
    made = plan(model, drops=[name for name, place in places.items() if place == "part2.safetensors"])
    assert [shard.name for shard in made.shards] == ["part1.safetensors", "part3.safetensors"]


def test_names_that_count_wrong_are_counted_anew(model: Path) -> None:
    index = json.loads((model / INDEX).read_text())
    for path in model.glob("*.safetensors"):
        path.rename(model / path.name.replace("of-00003", "of-00007"))
    places = {name: shard.replace("of-00003", "of-00007") for name, shard in index["weight_map"].items()}
    (model / INDEX).write_text(json.dumps(index | {"weight_map": places}))
    made = plan(model)
    assert all(shard.linked for shard in made.shards)
    assert json.loads(text(made, INDEX) or "") == index


def sizes(made: Plan, folder: Path) -> list[int]:
    return [
        (folder / shard.source).stat().st_size if shard.linked and shard.source else shard.layout[1].file_size
        for shard in made.shards
    ]


@pytest.mark.parametrize("limit", [1_000, 40_000, 80_000, 140_000, 200_000, 500_000, 10_000_000])
def test_no_file_is_larger_than_the_limit_unless_one_tensor_is(model: Path, limit: int) -> None:
    found = reshard(model, limit=limit)
    shards = found.plan.shards
    over = [shard for shard, size in zip(shards, sizes(found.plan, model), strict=True) if size > limit]
    assert all(len(shard.steps) == 1 for shard in over)
    assert {f.id for f in found.warnings} == ({"plan.oversized-tensor"} if over else set())
    assert sorted(name for shard in shards for name in names(shard)) == sorted(llama())
    count = len(shards)
    numbered = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    assert [shard.name for shard in shards] == (numbered if count > 1 else ["model.safetensors"])


def test_neighbours_that_fit_are_joined_and_what_fits_alone_is_linked(tmp_path: Path) -> None:
    sizes = [900, 100, 100, 950, 500, 400]
    parts = [{f"t{number}": torch.zeros(size * 100, dtype=torch.uint8)} for number, size in enumerate(sizes)]
    made = plan(checkpoint(tmp_path, parts, {}), limit=100_000)
    assert [names(shard) for shard in made.shards] == [["t0"], ["t1", "t2"], ["t3"], ["t4", "t5"]]
    assert [shard.linked for shard in made.shards] == [True, False, True, False]
    assert made.shards[0].name == "model-00001-of-00004.safetensors"


def test_layers_stay_in_order_and_modules_together(tmp_path: Path) -> None:
    tensors = {
        f"layers.{layer}.up.{part}": torch.zeros(1000, dtype=dtype)
        for layer in range(12)
        for part, dtype in (
            ("weight_scale", torch.float32),
            ("weight_packed", torch.int32),
            ("weight_zero", torch.int8),
        )
    }
    made = plan(checkpoint(tmp_path, tensors, {}), limit=21_000)
    assert [{name.split(".")[1] for name in names(shard)} for shard in made.shards] == [
        {str(layer), str(layer + 1)} for layer in range(0, 12, 2)
    ]


def test_metadata_of_joined_files(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = checkpoint(tmp_path, [{"a": torch.ones(2)}, {"b": torch.ones(2)}], {})
    for number, name in ((1, "a"), (2, "b")):
        metadata = {"format": "pt", "part": str(number), f"only{number}": "x"}
        save_file({name: torch.ones(2)}, folder / f"model-0000{number}-of-00002.safetensors", metadata=metadata)
    found = reshard(folder, limit=10**9)
    assert [shard.metadata for shard in found.plan.shards] == [{"format": "pt", "only1": "x", "only2": "x"}]
    assert [finding.id for finding in found.warnings] == ["plan.metadata"]


# --- config.json -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("casts", "dtype"),
    [
        (["*=f16"], "float16"),
        (["*=f32"], "float32"),
        (["lm_head.weight=f32"], None),
        (["lm_head.weight=f32", "*=f16"], None),
        (["*=bf16"], None),
    ],
)
def test_the_dtype_is_stated_anew_if_no_tensor_has_the_old_one(
    model: Path, casts: list[str], dtype: str | None
) -> None:
    written = text(plan(model, casts=casts), "config.json")
    assert (written and json.loads(written)) == (dtype and llama_config() | {"torch_dtype": dtype})


def test_nested_configs_and_scales(tmp_path: Path) -> None:
    config = llama_config(layers=1, quantization_config=CT)
    config |= {"text_config": {"dtype": "bfloat16", "x": 1}, "vision_config": {"dtype": "float32"}}
    folder = checkpoint(tmp_path, quantized_tensors(), config)
    dense = [f"{name}=f16" for name in llama(layers=1) if not name.startswith(UP)]
    written = json.loads(text(plan(folder, casts=dense), "config.json") or "")
    assert written == config | {"torch_dtype": "float16", "text_config": {"dtype": "float16", "x": 1}}


def test_the_first_cast_that_matches_counts_and_rules_are_told(model: Path) -> None:
    made = plan(model, casts=["lm_head*=f32", "*=f16"], renames=["lm_head=output"])
    rules = {step.outputs[0].name: (step.outputs[0].dtype, step.rule) for step in made.steps()}
    assert rules["output.weight"] == ("F32", "--cast lm_head*=f32")
    assert rules["model.norm.weight"] == ("F16", "--cast *=f16")
    assert {step.rule for step in plan(model, renames=["lm_head=output"]).steps()} == {
        "--rename lm_head=output",
        "as it is",
    }


def test_the_digest_tells_plans_apart(model: Path) -> None:
    kinds = ({}, {"drops": ["lm_head*"]}, {"casts": ["*=f16"]}, {"renames": ["lm_head=x"]}, {"limit": 140_000})
    assert len({plan(model, **changes).digest for changes in kinds}) == len(kinds)
