"""``cast@1`` against torch's own casts."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from ckptkit.files.header import Spec, row_view
from ckptkit.ops import Context, Overflow, operation
from ops.runner import DTYPES, run

FLOATS = ("BF16", "F16", "F32", "F64")
PAIRS = list(permutations(FLOATS, 2))


def cast(tensor: Tensor, dtype: str, **more: Any) -> Tensor:
    return run("cast@1", {"name": "made", "dtype": dtype}, {"given": tensor}, **more)["made"]


def values(dtype: str) -> Tensor:
    """Values of every magnitude that fits everywhere, ties between neighbours of the narrow dtypes among them."""
    random = torch.randn(61, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    magnitudes = torch.linspace(-24, 15, 50, dtype=torch.float64).exp2()
    ties = 1 + torch.arange(50, dtype=torch.float64) / 512
    return torch.cat([random.clamp(-1, 1) * magnitudes, ties[None], ties[None] * 2.0**-20]).to(DTYPES[dtype])


@pytest.mark.parametrize("budget", [1 << 20, 300, 1])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_bits_are_those_of_torch(source: str, target: str, budget: int) -> None:
    given = values(source)
    made = cast(given, target, budget=budget)
    assert made.dtype == DTYPES[target]
    assert torch.equal(made.view(torch.uint8), given.to(DTYPES[target]).view(torch.uint8))


def test_ties_go_to_even() -> None:
    halves = torch.tensor([[1 + 2**-8, 1 + 3 * 2**-8]])
    assert cast(halves, "BF16").tolist() == [[1.0, 1 + 2**-6]]


@pytest.mark.parametrize(
    ("source", "target", "value"),
    [
        ("F32", "F16", 65520.0),
        ("BF16", "F16", -1e5),
        ("F32", "BF16", 3.4e38),
        ("F64", "F32", 1e39),
        ("F64", "BF16", 1e300),
    ],
)
def test_what_does_not_fit_is_an_error_or_inf(source: str, target: str, value: float) -> None:
    given = torch.ones(4, 8, dtype=DTYPES[source])
    given[2, 3] = value
    with pytest.raises(Overflow) as caught:
        cast(given, target)
    assert caught.value.index == 0
    assert torch.equal(cast(given, target, context=Context(nonfinite_error=False)), given.to(DTYPES[target]))


def test_the_largest_that_fits_is_no_error() -> None:
    assert cast(torch.tensor([[65519.0]]), "F16").tolist() == [[65504.0]]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_inf_and_nan_stay_and_do_not_depend_on_the_chunks(source: str, target: str) -> None:
    given = torch.zeros(40, 3, dtype=DTYPES[source])
    given[::3], given[1::3], given[2::3] = torch.inf, -torch.inf, torch.nan
    made = [cast(given, target, budget=budget).view(torch.uint8) for budget in (1 << 20, 50, 1)]
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])
    assert torch.allclose(made[0].view(DTYPES[target]).double(), given.double(), equal_nan=True)


@pytest.mark.parametrize(("source", "target", "rows"), [("BF16", "F32", 16), ("F32", "BF16", 16), ("F16", "BF16", 32)])
def test_neither_what_is_read_nor_what_is_made_exceeds_the_budget(source: str, target: str, rows: int) -> None:
    chunks = list(
        operation("cast@1").chunks([Spec("given", source, (1000, 64))], {"name": "made", "dtype": target}, 4096)
    )
    assert max(read.row_stop - read.row for chunk in chunks for read in chunk.reads) == rows


@pytest.mark.parametrize("shape", [(), (7,), (0, 4), (4, 0), (2, 3, 5)])
def test_shapes(shape: tuple[int, ...]) -> None:
    op, args = operation("cast@1"), {"name": "made", "dtype": "F16"}
    assert op.specs([Spec("given", "F32", shape)], args) == [Spec("made", "F16", shape)]
    chunks = list(op.chunks([Spec("given", "F32", shape)], args, 8))
    read = sum(read.row_stop - read.row for chunk in chunks for read in chunk.reads)
    assert read == (row_view("F32", shape)[0] if torch.empty(shape).numel() else 0)
