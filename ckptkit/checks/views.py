"""Matrices within stored weights: those of a stack, every other row of one, transposes. No bytes are read here."""

from __future__ import annotations

from typing import NamedTuple

from ..decode import Coding, Encoded
from ..errors import fail


class View(NamedTuple):
    """A matrix [rows, cols] that lies in a stored weight.

    Of the stored rows from ``first`` on it is every ``step``-th from ``start`` on; or of the transpose of ``cols``
    stored rows, if it lies ``turned``.
    """

    stored: Encoded
    rows: int
    cols: int
    first: int = 0
    start: int = 0
    step: int = 1
    turned: bool = False

    @property
    def name(self) -> str:
        return self.stored.name

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.cols

    @property
    def row_bytes(self) -> int:
        """Bytes of codes that a row takes, about."""
        stored = self.stored
        return stored.codes.nbytes * self.cols // max(stored.rows * stored.cols, 1)

    def place(self, row: int, column: int) -> tuple[int, int]:
        """Where in the stored weight, leading dimensions flattened, an element lies."""
        along = self.start + row * self.step
        return (self.first + column, along) if self.turned else (self.first + along, column)


def whole(stored: Encoded) -> View:
    return View(stored, stored.rows, stored.cols)


def column(stored: Encoded) -> View:
    """A vector, stored as a row."""
    return View(stored, stored.cols, 1, turned=True)


def linear(stored: Encoded) -> View:
    """A single matrix as a Linear has it, [out, in]."""
    return View(stored, stored.cols, stored.rows, turned=True) if is_of_words(stored) else whole(stored)


def is_of_words(stored: Encoded) -> bool:
    """GPTQ and AWQ: a Linear's weight lies transposed."""
    return stored.coding in {Coding.GPTQ, Coding.AWQ}


def same_module(made: Encoded, source: Encoded) -> list[tuple[View, View]]:
    """The matrices of a module's weight, made and source. If one is stored as the transpose, the other is turned.

    Raises UserError (``decode.format``) where that is not possible.
    """
    if made.transposed == source.transposed:
        return [(whole(made), whole(source))]
    if source.transposed:
        return [(mine, theirs) for theirs, mine in _upright(source, made)]
    return list(_upright(made, source))


def _upright(stored: Encoded, other: Encoded) -> list[tuple[View, View]]:
    """Views of a weight stored as the transpose, and of the same matrices of ``other``, which is not."""
    rows, cols = stored.stack, stored.cols
    count = stored.rows // max(rows, 1)
    if other.coding is not Coding.DENSE:
        return [(linear(stored), whole(other))]
    if (other.rows, other.cols) != (count * cols, rows):
        return [(linear(stored), whole(other))]  # told as a difference of shapes
    return [
        (View(stored, rows, cols, at * rows), View(other, rows, cols, at * cols, turned=True)) for at in range(count)
    ]


def check_readable(made: View, source: View) -> None:
    """Raise UserError (``decode.format``) for a transpose that cannot be read by rows, or whose scales would be lost."""
    for view, turns in ((made, False), (source, is_of_words(source.stored))):
        if view.turned and view.stored.coding is not Coding.DENSE and not turns:
            message = f"{view.name} lies transposed to what it is compared with"
            raise fail("decode.format", message, file=view.stored.codes.file, tensor=view.name)
