"""The made checkpoints themselves: files as published ones, values as the formats define them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from dsv4 import make
from safetensors import safe_open


def stored(folder: Path) -> dict[str, torch.Tensor]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for name, file in index.items():
        with safe_open(folder / file, framework="pt") as reader:
            found[name] = reader.get_tensor(name)
    return found


def test_the_index_is_complete_and_sizes_agree(tmp_path: Path) -> None:
    made = make(tmp_path / "made")
    tensors = stored(made.folder)
    index = json.loads((made.folder / "model.safetensors.index.json").read_text())
    assert tensors.keys() == made.shapes.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert index["weight_map"]["layers.0.attn_norm.weight"] == "model-00002-of-00009.safetensors"
    assert index["weight_map"]["mtp.2.norm.weight"] == "model-00009-of-00009.safetensors"


def test_truth_is_what_codes_and_scales_say_one_by_one(tmp_path: Path) -> None:
    made = make(tmp_path / "made", truth=True)
    tensors = stored(made.folder)
    expert, linear = "mtp.1.ffn.experts.1.w2", "mtp.0.main_proj"
    magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    for row, column in ((0, 0), (0, 1), (3, 31), (3, 32), (255, 127)):
        byte = int(tensors[f"{expert}.weight"].view(torch.uint8)[row, column // 2])
        code = byte & 15 if column % 2 == 0 else byte >> 4
        exponent = int(tensors[f"{expert}.scale"].view(torch.uint8)[row, column // 32]) - 127
        value = (-1 if code & 8 else 1) * magnitudes[code & 7] * 2.0**exponent
        assert made.truth[f"{expert}.weight"][row, column] == value
        scale = 2.0 ** (int(tensors[f"{linear}.scale"].view(torch.uint8)[row // 128, column // 128]) - 127)
        assert made.truth[f"{linear}.weight"][row, column] == float(tensors[f"{linear}.weight"][row, column]) * scale
    assert made.truth.keys() == {f"{name.removesuffix('.scale')}.weight" for name in tensors if name.endswith(".scale")}


def test_the_bf16_variant_is_the_official_one_dequantized(tmp_path: Path) -> None:
    truth = make(tmp_path / "official", truth=True).truth
    plain = stored(make(tmp_path / "bf16", form="bf16").folder)
    assert all(torch.equal(plain[name].float(), value) for name, value in truth.items())
    assert not [name for name in plain if name.endswith(".scale")]


def test_variants_share_their_target(tmp_path: Path) -> None:
    dspark, base = (stored(make(tmp_path / kind, draft=kind).folder) for kind in ("dspark", "nextn"))
    target = {name for name in dspark if not name.startswith("mtp.")}
    assert target == {name for name in base if not name.startswith("mtp.")}
    assert all(torch.equal(dspark[name].view(torch.uint8), base[name].view(torch.uint8)) for name in target)


def test_scattered_scales_lie_in_other_shards_and_are_the_same(tmp_path: Path) -> None:
    plain, scattered = make(tmp_path / "plain"), make(tmp_path / "scattered", scatter=True)
    index = json.loads((scattered.folder / "model.safetensors.index.json").read_text())["weight_map"]
    scales = [name for name in index if name.endswith(".scale")]
    assert scales
    assert all(index[name] != index[f"{name.removesuffix('.scale')}.weight"] for name in scales)
    first, second = stored(plain.folder), stored(scattered.folder)
    assert all(torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8)) for name in first)


def test_a_declared_draft_has_no_tensors(tmp_path: Path) -> None:
    made = make(tmp_path / "made", draft="declared")
    assert made.config["dspark_target_layer_ids"] == [1, 2, 3]
    assert not [name for name in made.shapes if name.startswith("mtp.")]


def test_config_keys_can_be_set_and_removed(tmp_path: Path) -> None:
    made = make(tmp_path / "made", dspark_block_size=7, expert_dtype=None)
    written = json.loads((made.folder / "config.json").read_text())
    assert written["dspark_block_size"] == 7
    assert "expert_dtype" not in written


@pytest.mark.slow
def test_transformers_dequantizes_the_target_to_the_same_values(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    made = make(tmp_path / "made", truth=True)
    model, loading = AutoModelForCausalLM.from_pretrained(
        made.folder,
        quantization_config=FineGrainedFP8Config(dequantize=True),
        dtype=torch.bfloat16,
        output_loading_info=True,
    )
    assert not any(loading.values())
    state = model.state_dict()
    expert, linear = "layers.2.ffn.experts.3", "layers.2.attn.wq_b.weight"
    fused = torch.cat([made.truth[f"{expert}.{name}.weight"] for name in ("w1", "w3")])
    assert torch.equal(state["model.layers.2.mlp.experts.gate_up_proj"][3].float(), fused)
    assert torch.equal(state["model.layers.2.mlp.experts.down_proj"][3].float(), made.truth[f"{expert}.w2.weight"])
    assert torch.equal(state["model.layers.2.self_attn.q_b_proj.weight"].float(), made.truth[linear])
