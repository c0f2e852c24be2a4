"""What ``ckptkit dequantize`` makes, loaded by transformers beside the source that transformers dequantizes itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from make import checkpoint, llama, llama_config
from safetensors.torch import load_file

from ckptkit.cli import main
from ckptkit.errors import OK

transformers: Any = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.slow

Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity_warning()


def call(*arguments: object) -> None:
    assert main([*map(str, arguments), "-q", "--no-progress"]) == OK


def loaded(folder: Path, **options: Any) -> Any:
    """The model, of which no tensor was missing or left over."""
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True, **options
    )
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


def assert_same(made: Any, source: Any, logits: bool = True) -> None:
    """Equal parameters, bit by bit, and equal logits where the source's activations are not quantized."""
    parameters = dict(source.named_parameters())
    for name, parameter in made.named_parameters():
        if not name.endswith("_scale"):  # compressed-tensors keeps those of what it decompressed
            assert torch.equal(parameter, parameters[name]), name
    tokens = torch.arange(40).reshape(2, 20)
    assert not logits or torch.equal(made(tokens).logits, source(tokens).logits)


def shards(tensors: Tensors) -> Any:
    """Three shards, so that most scales lie elsewhere than their weights."""
    items = list(tensors.items())
    return [dict(items[number::3]) for number in range(3)]


PARTS = [[], ["--only", "model.layers.1.*"]]


@pytest.mark.parametrize("recipe", ["w4a16", "nvfp4a16", "mxfp4", "fp8-block", "fp8-dynamic", "w4a16-lm_head-w8a16"])
@pytest.mark.parametrize("options", PARTS)
def test_compressed_tensors(recipe: str, options: list[str], tmp_path: Path) -> None:
    checkpoint(tmp_path / "dense", shards(llama()), llama_config())
    call("quantize", tmp_path / "dense", tmp_path / "src", "--recipe", recipe)
    call("dequantize", tmp_path / "src", tmp_path / "out", *options)
    decompress = {"quantization_config": transformers.CompressedTensorsConfig(run_compressed=False)}
    source = loaded(tmp_path / "src", **decompress)
    made = loaded(tmp_path / "out", **(decompress if options else {}))
    assert_same(made, source, logits=recipe in {"w4a16", "nvfp4a16", "w4a16-lm_head-w8a16"})


@pytest.mark.parametrize("options", PARTS)
def test_compressed_tensors_mxfp4_as_block_fp8(options: list[str], tmp_path: Path) -> None:
    checkpoint(tmp_path / "dense", shards(llama()), llama_config())
    call("quantize", tmp_path / "dense", tmp_path / "src", "--recipe", "mxfp4")
    call("dequantize", tmp_path / "src", tmp_path / "out", "--dtype", "fp8", *options)
    decompress = {"quantization_config": transformers.CompressedTensorsConfig(run_compressed=False)}
    made, source = (loaded(tmp_path / name, **decompress) for name in ("out", "src"))
    assert_same(made, source, logits=False)


def fp8_blocks(weight: torch.Tensor, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 and its scales, for blocks of 128 x 128 that divide the weight."""
    rows, cols = weight.shape
    blocks = weight.float().reshape(rows // 128, 128, cols // 128, 128)
    scale = blocks.abs().amax((1, 3), keepdim=True) / 448
    return (blocks / scale).reshape(rows, cols).to(torch.float8_e4m3fn), scale.reshape(rows // 128, cols // 128)


@pytest.mark.parametrize("options", PARTS)
def test_fp8(options: list[str], tmp_path: Path) -> None:
    tensors: Tensors = {}
    for name, tensor in llama().items():
        if "_proj" in name:
            tensors[name], tensors[f"{name}_scale_inv"] = fp8_blocks(tensor)
        else:
            tensors[name] = tensor
    table = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    checkpoint(tmp_path / "src", shards(tensors), llama_config(quantization_config=table))
    call("dequantize", tmp_path / "src", tmp_path / "out", *options)
    assert_same(loaded(tmp_path / "out"), loaded(tmp_path / "src"))


def test_gpt_oss(tmp_path: Path) -> None:
    config = transformers.GptOssConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2, vocab_size=128,
        head_dim=16, num_attention_heads=4, num_key_value_heads=2, sliding_window=8, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config).bfloat16()
    generator = torch.Generator().manual_seed(1)
    tensors: Tensors = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = tensor.shape
            shape = (experts, outputs, inputs // 32, 16)
            tensors[f"{name}_blocks"] = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(118, 122, shape[:3], generator=generator).to(torch.uint8)
        else:
            tensors[name] = tensor.clone()
    table = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    described = {**config.to_dict(), "architectures": ["GptOssForCausalLM"], "quantization_config": table}
    checkpoint(tmp_path / "src", shards(tensors), described)
    call("dequantize", tmp_path / "src", tmp_path / "out")
    source = loaded(tmp_path / "src", quantization_config=transformers.Mxfp4Config(dequantize=True))
    assert_same(loaded(tmp_path / "out"), source)


DEEPSEEK_V4 = {
    "num_hidden_layers": 2, "hidden_size": 128, "moe_intermediate_size": 128, "vocab_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 64, "qk_rope_head_dim": 32, "q_lora_rank": 128, "o_lora_rank": 64, "o_groups": 2,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "index_n_heads": 2, "index_head_dim": 64,
    "index_topk": 8, "num_hash_layers": 0,
}  # fmt: skip
_EXPERT, _FP8 = r".*\.experts\.\d+\.w\d\.weight", r".*\.(?:wq_a|wq_b|wo_a|wo_b|shared_experts\.w\d)\.weight"


@pytest.mark.parametrize("options", [[], ["--experts"], ["--dtype", "fp8"]])
def test_deepseek_v4(options: list[str], tmp_path: Path) -> None:
    """FP4 experts beside FP8 projections, under the names of the published checkpoints."""
    config = transformers.AutoConfig.for_model("deepseek_v4", **DEEPSEEK_V4)
    transformers.AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(tmp_path / "dense")
    generator = torch.Generator().manual_seed(1)
    tensors: Tensors = {}
    for name, tensor in load_file(tmp_path / "dense" / "model.safetensors").items():
        rows, cols = (*tensor.shape, 1)[:2]
        if re.fullmatch(_EXPERT, name):
            tensors[name] = torch.randint(-128, 128, (rows, cols // 2), generator=generator).to(torch.int8)
            exponents = torch.randint(117, 123, (rows, cols // 32), generator=generator)
        elif re.fullmatch(_FP8, name):
            tensors[name] = torch.randn(rows, cols, generator=generator).to(torch.float8_e4m3fn)
            exponents = torch.randint(121, 124, (rows // 128, cols // 128), generator=generator)
        else:
            tensors[name] = tensor
            continue
        tensors[name.replace("weight", "scale")] = exponents.to(torch.uint8).view(torch.float8_e8m0fnu)
    table = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
    }
    described = json.loads((tmp_path / "dense" / "config.json").read_text())
    checkpoint(tmp_path / "src", shards(tensors), {**described, "expert_dtype": "fp4", "quantization_config": table})
    call("dequantize", tmp_path / "src", tmp_path / "out", *options)
    assert_same(loaded(tmp_path / "out").float(), loaded(tmp_path / "src").float())
