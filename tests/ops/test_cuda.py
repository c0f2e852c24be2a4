"""On a CUDA device: the same bytes as on the CPU."""

from __future__ import annotations

import pytest

from ckptkit.ops import Context, operation
from ops.runner import run
from ops.samples import SOURCES, difficult, normal
from ops.schemes import differing
from ops.test_operations import SCHEMES, chosen

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", SOURCES)
@pytest.mark.parametrize("name", SCHEMES)
def test_bytes_are_the_cpus(name: str, dtype: str) -> None:
    id, args = chosen(name, dtype)
    for w in (normal(200, 96, dtype), difficult(dtype)[:, :192].contiguous()):
        on_cpu, on_gpu = (run(id, args, {"m.weight": w}, 20_000, Context(device)) for device in ("cpu", "cuda"))
        assert differing(on_gpu, on_cpu) == []
    assert operation(id).bits_on_cuda
