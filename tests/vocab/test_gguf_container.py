"""The GGUF container against the ``gguf`` package, and files that are cut, broken or of another kind."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.errors import SOURCE, UserError
from ckptkit.files.gguf import (
    Gguf,
    block_sizes,
    encode,
    is_gguf,
    numbers,
    numbers_field,
    parse,
    scalar,
    strings,
    strings_field,
    text_field,
)
from vocab.gguf_made import ROWS, TOKENS, TYPES, WIDTH, model


def read(path: Path) -> Gguf:
    return parse(memoryview(path.read_bytes()), path.name)


def test_what_the_package_reads(tmp_path: Path) -> None:
    path = model(tmp_path / "a.gguf")
    ours, theirs = read(path), gguf.GGUFReader(path)
    assert list(ours.fields) == [key for key in theirs.fields if not key.startswith("GGUF.")]
    assert scalar(ours.fields["general.architecture"]) == "llama"
    assert scalar(ours.fields["tokenizer.ggml.eos_token_id"]) == 7
    assert [token.decode() for token in strings(ours.fields["tokenizer.ggml.tokens"])] == TOKENS
    assert numbers(ours.fields["tokenizer.ggml.scores"]).tolist() == [-float(id) for id in range(ROWS)]
    found = {
        name: (tensor.shape, tensor.type, ours.data_start + tensor.offset, tensor.nbytes)
        for name, tensor in ours.tensors.items()
    }
    assert found == {
        tensor.name: (tuple(tensor.shape.tolist()), tensor.tensor_type, tensor.data_offset, tensor.n_bytes)
        for tensor in theirs.tensors
    }


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_written_again_a_header_is_the_same(tmp_path: Path, kind: Any) -> None:
    content = model(tmp_path / "a.gguf", kind=kind).read_bytes()
    found = parse(memoryview(content), "a.gguf")
    assert content.startswith(encode(found))
    assert len(encode(found)) == found.data_start


def test_fields_are_those_the_package_reads(tmp_path: Path) -> None:
    found = read(model(tmp_path / "a.gguf"))
    more = [
        strings_field("x.strings", [b"a", "ß".encode()]),
        numbers_field("x.numbers", 5, [1, -2]),
        text_field("x.text", "é"),
    ]
    path = tmp_path / "b.gguf"
    fields = {**found.fields, **{field.key: field for field in more}}
    head = encode(found._replace(fields=fields, tensors={}))
    path.write_bytes(head)
    theirs = gguf.GGUFReader(path)
    contents = [theirs.fields[key].contents() for key in ("x.strings", "x.numbers", "x.text")]
    assert contents == [["a", "ß"], [1, -2], "é"]


def ids(content: bytes) -> set[str]:
    with pytest.raises(UserError) as error:
        parse(memoryview(content), "a.gguf")
    assert error.value.exit_code == SOURCE
    return {finding.id for finding in error.value.findings}


def test_every_cut_is_told(tmp_path: Path) -> None:
    """A file that ends anywhere before the end of its last tensor."""
    content = model(tmp_path / "a.gguf").read_bytes()
    found = parse(memoryview(content), "a.gguf")
    end = found.data_start + max(tensor.offset + tensor.nbytes for tensor in found.tensors.values())
    for stop in [*range(1, found.data_start, 131), *range(found.data_start, end, 997), end - 1]:
        assert ids(content[:stop]) <= {"layout.truncated", "layout.header"}, stop


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return model(tmp_path_factory.mktemp("whole") / "a.gguf").read_bytes()


@settings(max_examples=200, deadline=None)
@given(changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=6))
def test_broken_bytes_are_refused_or_read(changes: list[tuple[float, int]], whole: bytes) -> None:
    """Bytes of the header changed at will end in a finding of the source or in a file that reads; never otherwise."""
    content = bytearray(whole)
    stop = parse(memoryview(whole), "a.gguf").data_start
    for where, byte in changes:
        content[int(where * stop)] = byte
    try:
        parse(memoryview(bytes(content)), "a.gguf")
    except UserError as error:
        assert error.exit_code == SOURCE


def test_kinds_of_files(tmp_path: Path) -> None:
    big = model(tmp_path / "big.gguf", endian=gguf.GGUFEndian.BIG).read_bytes()
    assert ids(big) == {"layout.header"}
    assert ids(b"GGUF" + struct.pack("<IQQ", 1, 0, 0)) == {"layout.header"}
    assert ids(b"\x80\x02" + bytes(100)) == {"layout.header"}
    assert is_gguf(tmp_path / "big.gguf")
    (tmp_path / "model.bin").write_bytes(big)
    (tmp_path / "folder.gguf").mkdir()
    assert is_gguf(tmp_path / "model.bin")
    assert not is_gguf(tmp_path / "folder.gguf")
    assert not is_gguf(tmp_path / "none.bin")


def _with(content: bytes, old: bytes, new: bytes) -> bytes:
    assert content.count(old) >= 1
    return content.replace(old, new, 1)


def test_what_contradicts_itself(tmp_path: Path) -> None:
    content = model(tmp_path / "a.gguf").read_bytes()
    found = parse(memoryview(content), "a.gguf")
    assert ids(_with(content, b"blk.0.attn_q", b"blk.1.attn_q")) == {"layout.duplicate-key"}
    second = found.tensors["blk.0.attn_q.weight"]
    info = struct.pack("<IQ", second.type, second.offset)
    assert ids(_with(content, info, struct.pack("<IQ", second.type, 0))) == {"layout.offsets"}
    assert ids(_with(content, info, struct.pack("<IQ", second.type, second.offset + 1))) == {"layout.offsets"}
    assert ids(_with(content, info, struct.pack("<IQ", 999, second.offset))) == {"layout.header"}
    assert ids(_with(content, struct.pack("<QQ", WIDTH, 5), struct.pack("<QQ", WIDTH - 1, 5))) == {"layout.header"}
    seven = found.fields["tokenizer.ggml.eos_token_id"]._replace(key="general.alignment")
    assert ids(encode(found._replace(fields={"general.alignment": seven}))) == {"layout.header"}


def test_block_sizes_are_the_packages() -> None:
    assert block_sizes() == {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert np.prod(list(block_sizes()[gguf.GGMLQuantizationType.Q8_0])) == 32 * 34
