"""Text that tokens are counted in: files of it cut into pieces, pieces into documents.

Forms, by a file's ending: ``.jsonl`` (a record a line: ``text`` or ``content``, ``messages`` or ``conversations``,
``input_ids`` or ``token_ids``; or a bare string or list of ids), ``.npy`` (a vector of token ids), ``.ids`` (token ids,
separated by whitespace), everything else UTF-8 text. Files are read in pieces of some MiB, never whole.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from ..errors import UserError, fail, unreadable

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]
    Document = str | Array

PIECE = 4 << 20  # bytes of a file that one process takes at a time
_TEXT = 4 << 10  # bytes of lines that make a document of plain text
_IDS = 1 << 10  # token ids that make a document of a file of them
_LONGEST = 64 << 20  # bytes of a line
_LABEL = re.compile(r"([\w.+-]+)(?::([\w-]+))?=(.+)", re.DOTALL)
_NPY = ".npy"


class Label(NamedTuple):
    """A kind of text, and its language where that was said."""

    kind: str
    language: str | None = None


class File(NamedTuple):
    """A file of a corpus and what text it holds; ``size`` in bytes, of ``.npy`` in token ids."""

    path: str
    label: Label
    size: int


class Piece(NamedTuple):
    """The lines (of ``.npy`` the token ids) of a file that begin in [start, stop)."""

    file: File
    start: int
    stop: int


def corpus(arguments: Iterable[str]) -> list[File]:
    """Files given as ``FILE`` or ``KIND[:LANGUAGE]=FILE``; without a kind, a file's own name is it.

    Raises UserError: ``vocab.corpus``, ``access.denied``.
    """
    return [_file(argument) for argument in arguments]


def _file(argument: str) -> File:
    said = None if Path(argument).exists() else _LABEL.fullmatch(argument)
    path = Path(said[3] if said else argument).expanduser()
    label = Label(said[1], said[2]) if said else Label(path.stem)
    try:
        if not path.is_file():
            what = "is no file" if path.exists() else "does not exist"
            hint = "--corpus FILE or --corpus KIND:LANGUAGE=FILE, for each file"
            raise fail("vocab.corpus", f"{path} {what}", file=str(path), hint=hint)
        return File(str(path), label, len(_load_ids(path)) if path.suffix == _NPY else path.stat().st_size)
    except OSError as error:
        raise unreadable(error, "vocab.corpus", str(path)) from None


def pieces(files: Iterable[File]) -> Iterator[Piece]:
    """The files cut into pieces, which do not depend on who reads them."""
    for file in files:
        for start in range(0, file.size, PIECE):
            yield Piece(file, start, min(start + PIECE, file.size))


def documents(piece: Piece, roles: Collection[str] = ()) -> Iterator[Document]:
    """What a piece holds, text or token ids. ``roles``: of a conversation only what these said; empty: all of it.

    Raises UserError ``vocab.corpus`` naming the file.
    """
    path = Path(piece.file.path)
    try:
        if path.suffix == _NPY:
            yield from _blocks(_load_ids(path)[piece.start : piece.stop])
            return
        with path.open("rb") as file:
            lines = _lines(file, piece, whole=path.suffix in {".jsonl", ".ids"})
            match path.suffix:
                case ".jsonl":
                    yield from (document for line in lines for document in _of_record(line, piece, roles))
                case ".ids":
                    yield from _blocks(_ids((word for line in lines for word in line.split()), piece))
                case _:
                    yield from _of_text(lines, piece)
    except OSError as error:
        raise unreadable(error, "vocab.corpus", str(path)) from None


def _lines(file: BinaryIO, piece: Piece, whole: bool) -> Iterator[bytes]:
    """The lines that begin in the piece; a very long one in parts, or refused where it must be ``whole``."""
    if piece.start:
        file.seek(piece.start - 1)
        while (rest := file.readline(PIECE)) and not rest.endswith(b"\n"):
            pass
    begins = True
    while (not begins or file.tell() < piece.stop) and (line := file.readline(_LONGEST)):
        if whole and len(line) == _LONGEST:
            raise _unfit(piece, f"has a line of {_LONGEST:,} bytes or more")
        yield line
        begins = line.endswith(b"\n")


def _of_text(lines: Iterable[bytes], piece: Piece) -> Iterator[str]:
    """Lines of plain text, some KiB of them together."""
    decode = codecs.getincrementaldecoder("utf-8")().decode
    gathered, size = list[str](), 0
    for line in chain(lines, [b""]):
        try:
            gathered.append(decode(line, final=not line))
        except UnicodeDecodeError:
            raise _unfit(piece, "is not UTF-8 text") from None
        size += len(line)
        if size >= _TEXT:
            yield "".join(gathered)
            gathered, size = [], 0
    if size:
        yield "".join(gathered)


def _of_record(line: bytes, piece: Piece, roles: Collection[str]) -> Iterator[Document]:
    """The texts of one line of a ``.jsonl`` file, or its token ids."""
    if not line.strip():
        return
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise _unfit(piece, f"has a line that is not JSON: {line[:60].decode('utf-8', 'replace').strip()}") from None
    if isinstance(record, dict):
        talk = record.get("messages", record.get("conversations"))
        found = next((record[key] for key in ("input_ids", "token_ids", "text", "content") if key in record), None)
        if isinstance(talk, list):
            yield from (_plain(text) for message in talk for text in _said(message, roles))
            return
        record = found
    if isinstance(record, str):
        yield _plain(record)
    elif isinstance(record, list):
        yield _ids(record, piece)
    else:
        raise _unfit(piece, "has a record without text, messages or input_ids")


def _said(message: Any, roles: Collection[str]) -> Iterator[str]:
    """The texts of a message: its content is a string, or a list of parts of which some are text."""
    if not isinstance(message, dict) or (roles and message.get("role", message.get("from")) not in roles):
        return
    content = message.get("content", message.get("value"))
    parts = content if isinstance(content, list) else [{"text": content}]
    yield from (part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))


def _plain(text: str) -> str:
    """Text without halves of surrogate pairs, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode()


def _ids(values: Iterable[Any], piece: Piece) -> Array:
    import numpy as np

    try:
        return np.array([int(value) for value in values], np.int64)
    except (ValueError, TypeError, OverflowError):
        raise _unfit(piece, "holds something that is no token id") from None


def _blocks(ids: Array) -> Iterator[Array]:
    return (ids[start : start + _IDS] for start in range(0, len(ids), _IDS))


def _load_ids(path: Path) -> Array:
    import numpy as np

    try:
        ids: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError):
        raise fail("vocab.corpus", f"{path} is no .npy file of plain numbers", file=str(path)) from None
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        message = f"{path} holds an array of {ids.dtype}, shape {list(ids.shape)}: no vector of token ids"
        raise fail("vocab.corpus", message, file=str(path))
    return ids


def _unfit(piece: Piece, reason: str) -> UserError:
    where = f"{piece.file.path} (bytes {piece.start:,} to {piece.stop:,})"
    hint = "text as UTF-8; .jsonl with text, messages or input_ids; .npy or .ids with token ids"
    return fail("vocab.corpus", f"{where} {reason}", file=piece.file.path, hint=hint)
