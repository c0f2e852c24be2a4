"""Whatever a config or a header says, static checks find something or nothing, and never break."""

from __future__ import annotations

from typing import Any

import headers
import pytest
from make import llama_config
from quantized_parts import subject_of

from ckptkit.checks import Level, run
from ckptkit.files.header import Spec

ODD: tuple[Any, ...] = (None, True, -1, 0, 1.5, "", "x", [], [[]], [None], {}, {"a": {}}, {"a": [1]}, 1 << 70)
SHAPES = ((), (0,), (7,), (0, 0), (1, 1), (3, 5, 7), (2, 3, 4, 5))
DTYPES = ("BOOL", "I64", "U8", "I8", "F8_E4M3", "F8_E8M0", "F4", "F64")
CONFIG = llama_config(num_experts=4, num_nextn_predict_layers=1, draft_vocab_size=8, layer_types=["full"] * 2,
                      text_config={}, auto_map={}, is_encoder_decoder=False)  # fmt: skip
SPECS = [Spec(name, dtype, shape) for name, dtype, shape in (
    ("model.embed_tokens.weight", "BF16", (512, 128)), ("model.norm.weight", "BF16", (128,)), ("lm_head.weight", "BF16", (512, 128)),
    *((f"model.layers.{layer}.{part}", dtype, shape) for layer in range(3) for part, dtype, shape in (
        ("input_layernorm.weight", "BF16", (128,)),
        ("self_attn.q_proj.weight_packed", "I32", (128, 16)), ("self_attn.q_proj.weight_scale", "BF16", (128, 1)),
        ("self_attn.q_proj.weight_shape", "I64", (2,)), ("mlp.up_proj.weight", "F8_E4M3", (256, 128)),
        ("mlp.up_proj.weight_scale_inv", "F32", (2, 1)), ("mlp.experts.0.w1.qweight", "I32", (16, 64)),
        ("mlp.experts.0.w1.scales", "F16", (1, 64)), ("mlp.experts.gate_up_proj", "BF16", (4, 128, 64)))),
)]  # fmt: skip


@pytest.mark.parametrize("key", CONFIG)
def test_odd_values_in_a_config(key: str) -> None:
    for value in ODD:
        run(subject_of(SPECS, CONFIG | {key: value}), Level.STATIC)
        run(subject_of(SPECS, CONFIG | {"text_config": {key: value}}), Level.STATIC)


@pytest.mark.parametrize("spec", SPECS[:12], ids=lambda spec: spec.name)
def test_odd_shapes_and_dtypes(spec: Spec) -> None:
    rest = [other for other in SPECS if other != spec]
    for odd in (*(spec._replace(shape=shape) for shape in SHAPES), *(spec._replace(dtype=dtype) for dtype in DTYPES)):
        run(subject_of([*rest, odd], CONFIG), Level.STATIC)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a.", ".0.", "layers.0", "layers.0.", "0.weight", "model.layers.99999999999.a.weight"]
)
def test_odd_names(name: str) -> None:
    run(subject_of([*SPECS, Spec(name, "BF16", (4, 4))], CONFIG), Level.STATIC)


@pytest.mark.parametrize("fixture", ["qwen3-8b-w4a16", "qwen3-8b-fp8", "gpt-oss-20b"])
def test_odd_quantization_configs(fixture: str) -> None:
    config, specs = headers.config(fixture), headers.specs(fixture)
    table = config["quantization_config"]
    for key in table:
        for value in ODD:
            run(subject_of(specs[:40], config | {"quantization_config": table | {key: value}}), Level.STATIC)
