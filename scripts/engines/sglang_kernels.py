"""SGLang's Marlin kernel, compiled for an H200 where nvcc 13 is, so that no server there waits for it:

    PYTHONPATH=BUNDLE/site TVM_FFI_CACHE_DIR=BUNDLE/kernels python3.12 scripts/engines/sglang_kernels.py

BUNDLE is FOLDER/sglang of bundle.sh, and is packed again afterwards. It takes four minutes of a core, and no GPU; any
torch will do. Servers find the kernel by the same TVM_FFI_CACHE_DIR.
"""

from __future__ import annotations

import torch
from sglang.kernels.jit.utils import override_jit_cuda_arch
from sglang.kernels.ops.quantization.gptq_marlin import _jit_gptq_marlin_module

if __name__ == "__main__":
    with override_jit_cuda_arch(9, 0):
        print(_jit_gptq_marlin_module(torch.bfloat16))
