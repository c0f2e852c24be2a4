"""``ckptkit check-features`` as a user runs it: reports, exit codes, what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ckptkit.cli import main
from ckptkit.errors import FOUND, OK, OUTPUT, SOURCE, USAGE
from ckptkit.features.pages import PAGES
from ckptkit.features.probes import PROBES

from .capture import DSPARK, UPSTREAM, cache, config, sample, store
from .conftest import Told

BAD = "rows_0-2000/data_1.ckpt"


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    """One sound sample, one without its last states."""
    return store(tmp_path / "f", sample(0), sample(1, **{UPSTREAM[1]: None}))


def run(folder: Path, *options: str) -> int:
    path = config(folder.parent, **DSPARK)
    return main(["check-features", str(folder), "--draft-config", str(path), "--no-progress", *options])


def test_every_id_has_a_page_and_a_probe() -> None:
    probed = [id for probe in PROBES for id in probe.ids]
    assert sorted(probed) == sorted(page.id for page in PAGES)
    assert len(set(probed)) == len(probed)
    assert all(page.level == probe.level for probe in PROBES for page in PAGES if page.id in probe.ids)


def test_the_reports(bad: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / f"report.{name}" for name in ("html", "json", "xml")}
    options = ["--report", str(files["html"]), "--report", str(files["json"]), "--junit", str(files["xml"])]
    assert run(bad, *options, "--format", "github") == FOUND
    out = capsys.readouterr().out
    assert f"::error file={bad}/{BAD},title=features.keys::" in out
    report = json.loads(files["json"].read_text())
    assert (report["command"], report["ok"], report["level"]) == ("check-features", False, "data")
    cases = {case.get("name"): case for case in ElementTree.parse(files["xml"]).iter("testcase")}
    assert cases.keys() == {check["id"] for check in report["checks"]}
    assert [name for name, case in cases.items() if case.find("failure") is not None] == ["features.keys"]
    page = files["html"].read_text()
    assert "features.keys" in page
    assert BAD in page
    assert "<svg" not in page


def test_what_people_and_shells_are_told(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(bad) == FOUND
    told = capsys.readouterr()
    assert "features.keys" in told.out
    assert BAD in told.err
    assert run(bad, "--quiet") == FOUND
    assert capsys.readouterr().out.split() == ["features.keys"]


def test_exit_codes(bad: Path) -> None:
    assert run(bad, "--allow", "features.keys") == OK
    assert run(bad, "--allow", "features.keys", "--strict") == FOUND
    assert run(bad, "--exit-zero") == OK
    assert run(bad, "--allow", "features.kyes") == USAGE
    assert run(bad, "--report", "report.txt") == USAGE
    assert run(bad, "--sample", "0/3") == USAGE
    assert run(bad, "--junit", str(bad / "none" / "j.xml")) == OUTPUT


@pytest.mark.parametrize("make", [store, cache])
def test_samples_take_turns(told: Told, tmp_path: Path, make: Callable[..., Path]) -> None:
    """n/t for all n is everything, each sample once."""
    samples = [sample(seed, tokens=8) for seed in range(24)]
    folder = store(tmp_path / "f", *samples) if make is store else cache(tmp_path / "f", samples)
    reports = [told(folder, "--sample", f"{part}/3") for part in (1, 2, 3)]
    counts = [report["checks"][0]["checked"] for report in reports]
    assert sum(counts) == len(samples)
    assert max(counts) < len(samples)
    assert reports[1]["sample"] == "2/3"


def test_one_thread_finds_what_many_do(told: Told, tmp_path: Path) -> None:
    samples = [sample(seed % 7, **({UPSTREAM[1]: None} if seed % 5 == 3 else {})) for seed in range(20)]
    folder = store(tmp_path / "f", *samples)
    one, many = (told(folder, "--jobs", jobs, code=FOUND)["findings"] for jobs in (1, 4))
    assert one == many


def failure(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main(["check-features", *map(str, arguments), "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, found["findings"][0]["id"]


def test_what_cannot_be_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft, empty, broken = config(tmp_path, **DSPARK), tmp_path / "empty", tmp_path / "broken.json"
    empty.mkdir()
    broken.write_text("[1]")
    assert failure(capsys, tmp_path / "none", "--draft-config", draft) == (SOURCE, "source.missing")
    assert failure(capsys, "a-name-as-on-the-hub", "--draft-config", draft) == (SOURCE, "source.missing")
    assert failure(capsys, draft, "--draft-config", draft) == (SOURCE, "source.kind")
    assert failure(capsys, empty, "--draft-config", draft) == (SOURCE, "source.empty")
    assert failure(capsys, empty, "--draft-config", tmp_path / "no.json") == (SOURCE, "source.missing")
    assert failure(capsys, empty, "--draft-config", broken) == (SOURCE, "config.parse")
    broken.write_bytes(b"\xff")
    assert failure(capsys, empty, "--draft-config", broken) == (SOURCE, "config.parse")
    broken.write_text("{}")
    assert failure(capsys, empty, "--draft-config", broken) == (SOURCE, "config.draft")
    assert failure(capsys, empty) == (USAGE, "usage.arguments")


def test_a_folder_given_for_its_config_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    config(tmp_path, **DSPARK).rename(draft / "config.json")
    folder = store(tmp_path / "f", sample(0))
    assert main(["check-features", str(folder), "--draft-config", str(draft), "--json"]) == SOURCE
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert found["hint"].split() == ["--draft-config", str(draft / "config.json")]
    assert main(["check-features", str(folder), *found["hint"].split(), "--json"]) == OK
    capsys.readouterr()


@pytest.mark.parametrize("key", ["input_ids", "loss_mask", UPSTREAM[1]])
def test_the_hint_names_the_key_that_is_missing(told: Told, tmp_path: Path, key: str) -> None:
    folder = store(tmp_path / "f", sample(0, **{key: None}), sample(1, **{key: [1]}))
    found = told(folder, code=FOUND)["findings"]
    assert [item["id"] for item in found] == ["features.keys"] * 2
    assert all(key in item["hint"] for item in found)


def test_what_is_no_dict_is_told_what_to_save(told: Told, tmp_path: Path) -> None:
    (found,) = told(store(tmp_path / "f", sample(0), [1, 2]), code=FOUND)["findings"]
    assert found["id"] == "features.unreadable"
    assert "input_ids" in found["hint"]


def test_the_pages_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checks", "features", "-q"]) == OK
    assert capsys.readouterr().out.split() == sorted(page.id for page in PAGES)


# --- memory --------------------------------------------------------------------------------------------------

MAKE = """
import gzip, sys, torch
tokens, path = int(sys.argv[1]), sys.argv[2]
made = {
    "input_ids": torch.arange(tokens) % 500, "loss_mask": torch.ones(tokens, dtype=torch.int64),
    "hidden_states": torch.randn(tokens, 3, 2048, dtype=torch.bfloat16).flatten(1),
    "target_last_hidden_states": torch.randn(1, tokens, 2048, dtype=torch.bfloat16),
}
with gzip.open(path, "wb", 1) if path.endswith(".gz") else open(path, "wb") as file:
    torch.save(made, file)
"""
PEAK = """
import resource, sys
from ckptkit.cli import main
assert main(sys.argv[1:]) == 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def peak(folder: Path) -> int:
    """Bytes that a run takes at most."""
    path = config(folder.parent, **DSPARK | {"hidden_size": 2048})
    arguments = ["check-features", str(folder), "--draft-config", str(path), "-q", "--jobs", "2"]
    command = [sys.executable, "-c", PEAK, *arguments]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) << 10


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".ckpt", ".ckpt.gz"])
def test_memory_does_not_grow_with_a_sample(tmp_path: Path, suffix: str) -> None:
    """A sample of 0.5 GB takes as much as one of 5 MB, but for some blocks of rows on two threads."""
    peaks = []
    for tokens in (320, 32_000):
        folder = tmp_path / str(tokens)
        folder.mkdir()
        subprocess.run([sys.executable, "-c", MAKE, str(tokens), str(folder / f"data_0{suffix}")], check=True)
        peaks.append(peak(folder))
    assert peaks[1] - peaks[0] < 100 << 20
