"""llama.cpp's server on what ``reorder-vocab`` makes of SmolLM2's GGUF file: ``pytest -m engine``.

It says the same of the renumbered file as of the source, and refuses the reordered one. ``scripts/engines`` makes the
server, ``demo/source.py`` fetches the file; where they lie elsewhere than in ``.cache``, ``CKPTKIT_ENGINES`` and
``CKPTKIT_SMOLLM2`` say it. What is not there is skipped.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np
import pytest
from serving.places import LLAMA
from serving.places import gguf as gguf_file

from ckptkit.cli import main
from ckptkit.errors import OK
from ckptkit.serving import llama_server, process
from ckptkit.serving.client import post
from ckptkit.serving.engine import Launch, Server

SOURCE = gguf_file() or Path("none")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (LLAMA.exists() and SOURCE.exists()), reason="no llama-server or no GGUF file"),
]

PROMPTS = (
    "The capital of France is",
    "<|im_start|>user\nHow many days are in a week?<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n",
    "Größe 日本語 🙂",
)
COUNT = 24


@contextmanager
def served(model: Path, folder: Path) -> Iterator[Server]:
    engine = llama_server.ENGINE
    launch = Launch(model, process.free_port(), folder, "", (str(LLAMA),), ("-c", "1024", "-np", "1"))
    server = Server(f"http://127.0.0.1:{launch.port}", engine.model(launch), 300.0)
    with process.serving(engine.command(launch), folder / "log", engine.grace) as running:
        process.wait_ready(running, engine, server, 300.0)
        yield server


def said(model: Path, folder: Path) -> tuple[list[list[int]], list[str]]:
    """The ids of each prompt, and the greedy text behind it."""
    folder.mkdir()
    with served(model, folder) as server:
        asked = [post(server, "/tokenize", {"content": text, "parse_special": True}, 60.0) for text in PROMPTS]
        wanted = [{"prompt": text, "n_predict": COUNT, "temperature": 0, "cache_prompt": False} for text in PROMPTS]
        answers = [post(server, "/completion", body, 300.0) for body in wanted]
    return [found["tokens"] for found in asked], [found["content"] for found in answers]


def a_list(folder: Path) -> Sequence[str]:
    ids = np.random.default_rng(0).permutation(49_152)[:16_000]
    (folder / "list.txt").write_text(" ".join(map(str, ids)))
    return ["--draft-vocab", str(folder / "list.txt"), "--slices", "2", "--engine", "llama.cpp"]


def test_a_renumbered_file_is_served_with_the_same_text(tmp_path: Path) -> None:
    out = tmp_path / "renumbered.gguf"
    assert main(["reorder-vocab", str(SOURCE), str(out), *a_list(tmp_path), "--remap-ids"]) == OK
    (old, before), (new, after) = said(SOURCE, tmp_path / "old"), said(out, tmp_path / "new")
    assert after == before
    field = gguf.GGUFReader(out).get_field("ckptkit.vocab_remap.row_to_token")
    assert field is not None
    mapping = np.argsort(field.contents())
    assert new == [[mapping[id] for id in ids] for ids in old]
    assert new != old


def test_a_reordered_file_is_refused(tmp_path: Path) -> None:
    """SmolLM2's head is tied; with one of its own, a copy of the embedding, the source is served and the result is not."""
    untied, out = tmp_path / "untied.gguf", tmp_path / "ordered.gguf"
    _untie(untied)
    assert main(["reorder-vocab", str(untied), str(out), *a_list(tmp_path)]) == OK
    assert said(untied, tmp_path / "served")[1][0].startswith(" Paris")
    command = [str(LLAMA), "-m", str(out), "--port", str(process.free_port()), "-c", "256"]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert done.returncode != 0
    assert b"ckptkit-vocab-order" in done.stderr + done.stdout


def _untie(out: Path) -> None:
    reader = gguf.GGUFReader(SOURCE)
    writer = gguf.GGUFWriter(out, "llama")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            of = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], of)
    for tensor in reader.tensors:
        for name in (tensor.name, "output.weight") if tensor.name == "token_embd.weight" else (tensor.name,):
            writer.add_tensor(name, np.asarray(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
