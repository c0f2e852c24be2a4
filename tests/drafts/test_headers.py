"""The DeepSeek-V4 header fixtures against what is published of the checkpoints: parameters, elements, bytes, counts."""

from __future__ import annotations

from collections import Counter
from math import prod

import pytest
from headers import specs

from ckptkit.files.header import Spec

FLASH, FLASH_DSPARK = "deepseek-v4-flash", "deepseek-v4-flash-dspark"
PRO, PRO_DSPARK = "deepseek-v4-pro", "deepseek-v4-pro-dspark"


def parameters(spec: Spec) -> int:
    """Numbers of the model: an I8 element is two FP4 codes, a scale (all of them E8M0) is none."""
    return 0 if spec.dtype == "F8_E8M0" else prod(spec.shape) * (2 if spec.dtype == "I8" else 1)


def draft(fixture: str, stage: int | str = "") -> list[Spec]:
    return [spec for spec in specs(fixture) if spec.name.startswith(f"mtp.{stage}")]


@pytest.mark.parametrize(
    ("fixture", "published"),
    [
        (FLASH, 290_944_616_402),
        (FLASH_DSPARK, 304_180_418_494),
        (PRO, 1_598_839_674_782),
        (PRO_DSPARK, 1_650_497_936_906),
    ],
)
def test_parameters(fixture: str, published: int) -> None:
    assert sum(map(parameters, specs(fixture))) == published


def test_elements_as_stored() -> None:
    assert sum(prod(spec.shape) for spec in specs(FLASH_DSPARK)) == 165_265_454_782


@pytest.mark.parametrize(("fixture", "stored"), [(FLASH, 159_609_485_896), (FLASH_DSPARK, 166_878_536_440)])
def test_bytes_as_stored(fixture: str, stored: int) -> None:
    assert sum(spec.nbytes for spec in specs(fixture)) == stored


@pytest.mark.parametrize(
    ("stage", "tensors", "stored"), [(0, 1568, 3_610_287_448), (1, 1565, 3_559_944_536), (2, 1572, 3_692_606_316)]
)
def test_stages_of_flash(stage: int, tensors: int, stored: int) -> None:
    found = draft(FLASH_DSPARK, stage)
    assert (len(found), sum(spec.nbytes for spec in found)) == (tensors, stored)


@pytest.mark.parametrize(
    ("fixture", "count", "stored"),
    [(FLASH_DSPARK, 19_845_850_983, 10_862_838_300), (PRO_DSPARK, 77_498_408_103, 41_979_375_900)],
)
def test_drafts(fixture: str, count: int, stored: int) -> None:
    found = draft(fixture)
    assert (sum(map(parameters, found)), sum(spec.nbytes for spec in found)) == (count, stored)


def test_nextn_block_of_the_base() -> None:
    assert len(draft(FLASH)) == 1575
    assert len(specs(FLASH)) == 67_612 + 1575


def test_dtypes_of_a_layer_with_compressor_and_indexer() -> None:
    """As a public listing of one shard of the checkpoint counts them."""
    layer = Counter(spec.dtype for spec in specs(FLASH_DSPARK) if spec.name.startswith("layers.4."))
    assert layer == {"F32": 10, "BF16": 12, "F8_E4M3": 9, "F8_E8M0": 777, "I8": 768}
