"""``dense_stack@1``: what it stacks is what each matrix is by itself, however the work is cut."""

from __future__ import annotations

import pytest
import torch

from ckptkit.files.header import Spec
from ops.runner import run_bytes

E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def fp4(seed: int, rows: int, cols: int) -> tuple[bytes, bytes, torch.Tensor]:
    """Bytes of codes and of scales, and the values by the format's definition."""
    random = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (rows, cols // 2), generator=random, dtype=torch.uint8)
    exponents = torch.randint(110, 130, (rows, cols // 32), generator=random, dtype=torch.uint8)
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).reshape(rows, cols)
    values = E2M1[codes.int()] * torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    return packed.numpy().tobytes(), exponents.numpy().tobytes(), values


@pytest.mark.parametrize("budget", [1, 500, 1 << 20])
@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_matrices_lie_one_after_another(budget: int, dtype: str) -> None:
    rows, cols, count = 6, 64, 5
    inputs, expected = {}, []
    for number in range(count):
        codes, scale, values = fp4(number, rows, cols)
        inputs[Spec(f"{number}.weight", "I8", (rows, cols // 2))] = codes
        inputs[Spec(f"{number}.scale", "F8_E8M0", (rows, cols // 32))] = scale
        expected.append(values)
    args = {
        "name": "stack", "dtype": dtype, "shape": [count, rows, cols], "matrix": [rows, cols],
        "roles": ["weight", "scale"], "bits": None, "block": None, "cols": 0, "layout": {},
    }  # fmt: skip
    ((spec, made),) = run_bytes("dense_stack@1", args, inputs, budget).items()
    stack = torch.stack(expected).to(torch.bfloat16 if dtype == "BF16" else torch.float32)
    assert spec == Spec("stack", dtype, (count, rows, cols))
    assert bytes(made) == stack.view(torch.uint8).numpy().tobytes()
