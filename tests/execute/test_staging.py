"""Where a result is made, what is refused beforehand, and what an overwritten result goes through."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lab
import pytest
from lab import Meter, run

from ckptkit.errors import SOURCE, USAGE, UserError
from ckptkit.execute import Options, execute, preflight, staging
from ckptkit.files.source import open_source
from ckptkit.plan import Plan, Sidecar

OUTPUT = 5


def refusal(folder: Path, out: Path, **options: Any) -> UserError:
    """What a run is refused with; nothing may have changed beside the source."""
    before = sorted(out.parent.rglob("*"))
    with open_source(str(folder)) as source:
        findings = preflight(lab.make_plan(source), source, out, Options(**options))
    assert sorted(out.parent.rglob("*")) == before
    with pytest.raises(UserError) as caught:
        run(folder, out, **options)
    assert [finding.id for finding in caught.value.findings] == [finding.id for finding in findings]
    return caught.value


def ids(error: UserError) -> list[str]:
    return [finding.id for finding in error.findings]


# --- refusals --------------------------------------------------------------------------------------------------------


def test_an_empty_folder_is_no_obstacle(source: Path, out: Path) -> None:
    out.mkdir()
    with open_source(str(source)) as opened:
        assert preflight(lab.make_plan(opened), opened, out, Options()) == []
    run(source, out)
    assert lab.same_tensors(lab.tensors_of(out), lab.expected(source))


def test_parents_are_made(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "a/b/out")
    assert lab.same_tensors(lab.tensors_of(tmp_path / "a/b/out"), lab.expected(source))


def test_a_link_to_an_output_is_followed(source: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    run(source, tmp_path / "out")
    assert (tmp_path / "out").is_symlink()
    assert lab.same_tensors(lab.tensors_of(tmp_path / "disk"), lab.expected(source))


def occupy_file(out: Path) -> None:
    out.write_text("mine")


def occupy_folder(out: Path) -> None:
    out.mkdir()
    (out / "config.json").write_text("{}")


def occupy_staging(out: Path) -> None:
    out.with_name("out.partial").mkdir()
    (out.with_name("out.partial") / "thesis.txt").write_text("mine")


@pytest.mark.parametrize("occupy", [occupy_file, occupy_folder, occupy_staging])
def test_what_stands_in_the_way_is_refused_and_kept(source: Path, out: Path, occupy: Callable[[Path], None]) -> None:
    occupy(out)
    error = refusal(source, out)
    assert (ids(error), error.exit_code) == (["output.exists"], OUTPUT)


@pytest.mark.parametrize("occupy", [occupy_file, occupy_staging])
def test_overwrite_takes_no_file_and_no_foreign_staging_folder(
    source: Path, out: Path, occupy: Callable[[Path], None]
) -> None:
    occupy(out)
    assert ids(refusal(source, out, overwrite=True)) == ["output.exists"]


def test_overwrite_takes_no_folder_that_is_no_checkpoint(source: Path, out: Path) -> None:
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    assert ids(refusal(source, out, overwrite=True)) == ["output.exists"]


@pytest.mark.parametrize("where", [".", "out", "more", "../"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_source_and_output_in_each_other(source: Path, where: str, overwrite: bool) -> None:
    with pytest.raises(UserError) as caught:
        run(source, source / where, overwrite=overwrite)
    assert (ids(caught.value), caught.value.exit_code) == (["output.same"], OUTPUT)


def test_a_source_where_the_staging_folder_would_be(source: Path, tmp_path: Path) -> None:
    staged = source.rename(tmp_path / "out.partial")
    try:
        with pytest.raises(UserError) as caught:
            run(staged, tmp_path / "out", overwrite=True)
    finally:
        staged.rename(source)
    assert ids(caught.value) == ["output.same"]


def test_an_output_among_the_blobs_that_the_source_points_to(source: Path, tmp_path: Path) -> None:
    (tmp_path / "snapshot").symlink_to(source)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "part1.safetensors").symlink_to(source / "part1.safetensors")
    with open_source(str(tmp_path / "linked")) as opened:
        found = preflight(Plan("none", ()), opened, source, Options(overwrite=True))
    assert [finding.id for finding in found] == ["output.same"]


def test_not_enough_space(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 25_000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    error = refusal(source, out, link="copy")
    assert (ids(error), error.exit_code) == (["output.space"], OUTPUT)
    data = error.findings[0].data
    run(source, out, link="hard")
    sizes = {path.name: path.stat().st_size for path in out.rglob("*") if path.is_file()}
    assert data["needed"] == sum(size for name, size in sizes.items() if name != "ckptkit.json")


def test_a_file_where_a_parent_should_be(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    error = refusal(source, tmp_path / "file/out")
    assert (ids(error), error.exit_code) == (["output.write"], OUTPUT)


OWN = [".ckptkit.lock", ".ckptkit.journal", "ckptkit.json", "SHA256SUMS", f"{lab.shard_name(1)}.partial"]


@pytest.mark.parametrize("name", [*OWN, "../x", "a/../../x", "/etc/x", lab.shard_name(1)])
def test_names_that_a_file_of_the_output_may_not_have(source: Path, out: Path, name: str) -> None:
    with open_source(str(source)) as opened:
        plan = dataclasses.replace(lab.make_plan(opened), sidecars=(Sidecar(name, "text"),))
        with pytest.raises(UserError) as caught:
            execute(plan, opened, out, Options(), Meter(), {})
    assert (ids(caught.value), caught.value.exit_code) == (["plan.name"], USAGE)
    assert not out.exists()


def test_a_device_on_which_the_bytes_are_not_known_to_be_equal(source: Path, out: Path) -> None:
    error = refusal(source, out, device="cuda")
    assert set(ids(error)) == {"usage.device"}
    assert error.exit_code == USAGE


def test_all_that_is_wrong_is_said_at_once(source: Path, out: Path) -> None:
    occupy_folder(out)
    assert set(ids(refusal(source, out, device="cuda"))) == {"output.exists", "usage.device"}


def test_without_a_plan_what_is_wrong_with_the_output_is_said(
    source: Path, out: Path, abandoned: Callable[..., None]
) -> None:
    with open_source(str(source)) as opened:
        assert preflight(None, opened, out, Options()) == []
        assert [finding.id for finding in preflight(None, opened, source / "out", Options())] == ["output.same"]
        abandoned()
        assert preflight(None, opened, out, Options(resume=True)) == []
        occupy_folder(out)
        assert [finding.id for finding in preflight(None, opened, out, Options())] == ["output.exists"] * 2


def test_a_backend_that_is_not_installed(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptkit.execute.refusals.find_spec", lambda name: None)
    error = refusal(source, out, backend="llmcompressor")
    assert (ids(error), error.exit_code) == (["usage.backend"], USAGE)


def test_a_weight_that_is_not_finite(source: Path, out: Path, tmp_path: Path) -> None:
    broken = lab.make_checkpoint(tmp_path / "broken")
    path = broken / lab.shard_name(2)
    data = bytearray(path.read_bytes())
    data[-100] = lab.NAN  # the matrix of bytes lies last
    path.write_bytes(data)
    with pytest.raises(UserError) as caught:
        run(broken, out)
    (finding,) = caught.value.findings
    assert (finding.id, finding.file, finding.tensor) == ("data.nan", lab.shard_name(2), "layer2.weight")
    assert caught.value.exit_code == SOURCE
    assert not out.exists()
    assert not list(out.parent.rglob("*.safetensors.partial"))
    run(broken, out, nonfinite_error=False, resume=True)
    assert lab.same_tensors(lab.tensors_of(out), lab.expected(broken))


@pytest.mark.parametrize(("shard", "left"), [(0, False), (2, True)])
def test_an_error_before_any_shard_is_finished_leaves_nothing(
    out: Path, tmp_path: Path, shard: int, left: bool
) -> None:
    """So that the same command with another option, as its hint says, is not stopped by what the first left."""
    broken = lab.make_checkpoint(tmp_path / "broken")
    path = broken / lab.shard_name(shard)
    data = bytearray(path.read_bytes())
    data[-100] = lab.NAN
    path.write_bytes(data)
    with pytest.raises(UserError) as caught:
        run(broken, out)
    assert ids(caught.value) == ["data.nan"]
    assert out.with_name("out.partial").exists() == left
    if not left:
        run(broken, out, nonfinite_error=False)
        assert lab.same_tensors(lab.tensors_of(out), lab.expected(broken))


def test_a_refused_plan_is_not_said_to_carry_on(source: Path, out: Path, abandoned: Callable[..., None]) -> None:
    abandoned()
    with open_source(str(source)) as opened:
        (finding,) = preflight(None, opened, out, Options(resume_command="again --resume"))
    assert finding.id == "output.exists"
    assert "--resume" not in (finding.hint or "")


# --- one process at a time ---------------------------------------------------------------------------------------------


def test_a_second_process_is_refused(source: Path, out: Path) -> None:
    code = (
        "import os, sys, lab; from pathlib import Path; source, out = map(Path, sys.argv[1:])\n"
        "class Slow(lab.Meter):\n"
        "    def start(self, *sizes): print('begun', flush=True); sys.stdin.read()\n"
        "lab.run(source, out, Slow(), flipped=())"
    )
    command = [sys.executable, "-c", code, str(source), str(out)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, cwd=Path(__file__).parent, text=True) as first:
        assert first.stdin
        assert first.stdout
        assert first.stdout.readline() == "begun\n"
        for options in ({}, {"resume": True}, {"overwrite": True}):
            error = refusal(source, out, **options)
            assert (ids(error), error.exit_code) == (["output.locked"], OUTPUT)
            assert str(first.pid) in error.findings[0].message
        first.stdin.close()
        assert first.wait(20) == 0
    assert lab.same_tensors(lab.tensors_of(out), lab.expected(source, ()))


def test_a_lock_file_that_nobody_holds_is_no_obstacle(source: Path, out: Path) -> None:
    out.with_name("out.partial").mkdir()
    (out.with_name("out.partial") / ".ckptkit.lock").write_text("process 1 on mars")
    run(source, out)
    assert not (out / ".ckptkit.lock").exists()


def test_a_staging_folder_in_which_nothing_was_begun_goes_again(out: Path) -> None:
    place = staging.locate(out)
    with staging.locked(place, "test"):
        assert place.folder.exists()
    assert not place.folder.exists()
    with staging.locked(place, "test"):
        (place.folder / staging.JOURNAL).write_text("{}")
    assert place.folder.exists()


def test_the_lock_is_held_while_shards_are_made(source: Path, out: Path) -> None:
    class Trying(Meter):
        def shard(self, name: str) -> None:
            with open(out.with_name("out.partial") / ".ckptkit.lock") as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            super().shard(name)

    meter = Trying()
    run(source, out, meter)
    assert len(meter.shards) == lab.SHARDS


# --- overwriting -------------------------------------------------------------------------------------------------------


def test_the_old_output_stands_until_the_new_one_is_whole(source: Path, out: Path) -> None:
    run(source, out, flipped=())
    old = lab.contents(out)

    class Watching(Meter):
        def shard(self, name: str) -> None:
            assert lab.contents(out) == old
            super().shard(name)

    meter = Watching()
    run(source, out, meter, overwrite=True)
    assert len(meter.shards) == lab.SHARDS
    assert lab.same_tensors(lab.tensors_of(out), lab.expected(source))
    assert sorted(path.name for path in out.parent.iterdir()) == ["out", "source"]


@pytest.mark.parametrize("inside", [False, True])
def test_the_old_output_is_put_back_if_the_new_one_cannot_take_its_place(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    run(source, out, flipped=())
    old = lab.contents(out)
    if inside:
        monkeypatch.chdir(out)
    rename = os.rename

    def refuse(here: Any, there: Any) -> None:
        # The last rename of a publication: the whole folder's, or the manifest's.
        if Path(there) == (out / "ckptkit.json" if inside else out) and "partial" in str(here):
            raise OSError(errno.EIO, "broken")
        rename(here, there)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(UserError) as caught:
        run(source, out, overwrite=True)
    assert ids(caught.value) == ["output.write"]
    monkeypatch.undo()
    found = {name: value for name, value in lab.contents(out).items() if not name.startswith(".ckptkit-")}
    assert found == old


def test_an_abandoned_run_of_another_plan_is_begun_anew_with_overwrite(
    source: Path, out: Path, abandoned: Callable[..., None]
) -> None:
    abandoned(flipped=(0, 1))
    run(source, out, overwrite=True)
    assert lab.same_tensors(lab.tensors_of(out), lab.expected(source))


# --- an output that cannot be replaced by a rename -----------------------------------------------------------------------


needs_root = pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounts a filesystem")


@pytest.fixture(params=["tmpfs", "bind", "current"])
def fixed(request: pytest.FixtureRequest, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An output folder that is a mount point, of another filesystem or of its own, or the current folder."""
    out.mkdir()
    if request.param == "current":
        monkeypatch.chdir(out)
        yield out
        return
    if os.geteuid() != 0 or sys.platform != "linux":
        pytest.skip("only root may mount a filesystem")
    (tmp_path / "bound").mkdir()
    how = ["-t", "tmpfs", "-o", "size=1m", "tmpfs"] if request.param == "tmpfs" else ["--bind", str(tmp_path / "bound")]
    if subprocess.run(["mount", *how, str(out)], capture_output=True).returncode:
        pytest.skip("this machine mounts no filesystem")
    yield out
    subprocess.run(["umount", str(out)], check=True)


def test_an_output_that_stays_where_it_is(source: Path, fixed: Path, tmp_path: Path) -> None:
    inode = fixed.stat().st_ino
    run(source, fixed)
    run(source, tmp_path / "plain")
    assert fixed.stat().st_ino == inode
    assert lab.contents(fixed) == lab.contents(tmp_path / "plain")
    assert not [name for name in os.listdir(fixed) if name.startswith(".ckptkit")]


def test_an_output_that_stays_where_it_is_is_overwritten(source: Path, fixed: Path, tmp_path: Path) -> None:
    run(source, fixed, flipped=())
    assert ids(refusal(source, fixed)) == ["output.exists"]
    run(source, fixed, overwrite=True)
    run(source, tmp_path / "plain")
    assert lab.contents(fixed) == lab.contents(tmp_path / "plain")
    assert not [name for name in os.listdir(fixed) if name.startswith(".ckptkit")]


@pytest.fixture
def without_rights(source: Path, tmp_path: Path) -> Iterator[Path]:
    """A folder, and no right to do more than its owner may."""
    run(source, tmp_path / "first")  # so that nothing has to be imported later
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as folder:
        if user == 0:
            os.chown(folder, 65534, 65534)
            os.seteuid(65534)
        try:
            yield Path(folder)
        finally:
            os.seteuid(user)


def test_a_parent_that_is_not_writable(without_rights: Path) -> None:
    """An existing output is filled where it lies; one that is absent cannot be made."""
    parent = without_rights / "parent"
    folder = lab.make_checkpoint(parent / "source")
    (parent / "out").mkdir()
    parent.chmod(0o555)
    run(folder, parent / "out")
    assert lab.same_tensors(lab.tensors_of(parent / "out"), lab.expected(folder))
    assert sorted(os.listdir(parent)) == ["out", "source"]
    error = refusal(folder, parent / "other")
    assert (ids(error), error.exit_code) == (["output.write"], OUTPUT)
    parent.chmod(0o755)


@needs_root
def test_a_filesystem_that_is_mounted_for_reading_only(source: Path, out: Path) -> None:
    out.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(out)], capture_output=True).returncode:
        pytest.skip("this machine mounts no filesystem")
    try:
        error = refusal(source, out / "new")
    finally:
        subprocess.run(["umount", str(out)], check=True)
    assert (ids(error), error.exit_code) == (["output.write"], OUTPUT)
