"""Every format against the slow implementation, and back to the bytes that it was read from."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.decode import decode
from ckptkit.decode.columns import WHOLE, columns, strips
from ckptkit.decode.numbers import integers

from . import slow
from .memory import Module, Stored
from .samples import FORMATS, Sample, sample_of, values_of

TRANSPOSED = {name for name in FORMATS if name.startswith(("GPTQ", "AWQ", "gpt-oss"))}


@pytest.fixture(params=FORMATS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def sample(name: str) -> Sample:
    return sample_of(name)


def module(sample: Sample) -> Module:
    return Module(sample.last, sample.tensors, **sample.known)


def bits_of(values: object) -> list[list[int]]:
    return np.asarray(values, np.float32).view(np.uint32).tolist()


def test_values_are_those_of_the_slow_implementation(name: str, sample: Sample) -> None:
    found = module(sample)
    assert (found.weight.rows, found.weight.cols) == (sample.rows, sample.cols)
    assert bits_of(found.rows()) == bits_of(values_of(name))


@pytest.mark.parametrize("step", [1, 3, 32])
def test_rows_are_the_same_piece_by_piece(sample: Sample, step: int) -> None:
    found = module(sample)
    assert bits_of(found.in_pieces(step)) == bits_of(found.rows())


def test_values_and_scales_give_the_bytes_again(sample: Sample) -> None:
    """No two codes mean the same, whatever the scale; -0 is not 0."""
    codes = slow.codes_of(module(sample).rows().tolist(), sample.number, sample.bits, sample.scale, sample.zero)
    assert slow.put(codes, sample.bits, sample.place, len(sample.data)) == sample.data


def test_nothing_is_inferred_that_the_config_or_the_format_tells(name: str, sample: Sample) -> None:
    weight = module(sample).weight
    assert not weight.inferred
    assert weight.transposed is (name in TRANSPOSED)


@pytest.mark.parametrize("name", sorted(TRANSPOSED))
def test_columns_of_what_is_stored_transposed(name: str) -> None:
    found = module(sample_of(name))
    weight, whole = found.weight, found.rows()
    for matrix, first in itertools.product(range(weight.rows // weight.stack), range(0, weight.cols, WHOLE)):
        stop = min(first + WHOLE, weight.cols)
        part = columns(weight, first, stop)
        data = {role: found.strip(role, strip) for role, strip in strips(weight, matrix, first, stop).items()}
        rows = slice(matrix * weight.stack, (matrix + 1) * weight.stack)
        assert bits_of(decode(part, 0, part.rows, data)) == bits_of(whole[rows, first:stop])


@pytest.mark.parametrize("name", ["DeepSeek-V4 expert", "MXFP4 of compressed-tensors", "gpt-oss", "NVFP4 of ModelOpt"])
def test_nibbles_the_other_way_round_are_other_values(name: str) -> None:
    sample = sample_of(name)
    turned = bytes(byte >> 4 | (byte & 15) << 4 for byte in sample.data)
    tensors = {**sample.tensors, sample.last: sample.tensors[sample.last]._replace(data=turned)}
    found, other = module(sample).rows(), Module(sample.last, tensors).rows()
    assert not np.array_equal(found, other)
    pairs = other.reshape(sample.rows, -1, 2)[:, :, ::-1].reshape(found.shape)
    assert np.array_equal(found, pairs)


def test_a_zero_scale_makes_zeros_of_their_signs() -> None:
    sample = sample_of("FP8 channel")
    scale = sample.tensors["weight_scale"]
    tensors = {**sample.tensors, "weight_scale": scale._replace(data=bytes(len(scale.data)))}
    found = Module(sample.last, tensors).rows()
    assert not found.any()
    assert np.signbit(found).tolist() == [[code >= 128 for code in line] for line in sample.codes]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_integers_of_any_width_from_any_bit_on(data: st.DataObject) -> None:
    bits, cols, rows = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 50)), data.draw(st.integers(1, 3))
    first = data.draw(st.integers(0, 31)) // bits * bits if 32 % bits == 0 else data.draw(st.integers(0, 31))
    words = -(-(first + cols * bits) // 32)
    raw = data.draw(st.binary(min_size=4 * words * rows, max_size=4 * words * rows))
    offset = data.draw(st.integers(-2, 128))
    found = integers(np.frombuffer(raw, np.uint8), rows, cols, bits, first, offset)
    place = slow.along_columns(cols, bits, 32 * words)
    wanted = slow.taken(raw, rows, cols, bits, lambda row, col, bit: first + place(row, col, bit))
    assert found.tolist() == [[code - offset for code in line] for line in wanted]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_blocks_of_any_size_are_counted_anew_in_each_matrix(data: st.DataObject) -> None:
    """Every number is 1 and every scale tells its block: what is read is where each element got its scale."""
    stacks, rows, cols = (data.draw(st.integers(1, top)) for top in (3, 40, 40))
    block = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 20))
    down, across = -(-rows // block[0]), -(-cols // block[1])
    tensors = {
        "weight": np.full((stacks, rows, cols), 0x38, np.uint8),  # 1.0 in E4M3
        "weight_scale_inv": np.arange(1, 1 + stacks * down * across, dtype="<f4").reshape(stacks, down, across),
    }
    dtypes = {"weight": "F8_E4M3", "weight_scale_inv": "F32"}
    stored = {name: Stored(dtypes[name], array.shape, array.tobytes()) for name, array in tensors.items()}
    found = Module("weight", stored, block=block).in_pieces(data.draw(st.integers(1, 50)))
    wanted = [
        [1 + (s * down + r // block[0]) * across + c // block[1] for c in range(cols)]
        for s in range(stacks)
        for r in range(rows)
    ]
    assert found.tolist() == wanted
