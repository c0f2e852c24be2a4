"""The whole check on vLLM and llama-server for CPUs, with SmolLM2: ``pytest -m engine``. What is not there is skipped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptkit.errors import FOUND, OK

from .conftest import Result, Serve
from .places import LLAMA, VLLM, gguf
from .variants import changed, swap_nibbles

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

ON_VLLM = (
    "--engine", "vllm", "--engine-python", VLLM, "--engine-arg=--dtype=bfloat16", "--engine-arg=--enforce-eager",
    "--engine-arg=--max-model-len=1024", "--engine-arg=--max-num-seqs=4",
)  # fmt: skip
ON_LLAMA = (
    "--engine", "llama-server", "--engine-cmd", LLAMA,
    "--engine-arg=-c", "--engine-arg=1024", "--engine-arg=-t", f"--engine-arg={min(os.cpu_count() or 1, 4)}",
)  # fmt: skip

needs_vllm = pytest.mark.skipif(not VLLM.exists(), reason="no vLLM: scripts/engines/vllm_cpu.sh")
needs_llama = pytest.mark.skipif(
    not (LLAMA.exists() and gguf()), reason="no llama-server, or no GGUF: scripts/engines/llama_server.sh"
)


@needs_vllm
def test_vllm_serves_a_body_of_four_bits_as_it_is_stored(
    folder: Path, result: Result, golden: Path, serve: Serve
) -> None:
    """And drafts with the source, which mostly says the same."""
    draft = ("--speculative", "draft", "--draft", f"draft={folder / 'bf16'}")
    code, ids, figures = serve(result("w4-body"), "--golden", golden, *ON_VLLM, *draft, tokens=24)
    assert (code, ids) == (OK, set())
    plain, drafted = figures["cells"]
    assert plain["stored"]["mean"] < 0.15  # bfloat16 puts SmolLM2 itself 0.07 off
    assert plain["source"]["mean"] > 0.3
    assert drafted["speculated"]["accept_length"] > 1.5
    assert plain["kernels"]


@needs_vllm
def test_vllm_refuses_a_head_of_eight_bits(result: Result, golden: Path, serve: Serve) -> None:
    code, ids, figures = serve(result("w8"), "--golden", golden, *ON_VLLM, "--no-static")
    assert (code, ids) == (FOUND, {"serve.unsupported"})
    assert figures["cells"][0]["verdict"] == "FAIL"


@needs_vllm
def test_vllm_with_nibbles_the_wrong_way_round(result: Result, golden: Path, tmp_path: Path, serve: Serve) -> None:
    broken = changed(result("w4-body"), tmp_path / "broken", swap_nibbles)
    code, ids, figures = serve(broken, "--golden", golden, *ON_VLLM, "--no-static")
    assert code == FOUND
    assert "serve.tolerance" in ids
    assert figures["cells"][0]["source"]["mean"] > 5


@needs_llama
def test_llama_server_serves_a_gguf_as_it_is_stored(folder: Path, golden: Path, serve: Serve) -> None:
    """Against its own values as transformers reads them, and those of the checkpoint that was made of it."""
    model = gguf()
    draft = ("--speculative", "draft", "--draft", f"draft={model}")
    code, ids, figures = serve(model or "", "--golden", golden, *ON_LLAMA, *draft, tokens=24)
    assert (code, ids) == (OK, set())
    plain, drafted = figures["cells"]
    assert plain["stored"]["positions"] > 20
    assert plain["not_judged"] == {}
    assert drafted["speculated"]["accept_length"] > 3.0
