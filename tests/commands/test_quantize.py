"""``ckptkit quantize`` as a user runs it: results against the peer library and transformers, refusals by id and code."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from make import checkpoint, llama, llama_config
from safetensors.torch import load_file

from ckptkit.cli import main


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def src(tmp_path: Path) -> Iterator[Path]:
    """A Llama in two shards with a tokenizer beside it; untouched when the test is over."""
    tensors = llama()
    names = list(tensors)
    folder = checkpoint(
        tmp_path / "src", [{n: tensors[n] for n in names[:8]}, {n: tensors[n] for n in names[8:]}], llama_config()
    )
    (folder / "tokenizer.json").write_text("{}")
    before = digests(folder)
    yield folder
    assert digests(folder) == before


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Run a command line with ``--json``; give the exit code and the document, which must agree."""

    def call(*arguments: object) -> tuple[int, dict[str, Any]]:
        code = main([*map(str, arguments), "--json", "--no-progress"])
        out, err = capsys.readouterr()
        document = json.loads(out)
        assert document["exit_code"] == code
        assert document["ok"] == (code == 0)
        assert "Traceback" not in err
        return code, document

    return call


def ids(document: dict[str, Any]) -> set[str]:
    return {finding["id"] for finding in document["findings"]}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def recipe(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text("schema: 1\nname: test\n" + text)
    return path


def library(src: Path, out: Path, config: dict[str, dict[str, Any]], ignore: list[str]) -> dict[str, torch.Tensor]:
    from compressed_tensors.quantization import QuantizationConfig
    from llmcompressor.entrypoints.model_free import model_free_ptq

    made = QuantizationConfig(config_groups=config)
    model_free_ptq(str(src), str(out), config=made, ignore=ignore, device="cpu")
    return tensors_of(out)


def same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (value.dtype, value.shape), name
        assert torch.equal(ours[name].view(torch.uint8), value.view(torch.uint8)), name


def test_same_bytes_as_the_peer_library(src: Path, tmp_path: Path, run: Callable[..., Any]) -> None:
    code, document = run("quantize", src, tmp_path / "out", "--recipe", "w4a16-lm_head-w8a16")
    assert code == 0
    assert document["output"] == str(tmp_path / "out")
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    body = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
    groups = {
        "head": {"targets": ["re:.*lm_head$"], "weights": weights},
        "body": {"targets": ["Linear"], "weights": body},
    }
    same_bits(tensors_of(tmp_path / "out"), library(src, tmp_path / "ref", groups, ["re:.*embed_tokens"]))
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("backend", ["native", "llmcompressor"])
def test_nvfp4_across_shards(backend: str, src: Path, tmp_path: Path, run: Callable[..., Any]) -> None:
    """The library refuses a fused set that a shard boundary cuts; on one shard it is the oracle."""
    single = checkpoint(tmp_path / "single", llama(), llama_config())
    for source, out in ((src, "cut"), (single, "whole")):
        code, _ = run("quantize", source, tmp_path / out, "--recipe", "nvfp4a16", "--backend", backend)
        assert code == 0
    weights = {
        "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True,
        "scale_dtype": "torch.float8_e4m3fn",
    }  # fmt: skip
    groups = {"body": {"targets": ["Linear"], "weights": weights}}
    theirs = library(single, tmp_path / "ref", groups, ["re:.*embed_tokens", "lm_head"])
    same_bits(tensors_of(tmp_path / "cut"), theirs)
    same_bits(tensors_of(tmp_path / "whole"), theirs)


def logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        return model(torch.arange(40)[None]).logits.float()


def test_transformers_serves_a_head_merged_onto_a_finished_body(
    src: Path, tmp_path: Path, run: Callable[..., Any]
) -> None:
    assert run("quantize", src, tmp_path / "body", "--recipe", "w4a16")[0] == 0
    head = ("--recipe", "lm_head-w8a16", "--set", "existing=merge")
    assert run("quantize", tmp_path / "body", tmp_path / "both", *head)[0] == 0
    assert run("quantize", src, tmp_path / "at_once", "--recipe", "w4a16-lm_head-w8a16")[0] == 0
    same_bits(tensors_of(tmp_path / "both"), tensors_of(tmp_path / "at_once"))
    body, both, at_once = (logits(tmp_path / name) for name in ("body", "both", "at_once"))
    assert torch.equal(both, at_once)
    assert ((both - body).norm() / body.norm()).item() < 0.02
    source = logits(src)
    assert torch.nn.functional.cosine_similarity(source.flatten(), both.flatten(), dim=0).item() > 0.9


def test_untied_head_is_the_embedding(tmp_path: Path, run: Callable[..., Any]) -> None:
    tensors = llama(lm_head__weight=None)
    src = checkpoint(tmp_path / "src", tensors, llama_config(tie_word_embeddings=True))
    code, document = run("quantize", src, tmp_path / "out", "-r", "lm_head-w8a16")
    assert (code, ids(document)) == (2, {"plan.tie"})
    assert not (tmp_path / "out").exists()
    assert run("quantize", src, tmp_path / "out", "-r", "lm_head-w8a16", "--set", "tie=untie")[0] == 0
    error = (logits(tmp_path / "out") - logits(src)).norm() / logits(src).norm()
    assert error.item() < 0.02


@pytest.mark.parametrize("equal", [True, False])
def test_stored_head_of_a_tied_model_must_be_the_embedding(
    equal: bool, tmp_path: Path, run: Callable[..., Any]
) -> None:
    tensors = llama()
    if equal:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    src = checkpoint(tmp_path / "src", tensors, llama_config(tie_word_embeddings=True))
    code, document = run("quantize", src, tmp_path / "out", "-r", "lm_head-w8a16", "--set", "tie=untie")
    assert (code, ids(document)) == ((0, set()) if equal else (2, {"plan.tie"}))
    assert (tmp_path / "out").exists() == equal


def test_dry_run_writes_nothing_and_imports_no_torch(src: Path, tmp_path: Path) -> None:
    import subprocess
    import sys

    script = (
        "import sys; from ckptkit.cli import main; code = main(sys.argv[1:]);"
        "heavy = {'torch', 'compressed_tensors', 'transformers', 'llmcompressor'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    for name in ("lm_head-w8a16", "nvfp4a16", "mxfp4", "fp8-block"):
        command = [sys.executable, "-c", script, "quantize", str(src), str(tmp_path / "out"), "-r", name, "--dry-run"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "quantization_config" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["src"]


@pytest.mark.parametrize(
    ("value", "id"), [(float("nan"), "data.nan"), (float("inf"), "data.inf"), (float("-inf"), "data.inf")]
)
@pytest.mark.parametrize("name", ["lm_head-w8a16", "fp8-dynamic", "fp8-block", "nvfp4a16", "mxfp4", "w4a16"])
def test_nonfinite_weights_are_seen(value: float, id: str, name: str, tmp_path: Path, run: Callable[..., Any]) -> None:
    tensors = llama(layers=1)
    broken = "lm_head.weight" if name.startswith("lm_head") else "model.layers.0.mlp.up_proj.weight"
    tensors[broken][7, 3] = value
    src = checkpoint(tmp_path / "src", tensors, llama_config(num_hidden_layers=1))
    code, document = run("quantize", src, tmp_path / "out", "-r", name)
    assert (code, ids(document)) == (3, {id})
    assert document["findings"][0]["tensor"] == broken
    assert not (tmp_path / "out").exists()
    assert run("quantize", src, tmp_path / "out", "-r", name, "--set", "nonfinite=keep", "--overwrite")[0] == 0


def test_a_fault_of_the_source_is_inherited_under_another_name(tmp_path: Path, run: Callable[..., Any]) -> None:
    src = checkpoint(tmp_path / "src", llama(layers=2, inter=384), llama_config(inter=256))
    code, document = run("quantize", src, tmp_path / "out", "-r", "w4a16")
    assert code == 0
    told = [finding for finding in document["findings"] if finding["id"] == "shapes.config"]
    assert told
    assert all(finding["data"]["inherited"] and finding["severity"] == "warning" for finding in told)


# --- broken sources: one clear line, exit 3 ------------------------------------------------------------------


def truncate(src: Path) -> None:
    path = src / "model-00002-of-00002.safetensors"
    os.truncate(path, path.stat().st_size - 41)


def grow(src: Path) -> None:
    with (src / "model-00001-of-00002.safetensors").open("ab") as file:
        file.write(b"xx")


def edit_index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(src: Path) -> None:
        path = src / "model.safetensors.index.json"
        table = json.loads(path.read_text())
        change(table)
        path.write_text(json.dumps(table))

    return edit


def write(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda src: (src / name).write_bytes(data) and None


SHARD = "model-00001-of-00002.safetensors"
HUGE = struct.pack("<Q", 1 << 62) + b"{}"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncate, "layout.truncated"),
    "trailing bytes": (grow, "layout.trailing"),
    "an empty file": (write(SHARD, b""), "layout.truncated"),
    "a huge header": (write(SHARD, HUGE), "layout.header"),
    "a pickle": (write(SHARD, b"\x80\x02}q\x00." * 20), "layout.header"),
    "an LFS pointer": (write(SHARD, b"version https://git-lfs.github.com/spec/v1\n"), "layout.header"),
    "a lost shard": (lambda src: (src / SHARD).unlink(), "index.missing-shard"),
    "a dangling link": (lambda src: ((src / SHARD).unlink(), (src / SHARD).symlink_to("nowhere")), "index.missing-shard"),
    "a folder for a shard": (lambda src: ((src / SHARD).unlink(), (src / SHARD).mkdir()), "index.missing-shard"),
    "an unlisted tensor": (edit_index(lambda t: t["weight_map"].pop("lm_head.weight")), "index.extra-tensor"),
    "a promised tensor": (edit_index(lambda t: t["weight_map"].update(ghost=SHARD)), "index.missing-tensor"),
    "a path upwards": (edit_index(lambda t: t["weight_map"].update(x="../x.safetensors")), "index.path"),
    "an absolute path": (edit_index(lambda t: t["weight_map"].update(x="/etc/passwd")), "index.path"),
    "an index without a map": (edit_index(lambda t: t.pop("weight_map")), "index.parse"),
    "an index of nothing": (edit_index(lambda t: t.update(weight_map={})), "index.parse"),
    "an index that leaves out a shard": (
        edit_index(lambda t: t.update(weight_map={k: v for k, v in t["weight_map"].items() if v == SHARD})), "index.stray-shard"),
    "an index that is no JSON": (write("model.safetensors.index.json", b"{"), "index.parse"),
    "a map to numbers": (edit_index(lambda t: t["weight_map"].update(x=3)), "index.parse"),
    "no index": (lambda src: (src / "model.safetensors.index.json").unlink(), "index.missing"),
    "a config that is no JSON": (write("config.json", b"{'a': 1}"), "config.parse"),
    "a config that is no text": (write("config.json", b"\xff\xfe\x00"), "config.parse"),
    "a config that is a list": (write("config.json", b"[]"), "config.parse"),
    "a deep config": (write("config.json", b"[" * 100_000), "config.parse"),
    "no config": (lambda src: (src / "config.json").unlink(), "config.missing"),
}  # fmt: skip


@pytest.mark.parametrize("defect", BROKEN)
def test_broken_sources(defect: str, tmp_path: Path, run: Callable[..., Any]) -> None:
    tensors = llama(layers=1)
    names = list(tensors)
    src = checkpoint(
        tmp_path / "src", [{n: tensors[n] for n in names[:5]}, {n: tensors[n] for n in names[5:]}], llama_config()
    )
    damage, id = BROKEN[defect]
    damage(src)
    code, document = run("quantize", src, tmp_path / "out", "-r", "lm_head-w8a16")
    assert code == 3
    assert id in ids(document)
    assert all("\n" not in finding["message"] for finding in document["findings"])
    assert not list(tmp_path.glob("out*"))


def test_names_that_are_no_paths(tmp_path: Path, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model", "./model", "/nowhere/x", "~/nowhere", "a/b/c", "x.safetensors"):
        code, document = run("quantize", name, "out", "-r", "w4a16")
        assert (code, ids(document)) == (3, {"source.missing"})
    (tmp_path / "empty").mkdir()
    code, document = run("quantize", "empty", "out", "-r", "w4a16")
    assert (code, ids(document)) == (3, {"source.empty"})
    code, document = run("quantize", "-r", "w4a16")
    assert (code, ids(document)) == (2, {"usage.arguments"})


def test_recipe_names_source_and_output(src: Path, tmp_path: Path, run: Callable[..., Any]) -> None:
    path = recipe(
        tmp_path, f"source: {src}\noutput: {tmp_path}/a\ngroups: {{h: {{targets: [lm_head], scheme: W8A16}}}}\n"
    )
    assert run("quantize", "-r", path)[1]["output"] == f"{tmp_path}/a"
    assert run("quantize", src, tmp_path / "b", "-r", path)[1]["output"] == f"{tmp_path}/b"
    assert run("quantize", "-r", path)[0] == 5


def test_output_inside_the_source_is_refused(src: Path, run: Callable[..., Any]) -> None:
    for out in (src, src / "out", src.parent):
        code, document = run("quantize", src, out, "-r", "lm_head-w8a16", "--overwrite")
        assert (code, ids(document)) == (5, {"output.same"})


def test_source_and_output_problems_come_together(tmp_path: Path, run: Callable[..., Any]) -> None:
    src = checkpoint(tmp_path / "src", llama(layers=1), llama_config())
    (tmp_path / "out").mkdir()
    (tmp_path / "out/x").write_text("mine")
    code, document = run(
        "quantize", src, tmp_path / "out", "-r", recipe(tmp_path, "groups: {h: {targets: [x], scheme: W8A16}}")
    )
    assert ids(document) == {"recipe.target-unmatched", "output.exists"}
    assert code == 5


def test_hub_cache_folder(src: Path, tmp_path: Path, run: Callable[..., Any]) -> None:
    """A snapshot of the Hub's cache: every file is a symlink to a blob."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots/abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(src.iterdir())):
        (blobs / str(number)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    for link in ("auto", "hard", "copy", "symlink"):
        out = tmp_path / link
        assert run("quantize", snapshot, out, "-r", "lm_head-w8a16", "--link", link)[0] == 0
        assert tensors_of(out).keys() == tensors_of(tmp_path / "auto").keys()
        assert (out / SHARD).is_symlink() == (link == "symlink")
    assert (tmp_path / "hard" / SHARD).stat().st_ino == (snapshot / SHARD).resolve().stat().st_ino
