"""Where real engines and SmolLM2 lie."""

from __future__ import annotations

import os
from pathlib import Path

CACHE = Path(__file__).parents[2] / ".cache"
ENGINES = Path(os.environ.get("CKPTKIT_ENGINES", CACHE / "engines"))
SMOLLM2 = Path(os.environ.get("CKPTKIT_SMOLLM2", CACHE / "smollm2-135m-bf16"))
VLLM = ENGINES / "vllm" / "bin" / "python"
LLAMA = ENGINES / "llama" / "bin" / "llama-server"


def gguf() -> Path | None:
    """The GGUF file that SmolLM2's checkpoint was made of, if it is kept: beside it, or with the engines."""
    return next(iter([*SMOLLM2.glob("*.gguf"), *ENGINES.glob("*.gguf")]), None)
