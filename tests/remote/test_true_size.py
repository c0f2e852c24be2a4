"""DeepSeek-V4-Flash-DSpark's headers over sparse files, 167 GB of them, behind a Hub: what looking and cutting out cost.

Names, dtypes, shapes and their order are those of the published checkpoint; the bytes are zeros. No sha256 is computed
of them: the server records a wrong one, which a range is not held against, and a whole shard would be.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from headers import materialize, specs
from told import Told

from ckptkit.remote import store

from .conftest import Serve
from .hub_server import Repo

FIXTURE = "deepseek-v4-flash-dspark"


@pytest.fixture
def flash(tmp_path: Path) -> Repo:
    folder = materialize(FIXTURE, tmp_path / "flash")
    return Repo(folder, sha256={path.name: "0" * 64 for path in folder.glob("*.safetensors")})


def header_bytes(folder: Path) -> int:
    """Bytes of all headers, with what is read beyond them: no less than the prefetch of each."""
    lengths = [8 + int.from_bytes(path.open("rb").read(8), "little") for path in folder.glob("*.safetensors")]
    return sum(max(length, store.PREFETCH) for length in lengths)


def test_a_167_gb_repository_is_looked_at_for_its_headers(serve: Serve, flash: Repo, told: Told) -> None:
    server = serve(flash)
    shards = [*flash.folder.glob("*.safetensors")]
    assert sum(path.stat().st_size for path in shards) > 160_000_000_000
    found = told("inspect", "org/model")
    assert found["total"]["tensors"] == len(specs(FIXTURE))
    index = (flash.folder / "model.safetensors.index.json").stat().st_size
    assert server.sent <= header_bytes(flash.folder) + index + 100_000
    told("extract-dspark", "org/model", "draft", "--dry-run")


@pytest.mark.slow
def test_a_draft_costs_its_own_bytes_and_the_headers(
    serve: Serve, flash: Repo, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "PREFETCH", 8)
    server = serve(flash)
    told("extract-dspark", "org/model", "draft")
    size = sum(path.stat().st_size for path in Path("draft").iterdir())
    fetched = json.loads((Path("draft") / "ckptkit.json").read_text())["fetched"]["bytes"]
    shutil.rmtree("draft")
    draft = sum(spec.nbytes for spec in specs(FIXTURE) if spec.name.startswith("mtp."))
    assert fetched == server.sent
    assert draft <= fetched <= draft + header_bytes(flash.folder) + 20_000_000
    assert size >= draft
