"""Header-only checkpoints for the engine lint: names, dtypes and shapes, and a config; small, and like real ones."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckptkit.checks import Subject
from ckptkit.files.checkpoint import scan
from ckptkit.files.header import Spec, lay_out
from ckptkit.files.source import open_source

H, V, I = 256, 512, 512  # noqa: E741


@dataclass(frozen=True)
class Model:
    """Tensors by name, (dtype, shape), and the config. Methods give a changed copy."""

    tensors: dict[str, tuple[str, tuple[int, ...]]]
    config: dict[str, Any] = field(default_factory=dict)

    def having(self, **config: Any) -> Model:
        merged = {key: value for key, value in {**self.config, **config}.items() if value is not None}
        return replace(self, config=merged)

    def plus(self, **tensors: tuple[str, tuple[int, ...]]) -> Model:
        """Tensors added; ``__`` stands for a dot."""
        return replace(self, tensors={**self.tensors, **{n.replace("__", "."): spec for n, spec in tensors.items()}})

    def minus(self, *prefixes: str) -> Model:
        kept = {name: spec for name, spec in self.tensors.items() if not name.startswith(prefixes)}
        return replace(self, tensors=kept)

    def instead(self, module: str, parts: dict[str, tuple[str, tuple[int, ...]]]) -> Model:
        """The module's weight replaced by ``parts``."""
        kept = {name: spec for name, spec in self.tensors.items() if name != f"{module}.weight"}
        return replace(self, tensors={**kept, **{f"{module}.{part}": spec for part, spec in parts.items()}})

    def shape(self, module: str) -> tuple[int, int]:
        rows, columns = self.tensors[f"{module}.weight"][1]
        return rows, columns

    # --- stored formats

    def packed(self, *modules: str, bits: int = 8, zero_points: bool = False) -> Model:
        """compressed-tensors' pack-quantized, one scale for a channel."""
        model = self
        for module in modules:
            rows, columns = model.shape(module)
            parts = {
                "weight_packed": ("I32", (rows, columns * bits // 32)),
                "weight_scale": ("BF16", (rows, 1)),
                "weight_shape": ("I64", (2,)),
            }
            if zero_points:
                parts["weight_zero_point"] = ("I32", (-(-rows * bits // 32), 1))
            model = model.instead(module, parts)
        return model

    def fp8(self, *modules: str, scale: str = "weight_scale", block: bool = False) -> Model:
        model = self
        for module in modules:
            rows, columns = model.shape(module)
            scales = (rows // 128, columns // 128) if block else (rows, 1)
            model = model.instead(module, {"weight": ("F8_E4M3", (rows, columns)), scale: ("F32", scales)})
        return model

    def nvfp4(self, *modules: str) -> Model:
        model = self
        for module in modules:
            rows, columns = model.shape(module)
            parts = {
                "weight_packed": ("U8", (rows, columns // 2)),
                "weight_scale": ("F8_E4M3", (rows, columns // 16)),
                "weight_global_scale": ("F32", (1,)),
            }
            model = model.instead(module, parts)
        return model

    def gptq(self, module: str) -> Model:
        rows, columns = self.shape(module)
        parts: dict[str, tuple[str, tuple[int, ...]]] = {
            "qweight": ("I32", (columns // 8, rows)),
            "qzeros": ("I32", (columns // 128, rows // 8)),
            "scales": ("F16", (columns // 128, rows)),
            "g_idx": ("I32", (columns,)),
        }
        return self.instead(module, parts)

    # --- declarations

    def declared(self, *targets: str, ignore: tuple[str, ...] = (), **weights: Any) -> Model:
        """A compressed-tensors config of one group; ``weights`` override W8 by channel."""
        scheme = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, **weights}
        table = {
            "quant_method": "compressed-tensors",
            "format": "float-quantized" if scheme["type"] == "float" else "pack-quantized",
            "config_groups": {"group_0": {"targets": list(targets), "weights": scheme}},
            "ignore": list(ignore),
        }
        return self.having(quantization_config=table)

    def subject(self, folder: Path, engine: str | None = None, *speculative: str) -> Subject:
        """Written as real headers over sparse data, and opened."""
        header, layout = lay_out([Spec(name, *spec) for name, spec in self.tensors.items()], {"format": "pt"})
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        (folder / "model.safetensors").write_bytes(header)
        os.truncate(folder / "model.safetensors", layout.file_size)
        with open_source(str(folder)) as source:
            checkpoint, found = scan(source)
        return Subject(checkpoint, tuple(found), options={"engine": engine, "speculative": speculative})


BODY = r"re:^(?:.*\.)?layers\..*"
HEAD = r"re:^(?:.*\.)?lm_head$"


def dense(architecture: str = "LlamaForCausalLM", layers: int = 2, hidden: int = H, vocab: int = V) -> Model:
    """A Llama-like model, untied."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {"model.embed_tokens.weight": ("BF16", (vocab, hidden))}
    for layer in range(layers):
        tensors |= {f"model.{name}": spec for name, spec in layer_tensors(f"layers.{layer}", hidden).items()}
    tensors |= {"model.norm.weight": ("BF16", (hidden,)), "lm_head.weight": ("BF16", (vocab, hidden))}
    config = {
        "architectures": [architecture],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
    }
    return Model(tensors, config)


def layer_tensors(prefix: str, hidden: int = H) -> dict[str, tuple[str, tuple[int, ...]]]:
    linears = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
    linears |= {"mlp.gate_proj": (I, hidden), "mlp.up_proj": (I, hidden), "mlp.down_proj": (hidden, I)}
    norms = {f"{prefix}.{name}.weight": ("BF16", (hidden,)) for name in ("input_layernorm", "post_attention_layernorm")}
    return {f"{prefix}.{name}.weight": ("BF16", shape) for name, shape in linears.items()} | norms


def packed_head(architecture: str = "LlamaForCausalLM") -> Model:
    """A dense body and a packed head, declared as ``ckptkit quantize`` does it."""
    return dense(architecture).packed("lm_head").declared(HEAD, ignore=(BODY,))


def mixture(*stored: str, model_type: str = "qwen3_moe") -> Model:
    """Two layers of which the MLP is two experts, stored in the formats of ``stored``, layer by layer, and declared.

    ``dense``, ``int4`` and ``int8`` (one scale for a row), ``zeros`` (int8 with zero points), ``fp8`` (one scale for a
    row), ``fp8-block``, ``int8-plain`` (a byte each), ``nvfp4``.
    """
    kept = {name: spec for name, spec in dense().tensors.items() if ".mlp." not in name}
    experts = [f"model.layers.{layer}.mlp.experts.{expert}" for layer in range(2) for expert in range(2)]
    shapes = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
    plain = {f"{at}.{name}.weight": ("BF16", shape) for at in experts for name, shape in shapes.items()}
    model = Model({**kept, **plain}, dense("Qwen3MoeForCausalLM").config).having(model_type=model_type)
    groups: dict[str, dict[str, Any]] = {}
    for layer, format in zip(range(2), stored * 2, strict=False):
        modules = [f"{at}.{name}" for at in experts if f"layers.{layer}." in at for name in shapes]
        model = _stored(model, format, modules)
        target = r"re:.*mlp\.experts\..*" if len(set(stored)) == 1 else rf"re:.*layers\.{layer}\.mlp\.experts\..*"
        if format != "dense":
            groups[format] = {"targets": [target], "weights": _SCHEMES[format]}
    table = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": [r"re:.*self_attn.*", "lm_head"]}
    return model.having(quantization_config=table)


_SCHEMES: dict[str, dict[str, Any]] = {
    "int4": {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": True},
    "int8": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    "zeros": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False},
    "fp8": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
    "fp8-block": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
    "int8-plain": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    "nvfp4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
}


def _stored(model: Model, format: str, modules: list[str]) -> Model:
    if format == "nvfp4":
        return model.nvfp4(*modules)
    if format in {"fp8", "fp8-block"}:
        return model.fp8(*modules, block=format == "fp8-block")
    if format == "int8-plain":
        for module in modules:
            rows, columns = model.shape(module)
            model = model.instead(module, {"weight": ("I8", (rows, columns)), "weight_scale": ("BF16", (rows, 1))})
        return model
    bits = 4 if format == "int4" else 8
    return model if format == "dense" else model.packed(*modules, bits=bits, zero_points=format == "zeros")


def linears(model: Model) -> list[str]:
    """The modules of the model's own layers that are matrices."""
    return [
        name.removesuffix(".weight")
        for name, (_, shape) in model.tensors.items()
        if name.startswith("model.layers.") and len(shape) == 2
    ]


def fp8_body() -> Model:
    model = dense()
    return model.fp8(*linears(model), scale="weight_scale_inv", block=True).having(
        quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}
    )


def with_mtp(model: Model) -> Model:
    """A dense layer under ``mtp.``, as Qwen3-Next has it."""
    return replace(
        model, tensors={**model.tensors, **layer_tensors("mtp.layers.0"), "mtp.fc.weight": ("BF16", (H, 2 * H))}
    )


def deepseek_v4(stages: int = 3, **config: Any) -> Model:
    """DeepSeek-V4 with its own names, and DSpark stages."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        "embed.weight": ("BF16", (V, H)),
        "head.weight": ("BF16", (V, H)),
        "norm.weight": ("BF16", (H,)),
        "layers.0.attn.wq_a.weight": ("BF16", (H, H)),
        "mtp.0.main_proj.weight": ("BF16", (H, 3 * H)),
        "mtp.0.main_norm.weight": ("BF16", (H,)),
    }
    for stage in range(stages):
        tensors[f"mtp.{stage}.attn.wq_a.weight"] = ("BF16", (H, H))
    tensors |= {f"mtp.{stages - 1}.markov_head.markov_w{part}.weight": ("BF16", (V, 64)) for part in (1, 2)}
    known = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "num_hidden_layers": 1,
        "vocab_size": V,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 1,
        "dspark_markov_rank": 64,
        "dspark_target_layer_ids": list(range(stages)),
    }
    return Model(tensors, known).having(**config)


def deepseek_v4_nextn() -> Model:
    """DeepSeek-V4 with the NextN layer of its base."""
    nextn = {f"mtp__0__{name}__weight": ("BF16", (H, H)) for name in ("e_proj", "h_proj", "attn__wq_a")}
    return deepseek_v4().minus("mtp.").plus(**nextn).having(dspark_markov_rank=None, dspark_target_layer_ids=None)


def draft(architecture: str, d2t: int | None = None, model_type: str = "qwen3", **config: Any) -> Model:
    """A stand-alone draft of a few dense layers; ``d2t`` gives the length of a map from its vocabulary."""
    model = Model(
        {**layer_tensors("layers.0"), "fc.weight": ("BF16", (H, 3 * H)), "norm.weight": ("BF16", (H,))},
        {"architectures": [architecture], "model_type": model_type, "num_hidden_layers": 1, "vocab_size": V},
    )
    return (model.plus(d2t=("I64", (d2t,))) if d2t else model).having(**config)
