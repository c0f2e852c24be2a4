"""``ckptkit reshard`` as a user runs it: what safetensors reads of the result against what torch makes of the source."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from make import checkpoint, llama, llama_config
from safetensors.torch import load_file, save_file
from told import Told, teller

from ckptkit.cli import main
from ckptkit.errors import OK, OUTPUT, SOURCE, USAGE, UserError
from ckptkit.files.checkpoint import INDEX, open_checkpoint
from ckptkit.files.source import open_source
from ckptkit.options import size

Tensors = dict[str, torch.Tensor]
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def src(tmp_path: Path) -> Iterator[Path]:
    """A Llama in three shards with files beside them; untouched when the test is over."""
    tensors = llama()
    parts = [dict(list(tensors.items())[number::3]) for number in range(3)]
    folder = checkpoint(tmp_path / "src", parts, llama_config())
    (folder / "tokenizer.json").write_text("{}")
    before = digests(folder)
    yield folder
    assert digests(folder) == before


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    return teller(capsys)


def ids(document: dict[str, Any]) -> set[str]:
    return {finding["id"] for finding in document["findings"]}


def tensors_of(folder: Path) -> Tensors:
    return {name: value for file in folder.rglob("*.safetensors") for name, value in load_file(file).items()}


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)), name


def assert_sound(folder: Path) -> None:
    """Index, headers and files agree, by the project's strict reader and by the index's own words."""
    with open_source(str(folder)) as source:
        checkpoint = open_checkpoint(source)
    assert not checkpoint.warnings
    if checkpoint.index:
        total = sum(tensor.nbytes for tensor in tensors_of(folder).values())
        assert checkpoint.index.metadata["total_size"] == total


CHANGES: dict[str, tuple[list[str], Callable[[Tensors], Tensors]]] = {
    "nothing": ([], lambda t: t),
    "split": (["--max-shard-size", "150kB"], lambda t: t),
    "joined": (["--max-shard-size", "1GiB"], lambda t: t),
    "renamed": (["--rename", "model.=language_model."], lambda t: {
        name.replace("model.", "language_model.", 1) if name.startswith("model.") else name: v for name, v in t.items()}),
    "renamed by regex": (["--rename", r"re:layers\.(\d+)\.mlp=blocks.\1.ffn"], lambda t: {
        name.replace("layers.", "blocks.").replace("mlp", "ffn") if "mlp" in name else name: v for name, v in t.items()}),
    "swapped": (["--rename", "model.layers.0=x", "--rename", "model.layers.1=model.layers.0", "--rename", "x=model.layers.1"],
        lambda t: {name.replace(".0.", ".9.").replace(".1.", ".0.").replace(".9.", ".1."): v for name, v in t.items()}),
    "dropped": (["--drop", "*norm*", "--drop", "lm_head.weight", "--allow", "config.tie,names.incomplete-model"],
        lambda t: {name: v for name, v in t.items() if "norm" not in name and "lm_head" not in name}),
    "cast": (["--cast", "*=f16"], lambda t: {name: v.half() for name, v in t.items()}),
    "widened": (["--cast", "*=float32"], lambda t: {name: v.float() for name, v in t.items()}),
    "everything": (
        ["--cast", "*mlp*=f32", "--rename", "model.=", "--drop", "*lm_head*", "--max-shard-size", "0.3MB", "-j", "3", "--allow", "config.tie"],
        lambda t: {name.removeprefix("model."): v.float() if "mlp" in name else v for name, v in t.items() if "lm" not in name}),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_tensors(change: str, src: Path, out: Path, told: Told) -> None:
    arguments, expected = CHANGES[change]
    document = told("reshard", src, out, *arguments)
    assert_same(tensors_of(out), expected(llama()))
    assert_sound(out)
    assert document["output"] == str(out)
    assert (out / "tokenizer.json").read_text() == "{}"


def test_float32_is_rounded_as_torch_does(tmp_path: Path, out: Path, told: Told) -> None:
    wide = {name: torch.randn(300, 70) * 10**scale for name, scale in (("a", 0), ("b", -6), ("c", 4))}
    src = checkpoint(tmp_path / "src", wide)
    told("reshard", src, out, "--cast", "*=bf16")
    assert_same(tensors_of(out), {name: value.bfloat16() for name, value in wide.items()})


def test_untouched_files_are_linked(src: Path, out: Path, told: Told) -> None:
    told("reshard", src, out, "--link", "hard")
    assert [(out / name).stat().st_ino for name in SHARDS] == [(src / name).stat().st_ino for name in SHARDS]
    told("reshard", src, f"{out}2", "--link", "hard", "--drop", "lm_head.weight", "--allow", "config.tie")
    shared = {name for name in SHARDS if (Path(f"{out}2") / name).stat().st_ino == (src / name).stat().st_ino}
    holder = json.loads((src / INDEX).read_text())["weight_map"]["lm_head.weight"]
    assert shared == {*SHARDS} - {holder}


def test_the_same_limit_again_changes_nothing(src: Path, out: Path, told: Told) -> None:
    told("reshard", src, out, "--max-shard-size", "150kB")
    again = told("reshard", out, f"{out}2", "--max-shard-size", "150kB", "--dry-run")
    assert again["plan"]["shards_written"] == 0


def test_files_are_no_larger_than_the_limit(src: Path, out: Path, told: Told) -> None:
    told("reshard", src, out, "--max-shard-size", "150kB")
    found = [path.stat().st_size for path in out.glob("*.safetensors")]
    assert len(found) > 3
    assert max(found) <= 150_000
    document = told("reshard", src, f"{out}2", "--max-shard-size", "100KiB")
    assert ids(document) == {"plan.oversized-tensor"}
    assert sum(path.stat().st_size > 100 << 10 for path in Path(f"{out}2").glob("*.safetensors")) == 2


def test_what_was_dropped_is_in_plan_and_manifest(src: Path, out: Path, told: Told) -> None:
    document = told("reshard", src, out, "--drop", "lm_head.*", "--allow", "config.tie")
    dropped = {"name": "lm_head.weight", "reason": "--drop lm_head.*"}
    assert document["plan"]["dropped"] == [dropped]
    assert json.loads((out / "ckptkit.json").read_text())["dropped"] == {dropped["name"]: dropped["reason"]}


def edit_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], set[str]]] = {
    "an unlisted tensor": (lambda index: index["weight_map"].pop("lm_head.weight"), {"index.extra-tensor"}),
    "a tensor that is nowhere": (
        lambda index: index["weight_map"].update(gone=SHARDS[0]), {"index.missing-tensor"}),
    "a wrong place": (
        lambda index: index["weight_map"].update({"lm_head.weight": SHARDS[0], "model.norm.weight": SHARDS[0]}),
        {"index.extra-tensor", "index.missing-tensor"}),
    "a wrong size": (lambda index: index["metadata"].update(total_size=1), set()),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_index_is_written_anew(fault: str, tmp_path: Path, out: Path, told: Told) -> None:
    change, found = WRONG[fault]
    tensors = llama()
    src = checkpoint(tmp_path / "src", [dict(list(tensors.items())[number::3]) for number in range(3)], llama_config())
    right = json.loads((src / INDEX).read_text())
    edit_index(src, change)
    document = told("reshard", src, out, "--link", "hard")
    assert ids(document) == found
    assert document["plan"]["shards_written"] == 0
    assert json.loads((out / INDEX).read_text()) == {**right, "weight_map": dict(sorted(right["weight_map"].items()))}
    assert_same(tensors_of(out), tensors)
    assert_sound(out)


def test_shards_without_an_index_get_one(tmp_path: Path, out: Path, told: Told) -> None:
    src = checkpoint(tmp_path / "src", [{"a": torch.ones(2)}, {"b": torch.zeros(2)}])
    (src / INDEX).unlink()
    assert ids(told("reshard", src, out)) == {"index.missing", "config.missing"}
    assert_sound(out)
    assert set(tensors_of(out)) == {"a", "b"}


def test_a_second_copy_is_dropped_and_told(tmp_path: Path, out: Path, told: Told) -> None:
    src = checkpoint(tmp_path / "src", [{"a": torch.ones(2)}, {"b": torch.zeros(2)}])
    save_file({"a": torch.zeros(3), "b": torch.zeros(2)}, src / "model-00002-of-00002.safetensors")
    document = told("reshard", src, out)
    assert [item["name"] for item in document["plan"]["dropped"]] == ["a"]
    assert_same(tensors_of(out), {"a": torch.ones(2), "b": torch.zeros(2)})
    assert_sound(out)


@pytest.mark.parametrize(
    ("breaks", "id"),
    [
        (lambda src: (src / SHARDS[1]).unlink(), "index.missing-shard"),
        (lambda src: (src / SHARDS[1]).write_bytes((src / SHARDS[1]).read_bytes()[:-1]), "layout.truncated"),
        (lambda src: (src / "config.json").write_text("["), "config.parse"),
    ],
)
def test_what_is_lost_is_not_repaired(
    breaks: Callable[[Path], Any], id: str, tmp_path: Path, out: Path, told: Told
) -> None:
    tensors = llama()
    src = checkpoint(tmp_path / "src", [dict(list(tensors.items())[number::3]) for number in range(3)], llama_config())
    breaks(src)
    assert id in ids(told("reshard", src, out, code=SOURCE))
    assert not out.exists()


def test_a_value_that_does_not_fit(tmp_path: Path, out: Path, told: Told) -> None:
    wide = {"a.weight": torch.full((4, 4), 7e4), "b.weight": torch.ones(3)}
    src = checkpoint(tmp_path / "src", wide, {})
    document = told("reshard", src, out, "--cast", "*=f16", code=SOURCE)
    (finding,) = document["findings"]
    assert (finding["id"], finding["tensor"], finding["file"]) == ("data.overflow", "a.weight", "model.safetensors")
    assert not out.exists()
    told("reshard", src, out, "--cast", "*=f16", "--allow", "data.overflow", "--resume")
    assert_same(tensors_of(out), {name: value.half() for name, value in wide.items()})
    assert json.loads((out / "ckptkit.json").read_text())["allowed"] == ["data.overflow"]


@pytest.mark.parametrize(
    ("arguments", "id"),
    [
        (["--drop", "lm_haed.weight"], "usage.pattern-unmatched"),
        (["--drop", "re:("], "recipe.pattern"),
        (["--drop", "*"], "plan.empty"),
        (["--cast", "lm_head.weight=int4"], "usage.cast"),
        (["--cast", "lm_haed.weight=f32"], "usage.pattern-unmatched"),
        (["--rename", "lm_head"], "usage.rename"),
        (["--rename", "lm_haed=x"], "usage.pattern-unmatched"),
        (["--rename", "lm_head=model.embed_tokens"], "plan.rename-collision"),
        (["--max-shard-size", "5 apples"], "usage.size"),
        (["--max-shard-size", "0"], "usage.size"),
        (["--device", "cuda", "--cast", "*=f32"], "usage.device"),
    ],
)
def test_refusals(arguments: list[str], id: str, src: Path, out: Path, told: Told) -> None:
    assert id in ids(told("reshard", src, out, *arguments, code=USAGE))
    assert not out.exists()


def test_problems_of_plan_and_output_are_told_together(src: Path, told: Told) -> None:
    assert ids(told("reshard", src, src, "--drop", "no", code=OUTPUT)) == {"usage.pattern-unmatched", "output.same"}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("5GB", 5 * 10**9),
        ("5GiB", 5 << 30),
        ("1.5MB", 1_500_000),
        ("200kb", 200_000),
        ("7 KiB", 7168),
        ("12", 12),
        ("1TB", 10**12),
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert size(text) == count


@pytest.mark.parametrize("text", ["", "GB", "-5GB", "5XB", "5GBB", "1e9"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(UserError) as caught:
        size(text)
    assert [finding.id for finding in caught.value.findings] == ["usage.size"]


def test_a_plan_that_was_written_makes_the_same(src: Path, out: Path, told: Told, tmp_path: Path) -> None:
    arguments = [
        "--cast",
        "*mlp*=f16",
        "--rename",
        "model.=",
        "--max-shard-size",
        "200kB",
        "--drop",
        "lm_head*",
        "--allow",
        "config.tie",
    ]
    planned = told("reshard", src, *arguments, "--dry-run", "--plan", tmp_path / "plan.jsonl")
    told("reshard", src, out, *arguments)
    told("apply", tmp_path / "plan.jsonl", f"{out}2", "--allow", "config.tie")
    files = [{name: d for name, d in digests(Path(f)).items() if name != "ckptkit.json"} for f in (out, f"{out}2")]
    assert files[0] == files[1]
    assert json.loads((out / "ckptkit.json").read_text())["plan"] == planned["plan"]["digest"]


def test_a_plan_for_a_wrong_index_can_be_applied(tmp_path: Path, out: Path, told: Told) -> None:
    src = checkpoint(tmp_path / "src", [{"a": torch.ones(2)}, {"b": torch.zeros(2)}])
    edit_index(src, lambda index: index["weight_map"].pop("b"))
    told("reshard", src, "--dry-run", "--plan", tmp_path / "plan.jsonl")
    told("apply", tmp_path / "plan.jsonl", out)
    assert_sound(out)


def test_a_single_file(tmp_path: Path, out: Path, told: Told) -> None:
    save_file(llama(), tmp_path / "all.safetensors")
    told("reshard", tmp_path / "all.safetensors", out, "--max-shard-size", "300kB")
    assert_same(tensors_of(out), llama())
    assert_sound(out)
    told("reshard", out, f"{out}2", "--max-shard-size", "1GB")
    assert {path.name for path in Path(f"{out}2").iterdir()} == {"model.safetensors", "ckptkit.json"}


def test_moving_tensors_about_needs_no_torch(src: Path, out: Path) -> None:
    arguments = [
        "reshard",
        str(src),
        str(out),
        "--max-shard-size",
        "150kB",
        "--rename",
        "lm_head=x",
        "--allow",
        "config.tie",
        "-q",
    ]
    code = (
        f"import sys; from ckptkit.cli import main; assert main({arguments!r}) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_examples_of_the_help_page_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import shlex

    tensors = {name.replace("model.", "model.language_model."): value for name, value in llama(layers=1).items()}
    checkpoint(tmp_path / "model", tensors | {"model.visual.patch.weight": torch.ones(2, 2)}, llama_config(1))
    monkeypatch.chdir(tmp_path)
    assert main(["reshard", "--help"]) == OK
    lines = capsys.readouterr().out.split("Examples:")[1].split("Options:")[0].strip().splitlines()
    assert len(lines) == 4
    for line in lines:
        assert main(shlex.split(line)[1:]) == OK
