"""What in a declaration makes an engine refuse it before a weight is read: unknown methods, fields that are missing.

What compressed-tensors refuses is in :mod:`.group_syntax`.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..declarations import AWQ, FP8, GPTQ, MODELOPT
from ..errors import Finding
from ..files.checkpoint import CONFIG
from ..layout_config import NO_METHOD
from ..naming.patterns import nearest
from .declarations import Declaration

VERSION = "config.quant-version"

# quant_method of transformers 5.17, vLLM 0.26-0.33 and SGLang 0.5.17-0.5.23.
_METHODS = frozenset({
    "aqlm", "auto-round", "auto-round-int8", "awq", "awq_marlin", "bitblas", "bitnet", "bitsandbytes",
    "blockwise_int8", "compressed-tensors", "deepseek_v4_fp8", "eetq", "experts_int8", "fbgemm_fp8", "fouroversix",
    "fp8", "fp_quant", "gemma", "gguf", "gpt_oss_mxfp4", "gptq", "gptq_marlin", "higgs", "hqq", "humming", "inc",
    "intel/auto-round", "marlin", "metal", "minimax_m3_nvfp4", "mlx_q4", "mlx_q8", "modelopt", "modelopt_fp4",
    "modelopt_fp8", "modelopt_mixed", "modelopt_mxfp8", "modelslim", "moe_wna16", "mxfp4", "mxfp8", "mxfp_w4a8",
    "nvfp4", "petit_nvfp4", "quanto", "quark", "quark_int4fp8_moe", "quark_mxfp4", "sinq", "spqr", "torchao", "vptq",
    "w4afp8", "w8a8_fp8", "w8a8_int8",
})  # fmt: skip
# ModelOpt's and TensorRT-LLM's algorithms.
_ALGORITHMS = frozenset({
    "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_BLOCK_SCALES", "NVFP4", "NVFP4_AWQ", "NVFP4_SVDQUANT",
    "W4A16_NVFP4", "W4A8_NVFP4_FP8", "MXFP4", "MXFP8", "W4A16_MXFP4", "W4A8_MXFP4_FP8", "W4A8_MXFP4_MXFP8",
    "W4A16_AWQ", "W4A8_AWQ", "W4A16", "W8A16", "W4A16_GPTQ", "W8A16_GPTQ", "W8A8_SQ_PER_CHANNEL",
    "W8A8_SQ_PER_TENSOR_PLUGIN", "INT8_SQ", "INT8_WO", "MIXED_PRECISION",
})  # fmt: skip
# What vLLM demands of a table: for each field the names that it may have.
_FIELDS = {
    GPTQ: (("bits",), ("group_size",), ("desc_act",), ("sym",)),
    AWQ: (("bits", "w_bit"), ("group_size", "q_group_size"), ("zero_point",)),
    MODELOPT: (("quant_algo",),),
    FP8: (("activation_scheme",),),
}


def refused(declaration: Declaration) -> Iterator[Finding]:
    """Findings (``config.quant-version``) about a declaration's own fields."""
    table, file = declaration.table, declaration.file
    method = table.get("quant_method")
    if file == CONFIG and not method and not (table.get("load_in_4bit") or table.get("load_in_8bit")):
        yield _finding(file, "has no quant_method", f"add quant_method: {declaration.method}")
    elif method and str(method).lower() not in _METHODS and not str(method).startswith(NO_METHOD):
        near = nearest(str(method), _METHODS)
        hint = f"is {near!r} meant?" if near else "does the engine know it?"
        yield _finding(file, f"has quant_method {method!r}, which no engine known here has", hint, "warning")
    for names in _FIELDS.get(declaration.method, ()):
        if all(table.get(name) is None for name in names):
            yield _finding(file, f"has no {names[0]}, which vLLM demands of {declaration.method}", f"add {names[0]}")
    algorithm = table.get("quant_algo")
    if declaration.method == MODELOPT and algorithm is not None and str(algorithm).upper() not in _ALGORITHMS:
        near = nearest(str(algorithm).upper(), _ALGORITHMS)
        yield _finding(
            file, f"has quant_algo {algorithm!r}, which there is not", f"is {near!r} meant?" if near else None
        )
    scheme = table.get("activation_scheme")
    if declaration.method == FP8 and scheme not in (None, "dynamic", "static"):
        yield _finding(file, f"has activation_scheme {scheme!r}", "set activation_scheme to 'dynamic' or 'static'")


def _finding(file: str, what: str, hint: str | None, severity: str = "error") -> Finding:
    return Finding(VERSION, f"{file}: the quantization table {what}", file=file, hint=hint, severity=severity)
