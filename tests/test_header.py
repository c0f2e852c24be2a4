"""The safetensors header: against the safetensors package as an independent reader and writer, and against abuse."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from ckptkit.errors import UserError
from ckptkit.files.header import Header, Spec, lay_out, nbytes, read_header, row_view


def parse(data: bytes) -> Header:
    return read_header(lambda start, stop: data[start:stop], len(data), "x.safetensors")


def wrap(text: bytes, body: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text + body


def table(**tensors: object) -> bytes:
    return json.dumps(tensors).encode()


def fault(data: bytes) -> tuple[str, str | None]:
    with pytest.raises(UserError) as caught:
        parse(data)
    (finding,) = caught.value.findings
    assert caught.value.exit_code == 3
    assert finding.file == "x.safetensors"
    assert "\n" not in finding.message
    return finding.id, finding.tensor


def entry(dtype: object, shape: object, offsets: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_reads_what_the_reference_writer_writes(tmp_path: Path) -> None:
    tensors = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.ones((3,), np.uint8),
        "c": np.zeros((0, 4), np.int64),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "np", "é": "ü"})
    data = (tmp_path / "x.safetensors").read_bytes()
    header = parse(data)
    assert header.metadata == {"format": "np", "é": "ü"}
    assert header.file_size == len(data)
    for item in header.entries:
        assert data[item.start : item.stop] == tensors[item.name].tobytes()
        assert item.shape == tensors[item.name].shape


def test_the_reference_reader_reads_what_lay_out_writes(tmp_path: Path) -> None:
    specs = [Spec("w", "F32", (2, 2)), Spec("ü", "U8", (3,)), Spec("n", "I64", (1,)), Spec("h", "BF16", (5,))]
    head, header = lay_out(specs, {"k": "v"})
    assert len(head) % 8 == 0
    path = tmp_path / "x.safetensors"
    path.write_bytes(head + bytes(header.file_size - len(head)))
    assert parse(path.read_bytes()) == header
    with safe_open(path, "np") as file:
        assert set(file.keys()) == {"w", "ü", "n", "h"}
        assert file.metadata() == {"k": "v"}
        assert file.get_slice("w").get_shape() == [2, 2]
    sizes = [(item.stop - item.start) // max(1, item.shape[0] if item.shape else 1) for item in header.entries]
    assert [item.name for item in header.entries] == ["n", "w", "h", "ü"], sizes
    assert all(
        (item.start - header.data_start) % width == 0 for item, width in zip(header.entries, (8, 4, 2, 1), strict=True)
    )


@pytest.mark.parametrize(
    ("data", "id", "tensor"),
    [
        (b"", "layout.truncated", None),
        (b"\x05\0\0", "layout.truncated", None),
        (wrap(b""), "layout.header", None),
        (wrap(b"{"), "layout.header", None),
        (wrap(b"[1]"), "layout.header", None),
        (wrap(b"\xff\xfe{}"), "layout.header", None),
        (wrap(b"[" * 100_000), "layout.header", None),
        (wrap(b'{"a":' * 100_000), "layout.header", None),
        (wrap(b'{"a": NaN}'), "layout.header", None),
        (wrap(rb'{"a\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"1"), "layout.header", None),
        (wrap(rb'{"__metadata__":{"a":"\uDFFF"}}'), "layout.header", None),
        (wrap(b'{"a": ' + b"9" * 5000 + b"}"), "layout.header", None),
        ((1 << 60).to_bytes(8, "little") + b"{}", "layout.header", None),
        ((100_000_001).to_bytes(8, "little") + b"{}", "layout.header", None),
        ((90_000_000).to_bytes(8, "little") + b"{}", "layout.truncated", None),
        (wrap(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"1"), "layout.duplicate-key", "a"),
        (wrap(b'{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', b"1"), "layout.duplicate-key", "dtype"),
        (wrap(table(__metadata__={"a": 1})), "layout.header", None),
        (wrap(table(__metadata__=[])), "layout.header", None),
        (wrap(table(a=3)), "layout.header", "a"),
        (wrap(table(a=entry("U9", [1], [0, 1])), b"1"), "layout.header", "a"),
        (wrap(table(a=entry(["U8"], [1], [0, 1])), b"1"), "layout.header", "a"),
        (wrap(table(a=entry("U8", [-1], [0, 1])), b"1"), "layout.header", "a"),
        (wrap(table(a=entry("U8", [1.0], [0, 1])), b"1"), "layout.header", "a"),
        (wrap(table(a=entry("U8", [True], [0, 1])), b"1"), "layout.header", "a"),
        (wrap(table(a=entry("U8", "1", [0, 1])), b"1"), "layout.header", "a"),
        (wrap(table(a=entry("U8", [1 << 62, 1 << 62], [0, 1])), b"1"), "layout.header", "a"),
        (wrap(table(a=entry("U8", [1 << 64], [0, 1])), b"1"), "layout.header", "a"),
        (wrap(table(a=entry("U8", [1] * 10_000, [0, 1])), b"1"), "layout.header", "a"),
        (wrap(table(a=entry("U8", [2], [0, 1])), b"1"), "layout.header", "a"),
        (wrap(table(a=entry("U8", [1], [1, 0])), b"1"), "layout.header", "a"),
        (wrap(table(a=entry("U8", [1], [0])), b"1"), "layout.header", "a"),
        (wrap(table(a=entry("F4", [3], [0, 2])), b"12"), "layout.header", "a"),
        (wrap(table(a={"dtype": "U8", "shape": [1]}), b"1"), "layout.header", "a"),
        (wrap(table(a=entry("U8", [2], [0, 2]), b=entry("U8", [2], [1, 3])), b"123"), "layout.overlap", "b"),
        (wrap(table(a=entry("U8", [1], [0, 1]), b=entry("U8", [1], [2, 3])), b"123"), "layout.gap", "b"),
        (wrap(table(a=entry("U8", [1], [1, 2])), b"12"), "layout.gap", "a"),
        (wrap(table(a=entry("U8", [2], [0, 2]), b=entry("U8", [2], [2, 4])), b"123"), "layout.truncated", "b"),
        (wrap(table(a=entry("U8", [1], [0, 1])), b"12"), "layout.trailing", None),
        (wrap(b"{}", b"1"), "layout.trailing", None),
    ],
)  # fmt: skip
def test_faults_are_named(data: bytes, id: str, tensor: str | None) -> None:
    assert fault(data) == (id, tensor)


def test_an_escaped_pair_of_surrogates_is_a_character() -> None:
    data = wrap(rb'{"\ud83d\ude00":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"1")
    assert [entry.name for entry in parse(data).entries] == ["\U0001f600"]


def test_a_lying_length_allocates_nothing() -> None:
    tracemalloc.start()
    fault((99_000_000).to_bytes(8, "little") + b"{}")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_fuzzed_headers_give_one_clear_fault_or_parse(data: st.DataObject) -> None:
    specs = [Spec("a", "F32", (2, 3)), Spec("b", "BF16", (4,)), Spec("c", "I8", (5, 1))]
    head, header = lay_out(specs, {"format": "pt"})
    good = bytearray(head + bytes(header.file_size - len(head)))
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["flip", "cut", "insert", "grow"]))
        at = data.draw(st.integers(0, max(0, len(good) - 1)))
        if kind == "flip" and good:
            good[at] = data.draw(st.integers(0, 255))
        elif kind == "cut":
            del good[at:]
        elif kind == "insert":
            good[at:at] = data.draw(st.binary(max_size=8))
        else:
            good += data.draw(st.binary(max_size=8))
    try:
        parsed = parse(bytes(good))
    except UserError as error:
        assert error.exit_code == 3
        assert error.findings[0].id.startswith("layout.")
    else:
        covered = sum(item.nbytes for item in parsed.entries)
        assert parsed.data_start + covered == len(good)
        assert all(nbytes(item.dtype, item.shape) == item.nbytes for item in parsed.entries)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_any_json_is_refused_or_parsed(value: object) -> None:
    try:
        parse(wrap(json.dumps(value).encode("utf-8", "surrogatepass")))
    except UserError as error:
        assert error.findings[0].id.startswith("layout.")


def test_row_view_flattens_leading_dimensions() -> None:
    assert row_view("BF16", (2, 3, 5)) == (6, 10)
    assert row_view("F32", ()) == (1, 4)
    assert row_view("F32", (7,)) == (1, 28)
    assert row_view("F4", (4, 8)) == (4, 4)
    assert row_view("F32", (0, 3)) == (0, 0)
