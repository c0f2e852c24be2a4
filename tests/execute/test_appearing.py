"""What comes to stand at OUT while a run goes on is nobody's consent: it stays, and so does the work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import lab
import pytest

from ckptkit.errors import OUTPUT, UserError


def a_file(out: Path) -> None:
    out.write_text("mine")


def a_folder(out: Path) -> None:
    out.mkdir()
    (out / "precious").write_text("mine")


def a_checkpoint(out: Path) -> None:
    a_folder(out)
    (out / "config.json").write_text("{}")


def a_symlink(out: Path) -> None:
    a_folder(out.with_name("elsewhere"))
    out.symlink_to("elsewhere")


def standing(out: Path) -> object:
    return out.read_text() if out.is_file() else {path.name: path.read_text() for path in out.iterdir()}


@pytest.mark.parametrize("appear", [a_file, a_folder, a_checkpoint, a_symlink])
def test_what_appears_stays(source: Path, out: Path, appear: Callable[[Path], None]) -> None:
    class Meter(lab.Meter):
        def shard(self, name: str) -> None:
            super().shard(name)
            if len(self.shards) == 1:
                appear(out)

    with pytest.raises(UserError) as caught:
        lab.run(source, out, Meter())
    assert [finding.id for finding in caught.value.findings] == ["output.exists"]
    assert caught.value.exit_code == OUTPUT
    assert "mine" in str(standing(out))
    assert not list(out.parent.glob("*replaced*"))
    out.rename(out.with_name("moved"))
    again = lab.Meter()
    lab.run(source, out, again, resume=True)
    assert again.shards == []
    lab.run(source, out.with_name("whole"))
    assert lab.contents(out) == lab.contents(out.with_name("whole"))


def test_a_name_that_appears_within_out_is_not_replaced(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OUT is the current folder, so files are moved in one by one; the check before has been passed already."""
    out = tmp_path / "here"
    out.mkdir()
    monkeypatch.chdir(out)
    monkeypatch.setattr("ckptkit.execute.run.append", lambda folder, line: "publishing" in line and a_name(out))

    def a_name(folder: Path) -> None:
        (folder / "config.json").write_text("mine")

    with pytest.raises(UserError) as caught:
        lab.run(source, out)
    assert [finding.id for finding in caught.value.findings] == ["output.exists"]
    assert (out / "config.json").read_text() == "mine"
    assert not (out / "ckptkit.json").exists()


def test_an_empty_folder_that_appears_is_taken(source: Path, out: Path) -> None:
    class Meter(lab.Meter):
        def shard(self, name: str) -> None:
            super().shard(name)
            out.mkdir(exist_ok=True)

    lab.run(source, out, Meter())
    assert (out / "ckptkit.json").exists()
