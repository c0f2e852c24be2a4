"""Comparison of tensors: values against sums in float64, and what is read at all."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from make import Tensors, checkpoint

from ckptkit.cli import main
from ckptkit.comparing import diffing
from ckptkit.comparing.closeness import Sums, Tolerance, sums
from ckptkit.comparing.config_diff import compare_configs
from ckptkit.comparing.diffing import Diff, Level, compare
from ckptkit.files.checkpoint import Checkpoint, open_checkpoint
from ckptkit.files.source import Source, open_source

EXACT = Tolerance()
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(open_source(str(folder)))


def diff(a: Path, b: Path, level: Level = Level.VALUES, **more: Any) -> Diff:
    sides = opened(a), opened(b)
    more = ({"tolerance": EXACT} if level is Level.VALUES else {}) | more
    return compare(*sides, {name: name for name in sides[0].tensors}, level, **more)


def pair(tmp_path: Path, a: Tensors, b: Tensors) -> tuple[Path, Path]:
    return checkpoint(tmp_path / "a", a, {}), checkpoint(tmp_path / "b", b, {})


# --- values ------------------------------------------------------------------------------------------------


def data(tensor: torch.Tensor) -> bytearray:
    return bytearray(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def measured(a: torch.Tensor, b: torch.Tensor, tolerance: Tolerance = EXACT) -> Sums:
    names = {dtype: name for name, dtype in DTYPES.items()}
    return sums(data(a), names[a.dtype], data(b), names[b.dtype], tolerance)


def noisy(dtype: torch.dtype, seed: int = 0, scale: float = 0.02) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(150_001, generator=generator) * scale).to(dtype)


@pytest.mark.parametrize("first", DTYPES)
@pytest.mark.parametrize("second", DTYPES)
@pytest.mark.parametrize("scale", [0.02, 1e-4, 300.0])
def test_figures(first: str, second: str, scale: float) -> None:
    a, b = noisy(DTYPES[first], scale=scale), noisy(DTYPES[second], seed=1, scale=scale)
    found = measured(a, b)
    x, y = a.double(), b.double()
    assert found.max_abs == pytest.approx(float((x - y).abs().max()), rel=1e-6)
    assert found.rel_rms == pytest.approx(float((x - y).norm() / x.norm()), rel=1e-5)
    cosine = float(torch.nn.functional.cosine_similarity(x, y, 0))
    assert found.cosine == pytest.approx(cosine, rel=1e-3, abs=1e-6)
    assert (found.beyond, found.odd) == (int((x != y).sum()), 0)


@pytest.mark.parametrize("scale", [1e-30, 1e25])
def test_squares_that_leave_the_range_of_float32(scale: float) -> None:
    a, b = noisy(torch.float32) * scale, noisy(torch.float32, seed=1) * scale
    found = measured(a, b)
    assert found.max_abs == pytest.approx(float((a - b).abs().max()))
    assert found.rel_rms is not None
    expected = float((a.double() - b.double()).norm() / a.double().norm())
    assert found.rel_rms == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("tolerance", [Tolerance(0.01, 0), Tolerance(0, 1e-4), Tolerance(0.01, 1e-4), Tolerance(9, 9)])
def test_the_tolerance_is_that_of_torch(tolerance: Tolerance) -> None:
    a = noisy(torch.float32)
    b = a * (1 + 0.02 * noisy(torch.float32, seed=1, scale=1.0))
    close = torch.isclose(b, a, rtol=tolerance.relative, atol=tolerance.absolute)
    assert measured(a, b, tolerance).beyond == pytest.approx(int((~close).sum()), abs=2)


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_nan_and_inf(dtype: torch.dtype) -> None:
    nan, inf = math.nan, math.inf
    a = torch.tensor([nan, inf, -inf, inf, nan, 1.0, 2.0, 3.0], dtype=dtype)
    b = torch.tensor([nan, inf, inf, 1.0, 2.0, nan, 2.5, 3.0], dtype=dtype)
    found = measured(a, b)
    assert (found.odd, found.beyond, found.max_abs) == (4, 5, 0.5)
    assert found.rel_rms == pytest.approx(0.5 / math.sqrt(13))


def test_zeros() -> None:
    zero, one = torch.zeros(4), torch.ones(4)
    assert (measured(zero, one).rel_rms, measured(zero, one).cosine) == (None, None)
    assert (measured(one, zero).rel_rms, measured(one, zero).cosine) == (1.0, None)
    assert (measured(zero, -zero).rel_rms, measured(zero, -zero).beyond) == (0.0, 0)
    assert measured(one, -one).cosine == -1.0


def test_float64_is_compared_in_float64() -> None:
    a = torch.ones(3, dtype=torch.float64)
    assert measured(a, a + 1e-12).max_abs == pytest.approx(1e-12, rel=1e-3)


def test_pieces_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = pair(
        tmp_path, {"w": noisy(torch.bfloat16)[:7000].view(-1, 7)}, {"w": noisy(torch.float32, 1)[:7000].view(-1, 7)}
    )
    whole = diff(a, b).worst[0].sums
    monkeypatch.setattr(diffing, "CHUNK", 1000)
    pieces = diff(a, b).worst[0].sums
    assert whole
    assert pieces
    assert (pieces.max_abs, pieces.beyond) == (whole.max_abs, whole.beyond)
    assert pieces.rel_rms == pytest.approx(whole.rel_rms)


# --- what is compared --------------------------------------------------------------------------------------


def test_each_level_sees_more(tmp_path: Path) -> None:
    one = torch.ones(8, 4)
    a, b = pair(
        tmp_path,
        {"same": 1 * one, "here": 1 * one, "dtype": 1 * one, "shape": 1 * one, "bytes": 1 * one, "codes": one.int(),
         "zero": 0 * one},
        {"same": 1 * one, "there": 1 * one, "dtype": one.half(), "shape": one.clone().view(4, 8), "bytes": 2 * one,
         "codes": 2 * one.int(), "zero": -torch.zeros(8, 4)},
    )  # fmt: skip
    for level in Level:
        found = diff(a, b, level)
        assert [ref.name for ref in found.only_a] == ["here"]
        assert [ref.name for ref in found.only_b] == ["there"]
        specs = {pair.a.name: pair.changed for pair in found.respecified}
        assert specs == ({"dtype": ("dtype",), "shape": ("shape",)} if level >= Level.SPECS else {})
        differ = {Level.DIGESTS: {"bytes", "codes", "zero"}, Level.VALUES: {"bytes", "codes"}}.get(level, set())
        assert {verdict.pair.a.name for verdict in found.differ} == differ
        assert found.equal == {Level.DIGESTS: 1, Level.VALUES: 3}.get(level, 0)
    assert [verdict.pair.a.name for verdict in diff(a, b).worst] == ["bytes"]


def test_the_worst_come_first(tmp_path: Path) -> None:
    weights = {f"w{number}": noisy(torch.float32, number) for number in range(6)}
    order = [3, 0, 5, 1, 4, 2]
    changed = {f"w{number}": weights[f"w{number}"] * (1 + 0.1 ** (rank + 1)) for rank, number in enumerate(order)}
    a, b = pair(tmp_path, weights, changed)
    assert [verdict.pair.a.name for verdict in diff(a, b, top=4).worst] == [f"w{number}" for number in order[:4]]
    changed["w2"][0] = math.nan
    b = checkpoint(tmp_path / "c", changed, {})
    assert diff(a, b, top=1).worst[0].pair.a.name == "w2"


def test_sharding_is_no_difference(tmp_path: Path) -> None:
    weights = {f"w{number}": noisy(torch.float16, number) for number in range(6)}
    a = checkpoint(tmp_path / "a", weights, {})
    b = checkpoint(
        tmp_path / "b", [{n: weights[n] for n in part} for part in (["w5", "w0"], ["w1", "w4", "w3", "w2"])], {}
    )
    for level in Level:
        assert diff(a, b, level).is_empty
    assert diff(a, b).equal == 6


def test_shapes_without_elements_and_scalars(tmp_path: Path) -> None:
    a, b = pair(
        tmp_path,
        {"none": torch.zeros(0, 3), "scalar": torch.tensor(1.0), "cast": torch.zeros(0)},
        {"none": torch.zeros(0, 3), "scalar": torch.tensor(1.5), "cast": torch.zeros(0, dtype=torch.float16)},
    )
    found = diff(a, b)
    assert [verdict.pair.a.name for verdict in found.differ] == ["scalar"]
    assert found.equal == 2


# --- what is read ------------------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folder names of the sources of which tensor bytes were read."""
    seen: list[str] = []
    original = Source.read_into

    def spy(self: Source, file: str, start: int, view: memoryview) -> None:
        if file.endswith(".safetensors") and start > 8:
            seen.append(self.root.name)
        original(self, file, start, view)

    monkeypatch.setattr(Source, "read_into", spy)
    return seen


def made(src: Path, out: Path, *arguments: str) -> Path:
    assert main(["reshard", str(src), str(out), *arguments, "-q"]) == 0
    return out


def test_recorded_digests_are_taken(tmp_path: Path, reads: list[str]) -> None:
    weights = {f"w{number}": noisy(torch.float32, number) for number in range(4)}
    src = checkpoint(tmp_path / "src", weights, {})
    a = made(src, tmp_path / "a", "--link", "copy")
    b = made(src, tmp_path / "b", "--max-shard-size", "700kB")
    c = made(src, tmp_path / "c", "--rename", "w1=w2", "--rename", "re:^w2$=w1", "--drop", "w2")
    reads.clear()
    found = diff(a, b, Level.DIGESTS)
    assert (found.is_empty, found.unread, reads) == (True, 4, [])
    assert [verdict.pair.a.name for verdict in diff(a, c, Level.DIGESTS).differ] == []
    assert reads == []
    assert diff(a, src, Level.DIGESTS).equal == 4
    assert set(reads) == {"src"}


def test_recorded_digests_that_differ_need_no_reading_but_their_values_do(tmp_path: Path, reads: list[str]) -> None:
    one = checkpoint(tmp_path / "one", {"w": torch.ones(9), "ids": torch.ones(9).int()}, {})
    two = checkpoint(tmp_path / "two", {"w": 2 * torch.ones(9), "ids": 2 * torch.ones(9).int()}, {})
    a, b = made(one, tmp_path / "a", "--link", "copy"), made(two, tmp_path / "b", "--link", "copy")
    reads.clear()
    found = diff(a, b, Level.DIGESTS)
    assert (len(found.differ), found.unread, reads) == (2, 2, [])
    found = diff(a, b)
    assert (len(found.differ), found.unread) == (2, 1)
    assert [verdict.pair.a.name for verdict in found.worst] == ["w"]


def test_a_changed_file_is_read(tmp_path: Path, reads: list[str]) -> None:
    src = checkpoint(tmp_path / "src", {"w": torch.ones(9)}, {})
    a, b = made(src, tmp_path / "a", "--link", "copy"), made(src, tmp_path / "b", "--link", "copy")
    path = b / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    reads.clear()
    assert len(diff(a, b, Level.DIGESTS).differ) == 1
    assert set(reads) == {"b"}


@pytest.mark.parametrize("link", ["hard", "symlink"])
def test_a_link_is_not_read(link: str, tmp_path: Path, reads: list[str]) -> None:
    src = checkpoint(tmp_path / "src", {"w": torch.ones(9)}, {})
    out = made(src, tmp_path / "out", "--link", link)
    reads.clear()
    assert (diff(src, out).is_empty, reads) == (True, [])


def test_reading_stops_at_the_first_difference(
    tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diffing, "CHUNK", 1000)
    a, b = pair(tmp_path, {"w": torch.zeros(5000)}, {"w": torch.ones(5000)})
    found = diff(a, b, Level.DIGESTS)
    assert (len(found.differ), reads) == (1, ["a", "b"])


# --- configs -----------------------------------------------------------------------------------------------


def configs(tmp_path: Path, a: dict[str, Any], b: dict[str, Any]) -> tuple[Checkpoint, Checkpoint]:
    one = checkpoint(tmp_path / "a", {"w": torch.ones(1)}, a)
    other = checkpoint(tmp_path / "b", {"w": torch.ones(1)}, b)
    return opened(one), opened(other)


def test_keys_by_dotted_path(tmp_path: Path) -> None:
    found = compare_configs(
        *configs(
            tmp_path,
            {"x": 1, "t": {"u": {"v": [1, 2]}, "gone": None}, "flag": True, "same": {"k": 1}},
            {"x": 2, "t": {"u": {"v": [1, 3]}, "new": {}}, "flag": 1, "same": {"k": 1}},
        )
    )
    assert found
    assert found.changed == {"x": (1, 2), "t.u.v": ([1, 2], [1, 3]), "flag": (True, 1)}
    assert (found.added, found.removed, found.files) == ({"t.new": {}}, {"t.gone": None}, {})


def test_files(tmp_path: Path) -> None:
    sides = configs(tmp_path, {}, {})
    for name, a, b in (("tokenizer.json", "x", "y"), ("vocab.txt", "x", "x"), ("README.md", "x", "y")):
        (tmp_path / "a" / name).write_text(a)
        (tmp_path / "b" / name).write_text(b)
    (tmp_path / "a/generation_config.json").write_text("{}")
    (tmp_path / "b/modeling_x.py").write_text("")
    sides = opened(tmp_path / "a"), opened(tmp_path / "b")
    found = compare_configs(*sides)
    assert found
    assert found.files == {
        "generation_config.json": "only in A",
        "modeling_x.py": "only in B",
        "tokenizer.json": "differs",
    }
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    same = compare_configs(sides[0], opened(tmp_path / "c"))
    assert same
    assert same.is_empty


def test_a_single_file_has_no_config(tmp_path: Path) -> None:
    sides = configs(tmp_path, {"x": 1}, {})
    assert compare_configs(sides[0], opened(tmp_path / "b/model.safetensors")) is None
