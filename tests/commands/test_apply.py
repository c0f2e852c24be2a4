"""Plan files: run as they were written on what they were made of, and on nothing else."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from make import checkpoint, llama, llama_config
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ckptkit.cli import main
from ckptkit.errors import ACCESS, OK, OUTPUT, SOURCE, USAGE
from ckptkit.files import origins

Run = Callable[..., tuple[int, set[str]]]
SHARD = "model-00001-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
DIFFERS = (SOURCE, {"source.plan-differs"})


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line with ``--json``; give the exit code and the ids of its findings."""

    def call(*arguments: object) -> tuple[int, set[str]]:
        code = main([*map(str, arguments), "--json", "--no-progress"])
        document = json.loads(capsys.readouterr().out)
        assert document["exit_code"] == code
        assert all("\n" not in finding["message"] for finding in document["findings"])
        return code, {finding["id"] for finding in document["findings"]}

    return call


@pytest.fixture
def src(tmp_path: Path) -> Path:
    """A Llama in two shards; the first stays as it is. Beside them texts that end lines where JSON lines do not."""
    tensors = llama(layers=1)
    head = {"lm_head.weight": tensors.pop("lm_head.weight")}
    folder = checkpoint(tmp_path / "src", [tensors, head], llama_config(layers=1, note="a\u2028b\x85c"))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "more").mkdir()
    (folder / "more" / "notes.txt").write_text("more")
    return folder


@pytest.fixture
def plan(src: Path, tmp_path: Path, run: Run) -> Path:
    path = tmp_path / "plan.jsonl"
    assert run("quantize", src, "-r", "lm_head-w8a16", "--dry-run", "--plan", path) == (OK, set())
    return path


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "ckptkit.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def edit_json(file: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content, indent=2))


def save(file: Path, tensors: dict[str, torch.Tensor], **metadata: str) -> None:
    save_file(tensors, file, metadata={"format": "pt", **metadata})


# --- the same result ---------------------------------------------------------------------------------------


def test_a_plan_makes_what_its_command_makes(src: Path, plan: Path, tmp_path: Path, run: Run) -> None:
    assert run("quantize", src, tmp_path / "a", "-r", "lm_head-w8a16") == (OK, set())
    assert run("apply", plan, tmp_path / "b", "--plan", tmp_path / "again.jsonl") == (OK, set())
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    made = [json.loads((tmp_path / name / "ckptkit.json").read_text()) for name in "ab"]
    assert {key: made[0][key] for key in ("plan", "settings")} == {key: made[1][key] for key in ("plan", "settings")}
    assert (tmp_path / "again.jsonl").read_text() == plan.read_text()


def test_every_line_is_one_line_of_ascii(plan: Path) -> None:
    lines = plan.read_bytes().decode("ascii").splitlines()
    assert all(isinstance(json.loads(line), dict) for line in lines)


def test_tensor_bytes_are_read_when_the_plan_runs(src: Path, plan: Path, tmp_path: Path, run: Run) -> None:
    for file in sorted(src.glob("*.safetensors")):
        save(file, {name: value + 1 for name, value in load_file(file).items()})
    assert run("apply", plan, tmp_path / "a") == (OK, set())
    assert run("quantize", src, tmp_path / "b", "-r", "lm_head-w8a16") == (OK, set())
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_what_no_plan_takes_along_may_come_and_go(src: Path, plan: Path, tmp_path: Path, run: Run) -> None:
    (src / "SHA256SUMS").write_text("")
    (src / "model.gguf").write_bytes(b"GGUF")
    os.utime(src / "config.json", ns=(1, 1))
    assert run("apply", plan, tmp_path / "out")[0] == OK
    (src / "SHA256SUMS").unlink()
    assert run("hash", src)[0] == OK
    assert run("apply", plan, tmp_path / "out", "--overwrite")[0] == OK


def test_the_source_is_found_from_anywhere(
    src: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("quantize", "src", "-r", "lm_head-w8a16", "--dry-run", "--plan", "plan.jsonl")[0] == OK
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert run("apply", "../plan.jsonl", "--dry-run") == (OK, set())
    shutil.move(src, tmp_path / "moved")
    assert run("apply", "../plan.jsonl", "--dry-run") == (SOURCE, {"source.missing"})
    assert run("apply", "../plan.jsonl", "--dry-run", "--source", "../moved") == (OK, set())
    assert os.listdir() == []


def test_names_that_are_no_utf8(src: Path, tmp_path: Path, run: Run) -> None:
    (src / os.fsdecode(b"n\xff.txt")).write_text("n")
    plan = tmp_path / os.fsdecode(b"p\xff.jsonl")
    assert run("quantize", src, "-r", "lm_head-w8a16", "--dry-run", "--plan", plan)[0] == OK
    assert run("apply", plan, tmp_path / "out")[0] == OK
    assert (tmp_path / "out" / os.fsdecode(b"n\xff.txt")).read_text() == "n"
    assert run("apply", tmp_path / os.fsdecode(b"\xff.jsonl"), tmp_path / "out") == (USAGE, {"plan.file"})


# --- another source ----------------------------------------------------------------------------------------


def add_to_metadata(src: Path) -> None:
    save(src / SHARD, load_file(src / SHARD), note="the same tensors")


def rename_a_tensor(src: Path) -> None:
    tensors = load_file(src / SHARD)
    tensors["renamed"] = tensors.pop("model.norm.weight")
    save(src / SHARD, tensors)
    edit_json(
        src / INDEX, lambda index: index["weight_map"].update(renamed=index["weight_map"].pop("model.norm.weight"))
    )


def link_nowhere(src: Path) -> None:
    (src / "tokenizer.json").unlink()
    (src / "tokenizer.json").symlink_to("nowhere")


CHANGES: dict[str, Callable[[Path], object]] = {
    "the config says something else": lambda src: edit_json(
        src / "config.json", lambda config: config.update(tie_word_embeddings=True)
    ),
    "the config is spelled otherwise": lambda src: (src / "config.json").write_text(
        (src / "config.json").read_text().replace("\n", "")
    ),
    "the index says something else": lambda src: edit_json(src / INDEX, lambda index: index.update(metadata={})),
    "a tokenizer of the same size": lambda src: (src / "tokenizer.json").write_text("[]"),
    "a file below is longer": lambda src: (src / "more/notes.txt").write_text("more!"),
    "a file is gone": lambda src: (src / "tokenizer.json").unlink(),
    "a folder is gone": lambda src: shutil.rmtree(src / "more"),
    "the config is gone": lambda src: (src / "config.json").unlink(),
    "a link leads nowhere": link_nowhere,
    "a file has come": lambda src: (src / "generation_config.json").write_text("{}"),
    "a shard's metadata is another": add_to_metadata,
    "a tensor has another name": rename_a_tensor,
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_source_is_noticed(change: str, src: Path, plan: Path, tmp_path: Path, run: Run) -> None:
    CHANGES[change](src)
    assert run("apply", plan, tmp_path / "out") == DIFFERS
    assert run("apply", plan, "--dry-run") == DIFFERS
    assert not list(tmp_path.glob("out*"))


def test_all_that_changed_is_told_at_once(
    src: Path, plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (src / "tokenizer.json").unlink()
    (src / "config.json").write_text("{}")
    (tmp_path / "out").write_text("in the way")
    assert main(["apply", str(plan), str(tmp_path / "out"), "--json"]) == SOURCE
    told = {(finding["id"], Path(finding["file"]).name) for finding in json.loads(capsys.readouterr().out)["findings"]}
    differs = {("source.plan-differs", name) for name in ("tokenizer.json", "config.json")}
    assert told == differs | {("output.exists", "out")}


def test_a_source_of_other_shapes(plan: Path, tmp_path: Path, run: Run) -> None:
    other = checkpoint(tmp_path / "other", llama(layers=1, inter=384), llama_config(layers=1))
    assert run("apply", plan, tmp_path / "out", "--source", other) == DIFFERS


def test_a_large_file_is_known_by_its_size(
    src: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origins, "LARGE", 100)
    (src / "large.bin").write_bytes(bytes(101))
    (src / "small.bin").write_bytes(bytes(100))
    plan = tmp_path / "plan.jsonl"
    take = ("--include", "*.bin", "--dry-run", "--plan", plan)
    assert run("quantize", src, "-r", "lm_head-w8a16", *take)[0] == OK
    (src / "large.bin").write_bytes(b"\1" * 101)
    assert run("apply", plan, "--dry-run") == (OK, set())
    (src / "small.bin").write_bytes(b"\1" * 100)
    assert run("apply", plan, "--dry-run") == DIFFERS
    (src / "small.bin").write_bytes(bytes(100))
    (src / "large.bin").write_bytes(bytes(102))
    assert run("apply", plan, "--dry-run") == DIFFERS


def test_a_plan_to_mend_an_index_fits_that_index_alone(src: Path, tmp_path: Path, run: Run) -> None:
    (src / INDEX).write_text("no index")
    plan = tmp_path / "plan.jsonl"
    assert run("reshard", src, "--dry-run", "--plan", plan)[0] == OK
    assert run("apply", plan, "--dry-run")[0] == OK
    (src / INDEX).write_text("an index?")
    assert run("apply", plan, "--dry-run") == DIFFERS


# --- another plan ------------------------------------------------------------------------------------------


def seal(header: dict[str, Any], steps: list[dict[str, Any]]) -> list[str]:
    """The lines of a plan file that says itself that it is as it was written."""
    rest = {key: value for key, value in sorted(header.items()) if key != "seal"}
    texts = [json.dumps(rest, separators=(",", ":"), sort_keys=True, ensure_ascii=False), *map(json.dumps, steps)]
    return [json.dumps(header | {"seal": hashlib.sha256("\n".join(texts).encode()).hexdigest()}), *texts[1:]]


Edit = Callable[[dict[str, Any], list[dict[str, Any]]], object]
EDITS: dict[str, tuple[Edit, tuple[int, set[str]]]] = {
    "nonfinite": (lambda header, steps: header["settings"].update(nonfinite="keep"), (OK, set())),
    "the recipe's name": (lambda header, steps: header["settings"]["recipe"].update(name="x"), (OK, set())),
    "no settings": (lambda header, steps: header.pop("settings"), (USAGE, {"plan.file"})),
    "another file": (lambda header, steps: header["sidecars"].append(["x.txt", "x"]), DIFFERS),
    "an unknown file": (lambda header, steps: header["sidecars"].append(["x.txt", None]), DIFFERS),
    "a file left out": (lambda header, steps: header["left_out"].append(["x", "y"]), (OK, set())),
    "made from nothing": (lambda header, steps: header.update(made_from={}), DIFFERS),
    "not made from anything": (lambda header, steps: header.update(made_from=None), (USAGE, {"plan.file"})),
    "another rule": (lambda header, steps: steps[0].update(rule="x"), (OK, set())),
    "other arguments": (lambda header, steps: steps[-1]["args"].update(num_bits=4), DIFFERS),
    "arguments of another kind": (lambda header, steps: steps[-1].update(args=[]), (USAGE, {"plan.file"})),
    "another operation": (lambda header, steps: steps[-1].update(op="pack_int@9"), (USAGE, {"plan.unknown-op"})),
    "another dtype": (lambda header, steps: steps[0]["inputs"][0].__setitem__(1, "F16"), DIFFERS),
    "part of a tensor": (lambda header, steps: steps[0]["inputs"][0].__setitem__(3, [0, 1]), DIFFERS),
    "a step less": (lambda header, steps: steps.pop(), DIFFERS),
    "a step of no shard": (lambda header, steps: steps[0].update(shard="x"), (USAGE, {"plan.file"})),
    "no inputs": (lambda header, steps: steps[0].update(inputs=[]), (USAGE, {"plan.file"})),
    "a step that is none": (lambda header, steps: steps.__setitem__(0, []), (USAGE, {"plan.file"})),
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_plan_is_refused(edit: str, plan: Path, tmp_path: Path, run: Run) -> None:
    """As it is; and with a seal made anew, which is how a plan of another version would look."""
    header, *steps = map(json.loads, plan.read_text().splitlines())
    change, resealed = EDITS[edit]
    change(header, steps)
    plan.write_text("\n".join(map(json.dumps, [header, *steps])))
    assert run("apply", plan, tmp_path / "out") == DIFFERS
    plan.write_text("\n".join(seal(header, steps)))
    assert run("apply", plan, "--dry-run") == resealed
    assert not list(tmp_path.glob("out*"))


NO_PLANS = [b"", b"\n", b"{}", b"[]", b"{", b"\xff\xfe", b'{"schema": 2}', b'{"schema": 1}\n{', b"[" * 100_000]


@pytest.mark.parametrize("text", NO_PLANS, ids=range(len(NO_PLANS)))
def test_what_is_no_plan(text: bytes, tmp_path: Path, run: Run) -> None:
    (tmp_path / "plan.jsonl").write_bytes(text)
    assert run("apply", tmp_path / "plan.jsonl", tmp_path / "out") == (USAGE, {"plan.file"})


def test_plans_that_cannot_be_read(plan: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("apply", tmp_path / "none.jsonl", tmp_path / "out") == (USAGE, {"plan.file"})
    assert run("apply", tmp_path, tmp_path / "out") == (USAGE, {"plan.file"})

    def denied(*arguments: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", denied)
    assert run("apply", plan, tmp_path / "out") == (ACCESS, {"access.denied"})


# --- the command lines -------------------------------------------------------------------------------------


def test_a_dry_run_needs_no_output_and_a_run_does(plan: Path, tmp_path: Path, run: Run) -> None:
    assert run("apply", plan, "--dry-run") == (OK, set())
    assert run("apply", plan) == (USAGE, {"usage.arguments"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.jsonl", "src"]


def test_what_a_plan_takes_along_is_settled(plan: Path, run: Run) -> None:
    assert run("apply", plan, "--dry-run", "--include", "*.bin") == (USAGE, {"usage.arguments"})


def test_where_a_plan_may_be_written(
    src: Path, plan: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(src)
    before = contents(src)
    commands = (("quantize", ".", "-r", "lm_head-w8a16"), ("reshard", "."), ("apply", plan))
    for command in commands:
        assert run(*command, "--dry-run", "--plan", "-") == (USAGE, {"usage.arguments"})
        assert run(*command, "--dry-run", "--plan", "plan.jsonl") == (OUTPUT, {"output.same"})
        assert run(*command, "--dry-run", "--plan", "more/plan.jsonl") == (OUTPUT, {"output.same"})
        assert run(*command, "--dry-run", "--plan", tmp_path / "no/plan.jsonl") == (OUTPUT, {"output.write"})
        assert run(*command, "--dry-run", "--plan", tmp_path / ("n" * 300)) == (OUTPUT, {"output.write"})
    assert contents(src) == before


def test_a_linked_shard_is_the_source_s_own(src: Path, plan: Path, tmp_path: Path, run: Run) -> None:
    assert run("apply", plan, tmp_path / "out", "--link", "hard") == (OK, set())
    assert (tmp_path / "out" / SHARD).samefile(src / SHARD)
    with safe_open(tmp_path / "out/model-00002-of-00002.safetensors", "pt") as file:
        assert "lm_head.weight_packed" in file.keys()  # noqa: SIM118
