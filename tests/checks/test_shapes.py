"""Shapes and dtypes of quantized weights' parts, and of weights against the config and against other layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from make import llama, llama_config
from quantized_parts import found_in, subject_of

from ckptkit.checks import shapes
from ckptkit.errors import Finding
from ckptkit.files.header import Spec

Part = tuple[str, tuple[int, ...]]

# The parts of one weight of 256 rows and 512 columns in every form that is known, from the formats' descriptions.
PACKED = {"weight_packed": ("I32", (256, 64)), "weight_scale": ("BF16", (256, 4)), "weight_shape": ("I64", (2,))}
ASYMMETRIC = PACKED | {"weight_zero_point": ("I32", (32, 4))}
NVFP4 = {
    "weight_packed": ("U8", (256, 256)),
    "weight_scale": ("F8_E4M3", (256, 32)),
    "weight_global_scale": ("F32", (1,)),
}
MODELOPT = {"weight": ("U8", (256, 256)), "weight_scale": ("F8_E4M3", (256, 32)), "weight_scale_2": ("F32", ())}
MXFP4 = {"weight_packed": ("U8", (256, 256)), "weight_scale": ("U8", (256, 16))}
BLOCK = {"weight": ("F8_E4M3", (256, 512)), "weight_scale_inv": ("F32", (2, 4))}
GPTQ = {
    "qweight": ("I32", (64, 256)),
    "qzeros": ("I32", (4, 32)),
    "scales": ("F16", (4, 256)),
    "g_idx": ("I32", (512,)),
}
AWQ = {"qweight": ("I32", (512, 32)), "qzeros": ("I32", (4, 32)), "scales": ("F16", (4, 256))}
GOOD: dict[str, dict[str, Part]] = {
    "packed in groups": PACKED,
    "packed, 8 bits a row": PACKED | {"weight_packed": ("I32", (256, 128)), "weight_scale": ("BF16", (256, 1))},
    "packed, 3 bits": PACKED | {"weight_packed": ("I32", (256, 48))},
    "packed, asymmetric": ASYMMETRIC,
    "fp8 a tensor": {"weight": ("F8_E4M3", (256, 512)), "weight_scale": ("F32", ()), "input_scale": ("F32", (1,))},
    "fp8 a row": {"weight": ("F8_E4M3", (256, 512)), "weight_scale": ("BF16", (256, 1))},
    "fp8 a row, as a vector": {"weight": ("F8_E4M3", (256, 512)), "weight_scale": ("F32", (256,))},
    "fp8 blocks": BLOCK,
    "fp8 blocks cut at the edges": {"weight": ("F8_E4M3", (130, 200)), "weight_scale_inv": ("F32", (2, 2))},
    "fp8 blocks of ModelOpt": {"weight": ("F8_E4M3", (256, 512)), "weight_scale": ("F32", (2, 1, 4, 1))},
    "fp8 blocks in powers of two": {"weight": ("F8_E4M3", (256, 512)), "scale": ("F8_E8M0", (2, 4))},
    "int8": {"weight": ("I8", (256, 512)), "weight_scale": ("BF16", (256, 1))},
    "mxfp8": {"weight": ("F8_E4M3", (256, 512)), "weight_scale": ("U8", (256, 16))},
    "nvfp4": NVFP4,
    "nvfp4 of ModelOpt": MODELOPT,
    "mxfp4": MXFP4,
    "fp4 of DeepSeek": {"weight": ("I8", (256, 256)), "scale": ("F8_E8M0", (256, 16))},
    "gptq": GPTQ,
    "gptq, 3 bits, one group": {
        "qweight": ("I32", (48, 256)), "qzeros": ("I32", (1, 24)), "scales": ("F16", (1, 256)), "g_idx": ("I32", (512,)),
    },
    "awq": AWQ,
    "nf4": {"weight": ("U8", (65536, 1)), "weight.absmax": ("F32", (2048,)), "weight.quant_state.bitsandbytes__nf4": ("U8", (80,))},
    "unknown codes": {"weight": ("U8", (64, 512)), "weight_scale": ("BF16", (1,))},
}  # fmt: skip
NAMES = {
    "experts of gpt-oss": {"gate_up_proj_blocks": ("U8", (8, 64, 4, 16)), "gate_up_proj_scales": ("U8", (8, 64, 4))},
    "stacked experts in FP8": {
        "gate_up_proj": ("F8_E4M3", (8, 512, 256)), "gate_up_proj_scale_inv": ("F32", (8, 4, 2)),
    },
    "gate and up of 192 rows each, two blocks for each": {
        "gate_up_proj": ("F8_E4M3", (8, 384, 256)), "gate_up_proj_scale_inv": ("F32", (8, 4, 2)),
    },
}  # fmt: skip


def specs(parts: dict[str, Part], module: str = "model.layers.3.mlp.up_proj") -> list[Spec]:
    return [Spec(f"{module}.{part}", dtype, shape) for part, (dtype, shape) in parts.items()]


def findings(tensors: Iterable[Spec], config: dict[str, Any] | None = None) -> list[Finding]:
    return found_in(subject_of(tensors, config or {}), shapes)


@pytest.mark.parametrize("form", GOOD)
def test_parts_that_fit(form: str) -> None:
    assert findings(specs(GOOD[form])) == []


@pytest.mark.parametrize("form", NAMES)
def test_stacked_parts_that_fit(form: str) -> None:
    assert findings(specs(NAMES[form], "model.layers.0.mlp.experts")) == []


WRONG = [
    ("scale", PACKED, "weight_scale", ("BF16", (255, 4))),
    ("scale", PACKED, "weight_scale", ("BF16", (256, 5))),
    ("scale", PACKED, "weight_scale", ("BF16", (2, 4))),
    ("scale", PACKED, "weight_packed", ("I32", (255, 64))),
    ("weight-shape", PACKED, "weight_shape", ("I64", (3,))),
    ("dtype", PACKED, "weight_shape", ("F32", (2,))),
    ("dtype", PACKED, "weight_scale", ("U8", (256, 4))),
    ("dtype", PACKED, "weight_packed", ("I64", (256, 64))),
    ("packed", PACKED, "weight_packed", ("I32", (256 * 64,))),
    ("zero-point", ASYMMETRIC, "weight_zero_point", ("I32", (256, 4))),
    ("zero-point", ASYMMETRIC, "weight_zero_point", ("I32", (32, 3))),
    ("dtype", ASYMMETRIC, "weight_zero_point", ("I8", (32, 4))),
    ("scale", NVFP4, "weight_scale", ("F8_E4M3", (256, 16))),
    ("scale", NVFP4, "weight_global_scale", ("F32", (256,))),
    ("dtype", NVFP4, "weight_global_scale", ("BF16", (1,))),
    ("dtype", NVFP4, "weight_scale", ("BF16", (256, 32))),
    ("scale", MODELOPT, "weight_scale_2", ("F32", (2,))),
    ("scale", MODELOPT, "weight", ("U8", (256, 255))),
    ("scale", MXFP4, "weight_scale", ("U8", (256, 15))),
    ("scale", MXFP4, "weight_scale", ("U8", (1,))),
    ("dtype", MXFP4, "weight_scale", ("BF16", (256, 16))),
    ("scale", BLOCK, "weight_scale_inv", ("F32", (3, 4))),
    ("scale", BLOCK, "weight_scale_inv", ("F32", (2, 5))),
    ("scale", BLOCK, "weight", ("F8_E4M3", (256, 300))),
    ("dtype", BLOCK, "weight_scale_inv", ("I32", (2, 4))),
    ("packed", GPTQ, "g_idx", ("I32", (500,))),
    ("zero-point", GPTQ, "qzeros", ("I32", (4, 31))),
    ("zero-point", GPTQ, "qzeros", ("I32", (3, 32))),
    ("scale", GPTQ, "scales", ("F16", (4, 255))),
    ("dtype", GPTQ, "scales", ("I32", (4, 256))),
    ("dtype", GPTQ, "g_idx", ("F32", (512,))),
    ("zero-point", AWQ, "qzeros", ("I32", (4, 31))),
    ("zero-point", AWQ, "qzeros", ("I32", (5, 32))),
]


@pytest.mark.parametrize(("expected", "good", "part", "wrong"), WRONG)
def test_a_part_that_does_not_fit(expected: str, good: dict[str, Part], part: str, wrong: Part) -> None:
    found = findings(specs(good | {part: wrong}))
    assert f"shapes.{expected}" in {finding.id for finding in found}
    assert {finding.severity for finding in found} == {"error"}
    assert all(finding.exit_code == 3 and finding.hint for finding in found)


def test_a_scale_of_scales_that_is_missing() -> None:
    without = {part: spec for part, spec in MODELOPT.items() if part != "weight_scale_2"}
    assert [finding.id for finding in findings(specs(without))] == ["shapes.scale"]


@pytest.mark.parametrize(
    ("part", "wrong", "expected"),
    [
        ("gate_up_proj_scales", ("U8", (8, 64, 3)), "shapes.scale"),
        ("gate_up_proj_scales", ("BF16", (8, 64, 4)), "shapes.dtype"),
        ("gate_up_proj_blocks", ("U8", (8, 64, 4, 8)), "shapes.packed"),
    ],
)
def test_blocks_that_do_not_fit(part: str, wrong: Part, expected: str) -> None:
    parts = NAMES["experts of gpt-oss"] | {part: wrong}
    assert {finding.id for finding in findings(specs(parts, "model.layers.0.mlp.experts"))} == {expected}


def test_any_change_of_one_side_is_seen() -> None:
    """Every part, one longer and one shorter on each side; only words of unknown bits leave any freedom."""
    missed = []
    for form in ("nvfp4", "nvfp4 of ModelOpt", "mxfp4", "mxfp8", "fp4 of DeepSeek", "gptq", "packed, asymmetric"):
        for part, (dtype, shape) in GOOD[form].items():
            for axis in range(len(shape)):
                for step in (-1, 1):
                    changed = tuple(size + step * (axis == at) for at, size in enumerate(shape))
                    if not findings(specs(GOOD[form] | {part: (dtype, changed)})):
                        missed.append((form, part, changed))
    assert missed == [("packed, asymmetric", "weight_packed", (256, width)) for width in (63, 65)]


# --- one among many -----------------------------------------------------------------------------------------


def experts(odd: dict[str, dict[str, Part]], good: dict[str, Part] = MXFP4) -> list[Spec]:
    names = [f"model.layers.{layer}.mlp.experts.{expert}.up_proj" for layer in range(3) for expert in range(20)]
    return [spec for name in names for spec in specs(odd.get(name, good), name)]


def test_one_odd_expert_is_found_by_its_name() -> None:
    name = "model.layers.1.mlp.experts.7.up_proj"
    (found,) = findings(experts({name: MXFP4 | {"weight_scale": ("U8", (256, 8))}}))
    assert (found.id, found.tensor, found.data["count"]) == ("shapes.scale", f"{name}.weight_scale", 1)


def test_mixed_experts_that_all_fit_are_no_fault() -> None:
    mixed = {f"model.layers.1.mlp.experts.{expert}.up_proj": NVFP4 for expert in range(0, 20, 3)}
    assert findings(experts(mixed)) == []


def test_the_same_fault_everywhere_is_one_finding() -> None:
    (found,) = findings(experts({}, MXFP4 | {"weight_scale": ("U8", (256, 8))}))
    assert found.data["count"] == 60
    assert len(found.data["examples"]) <= 5


# --- the config and the other layers ------------------------------------------------------------------------


def of_llama(layers: int = 6, **changes: tuple[int, ...]) -> list[Spec]:
    """A Llama's headers, with some tensors (``__`` for dots) of another shape."""
    shapes_of = {name: tuple(value.shape) for name, value in llama(layers).items()}
    shapes_of |= {name.replace("__", "."): shape for name, shape in changes.items()}
    return [Spec(name, "BF16", shape) for name, shape in shapes_of.items()]


CONFIG = llama_config(layers=6)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("lm_head.weight", (512, 127), {"shapes.config"}),
        ("model.embed_tokens.weight", (512, 64), {"shapes.config"}),
        ("model.norm.weight", (127,), {"shapes.config"}),
        ("model.layers.2.input_layernorm.weight", (127,), {"shapes.config", "shapes.layer"}),
        ("model.layers.2.self_attn.q_proj.weight", (128, 64), {"shapes.config", "shapes.layer"}),
        ("model.layers.2.self_attn.k_proj.weight", (120, 128), {"shapes.config", "shapes.layer"}),
        ("model.layers.2.self_attn.k_proj.weight", (64, 128), {"shapes.config", "shapes.layer"}),
        ("model.layers.2.mlp.up_proj.weight", (255, 128), {"shapes.config", "shapes.layer"}),
        ("model.layers.2.mlp.down_proj.weight", (128, 255), {"shapes.config", "shapes.layer"}),
        ("model.layers.2.mlp.down_proj.weight", (127, 256), {"shapes.config", "shapes.layer"}),
    ],
)
def test_a_dense_weight_of_another_size(name: str, shape: tuple[int, ...], expected: set[str]) -> None:
    found = findings(of_llama(**{name.replace(".", "__"): shape}), CONFIG)
    assert {finding.id for finding in found} == expected
    assert {finding.tensor for finding in found} == {name}


def test_a_config_of_another_model() -> None:
    found = findings(of_llama(), CONFIG | {"hidden_size": 256})
    assert {finding.id for finding in found} == {"shapes.config"}
    assert {finding.data["count"] for finding in found} == {1, 6}  # the head, the norm, …; each of the layers' weights


@pytest.mark.parametrize(
    "change", [{"architectures": ["LlamaForCausalLMEagle3"]}, {"architectures": None}, {"hidden_size": None}]
)
def test_what_is_no_whole_language_model_is_not_judged_by_its_config(change: dict[str, Any]) -> None:
    subject = subject_of(of_llama(), CONFIG | {"hidden_size": 256} | change)
    probe = next(probe for probe in shapes.PROBES if probe.ids == ("shapes.config",))
    assert probe.unfit(subject) is not None


def test_packed_weights_are_judged_by_the_form_where_it_tells_the_size() -> None:
    parts = specs(NVFP4, "model.layers.0.mlp.up_proj")
    assert findings(parts, CONFIG | {"hidden_size": 512}) == []
    assert {finding.id for finding in findings(parts, CONFIG)} == {"shapes.config"}
    assert findings(specs(PACKED, "model.layers.0.mlp.up_proj"), CONFIG) == []


def test_layers_that_differ_by_design_are_left_alone() -> None:
    wide = {f"model__layers__{layer}__mlp__up_proj__weight": (512, 128) for layer in (4, 5)}
    assert findings(of_llama(**wide), CONFIG | {"model_type": "gemma4_text"}) == []


def test_a_weight_in_no_dtype_of_weights() -> None:
    tensors = [spec._replace(dtype="I32") if "down_proj" in spec.name else spec for spec in of_llama()]
    assert [(finding.id, finding.data["count"]) for finding in findings(tensors, CONFIG)] == [("shapes.dtype", 6)]
