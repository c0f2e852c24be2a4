"""Schemes to test with, and what the libraries say of them. Imports compressed-tensors only when asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ckptkit.ops import Context
from ckptkit.ops.select import select
from ops.runner import NAMES, run

# All of compressed-tensors' presets that need no calibration.
PRESETS = (
    "W4A16_ASYM", "W8A8", "INT8", "W4AFP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "MXFP4A16", "MXFP4", "MXFP8A16",
    "MXFP8", "W2A4", "W2A8", "W2A16", "W3A4", "W3A8", "W3A16", "W4A4", "W4A8", "W4A16", "W5A8", "W5A16", "W6A8",
    "W6A16", "W7A8", "W7A16", "W8A16",
)  # fmt: skip

EXPLICIT: dict[str, dict[str, Any]] = {
    "w8-channel": {"num_bits": 8, "strategy": "channel"},
    "w4-channel": {"num_bits": 4, "strategy": "channel"},
    "w4-g32": {"num_bits": 4, "group_size": 32},
    "w4-g64": {"num_bits": 4, "group_size": 64},
    "w8-tensor": {"num_bits": 8, "strategy": "tensor"},
    "w8-block": {"num_bits": 8, "strategy": "block", "block_structure": [64, 128]},
    "w8-f16-scales": {"num_bits": 8, "strategy": "channel", "scale_dtype": "torch.float16"},
    "w8-asym": {"num_bits": 8, "strategy": "channel", "symmetric": False},
    "w8-asym-g64": {"num_bits": 8, "group_size": 64, "symmetric": False},
    "w8-asym-tensor": {"num_bits": 8, "strategy": "tensor", "symmetric": False},
    "w3-asym-g128": {"num_bits": 3, "group_size": 128, "symmetric": False},
    "fp8-tensor": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "fp8-channel": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "fp8-g64": {"num_bits": 8, "type": "float", "group_size": 64},
    "fp8-block-64x32": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 32]},
    "fp8-block-100x100": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [100, 100]},
}


def scheme(name: str) -> Any:
    """A compressed-tensors QuantizationScheme: a preset, or weights only."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    if name in EXPLICIT:
        return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**EXPLICIT[name]))
    return preset_name_to_scheme(name, ["Linear"])


def library(name: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What llmcompressor's converter makes of whole weights, by module."""
    from compressed_tensors.quantization import QuantizationConfig
    from llmcompressor.entrypoints.model_free.converter import ModelFreePtqConverter

    config = QuantizationConfig(config_groups={"all": scheme(name)})
    given = {f"{module}.weight": weight.clone() for module, weight in weights.items()}
    made: dict[str, Tensor] = ModelFreePtqConverter(config).process(given)
    return made


def chosen(name: str, dtype: str, arithmetic: str = "compat") -> tuple[str, dict[str, Any]]:
    """The operation and arguments for a scheme, by the format that compressed-tensors infers."""
    import torch
    from compressed_tensors.compressors.format import infer_module_format

    wanted = scheme(name)
    form = infer_module_format(torch.nn.Linear, wanted).value
    return select(wanted.weights.model_dump(mode="json"), form, dtype, arithmetic)


def ours(
    name: str, weights: Mapping[str, Tensor], budget: int = 1 << 16, context: Context | None = None
) -> dict[str, Tensor]:
    """What this project makes of the same weights, chunk by chunk."""
    id, args = chosen(name, NAMES[next(iter(weights.values())).dtype])
    inputs = {f"{module}.weight": weight for module, weight in weights.items()}
    return run(id, {**args, "modules": list(weights)}, inputs, budget, context)


def differing(made: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """Names whose tensors are not equal in dtype, shape and bytes, the missing and the surplus included."""
    return sorted(name for name in made.keys() | wanted.keys() if not same(made.get(name), wanted.get(name)))


def same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bytes_of(a) == bytes_of(b)


def bytes_of(tensor: Tensor) -> bytes:
    import torch

    return tensor.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).numpy().tobytes()
