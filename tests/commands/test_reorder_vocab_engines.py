"""A result of ``ckptkit reorder-vocab`` before a real engine: it must not start."""

from __future__ import annotations

import subprocess

import pytest
from serving.places import VLLM

from ckptkit.cli import main
from tests.make import checkpoint, llama, llama_config

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LOAD = """
import sys
from vllm import LLM
LLM(sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, load_format="safetensors")
print("LOADED")
"""


@pytest.mark.skipif(not VLLM.exists(), reason="no vLLM")
def test_vllm_loads_the_source_and_refuses_the_result(tmp_path):
    src, out = checkpoint(tmp_path / "src", llama(), llama_config()), tmp_path / "out"
    assert main(["reorder-vocab", str(src), str(out), "--draft-vocab", "prefix:64", "--slices", "2", "-q"]) == 0
    for folder, loads in ((src, True), (out, False)):
        command = ["env", "VLLM_CPU_KVCACHE_SPACE=1", str(VLLM), "-c", LOAD, str(folder)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert ("LOADED" in ended.stdout) == loads, ended.stderr[-2000:]
        assert (ended.returncode == 0) == loads
    assert "ckptkit_vocab_order" in ended.stderr
