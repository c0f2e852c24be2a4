"""Small good checkpoints of many families and formats: real bytes, whole folders, nothing wrong with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from make import checkpoint, llama, llama_config

from ckptkit.cli import main

VOCAB = 512
Tensors = dict[str, torch.Tensor]


def tokenizer(folder: Path, size: int = VOCAB) -> None:
    """A tokenizer of ``size`` tokens, its config and a generation config."""
    vocabulary = {f"t{i}": i for i in range(size)}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ messages[0]['content'] }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))


def write(folder: Path, tensors: Tensors, config: dict[str, Any], shards: int = 2) -> Path:
    """A whole checkpoint in ``shards`` shards with an index; in one file without, if there is but one."""
    names = list(tensors)
    step = -(-len(names) // shards)
    parts = [{name: tensors[name] for name in names[i : i + step]} for i in range(0, len(names), step)]
    checkpoint(folder, parts, config)
    tokenizer(folder)
    return folder


def bf16(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=generator) * 0.02).to(torch.bfloat16)


def dense(folder: Path) -> Path:
    return write(folder, llama(), llama_config())


def single(folder: Path) -> Path:
    return write(folder, llama(), llama_config(), shards=1)


def tied(folder: Path) -> Path:
    return write(folder, llama(lm_head__weight=None), llama_config(tie_word_embeddings=True))


def half(folder: Path) -> Path:
    tensors = {name: value.to(torch.float16) for name, value in llama().items()}
    return write(folder, tensors, llama_config(torch_dtype="float16"))


def quantized(recipe: str, *sets: str) -> Callable[[Path], Path]:
    """What ``ckptkit quantize`` makes of the dense one."""

    def make(folder: Path) -> Path:
        source = dense(folder.with_name(f"{folder.name}-source"))
        options = [item for value in sets for item in ("--set", value)]
        assert main(["quantize", str(source), str(folder), "-r", recipe, *options, "-q", "--no-progress"]) == 0
        return folder

    return make


def moe(folder: Path) -> Path:
    tensors = llama()
    for layer in range(2):
        stem = f"model.layers.{layer}.mlp."
        for name in ("gate_proj", "up_proj", "down_proj"):
            del tensors[f"{stem}{name}.weight"]
        tensors[stem + "gate.weight"] = bf16(4, 128, seed=layer)
        for expert in range(4):
            for name, shape in (("gate_proj", (64, 128)), ("up_proj", (64, 128)), ("down_proj", (128, 64))):
                tensors[f"{stem}experts.{expert}.{name}.weight"] = bf16(*shape, seed=layer * 10 + expert)
        for name in ("q_norm", "k_norm"):
            tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = torch.ones(32, dtype=torch.bfloat16)
    config = llama_config(
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=64, decoder_sparse_step=1, mlp_only_layers=[],
    )  # fmt: skip
    return write(folder, tensors, config, shards=3)


def mtp(folder: Path) -> Path:
    tensors = llama()
    for name, value in list(tensors.items()):
        if name.startswith("model.layers.0."):
            tensors[name.replace("model.layers.0.", "model.mtp_layers.0.")] = value.clone()
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"model.mtp_layers.0.{name}.weight"] = torch.ones(128, dtype=torch.bfloat16)
    tensors["model.mtp_layers.0.input_proj.weight"] = bf16(128, 256)
    config = llama_config(architectures=["MiMoForCausalLM"], model_type="mimo", num_nextn_predict_layers=1)
    return write(folder, tensors, config)


def projections(tensors: Tensors) -> list[str]:
    return [name.removesuffix(".weight") for name in tensors if name.endswith("_proj.weight")]


def fp8(folder: Path) -> Path:
    """DeepSeek-V3's and Qwen3-FP8's form: E4M3 weights, one F32 ``weight_scale_inv`` for each block of 128 x 128."""
    tensors = llama()
    for module in projections(tensors):
        weight = tensors.pop(f"{module}.weight").float()
        rows, cols = weight.shape
        blocks = weight.reshape(rows // 128, 128, cols // 128, 128)
        scale = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scale[:, None, :, None]).reshape(rows, cols).to(torch.float8_e4m3fn)
        tensors |= {f"{module}.weight": codes, f"{module}.weight_scale_inv": scale}
    table = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return write(folder, tensors, llama_config(quantization_config={**table, "modules_to_not_convert": ["lm_head"]}))


def gptq(folder: Path) -> Path:
    tensors = llama()
    for module in projections(tensors):
        rows, cols = tensors.pop(f"{module}.weight").shape
        generator = torch.Generator().manual_seed(rows + cols)
        tensors |= {
            f"{module}.qweight": torch.randint(-(2**31), 2**31, (cols // 8, rows), generator=generator).to(torch.int32),
            f"{module}.qzeros": torch.full((cols // 128, rows // 8), 0x77777777, dtype=torch.int32),
            f"{module}.scales": torch.rand(cols // 128, rows, generator=generator).to(torch.float16) * 0.01 + 0.001,
            f"{module}.g_idx": (torch.arange(cols) // 128).to(torch.int32),
        }
    table = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "lm_head": False}
    return write(folder, tensors, llama_config(quantization_config=table))


def awq(folder: Path) -> Path:
    tensors = llama()
    for module in projections(tensors):
        rows, cols = tensors.pop(f"{module}.weight").shape
        generator = torch.Generator().manual_seed(rows + cols)
        tensors |= {
            f"{module}.qweight": torch.randint(-(2**31), 2**31, (cols, rows // 8), generator=generator).to(torch.int32),
            f"{module}.qzeros": torch.randint(-(2**31), 2**31, (cols // 128, rows // 8), generator=generator).to(
                torch.int32
            ),
            f"{module}.scales": torch.rand(cols // 128, rows, generator=generator).to(torch.float16) * 0.01 + 0.001,
        }
    table = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    return write(folder, tensors, llama_config(quantization_config=table))


def modelopt(folder: Path) -> Path:
    """NVFP4 as ModelOpt writes it: declared in config.json and in a file of its own, the scale of scales a scalar."""
    tensors = llama()
    generator = torch.Generator().manual_seed(0)
    for module in projections(tensors):
        rows, cols = tensors.pop(f"{module}.weight").shape
        scale = torch.rand(rows, cols // 16, generator=generator) * 400 + 40
        tensors |= {
            f"{module}.weight": torch.randint(0, 256, (rows, cols // 2), generator=generator).to(torch.uint8),
            f"{module}.weight_scale": scale.to(torch.float8_e4m3fn),
            f"{module}.weight_scale_2": torch.tensor(2e-5),
            f"{module}.input_scale": torch.tensor(1e-3),
        }
    table = {"quant_algo": "NVFP4", "group_size": 16}
    config = {"quant_method": "modelopt", **table, "ignore": ["lm_head"]}
    write(folder, tensors, llama_config(quantization_config=config))
    producer = {"name": "modelopt", "version": "0.40.0"}
    own = {"producer": producer, "quantization": {**table, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}}
    (folder / "hf_quant_config.json").write_text(json.dumps(own))
    return folder


def gpt_oss(folder: Path) -> Path:
    """Stacked experts in MXFP4, as gpt-oss has them: blocks of 32 codes in 16 bytes, exponents apart."""
    tensors = llama()
    generator = torch.Generator().manual_seed(0)
    for layer in range(2):
        stem = f"model.layers.{layer}."
        for name in ("gate_proj", "up_proj", "down_proj"):
            del tensors[f"{stem}mlp.{name}.weight"]
        tensors |= {f"{stem}mlp.router.weight": bf16(4, 128, seed=layer), f"{stem}mlp.router.bias": bf16(4, seed=layer)}
        tensors[f"{stem}self_attn.sinks"] = bf16(4, seed=layer)
        for name, rows, cols in (("gate_up_proj", 128, 128), ("down_proj", 128, 64)):
            blocks = torch.randint(0, 256, (4, rows, cols // 32, 16), generator=generator).to(torch.uint8)
            scales = torch.randint(115, 125, (4, rows, cols // 32), generator=generator).to(torch.uint8)
            tensors |= {f"{stem}mlp.experts.{name}_blocks": blocks, f"{stem}mlp.experts.{name}_scales": scales}
            tensors[f"{stem}mlp.experts.{name}_bias"] = bf16(4, rows, seed=layer)
    dense = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config = llama_config(
        architectures=["GptOssForCausalLM"], model_type="gpt_oss", num_local_experts=4, num_experts_per_tok=2,
        intermediate_size=64, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": dense},
    )  # fmt: skip
    return write(folder, tensors, config)


def multimodal(folder: Path) -> Path:
    tensors = {f"model.language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name: value
               for name, value in llama().items()}  # fmt: skip
    for block in range(2):
        tensors[f"model.visual.blocks.{block}.attn.qkv.weight"] = bf16(96, 32, seed=block)
        tensors[f"model.visual.blocks.{block}.attn.qkv.bias"] = bf16(96, seed=block)
    tensors["model.visual.patch_embed.proj.weight"] = bf16(32, 3, 2, 14, 14)
    text = llama_config()
    del text["architectures"]
    config = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "text_config": text,
              "tie_word_embeddings": False, "vision_config": {"depth": 2, "hidden_size": 32}}  # fmt: skip
    return write(folder, tensors, config, shards=3)


GOOD: dict[str, Callable[[Path], Path]] = {
    "dense": dense,
    "single": single,
    "tied": tied,
    "half": half,
    "moe": moe,
    "mtp": mtp,
    "multimodal": multimodal,
    "fp8": fp8,
    "gptq": gptq,
    "awq": awq,
    "modelopt": modelopt,
    "gpt_oss": gpt_oss,
    "w8head": quantized("lm_head-w8a16"),
    "w4w8": quantized("w4a16-lm_head-w8a16"),
    "w8a8": quantized("fp8-dynamic", "groups.body.scheme=W8A8"),
    "asymmetric": quantized("w4a16", "groups.body.scheme=W4A16_ASYM"),
    "fp8-dynamic": quantized("fp8-dynamic"),
    "fp8-block": quantized("fp8-block"),
    "nvfp4": quantized("nvfp4a16"),
    "mxfp4": quantized("mxfp4"),
    "mxfp8": quantized("mxfp4", "groups.body.scheme=MXFP8"),
}
