"""``dequantize@1``: against decoding a weight at once, with torch for the rounding, and against numbers worked out by hand."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make import checkpoint
from safetensors import safe_open

from ckptkit.files.header import Spec
from ckptkit.ops import Context, NonFinite, Overflow, operation, values
from ckptkit.ops.rounding import rounded
from ops.formats import FORMATS, Format, decoded
from ops.runner import DTYPES, run_bytes

KEEP = Context(nonfinite_error=False)
WORDS = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32}


def dequantized(
    format: Format, given: dict[Spec, bytes], dtype: str, budget: int = 1 << 20, context: Context = KEEP
) -> Any:
    """The bits of the output."""
    [(spec, made)] = run_bytes("dequantize@1", format.args(dtype), given, budget, context).items()
    assert spec == ("m.weight", dtype, format.shape)
    return np.frombuffer(made, WORDS[dtype]).reshape(format.shape)


def by_torch(x: Any, dtype: str) -> Any:
    """The bits of float32 ``x`` in ``dtype``."""
    word = torch.int32 if dtype == "F32" else torch.int16
    return torch.from_numpy(x).to(DTYPES[dtype]).view(word).numpy().view(WORDS[dtype])


@pytest.mark.parametrize("dtype", WORDS)
@pytest.mark.parametrize("name", FORMATS)
def test_values_are_those_decoded_at_once(name: str, dtype: str) -> None:
    given = FORMATS[name].made()
    wanted = by_torch(decoded(given, FORMATS[name]), dtype)
    for budget in (700, 20_000, 1 << 20):
        assert np.array_equal(dequantized(FORMATS[name], given, dtype, budget), wanted)


@pytest.mark.parametrize("name", FORMATS)
def test_tables_give_what_computing_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = FORMATS[name].made(1)
    with_tables = dequantized(FORMATS[name], given, "BF16")
    monkeypatch.setattr(values, "table", lambda *arguments: None)
    assert np.array_equal(dequantized(FORMATS[name], given, "BF16"), with_tables)


@pytest.mark.parametrize(
    "name", ["fp4", "nvfp4", "fp8 block", "fp8 block of exponents", "fp8 channel", "mxfp8", "int8"]
)
def test_the_common_formats_are_looked_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: Any) -> None:
        raise AssertionError("computed")

    given = FORMATS[name].made()
    monkeypatch.setattr(values, "_computed", never)
    dequantized(FORMATS[name], given, "BF16")


def test_bits_are_rounded_as_torch_does() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 200_000, dtype=np.uint32)
    halves = rng.integers(0, 1 << 16, 20_000, dtype=np.uint32) << 16 | 0x8000  # as near to one BF16 as to the next
    x = np.concatenate([bits, halves, halves << 3]).view(np.float32)
    for dtype in ("BF16", "F16"):
        wanted = by_torch(x, dtype)
        wanted[np.isnan(x)] = {"BF16": 0x7FC0, "F16": 0x7E00}[dtype]
        assert np.array_equal(rounded(x, dtype), wanted)


# --- worked out by hand ------------------------------------------------------------------------------------

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def test_every_code_of_fp4_under_every_scale() -> None:
    codes, scales = np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8)
    format = Format({"weight": ("I8", (256, 256)), "scale": ("F8_E8M0", (256, 16))}, (256, 512))
    given = {
        Spec("m.weight", "I8", (256, 256)): np.tile(codes, 256).tobytes(),
        Spec("m.scale", "F8_E8M0", (256, 16)): np.repeat(scales, 16).tobytes(),
    }
    found = dequantized(format, given, "BF16").reshape(256, 256, 2)
    for scale, code in product((0, 1, 2, 126, 127, 128, 251, 252, 253, 254, 255), range(256)):
        for place, nibble in enumerate((code & 15, code >> 4)):
            value = E2M1[nibble & 7] * 2.0 ** (scale - 127)
            wanted = 0x7FC0 if scale == 255 else bfloat16(value) | nibble >> 3 << 15
            assert found[scale, code, place] == wanted, (scale, code)


def bfloat16(value: float) -> int:
    """The bits of a number that is not negative and has at most two significant ones."""
    if value >= 2.0**128:
        return 0x7F80
    for exponent in range(255):
        step = 2.0 ** (max(exponent, 1) - 127 - 7)
        mantissa = value / step - (128 if exponent else 0)
        if 0 <= mantissa < 128:
            assert mantissa == int(mantissa)
            return exponent << 7 | int(mantissa)
    raise AssertionError(value)


def test_a_worked_example_of_fp4() -> None:
    """Bytes 10 32 54 ... with scale 2**-7: the low half comes first."""
    format = Format({"weight": ("I8", (1, 16)), "scale": ("F8_E8M0", (1, 1))}, (1, 32))
    codes = bytes.fromhex("1032547698BADCFE" + "2F" + "00" * 7)
    given = {Spec("m.weight", "I8", (1, 16)): codes, Spec("m.scale", "F8_E8M0", (1, 1)): bytes([120])}
    found = (dequantized(format, given, "BF16").astype(np.uint32) << 16).view(np.float32)[0]
    positive = [0, 0.00390625, 0.0078125, 0.01171875, 0.015625, 0.0234375, 0.03125, 0.046875]
    assert found[:18].tolist() == [*positive, *(-value for value in positive), -0.046875, 0.0078125]
    assert np.signbit(found[8])


def test_a_worked_example_of_fp8_blocks() -> None:
    """[130, 200] of 1.75 in blocks of 128 x 128, those at the edges cut short."""
    format = FORMATS["fp8 block of exponents"]
    weight, scale = format.made()
    given = {weight: bytes([0x3E]) * 26_000, scale: bytes([126, 128, 127, 125])}
    found = (dequantized(format, given, "BF16").astype(np.uint32) << 16).view(np.float32)
    assert (found[0, 0], found[0, 127], found[0, 128], found[127, 199]) == (0.875, 0.875, 3.5, 3.5)
    assert (found[128, 0], found[129, 127], found[128, 128], found[129, 199]) == (1.75, 1.75, 0.4375, 0.4375)


# --- what does not fit -------------------------------------------------------------------------------------


def changed(given: dict[Spec, bytes], role: str, at: int, value: bytes) -> dict[Spec, bytes]:
    return {
        spec: data[:at] + value + data[at + len(value) :] if spec.name == f"m.{role}" else data
        for spec, data in given.items()
    }


@pytest.mark.parametrize(
    ("name", "role", "at", "value", "index", "what"),
    [
        ("fp4", "scale", 60, b"\xff", 1, "NaN"),
        ("mxfp8", "weight_scale", 3, b"\xff", 1, "NaN"),
        ("nvfp4", "weight_scale", 5, b"\x7f", 1, "NaN"),
        ("nvfp4", "weight_global_scale", 0, np.float32(0).tobytes(), 2, "Inf"),
        ("nvfp4 of ModelOpt", "weight_scale_2", 0, np.float32("nan").tobytes(), 2, "NaN"),
        ("fp8 block", "weight_scale_inv", 4, np.float32("inf").tobytes(), 1, "Inf"),
        ("fp8 block", "weight", 50_000, b"\xff", 0, "NaN"),
        ("fp8 channel, a vector", "weight", 3_000, b"\x7c", 0, "Inf"),
        ("awq", "scales", 100, np.float16("nan").tobytes(), 1, "NaN"),
        ("gpt-oss", "scales", 200, b"\xff", 1, "NaN"),
    ],
)
def test_what_is_not_finite_is_refused_or_kept(
    name: str, role: str, at: int, value: bytes, index: int, what: str
) -> None:
    format = FORMATS[name]
    given = changed(format.made(), role, at, value)
    with pytest.raises(NonFinite) as error:
        dequantized(format, given, "BF16", 2_000, Context())
    assert (error.value.index, error.value.what) == (index, what)
    x = decoded(given, format)
    assert not np.isfinite(x).all()
    wanted = by_torch(x, "BF16").copy()
    wanted[np.isnan(x)] = 0x7FC0
    assert np.array_equal(dequantized(format, given, "BF16", 2_000), wanted)


@pytest.mark.parametrize(
    ("name", "role", "dtype", "value"),
    [
        ("fp4", "scale", "BF16", b"\xfd"),  # 2**126, times 4 or 6
        ("fp4", "scale", "F16", bytes([127 + 15])),
        ("fp8 block", "weight_scale_inv", "F16", np.float32(1000).tobytes()),
        ("fp8 channel", "weight_scale", "BF16", b"\x7f\x7f"),
        ("int4 group", "weight_scale", "F16", b"\x7f\x47"),
    ],
)
def test_what_is_too_large_is_refused_or_becomes_infinite(name: str, role: str, dtype: str, value: bytes) -> None:
    format = FORMATS[name]
    given = changed(format.made(), role, 0, value)
    with pytest.raises(Overflow):
        dequantized(format, given, dtype, 2_000, Context())
    x = decoded(given, format)
    assert not np.isnan(x).any()
    assert np.array_equal(dequantized(format, given, dtype, 2_000), by_torch(x, dtype))


def test_a_large_scale_over_small_codes_is_no_overflow() -> None:
    format = FORMATS["fp4"]
    weight, scale = format.made()
    given = {weight: bytes([0x2A]) * (37 * 48), scale: bytes([253]) * (37 * 3)}
    assert (dequantized(format, given, "BF16", context=Context()) & 0x7FFF == 253 << 7).all()


# --- what it costs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_a_chunk_is_bounded(name: str) -> None:
    """Read and made together stay near the budget, or are those of one row (of 32 columns, where read by columns)."""
    format, budget = FORMATS[name], 4_000
    args, inputs = format.args(), list(format.made())
    least = 2 * max(format.shape[-1], 32 * format.shape[-1] if "scales" in format.parts else 0)
    for chunk in operation("dequantize@1").chunks(inputs, args, budget):
        read = 0
        for part in chunk.reads:
            spec = inputs[part.tensor]
            columns = spec.shape[-1] if spec.shape else 1
            share = ((columns if part.col_stop is None else part.col_stop) - (part.col or 0)) / columns
            rows = int(np.prod(spec.shape[:-1]))
            read += spec.nbytes * (part.row_stop - part.row) / rows * share
        assert read <= 2 * max(budget, least)


def test_a_run_imports_no_torch(tmp_path: Path) -> None:
    tensors = {"lm_head.weight": torch.ones(64, 64, dtype=torch.bfloat16)}
    for name in ("q_proj", "o_proj"):
        tensors[f"model.layers.0.self_attn.{name}.weight"] = torch.ones(128, 64).to(torch.float8_e4m3fn)
        tensors[f"model.layers.0.self_attn.{name}.weight_scale_inv"] = torch.full((1, 1), 0.5)
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    checkpoint(tmp_path / "source", tensors, {"model_type": "llama", "quantization_config": quantization})
    code = "import sys; from ckptkit.cli import main; assert main(sys.argv[1:]) == 0; assert 'torch' not in sys.modules"
    command = ["dequantize", str(tmp_path / "source"), str(tmp_path / "out")]
    subprocess.run([sys.executable, "-c", code, *command], check=True, timeout=60)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.get_tensor("model.layers.0.self_attn.q_proj.weight").unique().tolist() == [0.5]
