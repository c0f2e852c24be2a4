"""Checkpoints of the Hub, against a real HTTP server: what is read, what is fetched, what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from make import checkpoint, llama, llama_config
from told import Told

from ckptkit.errors import ACCESS, FOUND, INTERRUPTED, OUTPUT, SOURCE, USAGE
from ckptkit.remote import ranges, store

from .conftest import Serve
from .hub_server import TOKEN, Fault, Repo

SHA = "a" * 40
RECIPE = ["--recipe", "lm_head-w8a16"]
FIRST, SECOND, THIRD = (f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Three shards; the recipe changes the last one, which holds lm_head."""
    tensors = llama(layers=3)
    names = list(tensors)
    parts = [{n: tensors[n] for n in names[a:b]} for a, b in ((0, 10), (10, 20), (20, None))]
    folder = checkpoint(tmp_path / "model", parts, llama_config(layers=3))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("# a model\n")
    return folder


def ids(document: dict[str, Any]) -> set[str]:
    return {finding["id"] for finding in document["findings"]}


def manifest(folder: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(folder) / "ckptkit.json").read_text())
    return found


def files(folder: str | Path) -> dict[str, bytes]:
    """All files but the manifest, which says where the source lay."""
    return {p.name: p.read_bytes() for p in Path(folder).iterdir() if p.name != "ckptkit.json"}


def header_end(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


# --- looking -----------------------------------------------------------------------------------------------


def test_inspect_says_of_a_repository_what_it_says_of_its_folder(serve: Serve, model: Path, told: Told) -> None:
    serve(model)
    remote, local = told("inspect", "org/model"), told("inspect", model)
    assert (remote.pop("uri"), remote.pop("revision")) == (f"org/model@{SHA}", SHA)
    assert remote.pop("fetched")["requests"] == 5  # index, config, three headers
    assert {**remote, "source": None, "seconds": 0} == {**local, "source": None, "seconds": 0}


def test_looking_fetches_no_tensor(
    serve: Serve, model: Path, told: Told, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(store, "PREFETCH", 8)
    server = serve(model)
    for command in (
        ["inspect", "org/model", "--tensors"],
        ["verify", "org/model"],
        ["diff", "org/model", model, "--level", "specs"],
        ["quantize", "org/model", "out", *RECIPE, "--dry-run"],
        ["inspect", f"hf://org/model@{SHA}", "--group", "layer"],
    ):
        told(*command)
    ends = {name: header_end(model / name) for name in (FIRST, SECOND, THIRD)}
    ranges = [
        (path.rpartition("/")[2], range_) for method, path, range_, _ in server.asked if method == "GET" and range_
    ]
    assert {name for name, _ in ranges} >= set(ends)
    for name, range_ in ranges:
        assert int(range_.rpartition("-")[2]) < ends.get(name, 1 << 30)
    assert not cache.exists()
    assert not Path("out").exists()


@pytest.mark.parametrize("more", [-9, -8, -7, -1, 0, 1, 7, 8, 9])
def test_headers_around_the_prefetch_boundary(
    serve: Serve, model: Path, told: Told, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    monkeypatch.setattr(store, "PREFETCH", header_end(model / SECOND) + more)
    serve(model)
    assert told("inspect", "org/model", "--tensors")["tensors"] == told("inspect", model, "--tensors")["tensors"]


def test_a_folder_and_a_file_of_a_repository(serve: Serve, tmp_path: Path, model: Path, told: Told) -> None:
    (tmp_path / "repo").mkdir()
    model.rename(tmp_path / "repo" / "deep")
    serve(tmp_path / "repo")
    found = told("inspect", "hf://org/model/deep")
    assert (found["shards"], found["architectures"]) == (3, ["LlamaForCausalLM"])
    assert told("inspect", f"hf://org/model@{SHA}/deep/{FIRST}")["shards"] == 1
    assert ids(told("inspect", "hf://org/model/nothing", code=SOURCE)) == {"source.missing"}
    assert ids(told("inspect", "hf://datasets/org/model", code=USAGE)) == {"usage.source"}
    page = f"{constants.ENDPOINT}/org/model/tree/main"
    assert told("inspect", f"{page}/deep")["shards"] == 3


def test_what_looks_local_is_never_asked_for(tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a network call")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for name in (
        "model",
        "./org/model",
        "../model",
        "a/b/c",
        "org/x.safetensors",
        "/org",
        "~/m",
        "models/llama",
        ".x/y",
    ):
        assert ids(told("inspect", name, code=SOURCE)) == {"source.missing"}, name


def test_an_existing_path_is_the_path(serve: Serve, tmp_path: Path, model: Path, told: Told) -> None:
    server = serve(model)
    (tmp_path / "org").mkdir()
    (tmp_path / "org/model").symlink_to(model)
    told("inspect", "org/model")
    assert not server.asked


# --- making ------------------------------------------------------------------------------------------------


def test_a_result_is_that_of_the_folder_and_only_needed_bytes_are_fetched(
    serve: Serve, model: Path, told: Told, cache: Path
) -> None:
    server = serve(model)
    told("quantize", model, "local", *RECIPE)
    made = told("quantize", "org/model", "out", *RECIPE, "--link", "copy")
    assert files("out") == files("local")
    content = manifest("out")
    assert content["plan"] == manifest("local")["plan"]
    assert (content["source"]["uri"], content["source"]["revision"]) == (f"org/model@{SHA}", SHA)
    assert content["fetched"] == made["fetched"]
    assert content["fetched"]["bytes"] == server.sent
    stop = (model / THIRD).stat().st_size
    assert content["source"]["read"] == {
        FIRST: {"verified": True},
        SECOND: {"verified": True},
        THIRD: {"verified": False, "ranges": [[header_end(model / THIRD), stop]]},
        "README.md": {"verified": True},
        "tokenizer.json": {"verified": True},
    }
    assert content["source"]["files"][FIRST].keys() == {"size", "sha256"}
    assert not cache.exists()  # it would hold the shards a second time
    told("verify", "out", "--against", "org/model", "--level", "numeric")


def test_untouched_shards_lie_in_the_cache_and_are_linked_from_it(
    serve: Serve, model: Path, told: Told, cache: Path
) -> None:
    server = serve(model)
    told("quantize", "org/model", "out", *RECIPE)
    told("quantize", model, "local", *RECIPE)
    assert files("out") == files("local")
    held = {path.name: path for path in cache.rglob("*.safetensors")}
    assert held.keys() == {FIRST, SECOND}
    assert {shard["name"]: shard["link"] for shard in manifest("out")["shards"]}[FIRST] in {"hard", "reflink"}
    asked = len(server.asked)
    told("quantize", "org/model", "again", *RECIPE)
    assert not [path for method, path, _, _ in server.asked[asked:] if method == "GET" and FIRST in path]
    assert files("again") == files("local")


def test_a_part_costs_its_own_bytes(serve: Serve, model: Path, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PREFETCH", 8)
    server = serve(model)
    told("reshard", "org/model", "out", "--drop", "re:.*(mlp|self_attn).*")
    kept = sum(p.stat().st_size for p in Path("out").glob("*.safetensors"))
    small = sum(p.stat().st_size for p in model.iterdir() if p.suffix != ".safetensors")
    headers = sum(header_end(model / name) for name in (FIRST, SECOND, THIRD))
    assert server.sent <= kept + small + headers


def test_what_parts_fetched_and_whoever_joined_them_is_counted(serve: Serve, model: Path, told: Told) -> None:
    server = serve(model)
    for number in (1, 2):
        told("quantize", "org/model", "out", *RECIPE, "--part", f"{number}/2")
    told("apply", "--finish", "out")
    assert manifest("out")["fetched"]["bytes"] == server.sent


@pytest.mark.parametrize("jobs", [1, 3])
def test_hard_links_lead_into_the_cache_which_is_read_from_then_on(
    serve: Serve, model: Path, told: Told, cache: Path, jobs: int
) -> None:
    server = serve(model)
    told("quantize", "org/model", "out", *RECIPE, "--link", "hard", "-j", jobs)
    blobs = {path.stat().st_ino for path in cache.rglob("blobs/*")}
    assert {os.stat(f"out/{name}").st_ino for name in (FIRST, SECOND)} == blobs
    before = len(server.asked)
    told("quantize", "org/model", "again", *RECIPE, "--link", "hard")
    assert not [path for _, path, _, _ in server.asked[before:] if FIRST in path or SECOND in path]
    assert files("again") == files("out")


def test_a_cache_limit_leaves_no_more_than_it_says(serve: Serve, model: Path, told: Told, cache: Path) -> None:
    serve(model)
    told("quantize", "org/model", "out", *RECIPE, "--link", "hard", "--cache-limit", 0)
    assert not [*cache.rglob("*.safetensors"), *cache.rglob("blobs/*")]
    limit = max((model / name).stat().st_size for name in (FIRST, SECOND))
    told("quantize", "org/model", "again", *RECIPE, "--link", "hard", "--cache-limit", limit)
    assert [path.name for path in cache.rglob("*.safetensors")] == [SECOND]
    assert files("out") == files("again")
    told("verify", "again", "--level", "data")
    symlinks = ["--link", "symlink", "--cache-limit", "1GB"]
    assert ids(told("quantize", "org/model", "third", *RECIPE, *symlinks, code=USAGE)) == {"usage.arguments"}


def test_a_plan_file_names_the_commit(serve: Serve, model: Path, told: Told) -> None:
    serve(model)
    told("quantize", "org/model", *RECIPE, "--dry-run", "--plan", "plan.jsonl")
    assert json.loads(Path("plan.jsonl").read_text().splitlines()[0])["source"] == f"org/model@{SHA}"
    told("apply", "plan.jsonl", "out")
    told("quantize", model, "local", *RECIPE)
    assert files("out") == files("local")


# --- faults ------------------------------------------------------------------------------------------------

HELPED = [
    [Fault("cut", times=4, path=THIRD, after=40_000)],
    [Fault("cut", times=2, path=THIRD)],
    [Fault("status", path="cdn", status=503)],
    [Fault("status", path="cdn", status=500), Fault("cut", path=FIRST, after=1)],
    [Fault("status", path=f"cdn.*{SECOND}", status=429)],
    [Fault("expired", path=THIRD)],
    [Fault("cut", path="index.json", after=10)],
    [Fault("status", path="api/models/org/model$", status=429, times=2)],
    [Fault("status", path="/tree/", status=503, times=2)],
]


@pytest.mark.parametrize("faults", HELPED, ids=lambda faults: "-".join(f.kind + str(f.status) for f in faults))
def test_what_passes_is_tried_again(serve: Serve, model: Path, told: Told, faults: list[Fault]) -> None:
    server = serve(model)
    server.faults += [Fault(**vars(fault)) for fault in faults]
    told("quantize", model, "local", *RECIPE)
    told("quantize", "org/model", "out", *RECIPE)
    assert all(fault.times == 0 for fault in server.faults)
    assert files("out") == files("local")


REFUSED = [
    (Fault("whole", path=f"cdn.*{THIRD}", skip=1), "source.range", SOURCE),
    (Fault("range", path=THIRD), "source.range", SOURCE),
    (Fault("resized", path=FIRST), "source.changed", SOURCE),
    (Fault("gzip", path=FIRST), "source.range", SOURCE),
    (Fault("flip", path="config.json"), "source.digest", SOURCE),
    (Fault("status", path=rf"cdn.*{THIRD}", status=404, times=99), "source.changed", SOURCE),
    (Fault("status", path=rf"cdn.*{THIRD}", status=416, times=99), "source.changed", SOURCE),
    (Fault("status", path=rf"cdn.*{THIRD}", status=403, times=99), "access.denied", ACCESS),
    (Fault("status", path=rf"cdn.*{THIRD}", status=418, times=99), "source.read", SOURCE),
    (Fault("cut", path=THIRD, times=99), "access.unreachable", ACCESS),
    (Fault("status", path="api/models/org/model$", status=503, times=99), "access.unreachable", ACCESS),
    (Fault("status", path="api/models/org/model$", status=200), "access.unreachable", ACCESS),
    (Fault("status", path="/tree/", status=200), "access.unreachable", ACCESS),
]


@pytest.mark.parametrize(("fault", "id", "code"), REFUSED, ids=lambda value: getattr(value, "kind", None))
def test_what_stays_wrong_is_refused(serve: Serve, model: Path, told: Told, fault: Fault, id: str, code: int) -> None:
    serve(model).faults.append(Fault(**vars(fault)))
    assert ids(told("quantize", "org/model", "out", *RECIPE, code=code)) == {id}
    assert not Path("out").exists()


@pytest.mark.parametrize("link", ["copy", "auto", "hard"])
def test_a_shard_that_is_not_what_the_hub_recorded_is_never_published(
    serve: Serve, model: Path, told: Told, cache: Path, link: str
) -> None:
    server = serve(Repo(model, sha256={FIRST: "0" * 64}))
    assert ids(told("quantize", "org/model", "out", *RECIPE, "--link", link, code=SOURCE)) == {"source.digest"}
    assert not Path("out").exists()
    assert not list(cache.rglob("*.safetensors"))
    assert ids(told("verify", "org/model", "--level", "data", code=FOUND)) >= {"data.digest"}
    assert server.sent


@pytest.mark.parametrize(("link", "times"), [("hard", 1), ("hard", 2), ("copy", 1)])
def test_a_byte_that_changes_on_its_way_is_seen(
    serve: Serve, model: Path, told: Told, cache: Path, link: str, times: int
) -> None:
    """Into the cache the file is fetched once more; what is streamed is refused. The first answer is the header."""
    serve(model).faults.append(Fault("flip", path=f"cdn.*{FIRST}", skip=1, times=times))
    healed = (link, times) == ("hard", 1)
    told_of = told("quantize", "org/model", "out", *RECIPE, "--link", link, code=0 if healed else SOURCE)
    assert healed or ids(told_of) == {"source.digest"}
    assert Path("out").exists() == healed
    told("quantize", "org/model", "out", *RECIPE, "--link", link, "--overwrite")
    told("quantize", model, "local", *RECIPE)
    assert files("out") == files("local")


def test_an_interrupted_run_carries_on_without_fetching_again(serve: Serve, model: Path, told: Told) -> None:
    server = serve(model)
    run = ["quantize", "org/model", "out", *RECIPE, "--link", "copy"]
    server.faults.append(Fault("cut", path=f"cdn.*{SECOND}", skip=1, times=99))
    assert ids(told(*run, code=ACCESS)) == {"access.unreachable"}
    assert not Path("out").exists()
    server.faults.clear()
    before = len(server.asked)
    told(*run, "--resume")
    assert len([path for method, path, _, _ in server.asked[before:] if method == "GET" and FIRST in path]) == 1
    told("quantize", model, "local", *RECIPE)
    assert files("out") == files("local")
    told(*run, "--resume")  # of what is published already


def test_a_branch_that_moved_is_known_by_what_its_files_are(serve: Serve, model: Path, told: Told) -> None:
    repo = Repo(model)
    server = serve(repo)
    run = ["quantize", "org/model", "out", *RECIPE, "--resume"]
    server.faults.append(Fault("cut", path=f"cdn.*{SECOND}", skip=1, times=99))
    told(*run, code=ACCESS)
    server.faults.clear()
    repo.commit = "b" * 40
    (model / "README.md").write_text("# another word\n")
    assert ids(told(*run, code=SOURCE)) == {"source.changed"}
    (model / "README.md").write_text("# a model\n")
    told(*run)
    assert manifest("out")["source"]["revision"] == "b" * 40


def test_a_folder_that_changes_under_its_commit_is_noticed(serve: Serve, model: Path, told: Told) -> None:
    """Which no Hub does; a mirror may."""
    serve(model).faults.append(Fault("resized", path=f"cdn.*{SECOND}", skip=1))
    assert ids(told("quantize", "org/model", "out", *RECIPE, "--link", "copy", code=SOURCE)) == {"source.changed"}


def test_a_server_that_goes_silent_is_given_up(
    serve: Serve, model: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.1)
    monkeypatch.setattr(ranges, "TRIES", 1)
    server = serve(model)
    server.faults.append(Fault("stall", path=THIRD, times=2, after=10))
    told("inspect", "org/model")
    server.faults.append(Fault("stall", path=THIRD, times=9))
    assert ids(told("inspect", "org/model", code=ACCESS)) == {"access.unreachable"}


def test_a_hub_that_nobody_runs_is_not_waited_for(
    serve: Serve, model: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(model)
    monkeypatch.setattr(ranges, "_wait", lambda seconds, traffic: pytest.fail("it waits"))
    with socket.socket() as taken:  # bound, and not listened on
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        assert ids(told("inspect", "org/model", code=ACCESS)) == {"access.unreachable"}


def test_a_limit_of_the_hub_tells_how_long_to_wait(
    serve: Serve, model: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(ranges, "_wait", lambda seconds, traffic: waits.append(seconds))
    limit = {"RateLimit": '"api";r=0;t=42', "RateLimit-Policy": '"fixed window";"api";q=500;w=300'}
    serve(model).faults.append(Fault("status", path="api/models/org/model$", status=429, headers=limit))
    told("inspect", "org/model")
    assert waits == [42]


def test_a_download_cache_in_a_repository_is_no_part_of_the_checkpoint(serve: Serve, model: Path, told: Told) -> None:
    (model / ".cache" / "huggingface").mkdir(parents=True)
    (model / ".cache" / "huggingface" / "config.json").write_text("{}")
    serve(model)
    told("quantize", model, "local", *RECIPE)
    told("quantize", "org/model", "out", *RECIPE)
    assert {p.name for p in Path("out").iterdir()} == {p.name for p in Path("local").iterdir()}


def test_a_statement_names_the_commit_and_what_the_hub_recorded(serve: Serve, model: Path, told: Told) -> None:
    serve(model)
    told("quantize", "org/model", "out", *RECIPE)
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in model.iterdir()}
    for name, options, known in (
        ("a", [], {FIRST, SECOND, THIRD}),
        ("b", ["--with-source"], set(manifest("out")["source"]["files"])),
    ):
        told("hash", "out", "--statement", f"{name}.json", *options)
        source, *found = json.loads(Path(f"{name}.json").read_text())["predicate"]["buildDefinition"][
            "resolvedDependencies"
        ]
        assert source["digest"] == {"gitCommit": SHA}
        told_of = {item["name"]: item["digest"]["sha256"] for item in found if "digest" in item}
        assert told_of == {name: sums[name] for name in known}
    told("verify", "out", "--provenance", "b.json", "--against", "org/model")


def test_a_wait_that_is_asked_for_is_kept_and_bounded(
    serve: Serve, model: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(ranges, "_wait", lambda seconds, traffic: waits.append(seconds))
    server = serve(model)
    for wait in ("7", "3600", "Wed, 21 Oct 2026 07:28:00 GMT"):
        server.faults.append(Fault("status", path=f"cdn.*{FIRST}", status=429, headers={"Retry-After": wait}))
    told("inspect", "org/model")
    assert waits == [7, ranges.LONGEST, ranges.WAIT * 4]


@pytest.mark.parametrize("link", ["copy", "auto"])
def test_a_run_that_waits_for_a_server_can_be_stopped(serve: Serve, model: Path, tmp_path: Path, link: str) -> None:
    server = serve(model)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path / "home"), "HF_ENDPOINT": server.url}
    command = [sys.executable, "-m", "ckptkit", "quantize", "org/model", "out", *RECIPE, "--link", link]
    busy = {"Retry-After": "30"}
    server.faults.append(Fault("status", path=f"cdn.*{SECOND}", skip=1, times=99, status=503, headers=busy))
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE) as process:
        while server.faults[0].times == 99:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=10)
    assert process.returncode == INTERRUPTED
    assert not (tmp_path / "out").exists()


# --- access ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "id"), [("gated", "access.gated"), ("private", "access.repository")])
def test_what_needs_a_login(
    serve: Serve, model: Path, told: Told, monkeypatch: pytest.MonkeyPatch, kind: str, id: str
) -> None:
    server = serve(Repo(model, **{kind: True}))
    document = told("inspect", "org/model", code=ACCESS)
    assert ids(document) == {id}
    assert all("hf auth login" in finding["hint"] for finding in document["findings"])
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    told("inspect", "org/model")
    sent_to = {path.split("/")[1] for _, path, _, token in server.asked if token}
    assert sent_to == {"api", "org"}  # never to the other host, which only has signed addresses


def test_names_that_the_hub_does_not_have(serve: Serve, model: Path, told: Told) -> None:
    serve(model)
    assert ids(told("inspect", "org/other", code=ACCESS)) == {"access.repository"}
    assert ids(told("inspect", "org/model@v9", code=SOURCE)) == {"source.revision"}
    assert ids(told("inspect", "org/mo..del", code=USAGE)) == {"usage.source"}


def test_a_hub_that_cannot_be_reached(serve: Serve, model: Path, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(model)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert ids(told("inspect", "org/model", code=ACCESS)) == {"access.unreachable"}


def test_without_a_network_the_cache_serves(
    serve: Serve, model: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import snapshot_download

    server = serve(model)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert ids(told("inspect", "org/model", code=ACCESS)) == {"access.offline"}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    snapshot_download("org/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    before = len(server.asked)
    told("quantize", "org/model", "out", *RECIPE)
    told("inspect", f"org/model@{SHA}")
    assert ids(told("inspect", f"hf://org/model/../../../../../{model.name}", code=ACCESS)) == {"access.offline"}
    assert len(server.asked) == before
    assert manifest("out")["source"]["revision"] == SHA


def test_the_variables_of_the_hub_are_obeyed_and_the_token_is_nowhere(
    serve: Serve, model: Path, tmp_path: Path
) -> None:
    """In a process of its own: the token is in its environment, and must be in nothing that it leaves behind."""
    server = serve(Repo(model, gated=True, private=True))
    home = tmp_path / "home"
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "HF_ENDPOINT": server.url, "HF_TOKEN": TOKEN}
    server.faults.append(Fault("status", path="cdn", status=503))
    command = [
        sys.executable,
        "-m",
        "ckptkit",
        "-v",
        "--debug",
        "quantize",
        "org/model",
        "out",
        *RECIPE,
        "--link",
        "hard",
    ]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "signature" not in ended.stdout + ended.stderr
    left = [path for place in ("out", "home") for path in (tmp_path / place).rglob("*") if path.is_file()]
    assert {path.name for path in left} >= {"ckptkit.json", THIRD}
    texts = [ended.stdout.encode(), ended.stderr.encode(), *(path.read_bytes() for path in left)]
    assert not [text for text in texts if TOKEN.encode() in text]
    assert any(token for _, _, _, token in server.asked)
    offline = subprocess.run(
        [*command[:3], "inspect", "org/other"], cwd=tmp_path, env={**environment, "HF_HUB_OFFLINE": "1"}, timeout=60
    )
    assert offline.returncode == ACCESS


def test_a_repository_is_not_written(serve: Serve, model: Path, told: Told) -> None:
    serve(model)
    assert ids(told("hash", "org/model", code=USAGE)) == {"usage.arguments"}
    Path("out").mkdir()
    Path("out/other").write_text("")
    assert ids(told("quantize", "org/model", "out", *RECIPE, code=OUTPUT)) == {"output.exists"}
