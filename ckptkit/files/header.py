"""The safetensors container: parse, check, lay out, encode. Knows bytes; imports no torch.

A file is an 8-byte little-endian length N, N bytes of JSON, then tensor data. The JSON maps each name to
``{"dtype", "shape", "data_offsets": [start, stop)}`` with offsets from the end of the header, and may hold
``"__metadata__"`` (string to string). Definition: the safetensors format description and its reference
reader, which accepts a header of at most 100 MB and demands that tensors cover the data without gap or overlap.

Reader and writer share :func:`nbytes` and :func:`lay_out`. All ranges are half-open.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import Finding, fail
from .foreign import LOOKED_AT, foreign

MAX_HEADER = 100_000_000
MAX_RANK = 64
ALIGN = 8

# Bits per element of every dtype the format names.
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


class Spec(NamedTuple):
    """A tensor's name, dtype (safetensors' spelling) and shape: all that a plan needs to know of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return nbytes(self.dtype, self.shape)


class Entry(NamedTuple):
    """A tensor inside one file. ``start`` and ``stop`` are byte offsets from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @property
    def spec(self) -> Spec:
        return Spec(self.name, self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header: entries in the order they lie in the file, and the file's declared size in bytes."""

    entries: tuple[Entry, ...]
    metadata: dict[str, str] | None
    data_start: int
    file_size: int


def nbytes(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a tensor; sub-byte dtypes are packed over the whole tensor (F4: two to a byte)."""
    return (math.prod(shape) * DTYPE_BITS[dtype] + 7) // 8


def row_view(dtype: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """A tensor as a matrix [rows, bytes per row]: leading dimensions flattened, the last one the row."""
    rows = math.prod(shape[:-1]) if shape else 1
    return rows, (nbytes(dtype, shape) // rows if rows else 0)


# --- reading -----------------------------------------------------------------------------------------------


def read_header(read: Callable[[int, int], bytes], size: int, file: str) -> Header:
    """Parse the header of a file of ``size`` bytes, given ``read(start, stop)``.

    Raises UserError (``layout.*``) naming ``file`` and, where there is one, the tensor.
    """
    if size < 8:
        raise fail("layout.truncated", f"{file} is {size} bytes long: too short for a safetensors header", file=file)
    length = int.from_bytes(read(0, 8), "little")
    if length > MAX_HEADER or not length:
        other = foreign(read(0, min(size, LOOKED_AT)), file)
        if other is not None:
            raise fail("layout.header", f"{file} is {other.what}", file=file, hint=other.hint)
    if length > MAX_HEADER:
        message = f"{file} declares a header of {length:,} bytes, over the format's limit of {MAX_HEADER:,}"
        raise fail("layout.header", message, file=file, hint=_not_safetensors(file))
    if 8 + length > size:
        message = f"{file} declares a header of {length:,} bytes, but the file has {size:,}"
        raise fail("layout.truncated", message, file=file, hint=_refetch(file))
    return _parse(read(8, 8 + length), 8 + length, size, file)


def _parse(text: bytes, data_start: int, size: int, file: str) -> Header:
    table = _load_json(text, file)
    metadata = _check_metadata(table.pop("__metadata__", None), file)
    entries = [_entry(name, value, data_start, file) for name, value in table.items()]
    entries.sort(key=lambda e: (e.start, e.stop, e.name))
    end = data_start
    for entry in entries:
        if entry.start != end:
            _raise_misplaced(entry, end, data_start, file)
        end = entry.stop
    _check_end(end, size, entries, file)
    return Header(tuple(entries), metadata, data_start, end)


def _load_json(text: bytes, file: str) -> dict[str, Any]:
    try:
        decoded = text.decode("utf-8")
        table = json.loads(decoded, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
        check_characters(table, decoded)
    except _DuplicateKey as error:
        message = f"{file}: the header names {error.args[0]!r} twice"
        raise fail("layout.duplicate-key", message, file=file, tensor=error.args[0]) from None
    except UnicodeDecodeError as error:
        message = f"{file}: the header is not UTF-8 (byte {error.start})"
        raise fail("layout.header", message, file=file, hint=_not_safetensors(file)) from None
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise fail("layout.header", f"{file}: the header is not JSON: {what}", file=file) from None
    if not isinstance(table, dict):
        raise fail("layout.header", f"{file}: the header is a JSON {type(table).__name__}, not an object", file=file)
    return table


class _DuplicateKey(Exception):
    pass


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        raise _DuplicateKey(next(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]
    return table


def check_characters(parsed: Any, text: str) -> None:
    """Raise ValueError where JSON ``text`` escapes half of a surrogate pair: Python reads that, and can't write it."""
    if "\\ud" in text.lower():
        try:
            json.dumps(parsed, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("half of a surrogate pair (\\ud800 to \\udfff) is no character") from None


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON value")


def _check_metadata(metadata: Any, file: str) -> dict[str, str] | None:
    if metadata is None:
        return None
    if isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values()):
        return metadata
    raise fail("layout.header", f"{file}: __metadata__ must map strings to strings", file=file)


def _are_sizes(values: Any) -> bool:
    if type(values) is not list:
        return False
    for value in values:  # noqa: SIM110  # asked for every tensor twice, and a generator takes twice the time
        if type(value) is not int or not 0 <= value < 1 << 63:
            return False
    return True


def _entry(name: str, value: Any, data_start: int, file: str) -> Entry:
    fields: Any = value if type(value) is dict else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if type(dtype) is str and dtype in DTYPE_BITS and _are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2:
        start, stop = offsets
        if start <= stop and len(shape) <= MAX_RANK and math.prod(shape) * DTYPE_BITS[dtype] == (stop - start) * 8:
            return Entry(name, dtype, tuple(shape), data_start + start, data_start + stop)
    message = f"{file}: tensor {name!r}: {_what_is_wrong(value, dtype, shape, offsets)}"
    raise fail("layout.header", message, file=file, tensor=name)


def _what_is_wrong(value: Any, dtype: Any, shape: Any, offsets: Any) -> str:
    if type(value) is not dict:
        return "its header entry is not an object"
    if type(dtype) is not str or dtype not in DTYPE_BITS:
        return f"unknown dtype {_short(dtype)}"
    if not _are_sizes(shape) or len(shape) > MAX_RANK:
        return f"shape {_short(shape)} is not a list of sizes"
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"data_offsets {_short(offsets)} are not [start, stop]"
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits % 8:
        return f"{dtype} {shape} does not fill whole bytes"
    return f"{dtype} {_short(shape)} takes {bits // 8:,} bytes, data_offsets span {offsets[1] - offsets[0]:,}"


def _raise_misplaced(entry: Entry, end: int, data_start: int, file: str) -> None:
    kind, verb = ("overlap", "overlaps its neighbour by") if entry.start < end else ("gap", "leaves a gap of")
    message = (
        f"{file}: tensor {entry.name!r} {verb} {abs(entry.start - end):,} bytes"
        f" (starts at {entry.start - data_start:,}, expected {end - data_start:,})"
    )
    raise fail(f"layout.{kind}", message, file=file, tensor=entry.name)


def _check_end(end: int, size: int, entries: list[Entry], file: str) -> None:
    if end == size:
        return
    if size > end:
        raise fail("layout.trailing", f"{file} has {size - end:,} bytes after its last tensor", file=file)
    whole = [entry for entry in entries if entry.stop <= size]
    last = f"; the last whole tensor is {whole[-1].name}" if whole else ""
    broken = next(entry.name for entry in entries if entry.stop > size)
    message = f"{file} is {end - size:,} bytes short: its header promises {end:,}, the file has {size:,}{last}"
    raise fail("layout.truncated", message, file=file, tensor=broken, hint=_refetch(file))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _refetch(file: str) -> str:
    return f"fetch {file} again: an interrupted download or copy looks like this"


def _not_safetensors(file: str) -> str:
    return f"is {file} a safetensors file? 'head -c 64 {file}' shows its beginning"


# --- writing -----------------------------------------------------------------------------------------------


def lay_out(specs: Iterable[Spec], metadata: Mapping[str, str] | None) -> tuple[bytes, Header]:
    """The header bytes (length prefix included, padded to 8) and the layout of a file that holds ``specs``.

    Tensors lie by falling element size, then name, as the reference writer puts them, so each is aligned.
    """
    ordered = sorted(specs, key=lambda s: (-DTYPE_BITS[s.dtype], s.name))
    table: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    spans = []
    for spec in ordered:
        if spec.name in table:
            raise ValueError(f"two tensors named {spec.name!r} in one file")
        stop = offset + spec.nbytes
        table[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, stop]}
        spans.append((offset, stop))
        offset = stop
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGN)
    base = 8 + len(text)
    entries = tuple(Entry(*spec, base + a, base + b) for spec, (a, b) in zip(ordered, spans, strict=True))
    header = Header(entries, None if metadata is None else dict(metadata), base, base + offset)
    return len(text).to_bytes(8, "little") + text, header


def compare(written: Header, planned: Header, file: str) -> list[Finding]:
    """Findings (``output.layout``) where a written header is not the planned one."""
    if written == planned:
        return []
    want, have = {e.name: e for e in planned.entries}, {e.name: e for e in written.entries}
    differing = sorted(name for name in want.keys() | have.keys() if want.get(name) != have.get(name))
    names = differing or ["__metadata__"]
    return [Finding("output.layout", f"{file}: {name} is not as planned", file=file, tensor=name) for name in names]
