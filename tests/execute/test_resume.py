"""What a run that did not end leaves, and what the next one makes of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lab
import pytest
from lab import Meter, run, shard_name

from ckptkit.errors import OUTPUT, SOURCE, UserError
from ckptkit.execute.journal import finished, read_journal
from ckptkit.files.source import Source, open_source

Abandoned = Callable[..., None]


def refused(*arguments: Any, **options: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        run(*arguments, **options)
    return caught.value


def staging(out: Path) -> Path:
    return out.with_name("out.partial")


@pytest.fixture
def whole(source: Path, tmp_path: Path) -> dict[str, Any]:
    """The files of a run that nothing stopped."""
    run(source, tmp_path / "whole")
    return lab.contents(tmp_path / "whole")


def test_finished_shards_are_neither_read_nor_written_again(
    source: Path, out: Path, abandoned: Abandoned, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned()
    with open_source(str(source)) as opened:
        data_start = {file: lab.header_of(opened, file).data_start for file in map(shard_name, range(lab.SHARDS))}
    kept = {name: (staging(out) / name).stat().st_ino for name in map(shard_name, range(2))}
    read: set[str] = set()
    read_into = Source.read_into

    def spy(self: Source, file: str, start: int, view: memoryview) -> None:
        read.update({file} if start >= data_start.get(file, 0) else {})
        read_into(self, file, start, view)

    monkeypatch.setattr(Source, "read_into", spy)
    meter = Meter()
    result = run(source, out, meter, resume=True)
    assert read.isdisjoint(kept)
    assert read >= {shard_name(2), shard_name(3)}
    assert meter.shards == [shard_name(2), shard_name(3)]
    assert (result.resumed, result.shards) == (2, 4)
    assert {name: (out / name).stat().st_ino for name in kept} == kept
    assert lab.contents(out) == whole


def test_without_anything_to_resume_the_run_begins(source: Path, out: Path, whole: dict[str, Any]) -> None:
    assert run(source, out, resume=True).resumed == 0
    assert lab.contents(out) == whole


@pytest.mark.parametrize("tail", [b'{"shard": {"name": "part2.sa', b'{"shard"}\n', b"\xff\xfe"])
def test_a_torn_last_line_does_not_count(
    source: Path, out: Path, abandoned: Abandoned, whole: dict[str, Any], tail: bytes
) -> None:
    abandoned()
    with open(staging(out) / ".ckptkit.journal", "ab") as journal:
        journal.write(tail)
    abandoned(resume=True)
    lines = (staging(out) / ".ckptkit.journal").read_bytes().splitlines()
    assert [json.loads(line).get("shard", {}).get("name") for line in lines[1:]] == [*map(shard_name, range(4))]
    assert run(source, out, resume=True).resumed == 4
    assert lab.contents(out) == whole


@pytest.mark.parametrize("harm", [os.unlink, lambda path: os.truncate(path, 100), lambda path: os.utime(path)])
def test_a_finished_shard_that_is_gone_or_changed_is_made_again(
    source: Path, out: Path, abandoned: Abandoned, whole: dict[str, Any], harm: Callable[[Path], None]
) -> None:
    abandoned()
    harm(staging(out) / shard_name(0))
    meter = Meter()
    assert run(source, out, meter, resume=True).resumed == 1
    assert meter.shards == [shard_name(0), shard_name(2), shard_name(3)]
    assert lab.contents(out) == whole


@pytest.mark.parametrize("link", ["hard", "symlink"])
def test_links_left_by_an_earlier_run_are_replaced(source: Path, out: Path, abandoned: Abandoned, link: str) -> None:
    abandoned(link=link, flipped=())
    lines = (staging(out) / ".ckptkit.journal").read_bytes().splitlines(keepends=True)
    (staging(out) / ".ckptkit.journal").write_bytes(lines[0])  # the shards stand there, and no line says so
    run(source, out, resume=True, link=link, flipped=())
    assert lab.same_tensors(lab.tensors_of(out), lab.expected(source, ()))
    assert not list(out.rglob("*.partial"))


@pytest.mark.parametrize("name", ["thesis.txt", "more/thesis.txt", "link"])
def test_what_another_put_into_the_staging_folder_is_not_published(
    source: Path, out: Path, abandoned: Abandoned, whole: dict[str, Any], name: str
) -> None:
    abandoned()
    path = staging(out) / name
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(source) if name == "link" else path.write_text("mine")
    error = refused(source, out, resume=True)
    assert ([(f.id, f.file) for f in error.findings], error.exit_code) == ([("output.exists", str(path))], OUTPUT)
    path.unlink()
    run(source, out, resume=True)
    assert lab.contents(out) == whole


def test_nor_what_is_put_there_while_a_run_goes_on(source: Path, out: Path, whole: dict[str, Any]) -> None:
    class Putting(Meter):
        def shard(self, name: str) -> None:
            super().shard(name)
            (staging(out) / "thesis.txt").write_text("mine")

    assert [finding.id for finding in refused(source, out, Putting()).findings] == ["output.exists"]
    assert not out.exists()
    (staging(out) / "thesis.txt").unlink()
    run(source, out, resume=True)
    assert lab.contents(out) == whole


def test_what_is_made_last_is_made_anew(source: Path, out: Path, abandoned: Abandoned, whole: dict[str, Any]) -> None:
    """Sums were asked for by the run that was stopped, and not by this one."""
    abandoned()
    for name in ("SHA256SUMS", "ckptkit.json", ".ckptkit-probe"):
        (staging(out) / name).write_text("left by the run that was stopped")
    run(source, out, resume=True)
    assert lab.contents(out) == whole


def test_an_abandoned_run_is_not_passed_over(source: Path, out: Path, abandoned: Abandoned) -> None:
    abandoned()
    error = refused(source, out, resume_command="again --resume")
    (finding,) = error.findings
    with open_source(str(source)) as opened:
        digest = lab.make_plan(opened).digest
    assert (finding.id, error.exit_code) == ("output.exists", OUTPUT)
    assert digest[:12] in finding.message
    assert "again --resume" in (finding.hint or "")
    assert (staging(out) / shard_name(1)).exists()


def test_another_plan_is_refused(source: Path, out: Path, abandoned: Abandoned) -> None:
    abandoned()
    error = refused(source, out, flipped=(0, 1, 2), resume=True)
    assert ([finding.id for finding in error.findings], error.exit_code) == (["output.plan-differs"], OUTPUT)


def test_consent_to_overwrite_outlives_the_run(source: Path, out: Path, abandoned: Abandoned) -> None:
    run(source, out, flipped=())
    abandoned(overwrite=True)
    run(source, out, resume=True)
    assert lab.same_tensors(lab.tensors_of(out), lab.expected(source))


def test_an_equal_result_is_replaced_by_the_run_that_was_to_replace_it(
    source: Path, out: Path, abandoned: Abandoned, whole: dict[str, Any]
) -> None:
    run(source, out)
    shard = out / shard_name(0)
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    abandoned(overwrite=True)
    run(source, out, resume=True)
    assert lab.contents(out) == whole
    assert not staging(out).exists()


def test_resuming_what_was_published_changes_nothing(source: Path, out: Path, whole: dict[str, Any]) -> None:
    run(source, out)
    before = lab.snapshot(out)
    meter = Meter()
    result = run(source, out, meter, resume=True)
    assert (result.resumed, meter.shards, meter.finished) == (4, [], True)
    assert lab.snapshot(out) == before
    assert refused(source, out, resume=True, flipped=(1,)).findings[0].id == "output.exists"
    (out / shard_name(1)).unlink()
    assert refused(source, out, resume=True).findings[0].id == "output.exists"


def test_what_was_published_from_another_source_is_not_this_result(tmp_path: Path, out: Path) -> None:
    folder = lab.make_checkpoint(tmp_path / "mine")
    run(folder, out)
    edit(folder / shard_name(0))
    assert refused(folder, out, resume=True).findings[0].id == "output.exists"


def test_shards_of_another_plan_are_not_finished(source: Path, out: Path, abandoned: Abandoned) -> None:
    abandoned()
    with open_source(str(source)) as opened:
        plan, other = lab.make_plan(opened), lab.make_plan(opened, flipped=(0, 1))
    journal = read_journal(staging(out))
    assert finished(plan, staging(out), journal).keys() == {shard_name(0), shard_name(1)}
    assert finished(other, staging(out), journal).keys() == {shard_name(0)}


# --- a source that changes -----------------------------------------------------------------------------------------------


def edit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    os.chmod(path, 0o644)
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [edit, os.unlink, lambda path: os.utime(path)])
@pytest.mark.parametrize("name", [shard_name(0), shard_name(3), "assets/notes.txt"])
def test_a_source_that_changed_since(tmp_path: Path, out: Path, harm: Callable[[Path], None], name: str) -> None:
    folder = lab.make_checkpoint(tmp_path / "mine")

    class Stop(Exception):
        pass

    class Stopping(Meter):
        def shard(self, name: str) -> None:
            raise Stop

    with pytest.raises(Stop):
        run(folder, out, Stopping())
    with open_source(str(folder)) as opened:
        plan = lab.make_plan(opened)
        harm(folder / name)
        with pytest.raises(UserError) as caught:
            lab.execute(plan, opened, out, lab.Options(resume=True), Meter(), {})
    assert [(finding.id, finding.file) for finding in caught.value.findings] == [("source.changed", name)]
    assert caught.value.exit_code == SOURCE
    assert not out.exists()


@pytest.mark.parametrize("link", ["hard", "copy"])
def test_a_source_that_vanishes_meanwhile(tmp_path: Path, out: Path, link: str) -> None:
    folder = lab.make_checkpoint(tmp_path / "mine")

    class Removing(Meter):
        def shard(self, finished: str) -> None:
            (folder / shard_name(3)).unlink(missing_ok=True)

    error = refused(folder, out, Removing(), link=link)
    assert [(finding.id, finding.file) for finding in error.findings] == [("source.changed", shard_name(3))]
    assert not out.exists()


@pytest.mark.parametrize(
    ("moment", "name"), [(1, shard_name(0)), (2, shard_name(2)), (4, shard_name(3)), (4, "assets/notes.txt")]
)
def test_a_source_that_changes_meanwhile(tmp_path: Path, out: Path, moment: int, name: str) -> None:
    folder = lab.make_checkpoint(tmp_path / "mine")

    class Editing(Meter):
        def shard(self, finished: str) -> None:
            super().shard(finished)
            if len(self.shards) == moment:
                edit(folder / name)

    error = refused(folder, out, Editing())
    assert [(finding.id, finding.file) for finding in error.findings] == [("source.changed", name)]
    assert error.exit_code == SOURCE
    assert not out.exists()
