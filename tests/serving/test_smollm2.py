"""The proof that serving proves something: what ckptkit makes of SmolLM2 passes, and what is broken fails.

``pytest -m engine``. ``demo/source.py`` makes the checkpoint; where it lies elsewhere than in ``.cache``,
``CKPTKIT_SMOLLM2`` says it. Without it these tests are skipped.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckptkit.errors import FOUND, OK

from .conftest import Result, Serve
from .variants import BROKEN, changed

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]


def test_a_body_of_four_bits(result: Result, golden: Path, serve: Serve) -> None:
    code, ids, figures = serve(result("w4"), "--golden", golden)
    assert (code, ids) == (OK, set())
    assert figures["cells"][0]["stored"]["mean"] < 0.02


@pytest.mark.parametrize("static", [True, False], ids=["static", "no-static"])
@pytest.mark.parametrize("name", BROKEN)
def test_broken_ones_fail(result: Result, golden: Path, tmp_path: Path, serve: Serve, name: str, static: bool) -> None:
    made_of, change, wanted = BROKEN[name]
    broken = changed(result(made_of), tmp_path / name, change)
    how = () if static else ("--no-static",)
    code, ids, figures = serve(broken, "--golden", golden, *how)
    assert code == FOUND
    assert {id for id in ids if id.startswith("serve.")} == wanted
    assert figures["cells"][0]["verdict"] == "FAIL"
    shutil.rmtree(broken)


def test_a_missing_layer_leaves_greedy_text_as_it_is(
    result: Result, golden: Path, tmp_path: Path, serve: Serve
) -> None:
    """Why equal text proves nothing: only logprobs show it."""
    made_of, change, _ = BROKEN["without-a-layer"]
    broken = changed(result(made_of), tmp_path / "broken", change)
    _, ids, figures = serve(broken, "--golden", golden, "--no-static")
    assert figures["cells"][0]["equal"] == [3, 3]
    assert "serve.tolerance" in ids


@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_speculation(folder: Path, golden: Path, serve: Serve, method: str) -> None:
    """Text that repeats itself, so that looking n-grams up helps; a draft that is the model itself."""
    model = folder / "bf16"
    draft = ("--draft", f"draft={model}") if method == "draft" else ()
    how = ("--speculative", method, *draft, "--min-accept-length", "1.01")
    code, _, figures = serve(model, "--golden", golden, *how, tokens=24)
    assert code == OK
    plain, speculated = figures["cells"]
    assert speculated["equal"] == [3, 3]
    assert plain["speculated"] is None
    assert speculated["speculated"]["accept_length"] > (2.5 if method == "draft" else 1.0)
