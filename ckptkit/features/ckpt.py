"""Samples that are files: dicts of tensors written by ``torch.save``, perhaps with gzip around them."""

from __future__ import annotations

import gzip
import re
import shutil
import tempfile
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO

from ..errors import Finding, UserError, fail, unreadable
from ..files.source import PIECE, Source
from .sample import Sample, Stored, dialect_of, read_whole

PLAIN, PACKED = ".ckpt", ".ckpt.gz"
_ALIGNED = "loss_mask_is_token_aligned"
_GROUP = re.compile(r"rows_\d+-\d+/")  # folders that samples are spread over; their numbers run on


def sample_files(source: Source) -> list[str]:
    """The files that trainers take for samples, in their order."""
    return sorted(name for name in source.files if name.endswith((PLAIN, PACKED)))


def duplicates(names: Iterable[str]) -> Iterator[Finding]:
    """Samples that would be trained twice: one packed and plain, one number in two groups."""
    places: dict[str, list[str]] = defaultdict(list)
    for name in names:
        places[_GROUP.sub("", name.removesuffix(".gz"))].append(name)
    for found in places.values():
        if len(found) > 1:
            message = f"{found[0]} and {found[1]} are the same sample: it would be trained twice"
            yield Finding("features.duplicate", message, file=found[1], data={"files": found})


def open_sample(source: Source, name: str) -> Sample:
    """The sample in a file; its tensors' bytes are not read yet.

    Raises UserError: ``features.truncated``, ``features.unreadable``, ``features.unsafe``; ``source.read`` and the like.
    """
    path = source.files[name].path
    try:
        file: BinaryIO = open(path, "rb")  # noqa: SIM115
    except OSError as error:
        raise unreadable(error, "source.read", name) from None
    try:
        if name.endswith(PACKED):
            with file as packed:
                file = _unpacked(packed, name)
        table = _load(file, name)
        return _sample(table, file, name)
    except BaseException:
        file.close()
        raise


def _unpacked(packed: BinaryIO, name: str) -> BinaryIO:
    """What gzip holds, in a file without a name that vanishes when it is closed."""
    file: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115
    try:
        shutil.copyfileobj(gzip.GzipFile(fileobj=packed), file, PIECE)
    except EOFError:
        raise _truncated(name, "gzip ends before its stream does") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise _unreadable(name, f"is no sound gzip file: {error}") from None
    except OSError as error:
        message = f"{name} cannot be unpacked into {tempfile.gettempdir()}: {error.strerror}"
        raise fail("output.space", message, file=name, hint="set TMPDIR to a folder with more space") from None
    return file


def _load(file: BinaryIO, name: str) -> Any:
    """The pickle's value, its tensors without their bytes (on torch's fake device, which notes where these lie)."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    _check_zip(file, name)
    file.seek(0)
    try:
        with FakeTensorMode():
            return torch.load(file, weights_only=True, map_location="cpu")
    except Exception as error:  # of whatever kind: the bytes are anybody's
        raise _refused(file, name, error) from None


def _refused(file: BinaryIO, name: str, error: Exception) -> UserError:
    import torch

    file.seek(0)
    try:
        asked = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception:
        asked = []
    if not asked:
        line = str(error).partition("\n")[0] or type(error).__name__
        return _unreadable(name, f"cannot be read by torch.load: {line}")
    message = f"{name} needs code to be run that it names: {', '.join(asked)}; it was not"
    return fail("features.unsafe", message, file=name, data={"globals": asked})


def _check_zip(file: BinaryIO, name: str) -> None:
    """Raises UserError unless the file is a whole zip whose entries are stored as they are."""
    file.seek(0)
    start = file.read(4)
    if start != b"PK\3\4"[: len(start)]:
        raise _unreadable(name, "is no file that torch.save has written since torch 1.6")
    try:
        entries = zipfile.ZipFile(file).infolist() if zipfile.is_zipfile(file) else None
    except Exception as error:  # of half a dozen kinds
        raise _unreadable(name, f"has a damaged zip directory: {error}") from None
    if entries is None:
        raise _truncated(name, "zip has no end")
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise _unreadable(name, "was compressed as a zip: trainers map tensors from it as they lie")


def _sample(table: Any, file: BinaryIO, name: str) -> Sample:
    import torch

    if not isinstance(table, Mapping):
        hint = "torch.save({'input_ids': …, 'loss_mask': …, …}, path) makes a sample; one file holds one"
        raise _unreadable(name, f"holds a {type(table).__name__}, not a dict of tensors", hint)
    size = file.seek(0, 2)
    tensors, others = {}, {}
    for key, value in table.items():
        start = _start(value) if isinstance(value, torch.Tensor) and value.layout is torch.strided else None
        if start is not None:
            tensors[str(key)] = _stored(value, start, file, name, str(key), size)
        else:
            others[str(key)] = type(value).__name__
    aligned = _ALIGNED in tensors or table.get(_ALIGNED) is True
    return Sample(name, tensors, others, dialect_of([*tensors, *others]), whole_mask=aligned, close=file.close)


def _start(value: Any) -> int | None:
    """The byte of the file at which a tensor's first element lies; None for one that has no bytes there."""
    offset = getattr(value.untyped_storage(), "_checkpoint_offset", None)
    return None if offset is None else offset + value.storage_offset() * value.element_size()


def _stored(value: Any, start: int, file: BinaryIO, name: str, key: str, size: int) -> Stored:
    stored = Stored(value.dtype, tuple(value.shape), tuple(value.stride()), start, read_whole(file, name))
    if max(start + stored.extent, value.numel() * value.element_size()) > size:
        raise _unreadable(name, f"says that {key} is {stored.spec}, which is more than it holds")
    return stored


def _truncated(name: str, what: str) -> UserError:
    return fail("features.truncated", f"{name} is cut off: its {what}", file=name)


def _unreadable(name: str, what: str, hint: str | None = None) -> UserError:
    return fail("features.unreadable", f"{name} {what}", file=name, hint=hint)
