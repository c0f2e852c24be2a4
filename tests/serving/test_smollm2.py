"""The proof that serving proves something: SmolLM2 and what ckptkit makes of it pass, and what is broken fails.

``pytest -m engine``. ``demo/source.py`` makes the checkpoint; where it lies elsewhere than in ``.cache``,
``CKPTKIT_SMOLLM2`` says it. Without it these tests are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptkit.cli import main
from ckptkit.errors import FOUND, OK

from .variants import BROKEN, changed, untie

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]
SMOLLM2 = Path(os.environ.get("CKPTKIT_SMOLLM2", Path(__file__).parents[2] / ".cache" / "smollm2-135m-bf16"))

PROMPTS = [
    {"name": "count", "text": "1, 2, 3, 4, 5, 6,"},
    {"name": "capital", "text": "The capital of France is"},
    {"name": "question", "messages": [{"role": "user", "content": "How many days are in a week?"}]},
]
RECIPES = {
    "w8": ["--recipe", "lm_head-w8a16"],
    # 576 columns are no multiple of the recipe's 128.
    "w4": ["--recipe", "w4a16-lm_head-w8a16", "--set", "groups.body.group_size=64"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The untied source ``bf16``, its results, and golden files of it and of ``w8``; 1.5 GB, gone afterwards."""
    if not SMOLLM2.is_dir():
        pytest.skip(f"no {SMOLLM2}: python demo/source.py {SMOLLM2}")
    folder = tmp_path_factory.mktemp("smollm2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # processes that spin for each other's processors are slower than one
        source = changed(SMOLLM2, folder / "bf16", untie)
        for name, options in RECIPES.items():
            assert main(["quantize", str(source), str(folder / name), *options]) == OK
        (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(prompt)}\n" for prompt in PROMPTS), "utf-8")
        yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def golden(folder: Path) -> Path:
    """What the source decodes, recorded while it is served itself."""
    path = folder / "golden.json"
    assert main(["verify", str(folder / "bf16"), "--serve", *_few(folder), "--record", str(path)]) == OK
    return path


def _few(folder: Path) -> list[str]:
    return ["--prompts", str(folder / "prompts.jsonl"), "--max-tokens", "6"]


def serve(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> tuple[int, set[str], dict[str, Any]]:
    """Exit code, ids of errors, and the figures of serving."""
    capsys.readouterr()
    code = main(["verify", *arguments, "--serve", *_few(folder), "--json"])
    document = json.loads(capsys.readouterr().out)
    ids = {finding["id"] for finding in document["findings"] if finding["severity"] == "error"}
    return code, ids, document["figures"]["serve"]


def test_a_result_is_equal_to_its_source_within_tolerance(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(folder / "bf16")
    code, ids, figures = serve(capsys, folder, source, str(folder / "w8"), "--against", source)
    assert (code, ids) == (OK, set())
    bf16, w8 = figures["cells"]
    assert bf16["source"]["mean"] < 1e-5
    assert w8["stored"]["mean"] < 0.02  # the engine computes what is stored,
    assert 0.001 < w8["source"]["mean"] < 0.15  # which is another thing than the source, and no more than its format
    assert w8["equal"] == [3, 3]


def test_a_body_of_four_bits(folder: Path, golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, ids, figures = serve(capsys, folder, str(folder / "w4"), "--golden", str(golden))
    assert (code, ids) == (OK, set())
    assert figures["cells"][0]["stored"]["mean"] < 0.02


@pytest.mark.parametrize("static", [True, False], ids=["static", "no-static"])
@pytest.mark.parametrize("name", BROKEN)
def test_broken_ones_fail(
    folder: Path, golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, static: bool
) -> None:
    made_of, change, wanted = BROKEN[name]
    broken = changed(folder / made_of, tmp_path / name, change)
    how = () if static else ("--no-static",)
    code, ids, figures = serve(capsys, folder, str(broken), "--golden", str(golden), *how)
    assert code == FOUND
    assert {id for id in ids if id.startswith("serve.")} == wanted
    assert figures["cells"][0]["verdict"] == "FAIL"
    shutil.rmtree(broken)


def test_a_missing_layer_leaves_greedy_text_as_it_is(
    folder: Path, golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Why equal text proves nothing: only logprobs show it."""
    made_of, change, _ = BROKEN["without-a-layer"]
    broken = changed(folder / made_of, tmp_path / "broken", change)
    _, ids, figures = serve(capsys, folder, str(broken), "--golden", str(golden), "--no-static")
    assert figures["cells"][0]["equal"] == [3, 3]
    assert "serve.tolerance" in ids


@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_speculation(folder: Path, golden: Path, capsys: pytest.CaptureFixture[str], method: str) -> None:
    """Text that repeats itself, so that looking n-grams up helps; a draft that is the model itself."""
    draft = ("--draft", f"draft={folder / 'bf16'}") if method == "draft" else ()
    arguments = (str(folder / "bf16"), "--golden", str(golden), "--speculative", method, *draft, "--max-tokens", "24")
    capsys.readouterr()
    code = main(
        [
            "verify",
            *arguments,
            "--min-accept-length",
            "1.01",
            "--serve",
            "--prompts",
            str(folder / "prompts.jsonl"),
            "--json",
        ]
    )
    figures = json.loads(capsys.readouterr().out)["figures"]["serve"]
    assert code == OK
    plain, speculated = figures["cells"]
    assert speculated["equal"] == [3, 3]
    assert plain["speculated"] is None
    assert speculated["speculated"]["accept_length"] > (2.5 if method == "draft" else 1.0)
