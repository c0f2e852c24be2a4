"""Every defect gives the findings that it must, and no other; a flipped bit under recorded digests gives one."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from ckptkit.checks import Level, Subject, pages, run
from ckptkit.errors import Finding
from ckptkit.files.checkpoint import scan
from ckptkit.files.source import open_source
from corrupt.broken_config import CONFIG, NAMES
from corrupt.broken_files import CONTAINER, INDEXES, SIDECARS
from corrupt.broken_quantization import DECLARED, OTHERS, PARTS
from corrupt.broken_values import FLIPPED, RECORDED, VALUES
from corrupt.defects import Defect
from corrupt.goods import GOOD

DEFECTS = [*CONTAINER, *INDEXES, *SIDECARS, *CONFIG, *NAMES, *PARTS, *DECLARED, *OTHERS, *VALUES, *RECORDED, *FLIPPED]


@pytest.fixture(scope="module")
def goods(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all good checkpoints."""
    root = tmp_path_factory.mktemp("goods")
    for name, make in GOOD.items():
        make(root / name)
    return root


def broken(defect: Defect, goods: Path, root: Path) -> list[Finding]:
    """What is found on a good checkpoint after the damage."""
    for name in (defect.good, f"{defect.good}-source"):
        if (goods / name).exists():
            shutil.copytree(goods / name, root / name)
    folder = root / defect.good
    defect.damage(folder)
    with open_source(str(folder)) as source:
        checkpoint, findings = scan(source)
        return run(Subject(checkpoint, tuple(findings)), defect.level).findings


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_exactly_the_expected_findings(defect: Defect, goods: Path, tmp_path: Path) -> None:
    findings = broken(defect, goods, tmp_path)
    assert {finding.id for finding in findings} == defect.ids
    for finding in findings:
        assert "\n" not in finding.message
        assert finding.file or finding.tensor
        assert finding.hint


@pytest.mark.parametrize("defect", FLIPPED, ids=lambda defect: defect.name)
def test_one_flipped_bit_is_one_finding(defect: Defect, goods: Path, tmp_path: Path) -> None:
    (finding,) = broken(defect, goods, tmp_path)
    assert (finding.id, finding.severity) == ("data.digest", "error")
    assert finding.tensor is not None
    assert f"{finding.tensor} of" in defect.name


def test_every_check_has_a_defect() -> None:
    """Lint concerns engines, not defects; others need a recipe, a source, a statement or an order: all have tests of their own."""
    found = frozenset().union(*(defect.ids for defect in DEFECTS))
    wanted = {page.id for page in pages().values() if page.level <= Level.DATA}
    elsewhere = {id for id in wanted - found if not id.startswith(("lint.", "provenance."))}
    assert elsewhere == {"config.recipe", "config.differs", "vocab.order-file"}


def test_defects_are_many_and_have_names_of_their_own() -> None:
    assert len(DEFECTS) >= 70
    assert max(Counter(defect.name for defect in DEFECTS).values()) == 1
    assert {defect.good for defect in DEFECTS} <= GOOD.keys()
