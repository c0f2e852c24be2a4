"""A GGUF head in another order, and back: bytes of rows against the ``gguf`` package, for every type of ggml's."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from ckptkit.cli import main
from ckptkit.errors import OK, OUTPUT, SOURCE, USAGE
from vocab.gguf_made import ROWS, TYPES, bytes_of, model, value

LIST = [3, 95, 40, 41, 7, 60]
P = "ckptkit.vocab_order."


Told = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    """A function that runs a command: its exit code, and what it prints under --json."""

    def call(*arguments: str) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        code = main([*arguments, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return call


def listed(folder: Path, ids: list[int] = LIST) -> str:
    (folder / "list.txt").write_text(" ".join(map(str, ids)))
    return str(folder / "list.txt")


def ordered(source: Path, folder: Path, *options: str, name: str = "ordered.gguf") -> Path:
    out = folder / name
    arguments = ["--draft-vocab", listed(folder), "--slices", "2", "--engine", "llama.cpp", *options]
    assert main(["reorder-vocab", str(source), str(out), *arguments]) == OK
    return out


def by_hand(ids: list[int], rows: int, layers: int) -> list[int]:
    """The order of two slices by llama.cpp's rule, with which rows of the head go where, written out."""
    half, count = rows // 2, len(ids)
    sizes = [half, rows - half] if layers % 2 == 0 else [rows - half, half]
    counts = [count // 2, count - count // 2] if layers % 2 == 0 else [count - count // 2, count // 2]
    mine, rest = sorted(ids), [id for id in range(rows) if id not in ids]
    first = mine[: counts[0]] + rest[: sizes[0] - counts[0]]
    return first + mine[counts[0] :] + rest[sizes[0] - counts[0] :]


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_rows_are_moved_and_come_back(tmp_path: Path, kind: Any) -> None:
    source = model(tmp_path / "source.gguf", kind=kind)
    out = ordered(source, tmp_path)
    before, after = bytes_of(source), bytes_of(out)
    order = by_hand(LIST, ROWS, 2)
    assert np.array_equal(after.pop("output.rows.weight"), before.pop("output.weight")[order])
    tables = {name: after.pop(P + name).view(np.int32)[0].tolist() for name in ("row_to_token", "token_to_row", "list")}
    assert tables["row_to_token"] == order
    assert [order[row] for row in tables["token_to_row"]] == list(range(ROWS))
    assert tables["list"] == sorted(LIST)
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert main(["reorder-vocab", str(out), str(tmp_path / "back.gguf"), "--inverse"]) == OK
    assert (tmp_path / "back.gguf").read_bytes() == source.read_bytes()


@pytest.mark.filterwarnings("ignore:invalid value")
def test_values_are_those_of_the_rows(tmp_path: Path) -> None:
    """Dequantized by the ``gguf`` package, row by row."""
    source = model(tmp_path / "source.gguf", kind=gguf.GGMLQuantizationType.Q4_0)
    out = ordered(source, tmp_path)
    found = {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type)
        for path in (source, out) for tensor in gguf.GGUFReader(path).tensors if tensor.name.startswith("output.")
    }  # fmt: skip
    expected = found["output.weight"][by_hand(LIST, ROWS, 2)]
    assert np.array_equal(found["output.rows.weight"], expected, equal_nan=True)


def test_what_is_said_of_it(tmp_path: Path) -> None:
    out = ordered(model(tmp_path / "source.gguf"), tmp_path)
    assert value(out, "general.architecture") == "ckptkit-vocab-order"
    assert value(out, P + "architecture") == "llama"
    assert value(out, P + "slice_rows") == [48, 48]
    assert value(out, P + "slice_list_rows") == [3, 3]
    assert value(out, P + "engine") == "llama.cpp"
    assert value(out, "tokenizer.ggml.eos_token_id") == 7


def test_a_bias_and_a_scale_of_the_head_go_with_it(tmp_path: Path) -> None:
    more = {"output.bias": np.arange(ROWS, dtype=np.float32), "output.scale": np.ones(1, np.float32)}
    out = ordered(model(tmp_path / "source.gguf", tensors=more), tmp_path)
    found = bytes_of(out)
    assert found["output.rows.bias"].view(np.float32)[0].tolist() == by_hand(LIST, ROWS, 2)
    assert found["output.rows.scale"].view(np.float32).tolist() == [[1.0]]


def test_a_file_without_padding_at_its_end_comes_back(tmp_path: Path) -> None:
    source = model(tmp_path / "source.gguf", tensors={"x": np.zeros(3, np.float32)})
    content = source.read_bytes()
    source.write_bytes(content[:-20])  # the padding behind 12 bytes
    out = ordered(source, tmp_path)
    assert main(["reorder-vocab", str(out), str(tmp_path / "back.gguf"), "--inverse"]) == OK
    assert (tmp_path / "back.gguf").read_bytes() == content[:-20]


# --- refusals ----------------------------------------------------------------------------------------------


def _refused(told: Told, source: Path, tmp_path: Path, *options: str) -> tuple[int, list[str]]:
    out = tmp_path / "out.gguf"
    arguments = options or ("--draft-vocab", listed(tmp_path), "--slices", "1")
    code, document = told("reorder-vocab", str(source), str(out), *arguments)
    assert not out.exists()
    assert not list(tmp_path.glob("*.partial"))
    return code, [finding["id"] for finding in document["findings"] if finding["severity"] == "error"]


def test_refused(tmp_path: Path, told: Told) -> None:
    source = model(tmp_path / "source.gguf")
    out = ordered(source, tmp_path)
    assert _refused(told, out, tmp_path) == (USAGE, ["vocab.ordered"])
    assert _refused(told, out, tmp_path, "--draft-vocab", listed(tmp_path), "--slices", "1", "--remap-ids") == (
        USAGE, ["vocab.ordered"],
    )  # fmt: skip
    assert _refused(told, source, tmp_path, "--inverse") == (USAGE, ["vocab.not-ordered"])
    whole = ("--draft-vocab", listed(tmp_path), "--slices", "1", "--part", "1/2")
    assert _refused(told, source, tmp_path, *whole) == (USAGE, ["usage.arguments"])
    assert _refused(told, model(tmp_path / "tied.gguf", tied=True), tmp_path) == (USAGE, ["vocab.tied"])
    splits = {"split.count": (2, gguf.GGUFValueType.UINT16)}
    assert _refused(told, model(tmp_path / "split.gguf", fields=splits), tmp_path) == (USAGE, ["vocab.gguf-split"])
    big = model(tmp_path / "big.gguf", endian=gguf.GGUFEndian.BIG)
    assert _refused(told, big, tmp_path) == (SOURCE, ["layout.header"])
    odd = {"output.other": np.zeros(5, np.float32)}
    assert _refused(told, model(tmp_path / "odd.gguf", tensors=odd), tmp_path) == (USAGE, ["vocab.table"])
    beyond = ("--draft-vocab", listed(tmp_path, [ROWS]), "--slices", "1")
    assert _refused(told, source, tmp_path, *beyond) == (USAGE, ["vocab.range"])
    (tmp_path / "empty.gguf").touch()
    assert _refused(told, tmp_path / "empty.gguf", tmp_path) == (SOURCE, ["layout.truncated"])
    assert _refused(told, tmp_path / "none.gguf", tmp_path) == (SOURCE, ["source.missing"])


def test_a_changed_result_does_not_go_back_unsaid(tmp_path: Path, told: Told) -> None:
    """A byte of another tensor, of the order, or of its fields."""
    source = model(tmp_path / "source.gguf")
    out = ordered(source, tmp_path)
    whole = out.read_bytes()
    reader = gguf.GGUFReader(out)
    places = {tensor.name: tensor.data_offset for tensor in reader.tensors}
    for place, expected in ((places["blk.0.attn_q.weight"], (OUTPUT, ["output.verify"])),
                            (places[P + "row_to_token"], (USAGE, ["vocab.order"]))):  # fmt: skip
        content = bytearray(whole)
        content[place] ^= 1
        out.write_bytes(content)
        assert _refused(told, out, tmp_path, "--inverse") == expected
    out.write_bytes(whole.replace(b"data_bytes", b"data_bites"))
    assert _refused(told, out, tmp_path, "--inverse") == (USAGE, ["vocab.order"])


# --- publication -------------------------------------------------------------------------------------------


def test_what_stands_there_is_not_replaced_unasked(tmp_path: Path, told: Told) -> None:
    source = model(tmp_path / "source.gguf")
    out = tmp_path / "out.gguf"
    out.write_text("mine")
    arguments = ["reorder-vocab", str(source), str(out), "--draft-vocab", listed(tmp_path), "--slices", "1"]
    code, document = told(*arguments)
    assert (code, document["findings"][0]["id"]) == (OUTPUT, "output.exists")
    assert out.read_text() == "mine"
    assert told(*arguments, "--overwrite")[0] == OK
    assert value(out, "general.architecture") == "ckptkit-vocab-order"
    same = ["reorder-vocab", str(source), str(source), *arguments[3:], "--overwrite"]
    code, document = told(*same)
    assert (code, document["findings"][0]["id"]) == (OUTPUT, "output.same")


def test_a_dry_run_writes_nothing_and_tells_the_size(tmp_path: Path, told: Told) -> None:
    source = model(tmp_path / "source.gguf")
    arguments = [
        "reorder-vocab",
        str(source),
        str(tmp_path / "out.gguf"),
        "--draft-vocab",
        listed(tmp_path),
        "--slices",
        "1",
    ]
    before = sorted(tmp_path.iterdir())
    code, document = told(*arguments, "--dry-run")
    assert code == OK
    assert sorted(tmp_path.iterdir()) == before
    assert told(*arguments)[0] == OK
    assert (tmp_path / "out.gguf").stat().st_size == document["bytes"]


def test_another_process_at_work_is_left_alone(tmp_path: Path, told: Told) -> None:
    source = model(tmp_path / "source.gguf")
    with (tmp_path / "out.gguf.partial").open("w") as held:
        held.write("half")
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        arguments = [
            "reorder-vocab",
            str(source),
            str(tmp_path / "out.gguf"),
            "--draft-vocab",
            listed(tmp_path),
            "--slices",
            "1",
        ]
        code, document = told(*arguments)
        assert (code, document["findings"][0]["id"]) == (OUTPUT, "output.locked")
        assert (tmp_path / "out.gguf.partial").read_text() == "half"
    assert told(*arguments)[0] == OK  # what a killed run left is begun anew
    assert not (tmp_path / "out.gguf.partial").exists()


def test_a_killed_run_leaves_no_result(tmp_path: Path) -> None:
    """SIGKILL at many moments: OUT is absent or whole, and the next run makes it."""
    source = model(tmp_path / "source.gguf", tensors={"big": np.zeros(30 << 18, np.float32)})
    out = tmp_path / "out.gguf"
    command = [
        sys.executable,
        "-m",
        "ckptkit",
        "reorder-vocab",
        str(source),
        str(out),
        "--draft-vocab",
        listed(tmp_path),
        "--slices",
        "1",
    ]
    seen = set()
    for wait in (0.0, 0.001, 0.005):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        partial = tmp_path / "out.gguf.partial"
        while not partial.exists() and process.poll() is None:
            time.sleep(0.0005)
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        process.wait()
        seen.add(out.exists())
        if out.exists():
            out.unlink()
    assert False in seen
    assert subprocess.run(command, check=False, capture_output=True).returncode == OK
    assert value(out, "general.architecture") == "ckptkit-vocab-order"
    assert os.listdir(tmp_path).count("out.gguf.partial") == 0


def test_json_is_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ordered(model(tmp_path / "source.gguf"), tmp_path, "--json")
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is True
    assert document["slice_list_rows"] == [3, 3]
