"""The reference: llmcompressor's converter on whole tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def convert(weights: Mapping[str, Tensor], scheme: Any) -> dict[str, Tensor]:
    """What model_free_ptq makes of ``weights`` (by module name) under a QuantizationScheme."""
    from compressed_tensors.quantization import QuantizationConfig
    from llmcompressor.entrypoints.model_free.converter import ModelFreePtqConverter

    scheme = scheme.model_copy(update={"targets": ["Linear"]}, deep=True)
    config = QuantizationConfig(config_groups={"all": scheme})
    return ModelFreePtqConverter(config).process({f"{name}.weight": weight.clone() for name, weight in weights.items()})
