"""Results published on the Hub: one commit or nothing, what is refused, what is carried on with, and the card."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, constants
from huggingface_hub.utils import _http
from make import checkpoint, llama, llama_config
from told import Told

from ckptkit.errors import ACCESS, OK, OUTPUT, SOURCE, USAGE
from ckptkit.remote import push_hub

from .conftest import Serve
from .hub_server import TOKEN, Fault, Hub, Repo
from .hub_writes import READER

RECIPE = ["--recipe", "lm_head-w8a16"]
CARD = "---\nlicense: mit\n---\n# a model\nwords\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tensors = llama()
    names = list(tensors)
    folder = checkpoint(
        tmp_path / "model", [{n: tensors[n] for n in part} for part in (names[:10], names[10:])], llama_config()
    )
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text(CARD)
    return folder


@pytest.fixture
def server(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path, told: Told) -> Hub:
    """A Hub with an empty repository ``org/model``, a result in ``out``, and somebody logged in."""
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository/.gitattributes").write_text("*.safetensors filter=lfs\n")
    server = serve(tmp_path / "repository")
    server.home = tmp_path / "made"
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    told("quantize", model, "out", *RECIPE, "--hash", "sha256")
    return server


def ids(document: dict[str, Any]) -> set[str]:
    return {finding["id"] for finding in document["findings"]}


def files(folder: str | Path) -> dict[str, bytes]:
    root = Path(folder)
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


TEXTS = {"README.md", "SHA256SUMS"}  # what a push writes anew


def test_a_result_becomes_one_commit(server: Hub, told: Told) -> None:
    before = files("out")
    pushed = told("push", "out", "org/model")
    repo = server.repos["org/model"]
    assert pushed["output"] == f"org/model@{repo.commit}"
    assert len(server.commits) == 1
    there = files(repo.folder)
    assert there.keys() == before.keys() | {".gitattributes"}
    assert {name: there[name] for name in before.keys() - TEXTS} == {n: before[n] for n in before.keys() - TEXTS}
    assert files("out") == before
    told("verify", "org/model", "--level", "data", "--strict")
    sums = subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=repo.folder, check=False)
    assert sums.returncode == 0
    rows = re.findall(r"\| `(.+)` \| ([\d,]+) \| `(\w{64})` \|", there["README.md"].decode())
    listed = {name: (f"{len(there[name]):,}", hashlib.sha256(there[name]).hexdigest()) for name, _, _ in rows}
    assert {name: (size, digest) for name, size, digest in rows} == listed
    assert listed.keys() == before.keys() - TEXTS
    posts = [path for method, path, _, _ in server.asked if method in {"PUT", "POST"}]
    assert posts[-1].startswith("/api/models/org/model/commit")


def test_a_card_that_was_written_on_is_no_fault_of_the_result(server: Hub, told: Told, model: Path) -> None:
    told("quantize", model, "plain", *RECIPE)
    told("hash", "plain", "--statement", "statement.json")
    told("push", "plain", "org/model")
    assert "README.md" in json.loads(Path("plain/ckptkit.json").read_text())["sidecars"]
    told("verify", "org/model", "--level", "data", "--strict")
    document = told("verify", "org/model", "--provenance", "statement.json", "--level", "data")
    assert {f["severity"] for f in document["findings"]} == {"warning"}


def test_what_is_there_already_is_no_commit(server: Hub, told: Told) -> None:
    first = told("push", "out", "org/model")
    again = told("push", "out", "org/model")
    assert again["output"] == first["output"]
    assert (len(server.commits), again["bytes"]) == (1, 0)


def test_another_result_takes_the_place_of_an_earlier_one(server: Hub, told: Told, model: Path) -> None:
    Path("out/.gitattributes").write_text("*.safetensors filter=lfs\n")
    manifest = json.loads(Path("out/ckptkit.json").read_text())
    manifest["sidecars"][".gitattributes"] = {"size": 25}
    Path("out/ckptkit.json").write_text(json.dumps(manifest))
    told("hash", "out", "--overwrite")
    told("push", "out", "org/model")
    (server.repos["org/model"].folder / "notes.md").write_text("mine")
    told("reshard", model, "single", "--max-shard-size", "1GB")
    pushed = told("push", "single", "org/model")
    there = files(server.repos["org/model"].folder)
    assert {n for n in there if n.endswith(".safetensors")} == {p.name for p in Path("single").glob("*.safetensors")}
    assert {"notes.md", ".gitattributes"} <= there.keys()
    assert set(pushed["removed"]) >= {"model-00001-of-00002.safetensors", "SHA256SUMS"}
    told("verify", "org/model", "--level", "data")


@pytest.mark.parametrize("old", [[], {"schema": 1, "shards": 3, "sidecars": 4}, {"schema": 1, "shards": [5]}, "x"])
def test_a_manifest_there_that_cannot_be_read(server: Hub, told: Told, old: object) -> None:
    (server.repos["org/model"].folder / "ckptkit.json").write_text(json.dumps(old))
    told("push", "out", "org/model")


def test_others_weights_are_not_replaced_unasked(server: Hub, told: Told) -> None:
    (server.repos["org/model"].folder / "model.safetensors").write_bytes(b"another's")
    assert ids(told("push", "out", "org/model", code=OUTPUT)) == {"output.exists"}
    assert not server.commits
    told("push", "out", "org/model", "--overwrite")
    assert "model.safetensors" not in files(server.repos["org/model"].folder)


def test_repositories_and_branches_are_made(server: Hub, told: Told) -> None:
    told("push", "out", "org/new", "--private")
    assert server.repos["org/new"].private
    main = server.repos["org/new"].commit
    told("push", "out", "org/new@w8/first")
    assert server.repos["org/new"].commit == main
    branch = server.repos["org/new"].branches["w8/first"]
    assert "--revision w8/first" in (branch.folder / "README.md").read_text()


def test_a_commit_that_fails_leaves_no_branch(server: Hub, told: Told) -> None:
    server.faults.append(Fault("status", path="/commit/", status=503, times=99))
    assert ids(told("push", "out", "org/model@w8", code=ACCESS)) == {"access.unreachable"}
    assert not server.repos["org/model"].branches
    server.faults.clear()
    told("push", "out", "org/model@w8")
    assert "ckptkit.json" in files(server.repos["org/model"].branches["w8"].folder)


def test_a_gitignore_hides_nothing(server: Hub, told: Told) -> None:
    (server.repos["org/model"].folder / ".gitignore").write_text("model-00001-of-00002.safetensors\ntokenizer.json\n")
    told("push", "out", "org/model")
    assert files(server.repos["org/model"].folder).keys() >= files("out").keys()


# --- faults ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        Fault("status", path="/lfs/", status=503, times=2),
        Fault("status", path="/lfs/", status=500),
        Fault("status", path="objects/batch", status=429),
        Fault("status", path="/preupload/", status=503),
        Fault("cut", path="/lfs/", after=1000),
    ],
    ids=lambda fault: f"{fault.kind}{fault.status}{fault.path}",
)
def test_what_passes_is_tried_again(server: Hub, told: Told, fault: Fault) -> None:
    server.faults.append(Fault(**vars(fault)))
    told("push", "out", "org/model")
    assert server.faults[0].times == 0
    assert len(server.commits) == 1


@pytest.mark.parametrize(
    ("fault", "id", "code"),
    [
        (Fault("status", path="/lfs/", status=503, times=99), "access.unreachable", ACCESS),
        (Fault("cut", path="/lfs/", times=99), "access.unreachable", ACCESS),
        (Fault("status", path="/commit/", status=503), "access.unreachable", ACCESS),
        (Fault("status", path="/commit/", status=403), "access.denied", ACCESS),
        (Fault("status", path="/commit/", status=413), "output.refused", OUTPUT),
        (Fault("moved", path="/commit/"), "output.conflict", OUTPUT),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_what_fails_leaves_nothing_visible_and_the_same_command_carries_on(
    server: Hub, told: Told, fault: Fault, id: str, code: int
) -> None:
    server.faults.append(Fault(**vars(fault)))
    assert ids(told("push", "out", "org/model", code=code)) == {id}
    assert not server.commits
    assert files(server.repos["org/model"].folder).keys() == {".gitattributes"}
    server.faults.clear()
    stored, before = set(server.objects), len(server.asked)
    told("push", "out", "org/model")
    sent = {path.rpartition("/")[2] for method, path, _, _ in server.asked[before:] if method == "PUT"}
    assert not sent & stored
    assert len(server.commits) == 1


def test_a_commit_whose_answer_is_lost_is_found_the_next_time(server: Hub, told: Told) -> None:
    server.faults.append(Fault("lost", path="/commit/"))
    assert ids(told("push", "out", "org/model", code=ACCESS)) == {"access.unreachable"}
    told("push", "out", "org/model")
    assert len(server.commits) == 1


def test_a_card_that_the_hub_refuses(server: Hub, told: Told) -> None:
    Path("out/README.md").write_text("---\nbase_model: [\n---\n")
    assert ids(told("push", "out", "org/model", code=OUTPUT)) == {"output.refused"}
    assert not server.commits


def test_who_may_write(server: Hub, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", READER)
    document = told("push", "out", "org/model", code=ACCESS)
    assert ids(document) == {"access.denied"}
    monkeypatch.delenv("HF_TOKEN")
    before = len(server.asked)
    document = told("push", "out", "org/model", code=ACCESS)
    assert ids(document) == {"access.denied"}
    assert "hf auth login" in document["findings"][0]["hint"]
    assert len(server.asked) == before
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert ids(told("push", "out", "org/model", code=ACCESS)) == {"access.offline"}


@pytest.mark.parametrize("file", ["tokenizer.json", "model-00002-of-00002.safetensors"])
@pytest.mark.parametrize("change", [lambda path: path.unlink(missing_ok=True), lambda path: path.write_bytes(b"x" * 9)])
def test_a_file_that_changes_while_it_is_sent(
    server: Hub, told: Told, monkeypatch: pytest.MonkeyPatch, file: str, change: Callable[[Path], None]
) -> None:
    send = HfApi.preupload_lfs_files

    def changing(*args: Any, **rest: Any) -> None:
        send(*args, **rest)
        change(Path("out", file))

    monkeypatch.setattr(push_hub, "_AT_ONCE", 1)
    monkeypatch.setattr(HfApi, "preupload_lfs_files", changing)
    assert ids(told("push", "out", "org/model", code=USAGE)) == {"push.changed"}
    assert not server.commits


def test_a_large_file_that_changes_while_it_is_sent(server: Hub, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_hub, "_SMALL", 0)
    first = Path("out/model-00001-of-00002.safetensors")
    send = HfApi.preupload_lfs_files

    def changing(*args: Any, **rest: Any) -> None:
        flip(first)
        send(*args, **rest)

    monkeypatch.setattr(HfApi, "preupload_lfs_files", changing)
    assert told("push", "out", "org/model", code=OUTPUT)["findings"]
    assert not server.commits


def test_a_hub_that_does_not_have_what_was_sent(server: Hub, told: Told) -> None:
    server.repos["org/model"].sha256 = {"model-00001-of-00002.safetensors": "0" * 64}
    assert ids(told("push", "out", "org/model", code=OUTPUT)) == {"output.verify"}


# --- what is pushed ----------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "change",
    [
        lambda: flip(Path("out/model-00002-of-00002.safetensors")),
        lambda: flip(Path("out/model-00001-of-00002.safetensors")),
        lambda: os.truncate("out/model-00001-of-00002.safetensors", 1000),
        lambda: os.unlink("out/model-00001-of-00002.safetensors"),
        lambda: flip(Path("out/config.json")),
        lambda: os.unlink("out/tokenizer.json"),
    ],
)
def test_a_result_that_has_changed_is_not_pushed(server: Hub, told: Told, change: Callable[[], None]) -> None:
    change()
    assert ids(told("push", "out", "org/model", code=USAGE)) == {"push.changed"}
    assert not server.commits


def test_a_copy_is_pushed_if_its_digests_are_known(server: Hub, told: Told, model: Path) -> None:
    told("quantize", model, "linked", *RECIPE, "--link", "hard")
    os.utime(model / "model-00001-of-00002.safetensors", ns=(1, 1))  # nobody has read this one
    assert ids(told("push", "linked", "org/model", code=USAGE)) == {"push.changed"}
    told("hash", "linked", "--per-tensor")
    told("push", "linked", "org/model")


def test_what_is_no_result_is_not_pushed(server: Hub, told: Told, model: Path) -> None:
    assert ids(told("push", model, "org/model", code=USAGE)) == {"push.no-result"}
    assert ids(told("push", "nothing", "org/model", code=SOURCE)) == {"source.missing"}
    told("quantize", model, "parts", *RECIPE, "--part", "1/2")
    assert ids(told("push", "parts.parts/1-of-2", "org/model", code=USAGE)) == {"push.no-result"}
    manifest = json.loads(Path("out/ckptkit.json").read_text())
    for broken in ([], {"schema": 1}, {**manifest, "shards": [1]}, {**manifest, "sidecars": {"a": None}}):
        Path("out/ckptkit.json").write_text(json.dumps(broken))
        assert ids(told("push", "out", "org/model", code=USAGE)) == {"push.no-result"}


@pytest.mark.parametrize(
    "place",
    [
        "model",
        "org/name/more",
        "datasets/org/name",
        "org/na..me",
        f"org/name@{'a' * 40}",
        "https://host/x",
        "file:///x",
        "s3://",
        "",
    ],
)
def test_places_that_are_none(server: Hub, told: Told, model: Path, place: str) -> None:
    assert ids(told("push", "out", place, code=USAGE)) == {"usage.destination"}
    assert not server.asked


def test_further_files_come_along_on_request(server: Hub, told: Told) -> None:
    Path("out/LICENSE").write_text("mine")
    assert ids(told("push", "out", "org/model")) == {"push.left"}
    assert "LICENSE" not in files(server.repos["org/model"].folder)
    told("push", "out", "org/model", "--include", "LICENSE")
    assert files(server.repos["org/model"].folder)["LICENSE"] == b"mine"
    assert ids(told("push", "out", "org/model", "--include", "NOTICE", code=USAGE)) == {"usage.pattern-unmatched"}


def test_a_dry_run_sends_nothing(server: Hub, told: Told) -> None:
    told("push", "out", "org/model", "--dry-run")
    assert {method for method, _, _, _ in server.asked} <= {"GET", "HEAD"}


# --- the card ----------------------------------------------------------------------------------------------


def card(server: Hub) -> str:
    return (server.repos["org/model"].folder / "README.md").read_text()


def test_whose_words_a_card_keeps(server: Hub, told: Told) -> None:
    told("push", "out", "org/model")
    assert card(server).startswith(CARD)  # the source's
    there = server.repos["org/model"].folder / "README.md"
    there.write_text(card(server).replace("words", "better words") + "after\n")
    told("push", "out", "org/model")
    assert "better words" in card(server)  # what was written there
    assert card(server).endswith("after\n")
    Path("out/README.md").write_text("# mine\n")
    told("push", "out", "org/model")
    assert card(server).startswith("# mine\n")  # what was written into the result
    assert card(server).count("## How this was made") == 1


def test_the_section_says_what_was_made_of_what(server: Hub, told: Told, model: Path) -> None:
    (model / "README.md").unlink()
    server.repos["org/base"] = Repo(model)
    told("quantize", "org/base", "other", *RECIPE, "--push", "org/model")
    text, manifest = card(server), json.loads(Path("other/ckptkit.json").read_text())
    assert "base_model: org/base\n" in text
    assert manifest["plan"] in text
    assert f"org/base/tree/{'a' * 40}" in text
    assert "vllm serve org/model" in text
    settings = json.loads(text.partition("```json\n")[2].partition("```")[0])
    assert settings == {key: value for key, value in manifest["settings"].items() if key != "launch"}
    named = ["sha256sum", *(path.name for path in Path("other").glob("*.safetensors"))]
    for line in subprocess.run(named, cwd="other", check=True, capture_output=True, text=True).stdout.splitlines():
        assert line.split()[0] in text


# --- with the command that makes it ------------------------------------------------------------------------


def test_a_command_that_makes_files_pushes_them(server: Hub, told: Told, model: Path) -> None:
    told("quantize", model, "made", *RECIPE, "--push", "org/model", "--dry-run")
    assert not server.commits
    document = told("quantize", model, "made", *RECIPE, "--push", "org/model")
    assert document["pushed"]["output"] == f"org/model@{server.repos['org/model'].commit}"


def test_what_is_in_the_way_is_said_before_anything_is_made(
    server: Hub, told: Told, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ["quantize", model, "made", *RECIPE, "--push"]
    (server.repos["org/model"].folder / "model.safetensors").write_bytes(b"another's")
    assert ids(told(*run, "org/model", code=OUTPUT)) == {"output.exists"}
    assert ids(told(*run, "org/model", "--dry-run", code=OUTPUT)) == {"output.exists"}
    assert ids(told(*run, "org", code=USAGE)) == {"usage.destination"}
    assert ids(told(*run, "org/model", "--part", "1/2", code=USAGE)) == {"usage.arguments"}
    monkeypatch.delenv("HF_TOKEN")
    assert ids(told(*run, "org/model", code=ACCESS)) == {"access.denied"}
    assert not Path("made").exists()


def test_a_push_that_fails_leaves_the_result_and_is_resumed(server: Hub, told: Told, model: Path) -> None:
    run = ["quantize", model, "made", *RECIPE, "--push", "org/model"]
    server.faults.append(Fault("status", path="/commit/", status=503))
    assert ids(told(*run, code=ACCESS)) == {"access.unreachable"}
    assert Path("made/ckptkit.json").exists()
    told(*run, "--resume", code=OK)
    assert len(server.commits) == 1


def test_parts_are_pushed_by_whoever_joins_them(server: Hub, told: Told, model: Path) -> None:
    told("quantize", model, *RECIPE, "--dry-run", "--plan", "plan.jsonl")
    for part in ("1/2", "2/2"):
        told("apply", "plan.jsonl", "joined", "--part", part)
    told("apply", "--finish", "joined", "--push", "org/model")
    assert "ckptkit.json" in files(server.repos["org/model"].folder)


@pytest.mark.slow
def test_the_pipeline_publishes(server: Hub, model: Path, tmp_path: Path) -> None:
    program = tmp_path / "bin/ckptkit"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ckptkit "$@"\n')
    program.chmod(0o755)
    environment = {"PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)}
    environment |= {"HF_ENDPOINT": server.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "SRC": str(model)}
    environment |= {"OUT": str(tmp_path / "made"), "RECIPE": "lm_head-w8a16", "REPORTS": str(tmp_path / "reports")}
    script = Path(__file__).parents[2] / "docs/ci/pipeline.sh"
    for _ in range(2):  # the second has nothing to send; what is made is there to be taken up
        subprocess.run(["sh", script], env={**environment, "PUSH": "org/new@w8", "ARGS": "--resume"}, check=True)
    assert "ckptkit.json" in files(server.repos["org/new"].branches["w8"].folder)
    assert len(server.commits) == 1


def test_the_token_is_nowhere(server: Hub, tmp_path: Path) -> None:
    """In a process of its own: not in what it prints, nor in what it sends but in the one header."""
    home = tmp_path / "home"
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "HF_ENDPOINT": server.url, "HF_TOKEN": TOKEN}
    command = [sys.executable, "-m", "ckptkit", "-v", "--debug", "push", "out", "org/model"]
    ended = subprocess.run(
        command,
        cwd=tmp_path,
        env={**environment, "HF_HUB_DISABLE_XET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == OK, ended.stderr
    assert "signature" not in ended.stdout + ended.stderr
    left = [*files("out").values(), *files(server.repos["org/model"].folder).values()]
    left += files(home).values() if home.exists() else ()
    texts = [ended.stdout.encode(), ended.stderr.encode(), json.dumps(server.commits).encode(), *left]
    assert not [text for text in texts if TOKEN.encode() in text]
    assert not [path for _, path, _, _ in server.asked if TOKEN in path]
