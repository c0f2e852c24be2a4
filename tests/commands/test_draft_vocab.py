"""``ckptkit draft-vocab build``, ``convert`` and ``check``, from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make import checkpoint
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from ckptkit.cli import main
from ckptkit.errors import FOUND, OK, OUTPUT, USAGE
from ckptkit.vocab.lists import read_list

WORDS = ["<unk>", *"abcdefgh"]
END = len(WORDS)
ROWS = 12  # of the head: two more than there are tokens
TEXT = "a b a c\nb a d a\n" * 40 + "e f\n"


def run(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = OK) -> dict[str, Any]:
    """The JSON document that a command prints, which must end with ``code``."""
    assert main(["draft-vocab", *map(str, arguments), "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def ids_of(found: dict[str, Any]) -> set[str]:
    return {finding["id"] for finding in found["findings"]}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A model of twelve rows with a tokenizer of ten tokens, the last of which ends a text."""
    made = Tokenizer(models.WordLevel({word: id for id, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([AddedToken("<end>", special=True)])
    tensors = {
        name: torch.arange(ROWS * 4, dtype=torch.float32).reshape(ROWS, 4)
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": ROWS, "eos_token_id": END}
    folder = checkpoint(tmp_path / "target", tensors, config)
    made.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


# --- build -------------------------------------------------------------------------------------------------


def test_build(capsys: pytest.CaptureFixture[str], tmp_path: Path, target: Path, text: Path) -> None:
    out = tmp_path / "draft.txt"
    arguments = ["build", out, "--tokenizer", target, "--corpus", text, "--size", 5, "--held-out", 0]
    found = run(capsys, *arguments)
    words = Counter(TEXT.split())
    expected = sorted(range(ROWS), key=lambda id: (-words[WORDS[id]] if id < END else 0, id))[:5]
    vocab = read_list(out)
    assert vocab.ids.tolist() == expected
    assert (vocab.is_ranked, vocab.n_vocab) == (
        False,
        ROWS,
    )  # a, b, c, d and e, which are in that order by their ids too
    assert found["tokenizer_sha256"] == vocab.tokenizer_sha256
    assert (found["tokens"], found["never_seen"], found["tokens_counted"]) == (5, 0, len(TEXT.split()))
    run(capsys, *arguments, code=OUTPUT)
    run(capsys, *arguments, "--overwrite")


def test_build_puts_special_tokens_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, target: Path, text: Path
) -> None:
    out = tmp_path / "draft.pt"
    arguments = ["build", out, "--tokenizer", target, "--corpus", text, "--size", 4, "--force-special", "--held-out", 0]
    assert run(capsys, *arguments, "--to", "sglang-token-map")["special"] == [END]
    assert torch.load(out, weights_only=True) == [END, 1, 2, 3]


def test_build_measures_on_what_it_did_not_count(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, target: Path
) -> None:
    rng = np.random.default_rng(0)
    texts = [" ".join(WORDS[id] for id in rng.integers(1, 9, 30)) for _ in range(200)]
    for name, part in (("chat.jsonl", texts[:150]), ("code.jsonl", texts[150:])):
        (tmp_path / name).write_text("\n".join(json.dumps({"text": text}) for text in part))
    corpora = ["--corpus", f"chat:en={tmp_path / 'chat.jsonl'}", "--corpus", f"code={tmp_path / 'code.jsonl'}"]
    found = run(capsys, "build", tmp_path / "d.txt", "--tokenizer", target, *corpora, "--size", 4, "--held-out", 0.3)
    rows = found["coverage"]
    assert [(row["kind"], row["language"]) for row in rows] == [("chat", "en"), ("code", None), (None, None)]
    assert sum(row["tokens"] for row in rows[:2]) == rows[2]["tokens"] == 30 * found["documents_held_out"]
    assert found["tokens_counted"] == 30 * found["documents"]
    assert found["documents"] + found["documents_held_out"] == 200
    assert all(0.3 < row["share"] < 0.7 for row in rows)


def test_build_says_what_it_does_not_know(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, target: Path, text: Path
) -> None:
    text.write_text("a b")
    found = run(capsys, "build", tmp_path / "d.txt", "--tokenizer", target, "--corpus", text, "--size", 4)
    assert ids_of(found) == {"vocab.corpus"}
    assert found["coverage"][-1]["share"] is None or found["never_seen"] == 4


@pytest.mark.parametrize(
    ("changes", "id"),
    [
        (["--size", 13], "vocab.size"),
        (["--size", 4, "--tokenizer", "."], "vocab.tokenizer"),
        (["--size", 4, "--corpus", "absent"], "vocab.corpus"),
    ],
)
def test_build_refuses(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, target: Path, text: Path, changes: list[object], id: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    given = ["build", tmp_path / "d.txt", "--tokenizer", target, "--corpus", text, *changes]
    assert ids_of(run(capsys, *given, code=USAGE)) == {id}
    assert not (tmp_path / "d.txt").exists()


def test_several_processes_from_the_shell(tmp_path: Path, target: Path, text: Path) -> None:
    """Processes are started anew, not forked: that needs a main module which can be imported."""
    text.write_text("a b a c\n" * 1_300_000)
    command = [sys.executable, "-m", "ckptkit", "draft-vocab", "build", "d.txt", "--tokenizer", str(target)]
    command += ["--corpus", str(text), "--size", "4", "--jobs", "2", "--json"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == OK, ended.stderr
    assert json.loads(ended.stdout)["tokens_counted"] % 4 == 0
    assert read_list(tmp_path / "d.txt").ids.tolist()[:3] == [1, 2, 3]


# --- convert -----------------------------------------------------------------------------------------------


def test_convert_between_a_ranked_list_and_a_map(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, target: Path
) -> None:
    (tmp_path / "ranked.txt").write_text("5 0 11 1 7")
    map_ = tmp_path / "map.safetensors"
    run(capsys, "convert", tmp_path / "ranked.txt", map_, "--tokenizer", target)
    tensors = load_file(map_)
    assert (np.arange(5) + tensors["d2t"]).tolist() == np.flatnonzero(tensors["t2d"]).tolist() == [0, 1, 5, 7, 11]
    told = run(capsys, "convert", map_, tmp_path / "again.txt", "--to", "llamacpp-list")
    assert ids_of(told) == {"vocab.unranked"}
    run(capsys, "convert", tmp_path / "ranked.txt", tmp_path / "first.json", "--size", 2)
    assert json.loads((tmp_path / "first.json").read_text()) == [5, 0]
    assert ids_of(run(capsys, "convert", map_, tmp_path / "x.txt", "--size", 2, code=USAGE)) == {"vocab.unranked"}
    assert ids_of(run(capsys, "convert", "prefix:9", tmp_path / "x.npy", "--to", "npy-mask", code=USAGE)) == {
        "vocab.size"
    }


def test_convert_refuses_to_guess(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, out = tmp_path / "d2t.safetensors", tmp_path / "out.json"
    save_file({"d2t": np.array([0, 1, 5], np.int64)}, path)
    assert ids_of(run(capsys, "convert", path, out, code=USAGE)) == {"vocab.ambiguous"}
    run(capsys, "convert", path, out, "--absolute")
    assert json.loads(out.read_text()) == [0, 1, 5]
    run(capsys, "convert", path, out, "--offsets", "--overwrite")
    assert json.loads(out.read_text()) == [0, 2, 7]


def test_convert_makes_a_folder_of_two_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run(capsys, "convert", "prefix:3+tail:1", tmp_path / "maps", "--to", "speculators-npy", "--n-vocab", 12)
    assert sorted(path.name for path in (tmp_path / "maps").iterdir()) == ["d2t-4.npy", "t2d-4.npy"]
    assert read_list(tmp_path / "maps" / "d2t-4.npy").ids.tolist() == [0, 1, 2, 11]


def test_a_list_of_another_tokenizer_is_not_converted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, target: Path
) -> None:
    (tmp_path / "a.txt").write_text(f"# tokenizer_sha256={'0' * 64}\n1 2")
    given = ["convert", tmp_path / "a.txt", tmp_path / "b.txt", "--tokenizer", target]
    assert ids_of(run(capsys, *given, code=USAGE)) == {"vocab.fingerprint"}


# --- check -------------------------------------------------------------------------------------------------


def draft(folder: Path, ids: list[int], rows: int | None = None, **config: object) -> Path:
    d2t = torch.tensor([id - i for i, id in enumerate(ids)])
    t2d = torch.tensor([id in ids for id in range(ROWS)])
    tensors = {"lm_head.weight": torch.ones(rows or len(ids), 4), "d2t": d2t, "t2d": t2d}
    stated = {"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": ROWS, "draft_vocab_size": len(ids), **config}
    return checkpoint(folder, tensors, stated)


def test_a_good_draft_has_no_finding(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, target: Path, text: Path
) -> None:
    made = draft(tmp_path / "draft", [1, 2, 3, END])
    given = ["check", made, "--head", made, "--tokenizer", target, "--corpus", f"words={text}", "--strict"]
    found = run(capsys, *given)
    assert found["findings"] == []
    words = Counter(TEXT.split())
    share = sum(words[word] for word in "abc") / sum(words.values())
    assert found["figures"]["coverage"][0]["share"] == pytest.approx(share)
    assert {check["result"] for check in found["checks"]} == {"ok"}


CASES: dict[str, tuple[str, list[object]]] = {
    "vocab.range": ("0 12", ["--n-vocab", 12]),
    "vocab.duplicate": ("0 1 1", []),
    "vocab.specials": ("0 1", ["--tokenizer", "{target}", "--strict"]),
    "vocab.fingerprint": (f"# tokenizer_sha256={'0' * 64}\n{END}", ["--tokenizer", "{target}"]),
    "vocab.coverage": (f"1 {END}", ["--tokenizer", "{target}", "--corpus", "{text}", "--min-coverage", 0.9]),
    "vocab.head-rows": ("0 15", ["--head", "{target}"]),
    "vocab.config": ("1 2 3", ["--head", "{config}"]),
    "vocab.head-map": ("1 2 4", ["--head", "{draft}"]),
}


@pytest.mark.parametrize("id", CASES)
def test_what_is_wrong_is_found(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, target: Path, text: Path, id: str
) -> None:
    content, options = CASES[id]
    (tmp_path / "list.txt").write_text(content)
    places = {"target": target, "text": text, "draft": draft(tmp_path / "draft", [1, 2, 3])}
    places["config"] = draft(tmp_path / "config", [1, 2, 3], draft_vocab_size=4)
    given = [str(option).format(**places) for option in options]
    found = run(capsys, "check", tmp_path / "list.txt", *given, code=FOUND)
    assert ids_of(found) == {id}
    results = {check["id"]: check["result"] for check in found["checks"]}
    assert results[id] in {"fail", "warn"}
    run(capsys, "check", tmp_path / "list.txt", *given, "--exit-zero")


def test_what_is_wrong_with_maps_is_found(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mask = np.zeros(12, bool)
    mask[[0, 1, 5]] = True
    cases = {
        "vocab.ambiguous": {"d2t": np.array([0, 1, 5])},
        "vocab.mapping": {"d2t": np.array([0, 0, 4]), "t2d": mask},
        "vocab.order": {"d2t": np.array([5, -1, -1]), "t2d": mask},
        "vocab.untrained-map": {"d2t": np.zeros(3, np.int64)},
    }
    for id, tensors in cases.items():
        save_file(tensors, tmp_path / "map.safetensors")
        assert ids_of(run(capsys, "check", tmp_path / "map.safetensors", "--strict", code=FOUND)) == {id}
    save_file({"d2t": np.array([0, 0, 3]), "t2d": mask}, tmp_path / "map.safetensors")
    assert ids_of(run(capsys, "check", tmp_path / "map.safetensors", "--n-vocab", 13, code=FOUND)) == {"vocab.size"}


def test_a_head_of_other_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    made = draft(tmp_path / "draft", [1, 2, 3], rows=4)
    assert ids_of(run(capsys, "check", made, "--head", made, code=FOUND)) == {"vocab.head-rows"}


def test_what_cannot_be_checked_at_all(capsys: pytest.CaptureFixture[str], tmp_path: Path, target: Path) -> None:
    assert ids_of(run(capsys, "check", tmp_path / "absent", code=USAGE)) == {"vocab.list"}
    assert ids_of(run(capsys, "check", "prefix:3", "--corpus", "x", code=USAGE)) == {"usage.arguments"}
    save_file({"x": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert ids_of(run(capsys, "check", "prefix:3", "--head", tmp_path, code=USAGE)) == {"vocab.head"}


def test_reports_are_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = ["--junit", tmp_path / "j.xml", "--report", tmp_path / "r.html", "--report", tmp_path / "r.json"]
    run(capsys, "check", "prefix:3", *given)
    assert "vocab.range" in (tmp_path / "j.xml").read_text()
    assert json.loads((tmp_path / "r.json").read_text())["command"] == "draft-vocab check"


def test_a_variable_sets_an_option_of_a_command_within(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTKIT_DRAFT_VOCAB_CONVERT_TO", "json")
    run(capsys, "convert", "prefix:3", tmp_path / "x")
    assert json.loads((tmp_path / "x").read_text()) == [0, 1, 2]
