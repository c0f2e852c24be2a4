"""Files that a plan reads beside its source."""

from __future__ import annotations

from pathlib import Path

from ckptkit.commands.places import keep


def test_what_is_kept_again_is_the_same_file_and_takes_no_other_s_place(tmp_path: Path) -> None:
    first, other, again = (keep(tmp_path / "run" / "a.bin", content) for content in (b"one", b"two", b"one"))
    assert (first.read_bytes(), other.read_bytes(), again, first.name) == (b"one", b"two", first, "a.bin")
    before = first.stat()
    assert keep(tmp_path / "run" / "a.bin", b"one").stat() == before


def test_what_was_cut_off_is_written_anew(tmp_path: Path) -> None:
    path = keep(tmp_path / "a.bin", b"one")
    path.write_bytes(b"o")
    assert keep(tmp_path / "a.bin", b"one").read_bytes() == b"one"
