"""The default engine on a real model: SmolLM2 and its packed-head result decode the same, and nearly as probably.

``make test`` makes the checkpoint; without it this is skipped. tests/serving/test_smollm2.py has what must fail.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptkit.errors import OK

from .conftest import Result, Serve

pytestmark = pytest.mark.timeout(900)


def test_a_result_is_equal_to_its_source_within_tolerance(folder: Path, result: Result, serve: Serve) -> None:
    source = folder / "bf16"
    code, ids, figures = serve(source, result("w8"), "--against", source)
    assert (code, ids) == (OK, set())
    bf16, w8 = figures["cells"]
    assert bf16["source"]["mean"] < 1e-5
    assert w8["stored"]["mean"] < 0.02  # the engine computes what is stored,
    assert 0.001 < w8["source"]["mean"] < 0.15  # which is another thing than the source, and no more than its format
    assert w8["equal"] == [3, 3]
