"""``ckptkit diff`` as a user runs it: exit codes, the document, what it prints for people."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from make import checkpoint, llama, llama_config

from ckptkit.cli import main
from ckptkit.errors import FOUND, OK, SOURCE, USAGE
from ckptkit.files.header import Spec, lay_out

Told = Callable[..., dict[str, Any]]
LEVELS = ["names", "specs", "digests", "values"]
NORM = "model.norm.weight"


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    """The document that ``diff`` prints under --json, its exit code being as expected."""

    def call(*arguments: object, code: int = FOUND) -> dict[str, Any]:
        assert main(["diff", *map(str, arguments), "--json", "--no-progress"]) == code
        out, err = capsys.readouterr()
        document: dict[str, Any] = json.loads(out, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
        assert (document["exit_code"], document["ok"]) == (code, code == OK)
        assert "Traceback" not in err
        return document

    return call


@pytest.fixture
def a(tmp_path: Path) -> Path:
    """A Llama in two shards."""
    tensors = llama()
    return checkpoint(tmp_path / "a", [dict(list(tensors.items())[n::2]) for n in range(2)], llama_config())


@pytest.fixture
def b(tmp_path: Path) -> Path:
    """The same in one file but for a tensor gone, one new, one cast, one reshaped, one scaled; another config."""
    tensors = llama(lm_head__weight=None, head__weight=llama()["lm_head.weight"])
    tensors |= {
        NORM: tensors[NORM] * 1.01,
        "model.layers.0.mlp.up_proj.weight": tensors["model.layers.0.mlp.up_proj.weight"].float(),
    }
    tensors |= {"model.layers.1.mlp.up_proj.weight": tensors["model.layers.1.mlp.up_proj.weight"].view(128, 256)}
    folder = checkpoint(tmp_path / "b", tensors, llama_config(rope_theta=5.0))
    (folder / "tokenizer.json").write_text("{}")
    return folder


COUNTS = {"only_a": 1, "only_b": 1, "shape": 1, "dtype": 1, "equal": 17, "differ": 1, "unread": 0, "config": 2}


@pytest.mark.parametrize("level", LEVELS)
def test_the_document(level: str, a: Path, b: Path, told: Told) -> None:
    found = told(a, b, "--level", level)
    seen = {"names": 2, "specs": 4, "digests": 7, "values": 7}[level]
    expected = {key: value if number < seen else None for number, (key, value) in enumerate(COUNTS.items())}
    expected |= {"config": 2} | ({"equal": 18} if level == "values" else {})  # the cast one has the same values
    assert found["summary"] == expected | {"tensors_a": 21, "tensors_b": 21}
    assert ([ref["name"] for ref in found["only_a"]], [ref["name"] for ref in found["only_b"]]) == (
        ["lm_head.weight"], ["head.weight"],
    )  # fmt: skip
    changed = {item["name"]: item["differs"] for item in found["changed"]}
    specs = {"model.layers.0.mlp.up_proj.weight": ["dtype"], "model.layers.1.mlp.up_proj.weight": ["shape"]}
    content = {"digests": {NORM: ["bytes"]}, "values": {NORM: ["values"]}}.get(level, {})
    assert changed == ({} if level == "names" else specs | content)
    assert [item["name"] for item in found["worst"]] == ([NORM] if level == "values" else [])
    assert found["config"] == {
        "added": {},
        "removed": {},
        "changed": {"rope_theta": {"a": 10000.0, "b": 5.0}},
        "files": {"tokenizer.json": "only in B"},
    }


def test_figures_of_the_worst(a: Path, b: Path, told: Told) -> None:
    (worst,) = told(a, b, "--level", "values")["worst"]
    one, other = torch.ones(128).double(), (torch.ones(128, dtype=torch.bfloat16) * 1.01).double()
    distance = float((one - other)[0].abs())
    assert worst == {
        "name": NORM, "name_b": NORM, "within": False, "max_abs": distance, "rel_rms": pytest.approx(distance),
        "cosine": pytest.approx(1), "beyond": 128, "nonfinite": 0, "values": 128,
    }  # fmt: skip


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_differs(level: str, a: Path, tmp_path: Path, told: Told) -> None:
    same = checkpoint(tmp_path / "same", llama(), llama_config())
    found = told(a, same, "--level", level, code=OK)
    assert (found["changed"], found["only_a"], found["only_b"], found["worst"]) == ([], [], [], [])
    assert told(a, a, "--level", level, code=OK)["ok"]


def test_the_default_level_is_specs(a: Path, b: Path, told: Told) -> None:
    assert told(a, b)["level"] == "specs"


@pytest.mark.parametrize("kind", ["--rename", "--map"])
@pytest.mark.parametrize("rule", ["lm_head=head", "lm_head.weight=head.weight", "re:lm_=", "re:^lm_(head)=\\1"])
def test_renamed_tensors_are_compared(kind: str, rule: str, a: Path, b: Path, told: Told) -> None:
    summary = told(a, b, kind, rule, "--level", "digests")["summary"]
    assert (summary["only_a"], summary["only_b"], summary["equal"]) == (0, 0, 18)


def test_a_tolerance(a: Path, tmp_path: Path, told: Told) -> None:
    tensors = llama()
    near = checkpoint(tmp_path / "near", tensors | {NORM: tensors[NORM] * 1.01}, llama_config())
    assert told(a, near, "--level", "values")["summary"]["differ"] == 1
    assert told(a, near, "--level", "values", "--rtol", "0.001")["summary"]["differ"] == 1
    for tolerance in (["--rtol", "0.02"], ["--atol", "0.02"]):
        found = told(a, near, "--level", "values", *tolerance, code=OK)
        assert (found["summary"]["differ"], found["summary"]["equal"]) == (0, 21)
        assert [(item["name"], item["within"], item["beyond"]) for item in found["worst"]] == [(NORM, True, 0)]


def test_patterns_restrict(a: Path, b: Path, told: Told) -> None:
    found = told(a, b, "*.mlp.up_proj.weight", "head.weight")
    assert (found["summary"]["only_a"], found["summary"]["only_b"], found["config"]) == (0, 1, None)
    assert {item["name"] for item in found["changed"]} == {f"model.layers.{n}.mlp.up_proj.weight" for n in (0, 1)}
    assert told(a, b, "*self_attn*", "--level", "digests", code=OK)["summary"]["equal"] == 8
    assert told(a, b, "head.weight", "--rename", "lm_head=head", code=OK)["summary"]["only_b"] == 0


def test_values_that_are_no_numbers(tmp_path: Path, told: Told) -> None:
    odd, zero = torch.tensor([float("nan"), float("inf"), 1.0]), torch.zeros(3)
    one = checkpoint(tmp_path / "one", {"odd": odd, "zero": zero}, {})
    two = checkpoint(tmp_path / "two", {"odd": zero + 1, "zero": zero + 1}, {})
    first, second = told(one, two, "--level", "values")["worst"]
    assert (first["name"], first["nonfinite"], first["max_abs"], first["beyond"]) == ("odd", 2, 0.0, 2)
    assert (second["name"], second["rel_rms"], second["cosine"]) == ("zero", None, None)


@pytest.mark.parametrize(
    ("arguments", "id"),
    [
        (["lm_haed.weight"], "usage.pattern-unmatched"),
        (["re:("], "recipe.pattern"),
        (["--rename", "lm_haed=x"], "usage.pattern-unmatched"),
        (["--rename", "lm_head"], "usage.rename"),
        (["--rename", "lm_head=model.embed_tokens"], "plan.rename-collision"),
        (["--rtol", "0.1"], "usage.arguments"),
        (["--level", "digests", "--atol", "0.1"], "usage.arguments"),
        (["--level", "bytes"], "usage.arguments"),
        (["--rtol", "-1"], "usage.arguments"),
    ],
)
def test_refusals(arguments: list[str], id: str, a: Path, b: Path, told: Told) -> None:
    assert {finding["id"] for finding in told(a, b, *arguments, code=USAGE)["findings"]} == {id}


@pytest.mark.parametrize(
    ("breaks", "id"),
    [
        (lambda a: (a / "model-00001-of-00002.safetensors").unlink(), "index.missing-shard"),
        (lambda a: (a / "model-00001-of-00002.safetensors").write_bytes(b""), "layout.truncated"),
        (lambda a: (a / "config.json").write_text("{"), "config.parse"),
        (shutil.rmtree, "source.missing"),
    ],
)
def test_a_broken_source(breaks: Callable[[Path], Any], id: str, a: Path, b: Path, told: Told) -> None:
    breaks(a)
    for sides in ((a, b), (b, a)):
        assert id in {finding["id"] for finding in told(*sides, code=SOURCE)["findings"]}


def test_for_people(a: Path, b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(a), str(b), "--level", "values", "--no-progress"]) == FOUND
    out, err = capsys.readouterr()
    rows = {line.split("  ")[0]: line.split() for line in out.splitlines() if line}
    assert err == ""
    assert rows["names"][1:3] == ["1", "1"]
    assert rows["tensors"][3:] == ["1", "1", "18", "1"]
    assert rows["head.weight"][1:] == ["1", "BF16", "[512,", "128]"]
    assert rows["model.layers.#.mlp.up_proj.weight"][1] == "1"
    assert rows[NORM][1:] == ["0.00781", "0.00781", "1.000000", "128"]
    assert rows["rope_theta"][1:] == ["10000.0", "5.0"]


def test_long_lists_are_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = checkpoint(tmp_path / "one", {f"w{n}": torch.ones(2) for n in range(50)}, {})
    two = checkpoint(tmp_path / "two", {f"layers.{n}.w": torch.ones(2) for n in range(50)}, {})
    assert main(["diff", str(one), str(two), "--top", "3"]) == FOUND
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.startswith("layers.#.w")).split()[1] == "50"
    assert sum(line.startswith("w") for line in lines) == 3


def test_bare_names(a: Path, b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(a), str(b), "-q", "--level", "digests"]) == FOUND
    assert sorted(capsys.readouterr().out.split()) == sorted(
        ["lm_head.weight", "head.weight", NORM, "rope_theta", "tokenizer.json"]
        + [f"model.layers.{n}.mlp.up_proj.weight" for n in (0, 1)]
    )


@pytest.mark.parametrize("level", LEVELS)
def test_torch_is_not_needed(level: str, a: Path, b: Path) -> None:
    arguments = ["diff", str(a), str(b), "--level", level, "-q"]
    code = (
        f"import sys; from ckptkit.cli import main; assert main({arguments!r}) == 1; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)


def test_the_examples_of_the_help_page_work(
    a: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prefixed = {name.replace("model.", "model.language_model."): value for name, value in llama().items()}
    for name in ("model", "model-w8", "finetuned", "copy", "b"):
        shutil.copytree(a, tmp_path / name)
    shutil.rmtree(a)
    checkpoint(a, prefixed)
    monkeypatch.chdir(tmp_path)
    assert main(["diff", "--help"]) == OK
    lines = capsys.readouterr().out.split("Examples:")[1].split("Options:")[0].strip().splitlines()
    assert len(lines) == 4
    for line in lines:
        assert main(shlex.split(line.partition("|")[0])[1:]) == OK


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("level", ["digests", "values"])
def test_memory_does_not_grow_with_the_tensors(level: str, tmp_path: Path) -> None:
    """Sparse files of 200 MB whose last value differs, so that both are read to the end."""
    header, layout = lay_out([Spec("w", "BF16", (100, 1_000_000))], {"format": "pt"})
    for name, last in (("a", b"\0\0"), ("b", b"\x80\x3f")):
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(header)
        os.truncate(path, layout.file_size - 2)
        with path.open("ab") as file:
            file.write(last)
    arguments = ["diff", *(str(tmp_path / f"{name}.safetensors") for name in "ab"), "--level", level, "-q"]
    code = f"from ckptkit.cli import main; assert main({arguments!r}) == 1; print(open('/proc/self/status').read())"
    ended = subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True)
    (peak,) = [line.split()[1] for line in ended.stdout.splitlines() if line.startswith("VmHWM")]
    assert int(peak) < 120_000, "kB"
