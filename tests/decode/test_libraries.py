"""The samples of the formats, read by libraries: transformers, compressed-tensors and auto-round's GPTQ and AWQ modules."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from .memory import Module, tensor
from .samples import Sample, gptq, sample_of

pytest.importorskip("llmcompressor", reason="the libraries come with it")


def read(name: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A sample's tensors by their roles' names, and its values by the package, as the module's weight."""
    return of(sample_of(name))


def of(sample: Sample) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    found = Module(sample.last, sample.tensors, **sample.known)
    tensors = {part: tensor(stored) for part, stored in sample.tensors.items()}
    values = torch.from_numpy(np.array(found.rows()))
    stacks = found.weight.rows // found.weight.stack
    values = values.reshape(stacks, found.weight.stack, -1) if stacks > 1 else values
    return tensors, values.transpose(-1, -2) if found.weight.transposed else values


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, signs of zero included."""
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize(
    "name",
    ["DeepSeek-V4 expert", "FP8 blocks, whole", "MXFP8", "FP8 channel", "FP8 channel of a stack"],
)
def test_by_transformers_fp8(name: str) -> None:
    """Whole blocks only: the library refuses others."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    tensors, values = read(name)
    weight, scale = tensors.pop("weight"), next(iter(tensors.values()))
    scale = scale.reshape(*weight.shape[:-1], 1) if "channel" in name else scale
    assert same(Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32), values)
    assert same(Fp8Dequantize(None)._dequantize_one(weight, scale, torch.bfloat16), values.bfloat16())


def test_gpt_oss_by_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors, values = read("gpt-oss")
    assert same(convert_moe_packed_tensors(**tensors, dtype=torch.bfloat16), values.bfloat16())


@pytest.mark.parametrize("name", ["FP8 blocks, F32, inverse", "FP8 blocks of 128, BF16", "FP8 blocks, one row"])
def test_cut_blocks_by_compressed_tensors(name: str) -> None:
    from compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer import FP8BlockDequantizer

    tensors, values = read(name)
    weight, scale = tensors.pop("weight"), next(iter(tensors.values()))
    library = FP8BlockDequantizer(weight_block_size=sample_of(name).known["block"], dtype=torch.float32)
    assert same(library._create_dequantized_weight(weight, scale.float()), values)


def test_nvfp4_by_compressed_tensors() -> None:
    from compressed_tensors.compressors import NVFP4PackedCompressor
    from compressed_tensors.quantization.quant_scheme import NVFP4, QuantizationScheme

    tensors, values = read("NVFP4 of compressed-tensors")
    found = NVFP4PackedCompressor.decompress(tensors, QuantizationScheme(targets=[], **NVFP4))
    assert same(found["weight"], values.bfloat16())


@pytest.mark.parametrize("order", ["", "mixed"])
@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_by_auto_round(bits: int, version: str, order: str) -> None:
    """The modules that auto-round runs GPTQ weights with: what they make of one row of the unit matrix after another."""
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    sample = gptq(bits, version, order)
    tensors, values = of(sample)
    library = (qlinear_torch_zp if version == "v1" else qlinear_torch).QuantLinear
    module = library(bits, 32, sample.rows, sample.cols, bias=False, g_idx=bool(order))
    module.load_state_dict(tensors)
    assert same(module(torch.eye(sample.rows, dtype=torch.float16)).T, values.half())


def test_awq_by_auto_round() -> None:
    from auto_round.export.export_to_awq.utils import dequantize_gemm

    tensors, values = read("AWQ")
    assert same(dequantize_gemm(tensors["qweight"], tensors["qzeros"], tensors["scales"], 4, 16).T, values.half())


def test_awq_as_compressed_tensors_converts_it() -> None:
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    tensors, values = read("AWQ")
    converted = AutoAWQConverter(group_size=16).process({f"m.{name}": part for name, part in tensors.items()})
    parts = {name.removeprefix("m."): part for name, part in converted.items()}
    cols = int(parts.pop("weight_shape")[1])
    assert np.array_equal(Module("weight_packed", parts, bits=4, cols=cols).rows(), values.numpy())
