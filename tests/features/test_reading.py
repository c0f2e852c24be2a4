"""Tensors read from where they lie in a file, against torch.load."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest
import torch

from ckptkit.features.ckpt import open_sample
from ckptkit.features.sample import matrix, rows
from ckptkit.files.source import open_source

TENSORS = {
    "plain": torch.randn(37, 24).bfloat16(),
    "batched": torch.randn(1, 37, 24).half(),
    "columns": torch.randn(37, 64)[:, 5:29],
    "every third row": torch.randn(111, 24)[::3],
    "transposed": torch.randn(24, 37).T,
    "expanded": torch.randn(1, 24).expand(37, 24),
    "ids": torch.arange(1000)[100:137],
    "flags": torch.rand(37) > 0.5,
    "bytes": torch.randint(0, 255, (37,), dtype=torch.uint8)[1:],
    "empty": torch.zeros(0, 24),
}
SHARED = torch.randn(80, 24)


@pytest.mark.parametrize("packed", [False, True])
def test_rows_are_those_that_torch_loads(tmp_path: Path, packed: bool) -> None:
    """Views keep their strides and share storage in the file."""
    path = tmp_path / ("data_0.ckpt.gz" if packed else "data_0.ckpt")
    saved = TENSORS | {"one half": SHARED[:40], "other half": SHARED[40:], "note": "text", "number": 3}
    with gzip.open(path, "wb") if packed else open(path, "wb") as file:
        torch.save(saved, file)
    with gzip.open(path) if packed else open(path, "rb") as file:
        expected = torch.load(file, weights_only=True)
    generator = random.Random(0)
    with open_source(str(tmp_path)) as source:
        sample = open_sample(source, path.name)
        assert sample.others == {"note": "str", "number": "int"}
        assert list(sample.tensors) == [key for key in saved if isinstance(saved[key], torch.Tensor)]
        for key, stored in sample.tensors.items():
            whole = expected[key][0] if key == "batched" else expected[key]
            found = matrix(stored)
            assert found.shape == tuple(whole.shape)
            for _ in range(8):
                start, stop = sorted(generator.choices(range(len(whole) + 1), k=2))
                read = rows(found, start, stop)
                assert read.dtype == whole.dtype
                assert torch.equal(read, whole[start:stop])
        sample.close()


def test_nothing_is_left_open_or_behind(tmp_path: Path) -> None:
    """A file that is refused is closed too, and what was unpacked is gone."""
    folder = tmp_path / "f"
    folder.mkdir()
    torch.save([1], folder / "a.ckpt")
    (folder / "b.ckpt.gz").write_bytes(gzip.compress(b"PK\3\4 and no more"))
    descriptors = Path("/proc/self/fd")
    if not descriptors.is_dir():
        pytest.skip("needs /proc")
    with open_source(str(folder)) as source:
        before = len(list(descriptors.iterdir()))
        for name in source.files:
            with pytest.raises(Exception, match="ckpt"):
                open_sample(source, name)
        assert len(list(descriptors.iterdir())) == before
