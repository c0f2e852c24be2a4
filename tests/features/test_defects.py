"""Each defect singly: what it is called, and that nothing else is found."""

from __future__ import annotations

import gzip
import io
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit.checks import Level
from ckptkit.errors import FOUND, OK
from ckptkit.features.pages import PAGES

from .capture import (
    AUX,
    DSPARK,
    EAGLE3,
    HIDDEN,
    LAYERS,
    NOISE,
    TAPS,
    TOKENS,
    UPSTREAM,
    VOCAB,
    cache,
    sample,
    store,
)
from .conftest import Told

TAPPED, LAST = UPSTREAM
BAD = "rows_0-2000/data_1.ckpt"


def found(report: dict[str, Any]) -> set[tuple[str, str, str | None]]:
    return {(f["id"].removeprefix("features."), f["severity"], f["file"]) for f in report["findings"]}


def saved(value: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def changed(key: str, at: Any, value: Any, **options: Any) -> dict[str, Any]:
    made = sample(1, **options)
    made[key][at] = value
    return made


def states(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(9)).bfloat16()


def mask(*ones: int) -> torch.Tensor:
    made = torch.zeros(TOKENS, dtype=torch.int64)
    made[list(ones)] = 1
    return made


@pytest.mark.parametrize("suffix", [".ckpt", ".ckpt.gz"])
@pytest.mark.parametrize(("keys", "draft"), [(UPSTREAM, DSPARK), (AUX, EAGLE3)], ids=["dspark", "eagle3"])
def test_a_sound_store(told: Told, tmp_path: Path, keys: tuple[str, str], draft: dict[str, Any], suffix: str) -> None:
    folder = store(tmp_path / "f", *(sample(seed, keys) for seed in range(3)), suffix=suffix)
    report = told(folder, draft=draft)
    assert report["findings"] == []
    assert {check["checked"] for check in report["checks"]} == {3}
    assert {check["id"] for check in report["checks"]} == {p.id for p in PAGES if p.level < Level.NUMERIC}


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32, torch.bfloat16], ids=str)
def test_masks_of_any_dtype(told: Told, tmp_path: Path, dtype: torch.dtype) -> None:
    made = sample(1)
    assert told(store(tmp_path / "f", made | {"loss_mask": made["loss_mask"].to(dtype)}))["findings"] == []


def test_a_dflash_draft_needs_no_last_states(told: Told, tmp_path: Path) -> None:
    draft = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "dflash_config": {"target_layer_ids": LAYERS}}
    assert told(store(tmp_path / "f", sample(**{LAST: None})), draft=draft)["findings"] == []


SHAPES = {
    "batched ids": ("shape", {"input_ids": torch.zeros(1, TOKENS, dtype=torch.int64)}),
    "batched mask": ("shape", {"loss_mask": torch.ones(1, TOKENS, dtype=torch.int64)}),
    "two samples": ("shape", {TAPPED: states(2, TOKENS, TAPS * HIDDEN)}),
    "flat states": ("shape", {LAST: states(TOKENS * HIDDEN)}),
    "float ids": ("dtype", {"input_ids": torch.zeros(TOKENS)}),
    "int32 ids": ("dtype", {"input_ids": torch.zeros(TOKENS, dtype=torch.int32)}),
    "complex mask": ("dtype", {"loss_mask": torch.ones(TOKENS, dtype=torch.complex64)}),
    "FP8 states": ("dtype", {TAPPED: states(TOKENS, TAPS * HIDDEN).to(torch.float8_e4m3fn)}),
    "double states": ("dtype", {LAST: states(TOKENS, HIDDEN).double()}),
    "a tap more": ("width", {TAPPED: states(1, TOKENS, (TAPS + 1) * HIDDEN)}),
    "wide last": ("width", {LAST: states(1, TOKENS, 4 * HIDDEN)}),
    "a state less": ("length", {TAPPED: states(TOKENS - 1, TAPS * HIDDEN)}),
    "a token more": ("length", {"input_ids": torch.zeros(TOKENS + 1, dtype=torch.int64)}),
    "a short mask": ("length", {"loss_mask": torch.ones(TOKENS - 2, dtype=torch.int64)}),
    "no taps": ("dialect", {TAPPED: None}),
    "no ids": ("keys", {"input_ids": None}),
    "no mask": ("keys", {"loss_mask": None}),
    "no last": ("keys", {LAST: None}),
    "a list of ids": ("keys", {"input_ids": [1, 2, 3]}),
}
VALUES = {
    "id too large": ("tokens", lambda: changed("input_ids", 5, VOCAB)),
    "negative id": ("tokens", lambda: changed("input_ids", 5, -100)),
    "noise": ("noise", lambda: changed("input_ids", 5, NOISE)),
    "a mask of 2": ("mask", lambda: changed("loss_mask", 30, 2)),
    "a mask of a half": ("mask", lambda: changed("loss_mask", 30, 0.5, loss_mask=torch.ones(TOKENS))),
    "no ones": ("mask", lambda: sample(1, loss_mask=mask())),
    "lone ones": ("mask", lambda: sample(1, loss_mask=mask(3, 5, 40, 79))),
    "NaN": ("nonfinite", lambda: changed(TAPPED, (70, 200), float("nan"))),
    "-Inf in last": ("nonfinite", lambda: changed(LAST, (0, 70, 0), float("-inf"))),
    "zero rows": ("zero-states", lambda: changed(TAPPED, (slice(60, 80), slice(128, 256)), 0.0)),
    "zeros but for their sign": ("zero-states", lambda: changed(LAST, (0, 79), -0.0)),
    "a tap of zeros": ("dead-tap", lambda: changed(TAPPED, (slice(None), slice(128, 256)), 0.0)),
    "a tap that stands still": ("dead-tap", lambda: changed(TAPPED, (slice(None), slice(0, 128)), states(HIDDEN))),
    "one buffer for two taps": ("same-taps", lambda: _twice(0, 2)),
    "last is a tap": ("same-taps", lambda: _last_is_tap(2)),
}  # fmt: skip


def _twice(one: int, other: int) -> dict[str, Any]:
    made = sample(1)
    taps = made[TAPPED].view(TOKENS, TAPS, HIDDEN)
    taps[:, other] = taps[:, one]
    return made


def _last_is_tap(tap: int) -> dict[str, Any]:
    made = sample(1)
    made[LAST] = made[TAPPED].view(TOKENS, TAPS, HIDDEN)[:, tap].clone()
    return made


@pytest.mark.parametrize("defect", SHAPES)
def test_what_is_stored(told: Told, tmp_path: Path, defect: str) -> None:
    id, changes = SHAPES[defect]
    folder = store(tmp_path / "f", sample(0), sample(1, **changes), sample(2))
    assert found(told(folder, code=FOUND)) == {(id, "error", BAD)}


@pytest.mark.parametrize("defect", VALUES)
@pytest.mark.parametrize(("suffix", "block"), [("", 8 << 20), ("", 3000), (".gz", 1)])
def test_values(
    told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defect: str, suffix: str, block: int
) -> None:
    """Rows all at once, two at a time, one by one."""
    monkeypatch.setattr("ckptkit.features.values.BLOCK", block)
    id, make = VALUES[defect]
    folder = store(tmp_path / "f", sample(0), make(), sample(2), suffix=f".ckpt{suffix}")
    assert found(told(folder, code=FOUND)) == {(id, "error", BAD + suffix)}


def test_taps_that_are_all_dead_are_not_called_equal_too(told: Told, tmp_path: Path) -> None:
    report = told(store(tmp_path / "f", changed(TAPPED, slice(None), 0.0)), code=FOUND)
    assert [f["id"] for f in report["findings"]] == ["features.dead-tap"] * TAPS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_magnitudes_at_the_edges(told: Told, tmp_path: Path, dtype: torch.dtype) -> None:
    """The largest finite number is finite, the least is not zero."""
    made = sample(1)
    made[TAPPED] = made[TAPPED].to(dtype)
    made[TAPPED][3, :HIDDEN] = torch.finfo(dtype).max
    made[TAPPED][4, :HIDDEN] = 0
    made[TAPPED][4, 7] = -torch.finfo(dtype).smallest_normal / 2
    folder = store(tmp_path / "f", made)
    assert told(folder)["findings"] == []


# --- masks ---------------------------------------------------------------------------------------------------


def _trains(values: list[int], run: int) -> bool:
    """Whether ``run`` neighbours are 1, by words."""
    return "1" * run in "".join(map(str, values))


@pytest.mark.parametrize("whole", [None, True, torch.tensor(True)], ids=["", "flag", "tensor"])
@pytest.mark.parametrize(("keys", "draft", "run"), [(UPSTREAM, DSPARK, 2), (AUX, DSPARK, 2), (AUX, EAGLE3, 1)])
def test_random_masks(
    told: Told, tmp_path: Path, keys: tuple[str, str], draft: dict[str, Any], run: int, whole: object
) -> None:
    """Cut to the length that is trained on; the aux keys' trainers pass over the last token, unless told not to."""
    generator, cut = random.Random(1), 6
    masks = [[int(generator.random() < 0.35) for _ in range(generator.choice([5, 6, 7, 9]))] for _ in range(40)]
    made = [
        sample(seed, keys, len(values), loss_mask=torch.tensor(values), loss_mask_is_token_aligned=whole)
        for seed, values in enumerate(masks)
    ]
    drops = keys == AUX and whole is None
    dull = sum(not _trains(values[:cut][: -1 if drops else None], run) for values in masks)
    assert 0 < dull < len(masks)
    report = told(store(tmp_path / "f", *made), "--max-len", cut, "--allow", "features.mask", draft=draft)
    counted = [f["data"].get("count", 1) for f in report["findings"] if f["id"] == "features.mask"]
    assert sum(counted) == dull


# --- files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.99, 0.9999])
@pytest.mark.parametrize("packed", [False, True])
def test_a_file_that_was_cut_off(told: Told, tmp_path: Path, share: float, packed: bool) -> None:
    whole = saved(sample(1))
    whole = gzip.compress(whole, 1) if packed else whole
    suffix = ".ckpt.gz" if packed else ".ckpt"
    folder = store(tmp_path / "f", sample(0), whole[: int(len(whole) * share)], sample(2), suffix=suffix)
    assert found(told(folder, code=FOUND)) == {("truncated", "error", BAD + (".gz" if packed else ""))}


class Calls:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_code_is_named_and_not_run(told: Told, tmp_path: Path) -> None:
    made = sample(1) | {"extra": Calls(tmp_path / "made")}
    report = told(store(tmp_path / "f", sample(0), made), code=FOUND)
    assert found(report) == {("unsafe", "error", BAD)}
    assert report["findings"][0]["data"]["globals"] == ["posix.mkdir"]
    assert not (tmp_path / "made").exists()


def _deflated() -> bytes:
    import zipfile

    packed = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(saved(sample(1)))) as old,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    return packed.getvalue()


def _emptied() -> bytes:
    import zipfile

    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        file.writestr("archive/version", "3\n")
    return made.getvalue()


@pytest.mark.parametrize(
    "made",
    [
        b"hello " * 1000,
        saved(sample(1), _use_new_zipfile_serialization=False),
        saved([1, 2, 3]),
        saved(torch.ones(3)),
        gzip.compress(saved(sample(1))),
        _deflated(),
        _emptied(),
    ],
    ids=["text", "legacy", "a list", "a tensor", "gzip by another name", "deflated", "a zip without a pickle"],
)
def test_what_is_no_dict_of_tensors(told: Told, tmp_path: Path, made: bytes) -> None:
    assert found(told(store(tmp_path / "f", sample(0), made), code=FOUND)) == {("unreadable", "error", BAD)}


def test_gzip_that_is_damaged_or_none(told: Told, tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(saved(sample(1)), 1))
    packed[len(packed) // 2] ^= 0xFF
    folder = store(tmp_path / "f", bytes(packed), saved(sample(2)), suffix=".ckpt.gz")
    assert {id for id, _, _ in found(told(folder, code=FOUND))} == {"unreadable"}


def test_garbage_never_ends_the_run(told: Told, tmp_path: Path) -> None:
    """Every byte of the pickle and the directory damaged in turn: a finding, or a file that is sound all the same."""
    whole, generator = saved(sample(1, tokens=4)), random.Random(3)
    spoilt = []
    for _ in range(60):
        made = bytearray(whole)
        for at in generator.sample([*range(400), *range(len(whole) - 900, len(whole))], 4):
            made[at] = generator.randrange(256)
        spoilt.append(bytes(made))
    told(store(tmp_path / "f", *spoilt), "--exit-zero")


# --- duplicates and dialects ---------------------------------------------------------------------------------


def test_a_sample_packed_and_plain(told: Told, tmp_path: Path) -> None:
    folder = store(tmp_path / "f", sample(0), sample(1))
    store(folder, sample(2), suffix=".ckpt.gz", start=1)
    assert found(told(folder, code=FOUND)) == {("duplicate", "error", f"{BAD}.gz")}


def test_a_manifest_of_something_else(told: Told, tmp_path: Path) -> None:
    folder = store(tmp_path / "f", sample(0))
    (folder / "manifest.json").write_text("{}")
    assert told(folder)["checks"][0]["checked"] == 1


def test_nothing_but_broken_files_is_no_pass_for_the_rest(told: Told, tmp_path: Path) -> None:
    report = told(store(tmp_path / "f", b""), "--allow", "features.truncated", code=FOUND)
    assert {check["result"] for check in report["checks"]} == {"warn", "skip"}


def test_a_number_in_two_groups(told: Told, tmp_path: Path) -> None:
    folder = store(tmp_path / "f", sample(0), sample(1))
    torch.save(sample(2), _made(folder / "rows_0-500" / "data_1.ckpt"))
    assert {id for id, _, _ in found(told(folder, code=FOUND))} == {"duplicate"}


def test_two_captures_side_by_side_are_no_duplicates(told: Told, tmp_path: Path) -> None:
    store(tmp_path / "f" / "a", sample(0))
    assert told(store(tmp_path / "f" / "b", sample(1)).parent)["findings"] == []


def _made(path: Path) -> Path:
    path.parent.mkdir()
    return path


def test_the_same_tokens_twice(told: Told, tmp_path: Path) -> None:
    folder = store(tmp_path / "f", sample(0), sample(0), sample(1))
    assert found(told(folder)) == {("repeated", "warning", BAD)}
    told(folder, "--strict", code=FOUND)


def test_two_dialects_in_a_folder(told: Told, tmp_path: Path) -> None:
    folder = store(tmp_path / "f", sample(0), sample(1, AUX), sample(2))
    assert found(told(folder, code=FOUND)) == {("dialect", "error", BAD)}


@pytest.mark.parametrize(
    ("keys", "draft", "severity"), [(AUX, DSPARK, "warning"), (UPSTREAM, EAGLE3, "error")], ids=["branch", "eagle3"]
)
def test_a_dialect_for_another_trainer(
    told: Told, tmp_path: Path, keys: tuple[str, str], draft: dict[str, Any], severity: str
) -> None:
    report = told(
        store(tmp_path / "f", sample(0, keys), sample(1, keys)), code=FOUND if severity == "error" else OK, draft=draft
    )
    assert found(report) == {("dialect", severity, None)}


def test_flattened_streams(told: Told, tmp_path: Path) -> None:
    """Told by the width where it differs from that of the taps; where it does not, that is said."""
    folder = store(tmp_path / "f", sample(0, **{TAPPED: states(TOKENS, 4 * HIDDEN)}))
    report = told(folder, code=FOUND, draft=DSPARK | {"hc_mult": 4})
    assert found(report) == {("width", "error", "rows_0-2000/data_0.ckpt")}
    assert report["findings"][0]["data"] == {"width": 4 * HIDDEN, "expected": 3 * HIDDEN}
    four = DSPARK | {"hc_mult": 4, "target_layer_ids": [1, 2, 3, 4]}
    assert found(told(folder, draft=four)) == {("width-ambiguous", "warning", None)}


def test_long_samples(told: Told, tmp_path: Path) -> None:
    folder = store(tmp_path / "f", sample(0), sample(1, tokens=TOKENS + 1))
    assert found(told(folder, "--max-len", TOKENS)) == {("max-len", "warning", BAD)}


def test_many_alike_are_one_finding(told: Told, tmp_path: Path) -> None:
    folder = store(tmp_path / "f", *(sample(seed, **{LAST: None}, tokens=4) for seed in range(40)))
    (finding,) = told(folder, code=FOUND)["findings"]
    assert (finding["id"], finding["data"]["count"]) == ("features.keys", 40)
    assert finding["data"]["examples"][1] == f"{BAD}: {LAST}"


# --- the store of DeepSpec -----------------------------------------------------------------------------------


def test_a_sound_cache(told: Told, tmp_path: Path) -> None:
    report = told(cache(tmp_path / "c", [sample(seed, tokens=40 + seed) for seed in range(5)]))
    assert report["findings"] == []
    assert {check["checked"] for check in report["checks"]} == {5}


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 1}, {"hidden_dtype": "float16"}, {"token_dtype": "int64"}, {"index_record_size": 48},
        {"target_layer_ids": [1, 2, 4]}, {"target_layer_ids": [1, 2]}, {"target_layer_ids": []},
        {"hidden_size": 64}, {"hidden_size": "128"}, {"num_shards": 3}, {"shards": [{"shard_id": 0, "file_name": "../x"}]},
    ],
    ids=str,
)  # fmt: skip
def test_a_manifest_that_does_not_fit(told: Told, tmp_path: Path, changes: dict[str, Any]) -> None:
    report = told(cache(tmp_path / "c", [sample(0), sample(1)], **changes), code=FOUND)
    assert {id for id, _, _ in found(report)} == {"manifest"}


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 2, "version": 2}'])
def test_a_manifest_that_is_none(told: Told, tmp_path: Path, text: str) -> None:
    folder = cache(tmp_path / "c", [sample(0)])
    (folder / "manifest.json").write_text(text)
    assert found(told(folder, code=FOUND)) == {("manifest", "error", "manifest.json")}


def _patch(path: Path, at: int, form: str, value: int) -> None:
    content = bytearray(path.read_bytes())
    struct.pack_into(form, content, at, value)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("at", "form", "value", "id"),
    [
        (0, "<Q", 7, "index"), (8, "<I", 9, "index"), (12, "<I", 0, "index"), (24, "<Q", 0, "index"),
        (12, "<I", 1 << 30, "truncated"), (40, "<Q", 1 << 62, "truncated"),
    ],
    ids=["number", "shard", "no tokens", "overlap", "too long", "far away"],
)  # fmt: skip
def test_a_record_that_cannot_be(told: Told, tmp_path: Path, at: int, form: str, value: int, id: str) -> None:
    folder = cache(tmp_path / "c", [sample(seed) for seed in range(4)])
    _patch(folder / "samples.idx", 56 + at, form, value)
    assert {id for id, _, _ in found(told(folder, code=FOUND))} == {id}


def test_missing_and_cut_files_of_a_cache(told: Told, tmp_path: Path) -> None:
    folder = cache(tmp_path / "c", [sample(seed) for seed in range(4)])
    shard = folder / "shard-00001.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    assert found(told(folder, code=FOUND)) == {("truncated", "error", shard.name)}
    shard.unlink()
    assert {id for id, _, _ in found(told(folder, code=FOUND))} == {"truncated"}
    (folder / "samples.idx").unlink()
    assert {file for _, _, file in found(told(folder, code=FOUND))} == {"samples.idx", shard.name}


@pytest.mark.parametrize("defect", VALUES)
def test_values_in_a_cache(told: Told, tmp_path: Path, defect: str) -> None:
    id, make = VALUES[defect]
    made: Callable[[], dict[str, Any]] = make
    bad = made()
    bad[LAST] = bad[LAST].view(1, TOKENS, HIDDEN)
    if bad["loss_mask"].is_floating_point():
        pytest.skip("a cache has no such masks")
    report = told(cache(tmp_path / "c", [sample(0), bad, sample(2)]), code=FOUND)
    assert [(f["id"], f["tensor"].partition(":")[0]) for f in report["findings"]] == [(f"features.{id}", "sample 1")]


def test_every_check_of_what_is_stored_has_a_defect() -> None:
    tested = {id for id, _ in SHAPES.values()} | {id for id, _ in VALUES.values()}
    tested |= {"truncated", "unsafe", "unreadable", "duplicate", "repeated", "max-len", "width-ambiguous"}
    tested |= {"manifest", "index"}
    assert {p.id for p in PAGES if p.level < Level.NUMERIC} == {f"features.{id}" for id in tested}
