"""Files that are something else than their name says, told by how they begin."""

from __future__ import annotations

from shlex import quote
from typing import NamedTuple

LOOKED_AT = 64  # bytes that are enough to tell
LFS = b"version https://git-lfs.github.com/spec/"


class Foreign(NamedTuple):
    """What a file is in truth, as the end of a sentence, and what to do about it; ``{file}`` stands for its name."""

    what: str
    hint: str


_AGAIN = "fetch {file} again"
_CONVERT = "load it with the program that wrote it, and save it as safetensors"
_PAGE = Foreign("a page of HTML or XML, as a failed download leaves it", f"{_AGAIN}, logged in: hf auth login")
_PICKLE = Foreign("a Python pickle", _CONVERT)
_BEGINNINGS = {
    LFS: Foreign("a Git LFS pointer, not the file that it stands for", "git lfs pull --include {file}"),
    b"<!doctype": _PAGE,
    b"<html": _PAGE,
    b"<?xml": _PAGE,
    b"gguf": Foreign("a GGUF file", _CONVERT),
    b"pk\x03\x04": Foreign("a zip archive, as torch.save writes it", _CONVERT),
    b"\x80\x02": _PICKLE,
    b"\x80\x04": _PICKLE,
    b"\x1f\x8b": Foreign("a gzip archive", "gzip -dc {file} gives what is in it"),
    bytes(8): Foreign("filled with zeros from its beginning: space that was never written", _AGAIN),
}


def foreign(beginning: bytes, file: str) -> Foreign | None:
    """What the file that begins so is, or None where that says nothing; for files that are not what they should be."""
    text = beginning.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    found = next((found for start, found in _BEGINNINGS.items() if text.startswith(start)), None)
    return found and Foreign(found.what, found.hint.replace("{file}", quote(file)))
