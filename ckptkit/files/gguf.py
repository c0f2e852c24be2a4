"""The GGUF container: parse, check, encode. Knows bytes; of the ``gguf`` package it takes the table of block sizes.

A file is the magic ``GGUF``, a version (u32), the numbers of tensors and of fields (u64 each); the fields, each a key,
a type and a value; the tensors' names, shapes, types and offsets; and, from the next multiple of ``general.alignment``
on, the data. Strings are a length (u64) and bytes. Definition: ggml's description of GGUF, versions 2 and 3.

A tensor's ``shape`` has its row length first, as ggml gives it. Values stay the bytes that they are in the file until
they are asked for: those of a field that nobody changes are written again as they were.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..errors import fail
from .foreign import LOOKED_AT, foreign

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

T = TypeVar("T")

MAGIC = b"GGUF"
ALIGNMENT = "general.alignment"
_VERSIONS = (2, 3)
_MAX_RANK = 4
_MAX_DEPTH = 8  # of arrays within arrays
U32, I32, STRING, ARRAY, U64, I64 = 4, 5, 8, 9, 10, 11
_BOOL = 7
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", U32: "I", I32: "i", 6: "f", _BOOL: "?", U64: "Q", I64: "q", 12: "d"}
INTEGERS = frozenset({0, 1, 2, 3, U32, I32, U64, I64})


class Field(NamedTuple):
    """A key and its value: ``type`` as GGUF numbers it, ``raw`` the value's bytes, without the type."""

    key: str
    type: int
    raw: bytes

    @property
    def item_type(self) -> int | None:
        """The type of an array's items; None where the value is no array."""
        return struct.unpack_from("<I", self.raw)[0] if self.type == ARRAY else None

    @property
    def length(self) -> int:
        """How many items an array has."""
        return int(struct.unpack_from("<Q", self.raw, 4)[0])


class Tensor(NamedTuple):
    """A tensor's name, ``shape`` (row length first), ggml type, and ``offset`` from the beginning of the data."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int

    @property
    def rows(self) -> int:
        """How many rows of ``shape[0]`` elements there are; a vector is one."""
        rows = 1
        for size in self.shape[1:]:
            rows *= size
        return rows

    @property
    def row_bytes(self) -> int:
        per_block, block_bytes = block_sizes()[self.type]
        return self.shape[0] // per_block * block_bytes

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


class Gguf(NamedTuple):
    """A parsed file: fields and tensors in the order they have there, where its data begins, and its size in bytes."""

    version: int
    fields: dict[str, Field]
    tensors: dict[str, Tensor]
    data_start: int
    size: int

    @property
    def alignment(self) -> int:
        found = self.fields.get(ALIGNMENT)
        return int(scalar(found)) if found else 32


@cache
def block_sizes() -> dict[int, tuple[int, int]]:
    """By ggml type: elements and bytes of a block. Rows are whole blocks, of every type that is here.

    Raises UserError (``usage.extra``) where the ``gguf`` package is not installed.
    """
    try:
        from gguf import GGML_QUANT_SIZES
    except ImportError:
        raise fail("usage.extra", "GGUF files need the gguf package", hint="pip install 'ckptkit[gguf]'") from None
    return {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}


def type_name(type: int) -> str:
    """A ggml type as ggml calls it."""
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType(type).name


def is_gguf(path: str | Path) -> bool:
    """Whether ``path`` is a file that is called or begins like a GGUF file."""
    path = Path(path)
    if path.suffix == ".gguf":
        return not path.is_dir()
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


# --- values ------------------------------------------------------------------------------------------------


def scalar(field: Field) -> Any:
    """The value of a field that is a number or a truth value; a string's as text."""
    if field.type == STRING:
        return field.raw[8:].decode("utf-8", "replace")
    return struct.unpack(f"<{_FORMATS[field.type]}", field.raw)[0]


def numbers(field: Field) -> Array:
    """The items of an array of numbers."""
    import numpy as np

    assert field.item_type is not None
    return np.frombuffer(field.raw, np.dtype(f"<{_FORMATS[field.item_type]}"), offset=12)


def strings(field: Field) -> list[bytes]:
    """The items of an array of strings, as the bytes that they are."""
    at, found = 12, []
    for _ in range(field.length):
        size = int.from_bytes(field.raw[at : at + 8], "little")
        found.append(field.raw[at + 8 : at + 8 + size])
        at += 8 + size
    return found


def text_field(key: str, text: str) -> Field:
    return Field(key, STRING, _string(text.encode()))


def integer_field(key: str, type: int, value: int) -> Field:
    return Field(key, type, struct.pack(f"<{_FORMATS[type]}", value))


def numbers_field(key: str, type: int, values: Sequence[int] | Array) -> Field:
    """An array of numbers, ``type`` each."""
    import numpy as np

    items = np.asarray(values).astype(f"<{_FORMATS[type]}")
    return Field(key, ARRAY, struct.pack("<IQ", type, items.size) + items.tobytes())


def strings_field(key: str, items: Iterable[bytes]) -> Field:
    encoded = [struct.pack("<Q", len(item)) + item for item in items]
    return Field(key, ARRAY, struct.pack("<IQ", STRING, len(encoded)) + b"".join(encoded))


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


# --- writing -----------------------------------------------------------------------------------------------


def encode(gguf: Gguf) -> bytes:
    """All that comes before the data of a file with these fields and tensors, padded to the alignment."""
    parts = [MAGIC, struct.pack("<IQQ", gguf.version, len(gguf.tensors), len(gguf.fields))]
    for field in gguf.fields.values():
        parts += [_string(field.key.encode()), struct.pack("<I", field.type), field.raw]
    for tensor in gguf.tensors.values():
        rank = len(tensor.shape)
        parts += [_string(tensor.name.encode()), struct.pack(f"<I{rank}Q", rank, *tensor.shape)]
        parts.append(struct.pack("<IQ", tensor.type, tensor.offset))
    head = b"".join(parts)
    return head + bytes(-len(head) % gguf.alignment)


# --- reading -----------------------------------------------------------------------------------------------


class _Cursor:
    """A place in the buffer that moves on with every read. Raises struct.error or ValueError beyond the end."""

    def __init__(self, buffer: memoryview):
        self.buffer, self.at = buffer, 0

    def take(self, format: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{format}", self.buffer, self.at)
        self.at += struct.calcsize(f"<{format}")
        return values

    def skip(self, size: int) -> None:
        if self.at + size > len(self.buffer):
            raise ValueError(f"{size:,} bytes are declared at byte {self.at:,}, which are not there")
        self.at += size

    def text(self) -> str:
        (size,) = self.take("Q")
        start = self.at
        self.skip(size)
        return bytes(self.buffer[start : self.at]).decode("utf-8")

    def value(self, type: int, depth: int = 0) -> None:
        """Move past a value."""
        if type in _FORMATS:
            self.skip(struct.calcsize(f"<{_FORMATS[type]}"))
        elif type == STRING:
            self.skip(self.take("Q")[0])
        elif type == ARRAY and depth < _MAX_DEPTH:
            kind, count = self.take("IQ")
            if kind in _FORMATS:
                self.skip(count * struct.calcsize(f"<{_FORMATS[kind]}"))
            else:
                self._items(kind, count, depth + 1)
        else:
            raise ValueError(f"a value of type {type} stands before byte {self.at:,}")

    def _items(self, kind: int, count: int, depth: int) -> None:
        if count > len(self.buffer) - self.at:
            raise ValueError(f"an array of {count:,} items is declared at byte {self.at:,}, which are not there")
        for _ in range(count):
            self.value(kind, depth)


def parse(buffer: memoryview, file: str) -> Gguf:
    """What the file that ``buffer`` holds whole says of itself.

    Raises UserError: ``layout.header`` for what is no GGUF file that can be read, ``layout.truncated``,
    ``layout.duplicate-key``, ``layout.offsets``; ``usage.extra`` without the ``gguf`` package.
    """
    _check_kind(bytes(buffer[:LOOKED_AT]), file)
    cursor = _Cursor(buffer)
    cursor.skip(len(MAGIC))
    try:
        version, n_tensors, n_fields = cursor.take("IQQ")
        fields = _by_name(_fields(cursor, n_fields), file)
        tensors = _by_name(_tensors(cursor, n_tensors), file)
    except UnicodeDecodeError as error:
        raise fail("layout.header", f"{file}: a name is not UTF-8 (byte {error.start})", file=file) from None
    except (struct.error, ValueError) as error:
        cut = f"{file} ends, or is broken, at byte {cursor.at:,} of {len(buffer):,} within its header"
        message = f"{file}: {error}" if type(error) is ValueError else cut
        raise fail("layout.truncated", message, file=file, hint=f"fetch {file} again") from None
    found = Gguf(version, fields, tensors, 0, len(buffer))
    _check_alignment(found, file)
    found = found._replace(data_start=cursor.at + -cursor.at % found.alignment)
    _check_tensors(found, file)
    return found


def _check_kind(beginning: bytes, file: str) -> None:
    """Raises UserError (``layout.header``) unless it is a little-endian GGUF file of a version that is known."""
    if beginning[:4] != MAGIC:
        other = foreign(beginning, file)
        message = f"{file} is {other.what}" if other else f"{file} is no GGUF file: it does not begin with GGUF"
        raise fail("layout.header", message, file=file, hint=other and other.hint)
    version = int.from_bytes(beginning[4:8], "little")
    if version not in _VERSIONS:
        swapped = int.from_bytes(beginning[4:8], "big") in _VERSIONS
        message = f"{file} is big-endian" if swapped else f"{file} is GGUF version {version}, not {_VERSIONS}"
        hint = "gguf-convert-endian FILE little, on a copy" if swapped else "convert the model again"
        raise fail("layout.header", message, file=file, hint=hint)


def _fields(cursor: _Cursor, count: int) -> Iterator[tuple[str, Field]]:
    for _ in range(count):
        key = cursor.text()
        (type,) = cursor.take("I")
        start = cursor.at
        cursor.value(type)
        yield key, Field(key, type, bytes(cursor.buffer[start : cursor.at]))


def _tensors(cursor: _Cursor, count: int) -> Iterator[tuple[str, Tensor]]:
    for _ in range(count):
        name = cursor.text()
        (rank,) = cursor.take("I")
        if not 1 <= rank <= _MAX_RANK:
            raise ValueError(f"{name} has {rank} dimensions, not 1 to {_MAX_RANK}")
        shape = cursor.take(f"{rank}Q")
        type, offset = cursor.take("IQ")
        yield name, Tensor(name, shape, type, offset)


def _by_name(items: Iterable[tuple[str, T]], file: str) -> dict[str, T]:
    table: dict[str, T] = {}
    for name, item in items:
        if name in table:
            raise fail("layout.duplicate-key", f"{file} names {name} twice", file=file, tensor=name)
        table[name] = item
    return table


def _check_alignment(gguf: Gguf, file: str) -> None:
    field = gguf.fields.get(ALIGNMENT)
    if field and (field.type != U32 or scalar(field) < 1 or scalar(field) & (scalar(field) - 1)):
        raise fail("layout.header", f"{file}: {ALIGNMENT} is no power of two (u32)", file=file)


def _check_tensors(gguf: Gguf, file: str) -> None:
    """Raises UserError (``layout.header``, ``layout.offsets``, ``layout.truncated``) for what cannot be where it is said."""
    end = 0
    for tensor in sorted(gguf.tensors.values(), key=lambda tensor: tensor.offset):
        details: dict[str, Any] = {"file": file, "tensor": tensor.name}
        if tensor.type not in block_sizes():
            message = f"{file}: {tensor.name} has ggml type {tensor.type}, of which no block size is known"
            raise fail("layout.header", message, hint="pip install -U gguf knows the newest types", **details)
        if tensor.shape[0] % block_sizes()[tensor.type][0]:
            message = (
                f"{file}: rows of {tensor.name} ({tensor.shape[0]:,}) are no whole blocks of {type_name(tensor.type)}"
            )
            raise fail("layout.header", message, **details)
        if tensor.offset % gguf.alignment or tensor.offset < end:
            message = f"{file}: {tensor.name} lies at {tensor.offset:,}, not aligned or within another tensor"
            raise fail("layout.offsets", message, **details)
        end = tensor.offset + tensor.nbytes
        if gguf.data_start + end > gguf.size:
            missing = gguf.data_start + end - gguf.size
            message = f"{file} ends {missing:,} bytes before the end of {tensor.name}"
            raise fail("layout.truncated", message, hint=f"fetch {file} again", **details)
