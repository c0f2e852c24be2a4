"""``--backend llmcompressor``: a step's tensors, whole, made by that library's model-free converter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import fail
from ..files.header import Spec
from . import Args, Block, Context, NonFinite

if TYPE_CHECKING:
    import numpy as np

# The converter knows a fused set by its modules' names, so a set of any other names is called one of these.
_NAMES = {
    1: ("proj",),
    2: ("mlp.gate_proj", "mlp.up_proj"),
    3: ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
}


def make_whole(
    blocks: Sequence[Block], outputs: Sequence[Spec], args: Args, context: Context
) -> list[np.ndarray[Any, Any]]:
    """The bytes of each of a quantizing step's ``outputs``, whole. ``blocks`` are all of its inputs, whole.

    Raises UserError (``usage.backend``) where llmcompressor is not installed, and NonFinite.
    """
    converter = _converter(args)
    from .kernels.arrays import largest, matrix, raw

    weights = [matrix(block, context.device, _columns(args, index)) for index, block in enumerate(blocks)]
    for index, weight in enumerate(weights):
        if context.nonfinite_error and len(weight):
            try:
                largest(weight)
            except NonFinite as error:
                raise NonFinite(index, error.what) from None
    names = _NAMES[len(weights)]
    made = converter.process({f"{name}.weight": weight for name, weight in zip(names, weights, strict=True)})
    known = dict(zip(args["modules"], names, strict=False))
    return [raw(made[f"{known[module]}.{suffix}"]) for module, _, suffix in (o.name.rpartition(".") for o in outputs)]


def _columns(args: Args, index: int) -> slice | None:
    if "columns" not in args:
        return None
    start, step, count = (args["columns"][index][key] for key in ("start", "step", "count"))
    return slice(start, start + count * step, step)


def _converter(args: Args) -> Any:
    try:
        from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
        from llmcompressor.entrypoints.model_free.converter import ModelFreePtqConverter
    except ImportError as error:
        message = f"--backend llmcompressor needs that library, which cannot be imported: {error}"
        raise fail("usage.backend", message, hint="pip install 'ckptkit[llmcompressor]'") from None
    weights = QuantizationArgs(**args["weights"])
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format=args["format"])
    return ModelFreePtqConverter(QuantizationConfig(config_groups={"all": scheme}))
