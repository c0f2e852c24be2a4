"""What tests on real engines share: SmolLM2, what ckptkit makes of it, and where engines are (``pytest -m engine``).

``demo/source.py`` makes the checkpoint, ``scripts/engines`` the engines; where they lie elsewhere than in ``.cache``,
``CKPTKIT_SMOLLM2`` and ``CKPTKIT_ENGINES`` say it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptkit.cli import main
from ckptkit.errors import OK

from .places import SMOLLM2
from .variants import changed, untie

PROMPTS = [
    {"name": "count", "text": "1, 2, 3, 4, 5, 6,"},
    {"name": "capital", "text": "The capital of France is"},
    {"name": "question", "messages": [{"role": "user", "content": "How many days are in a week?"}]},
]
RECIPES = {
    "w8": ["--recipe", "lm_head-w8a16"],
    # 576 columns are no multiple of the recipes' 128.
    "w4": ["--recipe", "w4a16-lm_head-w8a16", "--set", "groups.body.group_size=64"],
    "w4-body": ["--recipe", "w4a16", "--set", "groups.body.group_size=64"],
}
Result = Callable[[str], Path]
# Arguments of `verify --serve`, to exit code, ids of errors, and the figures of serving.
Serve = Callable[..., tuple[int, set[str], dict[str, Any]]]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The untied source ``bf16`` and ``prompts.jsonl``, and the results that tests ask for; at most 1.5 GB, gone afterwards."""
    if not SMOLLM2.is_dir():
        pytest.skip(f"no {SMOLLM2}: python demo/source.py {SMOLLM2}")
    folder = tmp_path_factory.mktemp("smollm2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # processes that spin for each other's processors are slower than one
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        changed(SMOLLM2, folder / "bf16", untie)
        (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(prompt)}\n" for prompt in PROMPTS), "utf-8")
        yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def result(folder: Path) -> Result:
    """What a recipe makes of the source, made when it is asked for."""

    def made(name: str) -> Path:
        if not (folder / name).exists():
            assert main(["quantize", str(folder / "bf16"), str(folder / name), *RECIPES[name]]) == OK
        return folder / name

    return made


@pytest.fixture(scope="session")
def golden(folder: Path) -> Path:
    """What the source decodes, recorded while it is served itself."""
    path = folder / "golden.json"
    few = ("--prompts", str(folder / "prompts.jsonl"), "--max-tokens", "6")
    assert main(["verify", str(folder / "bf16"), "--serve", *few, "--record", str(path)]) == OK
    return path


@pytest.fixture
def serve(folder: Path, capsys: pytest.CaptureFixture[str]) -> Serve:
    def run(*arguments: str | Path, tokens: int = 6) -> tuple[int, set[str], dict[str, Any]]:
        capsys.readouterr()
        few = ("--prompts", str(folder / "prompts.jsonl"), "--max-tokens", str(tokens))
        code = main(["verify", *map(str, arguments), "--serve", *few, "--json"])
        document = json.loads(capsys.readouterr().out)
        ids = {finding["id"] for finding in document["findings"] if finding["severity"] == "error"}
        return code, ids, document["figures"]["serve"]

    return run
