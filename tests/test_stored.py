from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from ckptkit.stored import declared_quantization, split_name, stored_format


class T(NamedTuple):
    """A tensor's dtype and shape."""

    dtype: str
    shape: tuple[int, ...]


# The shapes that each format has for a weight of 576 x 1024, as compressed-tensors, DeepSeek, ModelOpt, AutoGPTQ,
# gpt-oss and bitsandbytes write them.
FORMATS: list[tuple[str, str, T, dict[str, T], int | None]] = [
    ("BF16", "weight", T("BF16", (576, 1024)), {}, None),
    ("int4 group 128", "weight_packed", T("I32", (576, 128)), {"weight_scale": T("BF16", (576, 8))}, 4),
    ("int8 channel", "weight_packed", T("I32", (576, 256)), {"weight_scale": T("BF16", (576, 1))}, 8),
    ("packed integers", "weight_packed", T("I32", (576, 128)), {"weight_scale": T("BF16", (576, 8))}, None),
    ("int8 channel", "weight", T("I8", (576, 1024)), {"weight_scale": T("BF16", (576, 1))}, None),
    ("fp8 channel", "weight", T("F8_E4M3", (576, 1024)), {"weight_scale": T("F32", (576, 1))}, None),
    ("fp8 tensor", "weight", T("F8_E4M3", (576, 1024)), {"weight_scale": T("F32", ())}, None),
    ("fp8 block 128x128", "weight", T("F8_E4M3", (576, 1024)), {"weight_scale_inv": T("F32", (5, 8))}, None),
    ("fp8 block 128x128", "weight", T("F8_E4M3", (576, 1024)), {"scale": T("F8_E8M0", (5, 8))}, None),
    ("mxfp4", "weight", T("I8", (576, 512)), {"scale": T("F8_E8M0", (576, 32))}, None),
    ("mxfp4", "weight_packed", T("U8", (576, 512)), {"weight_scale": T("U8", (576, 32))}, None),
    ("nvfp4", "weight_packed", T("U8", (576, 512)), {"weight_scale": T("F8_E4M3", (576, 64))}, 4),
    ("nvfp4", "weight", T("U8", (576, 512)), {"weight_scale": T("F8_E4M3", (576, 64)), "weight_scale_2": T("F32", ())}, None),
    ("mxfp4", "blocks", T("U8", (32, 576, 32, 16)), {"scales": T("U8", (32, 576, 32))}, None),
    ("mxfp4", "weight_codes", T("U8", (576, 1024)), {"weight_scale": T("U8", (576, 32))}, None),
    ("nvfp4", "weight_codes", T("U8", (576, 1024)), {"weight_scale": T("F8_E4M3", (576, 64))}, None),
    ("mxfp4", "codes", T("U8", (32, 576, 32, 32)), {"scales": T("U8", (32, 576, 32))}, None),
    ("gptq 4 bits", "qweight", T("I32", (128, 576)), {"scales": T("F16", (8, 576)), "g_idx": T("I32", (1024,))}, 4),
    ("gptq 4 bits", "qweight", T("I32", (128, 576)), {"scales": T("F16", (8, 576))}, 4),
    ("awq 4 bits", "qweight", T("I32", (1024, 72)), {"scales": T("F16", (8, 576)), "qzeros": T("I32", (8, 72))}, 4),
    ("mxfp4", "weight", T("F4", (576, 1024)), {"weight_scale": T("F8_E8M0", (576, 32))}, None),
    ("nvfp4", "weight", T("F4", (576, 1024)), {"weight_scale": T("F8_E4M3", (576, 64)), "weight_scale_2": T("F32", ())}, None),
    ("nf4", "weight", T("U8", (294912, 1)), {"absmax": T("F32", (9216,)), "quant_state.bitsandbytes__nf4": T("U8", (80,))}, None),
]  # fmt: skip


@pytest.mark.parametrize(("label", "last", "weight", "companions", "bits"), FORMATS)
def test_formats_are_told_by_names_dtypes_and_shapes(
    label: str, last: str, weight: T, companions: dict[str, T], bits: int | None
) -> None:
    found = stored_format(last, weight, companions, bits)
    assert found.label == label
    assert found.quantized is (label != "BF16")
    assert not found.lacks_scale
    if label != "packed integers":
        stacked = weight.shape[0] if len(weight.shape) > 2 else 1
        elements = 1
        for size in weight.shape:
            elements *= size
        assert elements * found.per_element == 576 * 1024 * stacked


@pytest.mark.parametrize(
    ("label", "weight", "scale", "block"),
    [
        ("fp8 channel", (256, 128), (256, 1), None),
        ("fp8 group 128", (256, 128), (256, 1), (1, 128)),
        ("fp8 channel", (256, 128), (256, 1), (1, 64)),
        ("fp8 tensor", (64, 96), (1, 1), None),
        ("fp8 block 128x128", (64, 96), (1, 1), (128, 128)),
        ("fp8 tensor", (64, 96), (1,), (128, 128)),
        ("fp8 tensor", (192, 96), (1, 1), (128, 128)),
        ("fp8 block 128x128", (4, 192, 96), (4, 2, 1), (128, 128)),
    ],
)
def test_a_declared_block_decides_where_the_shapes_leave_it_open(
    label: str, weight: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int] | None
) -> None:
    companions = {"weight_scale": T("F32", scale)}
    assert stored_format("weight", T("F8_E4M3", weight), companions, None, block).label == label


@pytest.mark.parametrize(
    ("table", "block"),
    [
        ({"weight_block_size": [128, 64]}, (128, 64)),
        ({"config_groups": {"g": {"targets": [], "weights": {"group_size": 32}}}}, (1, 32)),
        (
            {"config_groups": {"g": {"targets": [], "weights": {"group_size": 128, "block_structure": [64, 32]}}}},
            (64, 32),
        ),
        ({"config_groups": {"g": {"targets": [], "weights": {"group_size": -1}}}}, None),
        ({"config_groups": {"g": {"targets": [], "weights": {"block_structure": "128x128"}}}}, None),
        ({"bits": 4}, None),
    ],
)
def test_declared_blocks(table: dict[str, Any], block: tuple[int, int] | None) -> None:
    found, _ = declared_quantization({"quantization_config": table})
    assert found is not None
    assert found.block("g") == block


def test_a_quantized_weight_without_its_scale() -> None:
    assert stored_format("weight", T("F8_E4M3", (4, 4)), {}, None).lacks_scale
    assert not stored_format("weight", T("BF16", (4, 4)), {}, None).lacks_scale


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("lm_head.weight", ("lm_head", "weight")),
        ("a.experts.3.up_proj.weight_scale", ("a.experts.3.up_proj", "weight_scale")),
        ("a.experts.gate_up_proj_blocks", ("a.experts.gate_up_proj", "blocks")),
        ("a.experts.gate_up_proj_scale_inv", ("a.experts.gate_up_proj", "weight_scale_inv")),
        ("a.experts.gate_up_proj", ("a.experts", "gate_up_proj")),
        ("a.q_proj.weight.absmax", ("a.q_proj", "absmax")),
        ("bias", ("", "bias")),
    ],
)
def test_a_name_is_split_into_module_and_part(name: str, parts: tuple[str, str]) -> None:
    assert split_name(name) == parts


@pytest.mark.parametrize(
    ("weights", "label"),
    [
        ({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}, "int4 group 128"),
        ({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}, "int4 group 32 asymmetric"),
        ({"num_bits": 8, "type": "int", "strategy": "channel"}, "int8 channel"),
        ({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}, "fp8 block 128x128"),
        ({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}, "nvfp4"),
        ({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}, "mxfp4"),
        ({}, None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("place", [(), ("text_config",)])
def test_declared_schemes_are_said_in_the_same_words(weights: Any, label: str | None, place: tuple[str, ...]) -> None:
    table = {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"], "weights": weights}}}
    config: dict[str, Any] = {"quantization_config": table}
    for key in place:
        config = {key: config}
    found, findings = declared_quantization(config)
    assert findings == []
    assert found is not None
    assert (found.method, found.label("g"), found.label("other")) == ("compressed-tensors", label, None)


@pytest.mark.parametrize("groups", [{"g": {"targets": ["re:("]}}, {"g": {"targets": [1]}}, {"g": 3}, [1]])
def test_groups_that_cannot_be_read_are_a_warning(groups: Any) -> None:
    found, findings = declared_quantization({"quantization_config": {"config_groups": groups}})
    assert [(finding.id, finding.severity) for finding in findings] == [("config.quant", "warning")]
    assert found is not None
    assert found.declared is None


def test_no_quantization_is_declared() -> None:
    assert declared_quantization({"quantization_config": None, "text_config": 1}) == (None, [])
