"""What a recipe does to a checkpoint: every refusal by id and exit code, and what the plan says otherwise."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from make import checkpoint, llama, llama_config

from ckptkit.errors import Finding, UserError
from ckptkit.files.checkpoint import open_checkpoint
from ckptkit.files.source import open_source
from ckptkit.plan import Plan
from ckptkit.planners.quantize import plan_quantize
from ckptkit.recipe.recipe import load_text

HEAD = 'head: {targets: ["re:.*lm_head$"], scheme: W8A16, strategy: channel}'
BODY = "body: {targets: [Linear], scheme: W4A16}"


def recipe(*groups: str, ignore: str = "[]", **settings: str) -> str:
    lines = ["schema: 1", "name: test", "groups:", *(f"  {group}" for group in groups), f"ignore: {ignore}"]
    return "\n".join([*lines, *(f"{key}: {value}" for key, value in settings.items())]) + "\n"


def plan(folder: Path, text: str, sets: tuple[str, ...] = (), allow: tuple[str, ...] = ()) -> Plan:
    with open_source(str(folder)) as source:
        return plan_quantize(open_checkpoint(source), load_text(text, "test.yaml", sets), allow=allow).plan


def refused(folder: Path, text: str, sets: tuple[str, ...] = (), allow: tuple[str, ...] = ()) -> tuple[set[str], int]:
    with pytest.raises(UserError) as caught:
        plan(folder, text, sets, allow)
    for finding in caught.value.findings:
        assert "\n" not in finding.message
        assert finding.hint, finding
    return {finding.id for finding in caught.value.findings}, caught.value.exit_code


def config_of(made: Plan) -> dict[str, Any]:
    (text,) = [item.text for item in made.sidecars if item.name == "config.json"]
    assert text is not None
    return json.loads(text)


def small(**extra: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return llama(layers=1, **extra)


def bf16(*shape: int) -> torch.Tensor:
    return torch.full(shape, 0.5, dtype=torch.bfloat16)


MTP = {"mtp.layers.0.self_attn.o_proj.weight": bf16(128, 128)}
ROUTER = {"model.layers.0.mlp.gate.weight": bf16(4, 128)}
STACKED = {
    "model.layers.0.mlp.experts.gate_up_proj": bf16(2, 512, 128),
    "model.layers.0.mlp.experts.down_proj": bf16(2, 128, 256),
}
GPTQ = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
CT = {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}},
        "ignore": ["lm_head"],
    }
}

CASES: dict[str, tuple[Callable[[], dict[str, torch.Tensor]], dict[str, Any], str, set[str], int]] = {
    "a misspelt target": (small, {}, recipe("h: {targets: [lm_haed], scheme: W8A16}"), {"recipe.target-unmatched"}, 2),
    "a target in the vision model's spelling": (
        small, {}, recipe("h: {targets: [model.language_model.lm_head], scheme: W8A16}"), {"recipe.target-unmatched"}, 2),
    "everything ignored": (small, {}, recipe(HEAD, ignore='["re:.*"]'), {"recipe.target-unmatched"}, 2),
    "body before head": (small, {}, recipe(BODY, HEAD), {"recipe.target-unmatched"}, 2),
    "a target that is a norm": (
        small, {}, recipe("n: {targets: [model.norm], scheme: W8A16}"), {"recipe.target-unmatched"}, 2),
    "a misspelt ignore": (small, {}, recipe(HEAD, ignore="[lm_haed]"), {"recipe.ignore-unmatched"}, 2),
    "an ignore by its last part": (small, {}, recipe(HEAD, ignore="[embed_tokens]"), {"recipe.ignore-unmatched"}, 2),
    "an ignore that names a tensor": (small, {}, recipe(HEAD, ignore="[lm_head.weight]"), {"recipe.ignore-unmatched"}, 2),
    "a head by class": (small, {}, recipe(BODY), {"recipe.class-reach"}, 2),
    "a router by class": (
        lambda: {**small(lm_head__weight=None), **ROUTER}, {}, recipe(BODY), {"recipe.class-reach"}, 2),
    "an MTP layer by class": (
        lambda: {**small(lm_head__weight=None), **MTP}, {}, recipe(BODY), {"recipe.class-reach"}, 2),
    "an embedding in passing": (small, {}, recipe('all: {targets: ["re:.*"], scheme: W8A16}'), {"recipe.class-reach"}, 2),
    "fused siblings in two schemes": (
        small, {}, recipe('q: {targets: ["re:.*q_proj"], scheme: W8A16}', BODY, ignore="[lm_head]"), {"recipe.fused-differ"}, 2),
    "a fused sibling ignored": (
        small, {}, recipe(BODY, ignore='[lm_head, "re:.*q_proj"]'), {"recipe.fused-differ"}, 2),
    "group does not divide": (
        lambda: llama(layers=1, hidden=96), {"hidden_size": 96}, recipe(BODY, HEAD.replace("head", "zz"), ignore="[lm_head]"),
        {"plan.divide", "recipe.target-unmatched"}, 2),
    "pack width does not divide": (
        lambda: llama(layers=1, hidden=90), {}, recipe(HEAD), {"plan.divide"}, 2),
    "a weight without columns": (
        lambda: {**small(), "model.layers.0.x_proj.weight": bf16(4, 0)}, {}, recipe(BODY, ignore="[lm_head]"), {"plan.divide"}, 2),
    "a tied head": (
        lambda: small(lm_head__weight=None), {"tie_word_embeddings": True}, recipe(HEAD), {"plan.tie"}, 2),
    "a tied head that is stored": (small, {"tie_word_embeddings": True}, recipe(HEAD), {"plan.tie"}, 2),
    "a tied embedding": (
        small, {"tie_word_embeddings": True}, recipe("e: {targets: [model.embed_tokens], scheme: W8A16}"),
        {"plan.tie", "plan.not-linear"}, 2),
    "an embedding alone": (
        small, {}, recipe("e: {targets: [model.embed_tokens], scheme: W8A16}"), {"plan.not-linear"}, 2),
    "an embedding named beside the body": (
        small, {}, recipe("all: {targets: [Linear, model.embed_tokens], scheme: W8A16}", ignore="[lm_head]"), {"plan.not-linear"}, 2),
    "a text model tied within": (
        lambda: small(lm_head__weight=None), {"tie_word_embeddings": None, "text_config": {"tie_word_embeddings": True}},
        recipe(HEAD), {"plan.tie"}, 2),
    "a GPTQ checkpoint": (small, GPTQ, recipe(HEAD), {"plan.existing"}, 2),
    "merge onto GPTQ": (small, GPTQ, recipe(HEAD, existing="merge"), {"plan.existing"}, 2),
    "compressed-tensors already": (small, CT, recipe(HEAD), {"plan.existing"}, 2),
    "merge where the config says quantized": (
        small, CT, recipe('o: {targets: ["re:.*o_proj"], scheme: W8A16}', existing="merge"), {"plan.existing"}, 2),
    "merge onto groups that cannot be read": (
        small, {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["re:(("]}}}},
        recipe(HEAD, existing="merge"), {"plan.existing"}, 2),
    "replace with old tensors there": (
        lambda: {**small(), "model.layers.0.self_attn.o_proj.weight_scale": bf16(128, 1)}, CT,
        recipe(HEAD, existing="replace"), {"plan.existing"}, 2),
    "FP8 weights that nothing declares": (
        lambda: small(model__layers__0__self_attn__o_proj__weight=bf16(128, 128).to(torch.float8_e4m3fn)), {},
        recipe(HEAD), {"plan.existing"}, 2),
    "a target that is quantized": (
        lambda: small(lm_head__weight=bf16(512, 128).to(torch.float8_e4m3fn)), {}, recipe(HEAD),
        {"plan.existing", "recipe.target-unmatched"}, 2),
    "stacked experts without a layout": (
        lambda: {**small(), **STACKED}, {}, recipe('e: {targets: ["re:.*experts.*"], scheme: W4A16}'), {"plan.experts-3d"}, 2),
    "stacked experts that lie otherwise": (
        lambda: {**small(), "model.layers.0.mlp.experts.gate_up_proj": bf16(2, 512, 128)}, {},
        recipe('e: {targets: ["re:.*experts.*"], scheme: W4A16, experts: columns}'), {"plan.experts-3d"}, 2),
    "a block-scaled FP8 head": (small, {}, recipe(HEAD.replace("W8A16, strategy: channel", "FP8_BLOCK")), {"plan.head-block-fp8"}, 2),
    "a head of integers in blocks": (
        small, {}, recipe("h: {targets: [lm_head], scheme: {weights: {num_bits: 8, strategy: block, block_structure: 128x128}, format: int-quantized}}"),
        {"plan.head-block-fp8"}, 2),
    "a gate without its up": (
        lambda: small(model__layers__0__mlp__up_proj__weight=None), {}, recipe(BODY, ignore="[lm_head]"), {"names.incomplete-layer"}, 3),
    "FP8 asks for calibration": (small, {}, recipe("h: {targets: [lm_head], scheme: FP8}"), {"recipe.scheme"}, 2),
    "NVFP4 asks for calibration": (small, {}, recipe("h: {targets: [lm_head], scheme: NVFP4}"), {"recipe.scheme"}, 2),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_refusals(case: str, tmp_path: Path) -> None:
    tensors, config, text, ids, exit_code = CASES[case]
    checkpoint(tmp_path, tensors(), llama_config(**{"num_hidden_layers": 1, **config}))
    assert refused(tmp_path, text) == (ids, exit_code)


def test_no_config(tmp_path: Path) -> None:
    checkpoint(tmp_path, small())
    assert refused(tmp_path, recipe(HEAD)) == ({"config.missing"}, 3)


def test_all_problems_at_once(tmp_path: Path) -> None:
    tensors = {**llama(hidden=90, layers=1), **ROUTER}
    checkpoint(tmp_path, tensors, llama_config(tie_word_embeddings=True, **GPTQ))
    ids, exit_code = refused(tmp_path, recipe(HEAD, BODY, ignore="[nothing]"))
    wanted = {"plan.existing", "plan.tie", "plan.divide", "recipe.ignore-unmatched", "recipe.class-reach"}
    assert (ids, exit_code) == (wanted, 2)


def hints(folder: Path, text: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        plan(folder, text)
    return [finding.hint or "" for finding in caught.value.findings]


MTP_BY_NUMBER = {
    f"model.layers.{layer}.{rest}.weight": bf16(*shape)
    for layer in (1, 2)
    for rest, shape in {
        "eh_proj": (128, 256), "self_attn.o_proj": (128, 128), "mlp.experts.0.up_proj": (256, 128),
        "mlp.experts.0.gate_proj": (256, 128), "mlp.gate": (4, 128), "embed_tokens": (512, 128), "shared_head.head": (512, 128),
    }.items()
}  # fmt: skip


def test_one_edit_names_all_that_a_class_reaches_in_passing(tmp_path: Path) -> None:
    """What the findings say to ignore, ignored at once, leaves the model's own layers as they were meant."""
    gates = {f"model.layers.0.mlp.{name}.weight": bf16(4, 128) for name in ("gate", "shared_expert_gate")}
    checkpoint(tmp_path, {**small(), **gates, **MTP, **MTP_BY_NUMBER}, llama_config(num_hidden_layers=1))
    with pytest.raises(UserError) as caught:
        plan(tmp_path, recipe(BODY))
    named = [text for finding in caught.value.findings for text in finding.data["patterns"]]
    assert {r"re:model\.layers\.1\..*", r"re:model\.layers\.2\..*", r"re:mtp\..*", "lm_head"} < set(named)
    assert all(f"'{text}'" in "".join(hints(tmp_path, recipe(BODY))) for text in named)
    made = plan(tmp_path, recipe(BODY, ignore=json.dumps(named)))
    taken = {name for step in made.steps() if step.rule == "groups.body" for name in step.args["modules"]}
    own = {name.removesuffix(".weight") for name in small() if "_proj" in name}
    assert taken == own


def test_stacked_experts_that_a_body_passes_by_are_told(tmp_path: Path) -> None:
    checkpoint(tmp_path, {**small(), **STACKED}, llama_config(num_hidden_layers=1))
    told = {
        ignore: [finding.id for finding in warnings(tmp_path, recipe(BODY, ignore=ignore))]
        for ignore in ("[lm_head]", '[lm_head, "re:.*experts.*"]')
    }
    assert list(told.values()) == [["recipe.experts-left"], []]
    assert warnings(tmp_path, recipe(HEAD)) == []


def warnings(folder: Path, text: str) -> list[Finding]:
    with open_source(str(folder)) as source:
        return list(plan_quantize(open_checkpoint(source), load_text(text, "test.yaml")).warnings)


@pytest.mark.parametrize("odd", [{}, [], 3, ["pack-quantized"]])
def test_merging_onto_a_config_with_an_odd_format(odd: object, tmp_path: Path) -> None:
    present = {**CT["quantization_config"], "quantization_status": "frozen", "format": odd}
    present["config_groups"] = {"group_0": {"targets": ["nothing"], "weights": {"num_bits": 4}, "format": odd}}
    checkpoint(tmp_path, small(), llama_config(num_hidden_layers=1, quantization_config=present))
    written = config_of(plan(tmp_path, recipe(HEAD, existing="merge")))["quantization_config"]
    assert (written["format"], written["quantization_status"]) == ("mixed-precision", "compressed")


def test_a_target_without_a_weight_to_quantize_is_not_told_its_own_name(tmp_path: Path) -> None:
    packed = {"lm_head.weight_packed": torch.zeros(512, 32, dtype=torch.int32), "lm_head.weight_scale": bf16(512, 1)}
    config = {**CT, "num_hidden_layers": 1}
    checkpoint(tmp_path, {**small(lm_head__weight=None), **packed}, llama_config(**config))
    assert "did you mean" not in "".join(hints(tmp_path, recipe(HEAD, existing="merge")))
    assert "did you mean" not in "".join(
        hints(tmp_path, recipe("n: {targets: [model.norm], scheme: W8A16}", existing="merge"))
    )
    assert "did you mean Linear?" in hints(tmp_path, recipe("n: {targets: [linear], scheme: W8A16}", existing="merge"))


@pytest.mark.parametrize("id", ["recipe.fused-differ", "recipe.ignore-unmatched"])
def test_policy_can_be_allowed(id: str, tmp_path: Path) -> None:
    checkpoint(tmp_path, small(), llama_config(num_hidden_layers=1))
    text = {
        "recipe.fused-differ": recipe(HEAD, 'q: {targets: ["re:.*q_proj"], scheme: W8A16}', BODY),
        "recipe.ignore-unmatched": recipe(HEAD, ignore="[nothing]"),
    }[id]
    assert refused(tmp_path, text)[0] == {id}
    assert plan(tmp_path, text, allow=(id,))


def test_what_cannot_be_made_cannot_be_allowed(tmp_path: Path) -> None:
    checkpoint(tmp_path, llama(hidden=90, layers=1), llama_config())
    assert refused(tmp_path, recipe(HEAD), allow=("plan.divide",)) == ({"plan.divide"}, 2)


def test_every_tensor_is_accounted_for(tmp_path: Path) -> None:
    tensors = {**llama(), **MTP, "visual.patch_embed.proj.weight": bf16(8, 3, 2, 2), "x.bias": bf16(4)}
    names = list(tensors)
    parts = [{name: tensors[name] for name in names[i::3]} for i in range(3)]
    checkpoint(tmp_path, parts, llama_config())
    made = plan(tmp_path, recipe(HEAD, BODY, ignore='["re:.*mtp.*"]'))
    read = [ref.name for step in made.steps() for ref in step.inputs]
    assert sorted(read) == sorted(names)
    copied = {step.inputs[0].name: step.rule for step in made.steps() if step.op == "copy@1"}
    assert copied["model.embed_tokens.weight"] == "not Linear: embedding"
    assert copied["visual.patch_embed.proj.weight"] == "not Linear: convolution"
    assert copied["mtp.layers.0.self_attn.o_proj.weight"] == "ignore re:.*mtp.*"
    assert copied["x.bias"] == "not a weight matrix"
    outputs = [spec.name for step in made.steps() for spec in step.outputs]
    (index,) = [item.text for item in made.sidecars if item.name == "model.safetensors.index.json"]
    assert sorted(outputs) == list(json.loads(index or "")["weight_map"])
    table = json.loads(index or "")
    assert table["metadata"] == {"total_size": sum(s.nbytes for t in made.steps() for s in t.outputs)}
    assert index == json.dumps(table, indent=2, ensure_ascii=False) + "\n"


def test_untied_head_joins_the_embedding_s_shard(tmp_path: Path) -> None:
    tensors = small(lm_head__weight=None)
    names = list(tensors)
    checkpoint(tmp_path, [{n: tensors[n] for n in names[:3]}, {n: tensors[n] for n in names[3:]}], llama_config(
        num_hidden_layers=1, tie_word_embeddings=True, text_config={"tie_word_embeddings": True}))  # fmt: skip
    made = plan(tmp_path, recipe(HEAD, tie="untie"))
    first, second = made.shards
    assert second.linked
    assert not first.linked
    (step,) = [step for step in first.steps if step.rule == "groups.head"]
    assert [ref.name for ref in step.inputs] == ["model.embed_tokens.weight"]
    assert [spec.name for spec in step.outputs] == [
        "lm_head.weight_packed",
        "lm_head.weight_scale",
        "lm_head.weight_shape",
    ]
    config = config_of(made)
    assert config["tie_word_embeddings"] is False
    assert config["text_config"]["tie_word_embeddings"] is False
    assert config["quantization_config"]["config_groups"]["head"]["targets"] == [r"re:^(?:.*\.)?lm_head$"]


def test_untie_without_quantizing_copies_the_head(tmp_path: Path) -> None:
    checkpoint(tmp_path, small(lm_head__weight=None), llama_config(num_hidden_layers=1, tie_word_embeddings=True))
    made = plan(tmp_path, recipe(BODY, ignore="[lm_head]", tie="untie"))
    (step,) = [step for step in made.steps() if step.rule == "tie: untie"]
    assert (step.op, step.inputs[0].name, step.outputs[0].name) == (
        "copy@1",
        "model.embed_tokens.weight",
        "lm_head.weight",
    )


def test_fused_set_across_shards_is_one_step_each(tmp_path: Path) -> None:
    tensors = small()
    q = {name: value for name, value in tensors.items() if "q_proj" in name or "gate_proj" in name}
    rest = {name: value for name, value in tensors.items() if name not in q}
    checkpoint(tmp_path, [q, rest], llama_config(num_hidden_layers=1))
    made = plan(tmp_path, recipe("b: {targets: [Linear], scheme: NVFP4A16}", ignore="[lm_head]"))
    seen = {
        tuple(step.args["modules"]): [ref.name for ref in step.inputs] for step in made.steps() if step.op != "copy@1"
    }
    layer = "model.layers.0.self_attn."
    assert seen[layer + "q_proj",] == [f"{layer}{p}_proj.weight" for p in "qkv"]
    assert seen[layer + "k_proj", layer + "v_proj"] == [f"{layer}{p}_proj.weight" for p in "kvq"]
    assert seen["model.layers.0.mlp.gate_proj",][1] == "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_stacked_experts_become_matrices(layout: str, tmp_path: Path) -> None:
    stacked = (
        STACKED if layout == "rows" else {name: value.transpose(1, 2).contiguous() for name, value in STACKED.items()}
    )
    biases = {"model.layers.0.mlp.experts.gate_up_proj_bias": bf16(2, 512)}
    tensors = {**small(), **stacked, **biases}
    checkpoint(tmp_path, tensors, llama_config(num_hidden_layers=1))
    made = plan(tmp_path, recipe(f'e: {{targets: ["re:.*experts.*"], scheme: W4A16, experts: {layout}}}'))
    outputs = {spec.name: spec.shape for step in made.steps() for spec in step.outputs}
    stem = "model.layers.0.mlp.experts.1."
    assert outputs[stem + "gate_proj.weight_packed"] == (256, 16)
    assert outputs[stem + "up_proj.weight_scale"] == (256, 1)
    assert outputs[stem + "down_proj.weight_packed"] == (128, 32)
    assert outputs[stem + "up_proj.bias"] == (256,)
    assert not any(name.endswith(("gate_up_proj", "_bias")) for name in outputs)
    read = {ref.name for step in made.steps() for ref in step.inputs}
    assert read == set(tensors)
    targets = config_of(made)["quantization_config"]["config_groups"]["e"]["targets"]
    assert r"re:^(?:.*\.)?layers\.\d+\.mlp\.experts\.\d+\.gate_proj$" in targets


def test_what_only_looks_like_a_stacked_bias_is_kept(tmp_path: Path) -> None:
    stacked = {f"model.layers.0.mlp.experts.{name}_bias": bf16(8) for name in ("gate_up_proj", "down_proj")}
    tensors = {**small(lm_head__weight=None), **STACKED, **stacked, "model.layers.0.self_attn.q_proj_bias": bf16(8)}
    checkpoint(tmp_path, tensors, llama_config(num_hidden_layers=1))
    made = plan(tmp_path, recipe('all: {targets: [Linear, "re:.*experts.*"], scheme: W4A16, experts: rows}'))
    assert {ref.name for step in made.steps() for ref in step.inputs} == set(tensors)


def test_merge_keeps_groups_and_opens_the_ignore_list(tmp_path: Path) -> None:
    tensors = small()
    packed = {}
    for name, value in tensors.items():
        module = name.removesuffix(".weight")
        if value.ndim == 2 and "proj" in name:
            packed |= {f"{module}.weight_packed": torch.zeros(value.shape[0], value.shape[1] // 8, dtype=torch.int32)}
            packed |= {
                f"{module}.weight_scale": bf16(value.shape[0], 1),
                f"{module}.weight_shape": torch.tensor(value.shape),
            }
        else:
            packed[name] = value
    present = {**CT["quantization_config"], "ignore": ["lm_head", "re:.*mtp.*"]}
    checkpoint(tmp_path, packed, llama_config(num_hidden_layers=1, quantization_config=present))
    config = config_of(plan(tmp_path, recipe(HEAD, existing="merge")))["quantization_config"]
    assert config["config_groups"]["group_0"] == present["config_groups"]["group_0"]
    assert config["config_groups"]["head"]["targets"] == [r"re:^(?:.*\.)?lm_head$"]
    assert config["ignore"] == ["re:.*mtp.*"]
    assert config["format"] == "pack-quantized"


@pytest.mark.parametrize("groups", [{}, {"config_groups": None}, {"config_groups": {"W8A8": ["nowhere"]}}])
def test_merge_onto_a_config_that_says_little(groups: dict[str, Any], tmp_path: Path) -> None:
    present = {"quant_method": "compressed-tensors", "format": "x", "ignore": ["lm_head"], **groups}
    checkpoint(tmp_path, small(), llama_config(num_hidden_layers=1, quantization_config=present))
    written = config_of(plan(tmp_path, recipe(HEAD, existing="merge")))["quantization_config"]
    assert set(written["config_groups"]) == {"head", *(groups.get("config_groups") or {})}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_merge_onto_weights_that_keep_their_names(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {}
    for name, value in small().items():
        is_body = value.ndim == 2 and "proj" in name
        tensors[name] = value.to(dtype) if is_body else value
        tensors |= {f"{name}_scale": bf16(value.shape[0], 1)} if is_body else {}
    checkpoint(tmp_path, tensors, llama_config(num_hidden_layers=1, **CT))
    written = config_of(plan(tmp_path, recipe(HEAD, existing="merge")))["quantization_config"]
    assert {name: group["targets"] for name, group in written["config_groups"].items()} == {
        "group_0": ["Linear"],
        "head": [r"re:^(?:.*\.)?lm_head$"],
    }
    assert written["ignore"] == []


def test_config_keeps_its_order_and_its_neighbours(tmp_path: Path) -> None:
    config = {"z": 1, **llama_config(num_hidden_layers=1), "a": {"é": [1e-05, None]}}
    checkpoint(tmp_path, small(), config)
    made = plan(tmp_path, recipe(HEAD))
    written = config_of(made)
    assert list(written) == [*config, "quantization_config"]
    assert {key: written[key] for key in config} == config


def test_head_only_ignores_every_other_matrix(tmp_path: Path) -> None:
    checkpoint(tmp_path, llama(), llama_config())
    ignore = config_of(plan(tmp_path, recipe(HEAD)))["quantization_config"]["ignore"]
    assert r"re:^(?:.*\.)?embed_tokens$" in ignore
    assert {rf"re:^(?:.*\.)?layers\.\d+\.self_attn\.{p}_proj$" for p in "kvo"} <= set(ignore)


def test_layers_that_engines_fuse_are_reached_by_their_own_name(tmp_path: Path) -> None:
    # SGLang's Qwen2, Qwen3 and MiMo do not say what qkv_proj is made of: it looks for that name.
    checkpoint(tmp_path, llama(), llama_config())
    head = config_of(plan(tmp_path, recipe(HEAD)))["quantization_config"]
    both = config_of(plan(tmp_path, recipe(HEAD, BODY)))["quantization_config"]
    for texts in (head["ignore"], both["config_groups"]["body"]["targets"]):
        for name in ("self_attn.qkv_proj", "mlp.gate_up_proj", "self_attn.q_proj", "mlp.gate_proj"):
            matching = [text for text in texts if re.match(text.removeprefix("re:"), f"model.layers.1.{name}")]
            assert len(matching) == 1, name


def test_a_layer_of_which_parts_differ_has_no_name_of_its_own(tmp_path: Path) -> None:
    checkpoint(tmp_path, llama(), llama_config())
    some = recipe(HEAD, 'some: {targets: ["re:.*layers.0.self_attn.(q|k)_proj"], scheme: W8A16}')
    planned = plan(tmp_path, some, allow=("recipe.fused-differ", "plan.config"))
    assert "qkv_proj" not in str(config_of(planned)["quantization_config"]["config_groups"])


def test_digest_has_no_path_and_no_time(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        checkpoint(tmp_path / folder, small(), llama_config(num_hidden_layers=1))
    digests = {plan(tmp_path / folder, recipe(HEAD)).digest for folder in ("a", "b")}
    assert len(digests) == 1
    assert (
        plan(tmp_path / "a", recipe(HEAD), sets=("groups.head.strategy=group", "groups.head.group_size=64")).digest
        not in digests
    )


def test_sidecars_are_all_accounted_for(tmp_path: Path) -> None:
    checkpoint(tmp_path, small(), llama_config(num_hidden_layers=1))
    kept = ["tokenizer.json", "sub/modeling_x.py", "README.md", "generation_config.json"]
    left = [
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "x/other.safetensors",
        "m.gguf",
        "ckptkit.json",
        "SHA256SUMS",
    ]
    for name in kept + left:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache/x").write_text("x")
    made = plan(tmp_path, recipe(HEAD))
    assert [item.name for item in made.sidecars] == sorted([*kept, "config.json"])
    assert [item.name for item in made.left_out] == sorted([*left, ".cache"])
    with open_source(str(tmp_path)) as source:
        planned = plan_quantize(open_checkpoint(source), load_text(recipe(HEAD), "t"), include=["*.gguf"])
    assert "m.gguf" in [item.name for item in planned.plan.sidecars]
