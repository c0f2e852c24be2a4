"""Schemes against compressed-tensors 0.19.0: presets, validation, formats and the written config; then our refusals."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.errors import USAGE, UserError
from ckptkit.recipe import schemes
from ckptkit.recipe.schemes import config_group, presets, problems, resolve, usable

ROOT = Path(__file__).parents[1]
CALIBRATED = {"FP8", "NVFP4"}
INT8_TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True}


def refused(scheme: Any, overrides: dict[str, Any] | None = None) -> list[tuple[str, str]]:
    """Ids and keys of what is wrong."""
    with pytest.raises(UserError) as caught:
        resolve(scheme, overrides or {})
    assert caught.value.exit_code == USAGE
    return [(finding.id, finding.data["key"]) for finding in caught.value.findings]


# --- equal to the library ----------------------------------------------------------------------------------


def library_group(parts: dict[str, Any], targets: list[str]) -> dict[str, Any]:
    """A group of ``config.json`` as llmcompressor's model_free_ptq writes it for a Linear."""
    import torch
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme(targets=targets, **parts)
    scheme.format = scheme.format or infer_module_format(torch.nn.Linear, scheme)
    dumped: dict[str, Any] = json.loads(json.dumps(scheme.model_dump()))
    return dumped


def test_the_table_is_the_one_the_script_makes() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "generate_presets.py"))
    assert script["TABLE"].read_text() == script["render"]()
    assert version("compressed-tensors") == schemes.COMPRESSED_TENSORS_VERSION


def test_presets_are_the_librarys() -> None:
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

    assert set(usable()) == set(PRESET_SCHEMES) - CALIBRATED - {"UNQUANTIZED"}
    for name in usable():
        parts = preset_name_to_scheme(name, []).model_dump(exclude={"targets"}, exclude_none=True)
        group = config_group(resolve(name.lower()), ["re:x"])
        assert group == library_group(parts, ["re:x"]), name
        assert list(group) == list(library_group(parts, ["re:x"]))
        read = QuantizationConfig.model_validate({"config_groups": {"g": group}}).config_groups["g"]
        assert json.loads(json.dumps(read.model_dump())) == group


ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "num_bits": st.sampled_from([2, 3, 4, 8]),
        "type": st.sampled_from(["int", "float", "INT", "Float", "fp8"]),
        "symmetric": st.booleans(),
        "group_size": st.sampled_from([None, -2, -1, 16, 32, 128]),
        "strategy": st.sampled_from([None, "tensor", "Channel", "group", "block", "token", "tensor_group", "rows"]),
        "block_structure": st.sampled_from([None, [128, 128], "64x32", [128], [0, 4], "x"]),
        "dynamic": st.sampled_from([False, False, True, "local", "maybe"]),
        "scale_dtype": st.sampled_from([None, None, "uint8", "torch.float8_e4m3fn", "torch.bfloat16", "float33"]),
        "observer": st.sampled_from([None, "memoryless_minmax", "static_minmax"]),
        "zp_dtype": st.none(),
        "actorder": st.sampled_from([None, False]),
    },
)


@settings(max_examples=400, deadline=None)
@given(ARGUMENTS)
def test_arguments_are_accepted_and_completed_as_by_the_library(arguments: dict[str, Any]) -> None:
    from compressed_tensors.quantization import QuantizationArgs

    def outcome(model: Any) -> Any:
        try:
            return json.loads(json.dumps(model(**arguments).model_dump(mode="json")))
        except (ValueError, NotImplementedError):
            return None

    assert outcome(schemes.QuantArgs) == outcome(QuantizationArgs)


@settings(max_examples=300, deadline=None)
@given(ARGUMENTS, st.sampled_from([None, INT8_TOKEN, INT8_TOKEN | {"type": "float"}]), st.booleans())
def test_what_resolves_is_what_the_library_writes(
    arguments: dict[str, Any], inputs: dict[str, Any] | None, override: bool
) -> None:
    parts = {"weights": arguments} | ({"input_activations": inputs} if inputs else {})
    try:
        found = resolve({**parts, "weights": {}}, arguments) if override else resolve(parts)
    except UserError:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about group sizes of inputs and weights that differ
        assert config_group(found, ["Linear"]) == library_group(parts, ["Linear"])


def converted(group: dict[str, Any], shape: tuple[int, int]) -> dict[str, Any]:
    """What llmcompressor makes of a bf16 weight of that shape."""
    import torch
    from compressed_tensors.quantization import QuantizationConfig
    from llmcompressor.entrypoints.model_free.converter import ModelFreePtqConverter
    from llmcompressor.entrypoints.model_free.validate import validate_config

    config = validate_config(QuantizationConfig.model_validate({"config_groups": {"g": group}}), None, [])
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    made: dict[str, Any] = ModelFreePtqConverter(config).process({"m.weight": weight})
    return made


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(ARGUMENTS, st.sampled_from([None, INT8_TOKEN]), st.sampled_from([(128, 256), (96, 100), (33, 160), (7, 24)]))
def test_what_resolves_and_divides_the_library_can_make(
    arguments: dict[str, Any], inputs: dict[str, Any] | None, shape: tuple[int, int]
) -> None:
    parts = {"weights": arguments} | ({"input_activations": inputs} if inputs else {})
    try:
        found = resolve(parts)
    except UserError:
        return
    group = config_group(found, ["Linear"])
    bits = shape[1] * found.weights.num_bits
    if problems(found, shape) is None:
        made = converted(group, shape)
        assert found.format != "pack-quantized" or tuple(made["m.weight_packed"].shape) == (shape[0], bits // 32)
    elif found.weights.group_size and shape[1] % found.weights.group_size:
        with pytest.raises(ValueError, match="Unable to quantize"):
            converted(group, shape)
    else:
        assert converted(group, shape)["m.weight_packed"].shape[1] * 32 > bits  # bits that belong to no column


# --- refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "instead"), [("FP8", "FP8_DYNAMIC"), ("nvfp4", "NVFP4A16"), ("W4A17", "W4A16"),
                                               ("unquantized", None), ("", None)])  # fmt: skip
def test_presets_that_cannot_be_made(name: str, instead: str | None) -> None:
    assert refused(name) == [("recipe.scheme", "scheme")]
    with pytest.raises(UserError) as caught:
        resolve(name)
    assert instead is None or instead in str(caught.value.findings[0].hint).split(" known")[0]


W4 = {"num_bits": 4, "group_size": 128}
NV4 = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group", "scale_dtype": "float8_e4m3fn"}
MX4 = {"num_bits": 4, "type": "float", "group_size": 32, "scale_dtype": "uint8"}
MX8 = MX4 | {"num_bits": 8}


@pytest.mark.parametrize(
    ("weights", "key"),
    [
        (W4 | {"dynamic": True}, "scheme.weights"),
        (W4 | {"actorder": "weight"}, "scheme.weights.actorder"),
        (W4 | {"actorder": True}, "scheme.weights.actorder"),
        (W4 | {"observer": "mse"}, "scheme.weights.observer"),
        (W4 | {"observer": "imatrix_mse"}, "scheme.weights.observer"),
        (W4 | {"observer_kwargs": {"averaging_constant": 0.5}}, "scheme.weights.observer_kwargs"),
        (W4 | {"scale_dtype": "uint8"}, "scheme.weights.scale_dtype"),
        (W4 | {"scale_dtype": "bfloat16"}, "scheme.weights.scale_dtype"),
        (W4 | {"num_bits": 9}, "scheme.weights.num_bits"),
        (W4 | {"num_bits": 0}, "scheme.weights.num_bits"),
        (W4 | {"num_bits": True}, "scheme.weights.num_bits"),
        (W4 | {"symmetric": False, "zp_dtype": "uint8"}, "scheme.weights.zp_dtype"),
        (W4 | {"strategy": "tensor_group"}, "scheme.weights.strategy"),
        ({"strategy": "attn_head"}, "scheme.weights"),
        ({"strategy": "token", "dynamic": True}, "scheme.weights"),
        ({"type": "float", "symmetric": False}, "scheme.weights.symmetric"),
        ({"type": "float", "num_bits": 6}, "scheme.weights"),
        (MX4 | {"group_size": 64}, "scheme.weights.group_size"),
        (MX4 | {"scale_dtype": None}, "scheme.weights.scale_dtype"),  # the library computes with unrounded scales
        (MX4 | {"strategy": "tensor_group"}, "scheme.weights.strategy"),
        (MX8 | {"strategy": "tensor_group"}, "scheme.weights.strategy"),
        (NV4 | {"strategy": "group"}, "scheme.weights.strategy"),
        (NV4 | {"scale_dtype": None}, "scheme.weights.scale_dtype"),
    ],
)
def test_weights_that_are_refused(weights: dict[str, Any], key: str) -> None:
    assert ("recipe.scheme", key) in refused({"weights": weights})


@pytest.mark.parametrize(
    ("parts", "key"),
    [
        ({"input_activations": {"num_bits": 8}}, "scheme.input_activations"),
        ({"input_activations": NV4 | {"dynamic": "local"}}, "scheme.input_activations"),
        ({"input_activations": NV4 | {"dynamic": True}}, "scheme.input_activations"),
        ({"input_activations": INT8_TOKEN | {"observer": "mse"}}, "scheme.input_activations.observer"),
        ({"output_activations": INT8_TOKEN}, "scheme.output_activations"),
        ({"kv_cache_scheme": INT8_TOKEN}, "scheme.kv_cache_scheme"),
        ({"format": "float-quantized"}, "scheme.format"),
        ({"format": "dense"}, "scheme.format"),
        ({"weights": None}, "scheme.weights"),
    ],
)
def test_parts_that_are_refused(parts: dict[str, Any], key: str) -> None:
    assert refused({"weights": {"num_bits": 8}} | parts) == [("recipe.scheme", key)]


def test_a_scheme_must_be_a_name_or_a_mapping_with_weights() -> None:
    assert refused(8) == refused(None) == refused(["W8A16"]) == [("recipe.scheme", "scheme")]
    assert refused({}) == [("recipe.scheme", "scheme.weights")]


def test_unknown_keys_and_all_problems_at_once() -> None:
    found = refused({"weights": {"num_bit": 4, "symmetric": "yes"}, "inputs": {}})
    assert set(found) == {
        ("recipe.invalid", "scheme.weights.num_bit"),
        ("recipe.scheme", "scheme.weights.symmetric"),
        ("recipe.invalid", "scheme.inputs"),
    }
    found = refused({"weights": MX4 | {"observer": "mse", "scale_dtype": None}, "format": "dense"})
    assert {key for _, key in found} == {"scheme.weights.observer", "scheme.weights.scale_dtype", "scheme.format"}


def test_an_overridden_field_is_called_by_its_own_key() -> None:
    assert refused("W8A16", {"observer": "mse", "symmetric": False, "zp_dtype": "uint8"}) == [
        ("recipe.scheme", "zp_dtype")
    ]


# --- overrides ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        ("W8A16", {"strategy": "channel"}, ("channel", None, None)),
        ("W8A16", {"strategy": "tensor"}, ("tensor", None, None)),
        ("W8A16", {"strategy": "group", "group_size": 64}, ("group", 64, None)),
        ("W8A16", {"group_size": 64}, ("group", 64, None)),
        ("W8A16", {"group_size": -1}, ("channel", -1, None)),
        ("W8A8", {"group_size": 32}, ("group", 32, None)),
        ("FP8_BLOCK", {"strategy": "channel"}, ("channel", None, None)),
        ("FP8_BLOCK", {"group_size": 128}, ("group", 128, None)),
        ("FP8_BLOCK", {"block_structure": [64, 32]}, ("block", None, (64, 32))),
        ("FP8_DYNAMIC", {"strategy": "block", "block_structure": "64x32"}, ("block", None, (64, 32))),
        ("W4A16", {"symmetric": False}, ("group", 128, None)),
    ],
)
def test_overrides_apply_to_the_weights(name: str, overrides: dict[str, Any], expected: tuple[Any, ...]) -> None:
    found = resolve(name, overrides)
    weights = found.weights
    assert (weights.strategy, weights.group_size, weights.block_structure) == expected
    assert found.input_activations == resolve(name).input_activations
    assert weights.num_bits == resolve(name).weights.num_bits


def test_an_override_that_leaves_something_missing_is_refused() -> None:
    assert refused("W8A16", {"strategy": "group"}) == [("recipe.scheme", "scheme.weights")]
    assert refused("W8A16", {"strategy": "block"}) == [("recipe.scheme", "scheme.weights")]


def test_formats_that_may_be_asked_for() -> None:
    ask = {"weights": W4, "input_activations": INT8_TOKEN | {"type": "float"}}
    assert resolve(ask).format == "int-quantized"
    assert resolve(ask | {"format": "pack-quantized"}).format == "pack-quantized"


def test_minmax_of_a_weight_is_written_as_the_library_writes_it() -> None:
    assert resolve({"weights": W4 | {"observer": "minmax"}}).weights.observer == "static_minmax"


# --- shapes and words --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "overrides", "shape", "divides"),
    [
        ("W4A16", {}, (7, 256), True),
        ("W4A16", {}, (256, 576), False),
        ("W4A16", {"group_size": 64}, (256, 576), True),
        ("W8A16", {"strategy": "channel"}, (49152, 576), True),
        ("W8A16", {"strategy": "channel"}, (4, 578), False),
        ("W4A16", {"strategy": "channel"}, (4, 100), False),
        ("W3A16", {"strategy": "channel"}, (4, 96), True),
        ("W3A16", {"strategy": "channel"}, (4, 80), False),
        ("W6A16", {"strategy": "channel"}, (4, 80), True),
        ("W4A16_ASYM", {}, (130, 256), True),
        ("W4A8", {"strategy": "channel"}, (4, 100), True),
        ("FP8_BLOCK", {}, (130, 100), True),
        ("FP8_DYNAMIC", {}, (3, 5), True),
        ("NVFP4A16", {}, (3, 48), True),
        ("NVFP4A16", {}, (3, 40), False),
        ("MXFP4", {}, (3, 64), True),
        ("MXFP8", {}, (3, 48), False),
        ("W4A16", {}, (4, 64, 128), False),
        ("W4A16", {}, (128,), False),
    ],
)
def test_shapes(name: str, overrides: dict[str, Any], shape: tuple[int, ...], divides: bool) -> None:
    assert (problems(resolve(name, overrides), shape) is None) == divides


def test_descriptions_tell_presets_apart() -> None:
    assert resolve("W8A16", {"strategy": "channel"}).describe() == "W8A16 int8 channel symmetric"
    described = {name: resolve(name).describe() for name in usable() if name != "INT8"}  # another name of W8A8
    assert len(set(described.values())) == len(described)


def test_reading_schemes_imports_no_torch() -> None:
    code = "import sys, ckptkit.recipe.recipe; ckptkit.recipe.recipe.load('w4a16'); print('torch' in sys.modules, 'compressed_tensors' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        presets()["W4A16"] = {}  # type: ignore[index]
