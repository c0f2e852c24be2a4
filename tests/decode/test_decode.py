"""Decoding against compressed-tensors' decompressors, torch's casts, published examples and slow obvious loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams

from .memory import Module

EXAMPLE = bytes.fromhex("1032547698badcfe")
MXFP4_ARGS = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
MXFP8_ARGS = MXFP4_ARGS | {"num_bits": 8}
NVFP4_ARGS = {
    "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
    "scale_dtype": torch.float8_e4m3fn,
}  # fmt: skip


def random(rows: int, cols: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows * cols)) * 0.02).to(dtype)


def qparams(w: torch.Tensor, q: QuantizationArgs) -> dict[str, torch.Tensor]:
    """Scales and the like by compressed-tensors' own functions."""
    height, width = w.shape
    found = {}
    match q.strategy:
        case "tensor":
            x = w.reshape(1, -1)
        case "channel":
            x = w
        case "block":
            h, b = q.block_structure
            x = w.reshape(height // h, h, width // b, b).transpose(1, 2).flatten(2)
        case _:
            x = w.reshape(height, width // q.group_size, q.group_size)
    if q.strategy == "tensor_group":
        found["weight_global_scale"] = (448 * 6 / w.abs().max()).reshape(1).float()
    scale, zero = calculate_qparams(x.amin(-1), x.amax(-1), q, found.get("weight_global_scale"))
    keep = q.strategy in {"tensor", "block"} or len(scale.shape) > 1
    found["weight_scale"] = (scale if keep else scale.unsqueeze(-1)).to(w.dtype)
    if not q.symmetric:
        found["weight_zero_point"] = zero if keep else zero.unsqueeze(-1)
    return found


def compressed(w: torch.Tensor, format: str, **weights: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors that compressed-tensors makes of ``w``, and what it reads back from them, in float32."""
    q = QuantizationArgs(symmetric=weights.pop("symmetric", True), **weights)
    scheme = QuantizationScheme(targets=[], weights=q, format=format)
    library = BaseCompressor.get_value_from_registry(format)
    tensors = library.compress({"weight": w, **qparams(w, q)}, scheme)
    wide = {name: t.float() if t.dtype in {torch.bfloat16, torch.float16} else t for name, t in tensors.items()}
    return dict(tensors), library.decompress(wide, scheme)["weight"].float()


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize(
    "sharing", [{"strategy": "group", "group_size": 32}, {"strategy": "channel"}, {"strategy": "tensor"}], ids=str
)
@pytest.mark.parametrize("bits", range(1, 9))
def test_packed_integers(bits: int, sharing: dict[str, Any], symmetric: bool) -> None:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, **sharing}
    tensors, values = compressed(random(64, 96), "pack-quantized", **weights)
    module = Module("weight_packed", tensors, bits=bits)
    assert np.array_equal(module.rows(), values.numpy())
    assert np.array_equal(module.in_pieces(5), values.numpy())


def test_a_row_that_does_not_fill_its_last_word() -> None:
    tensors, values = compressed(random(8, 100), "pack-quantized", num_bits=4, type="int", strategy="channel")
    module = Module("weight_packed", tensors, bits=4, cols=100)
    assert np.array_equal(module.rows(), values.numpy())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("format", "weights"),
    [
        ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
        ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 64]}),
        ("mxfp8-quantized", MXFP8_ARGS),
        ("mxfp4-pack-quantized", MXFP4_ARGS),
        ("nvfp4-pack-quantized", NVFP4_ARGS),
    ],
    ids=lambda value: value if isinstance(value, str) else value.get("strategy"),
)
def test_other_formats_of_compressed_tensors(format: str, weights: dict[str, Any], dtype: torch.dtype) -> None:
    tensors, values = compressed(random(64, 128, dtype), format, **weights)
    module = Module("weight_packed" if "weight_packed" in tensors else "weight", tensors)
    # The library multiplies out in float32, but NVFP4 in bfloat16.
    tolerance = 2**-7 if format == "nvfp4-pack-quantized" else 2**-22
    assert np.allclose(module.rows(), values.numpy(), rtol=tolerance, atol=0)
    assert np.array_equal(module.in_pieces(7), module.rows())


def test_group_order() -> None:
    """``weight_g_idx`` says which group each column belongs to (GPTQ with activation order)."""
    tensors, _ = compressed(random(8, 64), "pack-quantized", num_bits=4, type="int", strategy="group", group_size=32)
    codes = Module("weight_packed", tensors | {"weight_scale": torch.ones(8, 2)}, bits=4).rows()
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0)).to(torch.int32) % 2
    module = Module("weight_packed", tensors | {"weight_g_idx": order}, bits=4)
    scale = tensors["weight_scale"].float().numpy()
    wanted = [[codes[r, c] * scale[r, order[c]] for c in range(64)] for r in range(8)]
    assert np.array_equal(module.rows(), np.array(wanted, np.float32))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_byte_of_fp8(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).reshape(1, 256)
    module = Module("weight", {"weight": codes, "weight_scale": torch.ones(1)})
    assert np.array_equal(module.rows(), codes.float().numpy(), equal_nan=True)


def test_every_exponent() -> None:
    codes = torch.full((256, 32), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    exponents = torch.arange(256, dtype=torch.uint8).reshape(256, 1)
    module = Module("weight", {"weight": codes, "weight_scale": exponents})
    wanted = exponents.view(torch.float8_e8m0fnu).float().expand(256, 32).numpy()
    assert np.array_equal(module.rows(), wanted, equal_nan=True)


# --- published examples --------------------------------------------------------------------------------------

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
SIGNED = [*E2M1, *(-value for value in E2M1)]


def codes(rows: int = 1) -> torch.Tensor:
    return torch.tensor([[*EXAMPLE, *EXAMPLE]] * rows, dtype=torch.uint8)


def test_deepseek_v4_expert() -> None:
    scale = torch.tensor([[120]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    module = Module("weight", {"weight": codes().view(torch.int8), "scale": scale})
    assert module.rows().tolist() == [[value / 128 for value in SIGNED] * 2]
    two = Module("weight", {"weight": torch.full((1, 16), 0x2F, dtype=torch.int8), "scale": scale})
    assert two.rows()[0, :2].tolist() == [-0.046875, 0.0078125]


def test_deepseek_v4_linear_with_cut_blocks() -> None:
    weight = torch.full((130, 200), 1.75).to(torch.float8_e4m3fn)
    scale = torch.tensor([[126, 128], [127, 125]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    for block in (None, (128, 128)):
        rows = Module("weight", {"weight": weight, "scale": scale}, block=block).rows()
        assert [rows[0, 0], rows[0, 128], rows[128, 0], rows[129, 199]] == [0.875, 3.5, 1.75, 0.4375]


def test_deepseek_v3_multiplies_with_its_inverse_scale() -> None:
    weight = torch.full((256, 128), -3.5).to(torch.float8_e4m3fn)
    rows = Module("weight", {"weight": weight, "weight_scale_inv": torch.tensor([[0.5], [3.0]])}).in_pieces(100)
    assert [rows[0, 0], rows[127, 127], rows[128, 0]] == [-1.75, -1.75, -10.5]


@pytest.mark.parametrize(("byte", "code", "value"), [(0, 1, 2.0**-128), (0, 7, 6 * 2.0**-127), (252, 7, 6 * 2.0**125)])
def test_the_ends_of_the_range_of_exponents(byte: int, code: int, value: float) -> None:
    scale = torch.tensor([[byte]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    rows = Module("weight", {"weight": torch.full((1, 16), code, dtype=torch.int8), "scale": scale}).rows()
    assert rows.tolist() == [[value, 0] * 16]
    assert torch.tensor(rows).bfloat16().tolist() == rows.tolist()


def test_nvfp4_divides_in_compressed_tensors_and_multiplies_in_modelopt() -> None:
    scale = torch.full((1, 2), 112.0).to(torch.float8_e4m3fn)
    divided = {"weight_packed": codes(), "weight_scale": scale, "weight_global_scale": torch.tensor([3584.0])}
    multiplied = {"weight": codes(), "weight_scale": scale, "weight_scale_2": torch.tensor(1 / 3584)}
    wanted = [value / 32 for value in SIGNED] * 2
    assert Module("weight_packed", divided).rows().tolist() == [wanted]
    # Scale and scale of scales first, as ModelOpt does: number first, 1.5 would become 0.0468750037.
    assert Module("weight", multiplied).rows().tolist() == [wanted]


def test_gpt_oss_blocks() -> None:
    blocks = torch.stack([codes().reshape(1, 1, 16)] * 3)
    scales = torch.tensor([120, 121, 122], dtype=torch.uint8).reshape(3, 1, 1)
    module = Module("blocks", {"blocks": blocks, "scales": scales})
    assert (module.weight.rows, module.weight.cols) == (3, 32)
    assert module.in_pieces(2).tolist() == [[value * 2.0**e for value in SIGNED] * 2 for e in (-7, -6, -5)]


def test_blocks_are_counted_anew_in_each_expert_of_a_stack() -> None:
    weight = torch.ones(3, 130, 128).to(torch.float8_e4m3fn)
    scale = torch.arange(1, 7, dtype=torch.float32).reshape(3, 2, 1)
    rows = Module("weight", {"weight": weight, "weight_scale_inv": scale}).in_pieces(50)
    assert rows[:, 0].tolist() == [s for a in (1, 3, 5) for s in [a] * 128 + [a + 1] * 2]


def test_modelopt_puts_ones_between_the_blocks_of_its_scale() -> None:
    weight = torch.ones(256, 256).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).reshape(2, 1, 2, 1)
    rows = Module("weight", {"weight": weight, "weight_scale": scale}).in_pieces(100)
    assert rows[::128, ::128].tolist() == [[1, 2], [3, 4]]
