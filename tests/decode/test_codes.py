"""E2M1 codes one in a byte, as ``ckptkit unpack`` writes them: by the table of the format."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from ckptkit.decode import Coding

from .memory import Module, Stored

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
EVERY = bytes([*range(16), *reversed(range(16))])


@pytest.mark.parametrize(("part", "dtype"), [("scale", "F8_E8M0"), ("weight_scale", "U8")])
def test_every_code(part: str, dtype: str) -> None:
    module = Module(
        "weight_codes", {"weight_codes": Stored("U8", (1, 32), EVERY), part: Stored(dtype, (1, 1), b"\x80")}
    )
    assert (module.weight.coding, module.weight.cols, module.weight.transposed) == (Coding.CODES, 32, False)
    expected = np.array([*E2M1, *reversed(E2M1)], np.float32)[None] * 2
    assert np.array_equal(module.rows().view(np.uint32), expected.view(np.uint32))


def test_a_byte_that_is_no_code_is_no_number() -> None:
    codes = Stored("U8", (8, 32), bytes(range(256)))
    module = Module("weight_codes", {"weight_codes": codes, "weight_scale": Stored("U8", (8, 1), b"\x7f" * 8)})
    assert np.flatnonzero(np.isfinite(module.rows())).tolist() == list(range(16))


def test_codes_of_nvfp4_have_its_scales() -> None:
    """E4M3's 0x38 and 0x40 are 1 and 2."""
    tensors = {
        "weight_codes": Stored("U8", (1, 32), b"\x05" * 32),
        "weight_scale": Stored("F8_E4M3", (1, 2), b"\x38\x40"),
        "weight_global_scale": Stored("F32", (1,), struct.pack("<f", 8.0)),
    }
    assert Module("weight_codes", tensors).rows().tolist() == [[3 / 8] * 16 + [6 / 8] * 16]


def test_codes_of_stacked_experts() -> None:
    """Two experts of two outputs and 64 inputs; a module has the transpose of each."""
    codes = b"".join(bytes([row]) * 64 for row in range(4))
    scales = Stored("U8", (2, 2, 2), bytes([127, 128, 127, 127, 129, 127, 127, 126]))
    module = Module("codes", {"codes": Stored("U8", (2, 2, 2, 32), codes), "scales": scales})
    assert (module.weight.stack, module.weight.transposed) == (2, True)
    factors = [(1, 2), (1, 1), (4, 1), (1, 0.5)]
    expected = [[E2M1[row] * left] * 32 + [E2M1[row] * right] * 32 for row, (left, right) in enumerate(factors)]
    assert module.in_pieces(3).tolist() == expected
