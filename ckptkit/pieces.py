"""What one file is made of: pieces of another, rows of it in some order, and bytes of its own. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


class Copied(NamedTuple):
    """Bytes [start, stop) of the source."""

    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class Taken(NamedTuple):
    """Rows of ``width`` bytes that lie in the source from ``start`` on, in the order ``rows`` (integers [n])."""

    start: int
    width: int
    rows: Array

    @property
    def nbytes(self) -> int:
        return self.width * len(self.rows)


class Made(NamedTuple):
    """Bytes that are not the source's."""

    content: bytes

    @property
    def nbytes(self) -> int:
        return len(self.content)


Piece = Copied | Taken | Made
