"""A sample's tensors as they lie in a file, read some rows at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from ..errors import UserError, fail

if TYPE_CHECKING:
    from torch import Tensor

IDS, MASK = "input_ids", "loss_mask"
BLOCK = 8 << 20  # bytes of rows that are looked at together


class Dialect(NamedTuple):
    """The keys of the tapped states and of the last ones; whether a trainer passes over the last token of the mask."""

    name: str
    taps: str
    last: str
    drops_last: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        return IDS, MASK, self.taps, self.last


SPECFORGE = Dialect("specforge", "hidden_states", "target_last_hidden_states")
AUX = Dialect("aux", "aux_hidden_state", "hidden_state", drops_last=True)
DEEPSPEC = Dialect("deepspec", "target_hidden_states", "target_last_hidden_states")


class Stored(NamedTuple):
    """A tensor in a file: ``start`` is the byte of its first element, strides count elements. ``dtype`` is torch's."""

    dtype: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    read_into: Callable[[int, memoryview], None]

    @property
    def spec(self) -> str:
        """Dtype and shape in words."""
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"

    @property
    def row_bytes(self) -> int:
        return int(self.dtype.itemsize) * (self.stride[0] if len(self.shape) > 1 else 1)

    @property
    def extent(self) -> int:
        """Bytes from its first element to behind its last."""
        return _extent(self.shape, self.stride) * int(self.dtype.itemsize)


class Sample(NamedTuple):
    """What one sample holds: tensors by key, and of what type other values are.

    ``name`` is the file, ``part`` what says where in it; ``whole_mask``: the loss mask counts for its last token too.
    ``close`` frees what was unpacked.
    """

    name: str
    tensors: Mapping[str, Stored]
    others: Mapping[str, str]
    dialect: Dialect | None
    part: str | None = None
    whole_mask: bool = False
    close: Callable[[], object] = lambda: None


def dialect_of(keys: Sequence[str]) -> Dialect | None:
    """The dialect of files that ``keys`` tell; None where none does."""
    return next((dialect for dialect in (SPECFORGE, AUX) if dialect.taps in keys), None)


def matrix(stored: Stored) -> Stored:
    """States as [S, width]: those of [1, S, width] without their first dimension."""
    batched = len(stored.shape) == 3 and stored.shape[0] == 1
    return stored._replace(shape=stored.shape[1:], stride=stored.stride[1:]) if batched else stored


def rows(stored: Stored, start: int, stop: int) -> Tensor:
    """Rows [start, stop) of a matrix, or elements of a vector, as a tensor of its dtype."""
    import torch

    shape = (stop - start, *stored.shape[1:])
    if 0 in shape:
        return torch.empty(shape, dtype=stored.dtype)
    size = int(stored.dtype.itemsize)
    buffer = bytearray(_extent(shape, stored.stride) * size)
    stored.read_into(stored.start + start * stored.stride[0] * size, memoryview(buffer))
    return torch.frombuffer(buffer, dtype=stored.dtype).as_strided(shape, stored.stride)


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to behind the last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def read_whole(file: BinaryIO, name: str) -> Callable[[int, memoryview], None]:
    """Fill a view with the file's bytes from a place on. Raises UserError (``source.read``)."""

    def read_into(start: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            count = os.preadv(file.fileno(), [view[done:]], start + done)
            if count == 0:
                raise short(name, start + len(view))
            done += count

    return read_into


def short(name: str, wanted: int) -> UserError:
    return fail("source.read", f"{name} ended before byte {wanted:,} while it was read", file=name)
