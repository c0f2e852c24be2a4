"""Random single mutations of good checkpoints, and which level of checks finds them.

``python -m corrupt.mutations ../docs/mutations.md``, run in ``tests``, writes the table.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ckptkit.checks import Level, Subject, run
from ckptkit.cli import main
from ckptkit.files.checkpoint import CONFIG, scan
from ckptkit.files.source import open_source
from ckptkit.stored import SCALES, WEIGHTS, split_name
from corrupt import edit
from corrupt.goods import GOOD

SEED = 20261130
COUNT = 500
RECORDS = ("ckptkit.json", "ckptkit.digests.json", "SHA256SUMS")
Kind = Callable[[Path, random.Random], str]


class Seen(NamedTuple):
    """A mutation, and the ids found at each level: with no digest recorded, and, ``digests``, at data with them.

    ``numeric`` is None where there is no source to compare with.
    """

    kind: str
    good: str
    what: str
    static: frozenset[str]
    data: frozenset[str]
    numeric: frozenset[str] | None
    digests: frozenset[str]


# --- mutations: each changes one thing in a folder and says what ------------------------------------------


def header_bit(folder: Path, rng: random.Random) -> str:
    path = rng.choice(edit.shards(folder))
    data = bytearray(path.read_bytes())
    at, bit = rng.randrange(8 + int.from_bytes(data[:8], "little")), rng.randrange(8)
    data[at] ^= 1 << bit
    path.write_bytes(data)
    around = bytes(data[max(at - 32, 8) : at + 10]).decode("latin-1")
    return f"bit {bit} of byte {at}: {around!r}"


def _bit(folder: Path, rng: random.Random, wanted: Callable[[str], bool]) -> str:
    entries = [entry for path in edit.shards(folder) for entry in edit.header_of(path).entries]
    found = rng.choice([entry for entry in entries if wanted(split_name(entry.name)[1])])
    at, bit = rng.randrange(found.nbytes), rng.randrange(8)
    edit.flip(found.name, at, bit)(folder)
    return f"bit {bit} of byte {at} of {found.name} {found.dtype}"


def scale_bit(folder: Path, rng: random.Random) -> str:
    return _bit(folder, rng, lambda last: last in SCALES or last in {"weight_scale_2", "weight_global_scale"})


def weight_bit(folder: Path, rng: random.Random) -> str:
    return _bit(folder, rng, lambda last: last in WEIGHTS)


def _name(folder: Path, rng: random.Random) -> str:
    return rng.choice([entry.name for path in edit.shards(folder) for entry in edit.header_of(path).entries])


def tensor_dropped(folder: Path, rng: random.Random) -> str:
    name, follows = _name(folder, rng), rng.random() < 0.5
    edit.tensors(lambda held: held.pop(name), name, reindex=follows)(folder)
    return f"{name}, {_index(follows)}"


def tensor_renamed(folder: Path, rng: random.Random) -> str:
    name, follows = _name(folder, rng), rng.random() < 0.5
    at = rng.randrange(len(name))
    new = name[:at] + rng.choice([letter for letter in "abz_.07" if letter != name[at]]) + name[at + 1 :]
    edit.tensors(lambda held: held.update({new: held.pop(name)}), name, reindex=follows)(folder)
    return f"{name} to {new}, {_index(follows)}"


def tensor_resized(folder: Path, rng: random.Random) -> str:
    while True:
        name = _name(folder, rng)
        shape = next(e.shape for p in edit.shards(folder) for e in edit.header_of(p).entries if e.name == name)
        if max(shape, default=1) > 1:
            break
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "without its last row": lambda tensor: tensor[:-1],
        "without its last column": lambda tensor: tensor[..., :-1],
        "with its last row twice": lambda tensor: tensor[[*range(tensor.shape[0]), tensor.shape[0] - 1]],
        "flattened": lambda tensor: tensor.flatten(),
        "transposed": lambda tensor: tensor.transpose(0, -1),
    }
    fits = [way for way in ways if (len(shape) > 1 and shape[-1] > 1) or way.endswith(("last row", "twice"))]
    if len(shape) > 1 and shape[0] == shape[-1]:
        fits = [way for way in fits if way != "transposed"]
    way = rng.choice([way for way in fits if shape[0] > 1 or not way.endswith("last row")])
    edit.put(name, ways[way])(folder)
    return f"{name} {list(shape)} {way}"


def _index(follows: bool) -> str:
    return "the index follows" if follows else "the index does not"


def index_entry(folder: Path, rng: random.Random) -> str:
    table = json.loads((folder / edit.INDEX).read_text())
    found: dict[str, str] = table["weight_map"]
    name = rng.choice(sorted(found))
    way = rng.choice(["dropped", "misplaced", "of no file", "renamed", "total_size"])
    match way:
        case "dropped":
            del found[name]
        case "misplaced":
            found[name] = rng.choice([path.name for path in edit.shards(folder) if path.name != found[name]])
        case "of no file":
            found[name] = found[name].replace("-of-", "-to-")
        case "renamed":
            found[f"{name[:-1]}{rng.choice('abz')}"] = found.pop(name)
        case _:
            table["metadata"]["total_size"] += rng.choice([-2, 2, 1024])
    (folder / edit.INDEX).write_text(json.dumps(table))
    return f"{way}: {name}"


def config_field(folder: Path, rng: random.Random) -> str:
    table = json.loads((folder / CONFIG).read_text())
    path, holder, key = rng.choice(list(_leaves(table, "")))
    value = holder[key]
    new = None if rng.random() < 0.15 else _other(value, rng)
    if new is None and isinstance(holder, dict):
        del holder[key]
    else:
        holder[key] = new
    (folder / CONFIG).write_text(json.dumps(table, indent=2))
    return f"{path} {json.dumps(value)} to {json.dumps(new) if new is not None else 'nothing'}"


def _leaves(table: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    for key, value in list(table.items() if isinstance(table, dict) else enumerate(table)):
        here = f"{path}.{key}".removeprefix(".")
        if isinstance(value, dict | list) and value:
            yield from _leaves(value, here)
        elif value is not None:
            yield here, table, key


def _other(value: Any, rng: random.Random) -> Any:
    match value:
        case bool():
            return not value
        case int():
            return rng.choice([value + 1, value * 2, value // 2] if value > 1 else [value + 1, value + 7])
        case float():
            return value * rng.choice([0.5, 2.0, 10.0])
        case str() if value:
            at = rng.randrange(len(value))
            return value[:at] + rng.choice([letter for letter in "aeQ_8" if letter != value[at]]) + value[at + 1 :]
    return 1


KINDS: dict[str, Kind] = {
    "a bit of a header": header_bit,
    "an entry of the index": index_entry,
    "a bit of a scale": scale_bit,
    "a bit of a weight": weight_bit,
    "a tensor dropped": tensor_dropped,
    "a tensor renamed": tensor_renamed,
    "a tensor resized": tensor_resized,
    "a field of the config": config_field,
}
_SCALED = [name for name in GOOD if name not in {"dense", "single", "tied", "half", "moe", "mtp", "multimodal"}]


def _goods(kind: str) -> list[str]:
    if kind == "a bit of a scale":
        return [name for name in _SCALED if name != "gpt_oss"]
    if kind == "an entry of the index":
        return [name for name in GOOD if name != "single"]
    return list(GOOD)


# --- what is found ----------------------------------------------------------------------------------------


def found(folder: Path, level: Level, against: Path | None = None) -> frozenset[str]:
    with open_source(str(folder)) as source, open_source(str(against or folder)) as other:
        checkpoint, findings = scan(source)
        beside = scan(other)[0] if against else None
        outcome = run(Subject(checkpoint, tuple(findings), against=beside, options={"jobs": 1}), level)
    return frozenset(finding.id for finding in outcome.findings)


def make_goods(root: Path) -> None:
    """All good checkpoints, with the digests of files and tensors recorded."""
    with contextlib.redirect_stdout(io.StringIO()):
        for name, make in GOOD.items():
            make(root / name)
            assert main(["hash", str(root / name), "--per-tensor", "-q", "--no-progress"]) == 0


def mutations(goods: Path, work: Path, count: int = COUNT, seed: int = SEED) -> Iterator[Seen]:
    """``count`` mutations, kinds and checkpoints by turns, the rest by chance; ``work`` is a folder for copies."""
    rng = random.Random(seed)
    for number in range(count):
        kind = list(KINDS)[number % len(KINDS)]
        good = rng.choice(_goods(kind))
        folder = work / good
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(goods / good, folder)
        what = KINDS[kind](folder, rng)
        digests = found(folder, Level.DATA)
        for name in RECORDS:
            (folder / name).unlink(missing_ok=True)
        static, data = found(folder, Level.STATIC), found(folder, Level.DATA)
        source = goods / f"{good}-source"
        numeric = found(folder, Level.NUMERIC, source) if source.exists() else None
        yield Seen(kind, good, what, static, data, numeric, digests)


# --- the report -------------------------------------------------------------------------------------------


def table(seen: list[Seen]) -> Iterator[str]:
    yield "| changed | mutations | static | data | numeric | data, digests recorded |"
    yield "|---|---:|---:|---:|---:|---:|"
    by_kind: dict[str, list[Seen]] = defaultdict(list)
    for item in seen:
        by_kind[item.kind].append(item)
    for kind, items in (*by_kind.items(), ("all", seen)):
        compared = [item for item in items if item.numeric is not None]
        shares = (
            _share([bool(item.static) for item in items]),
            _share([bool(item.data) for item in items]),
            _share([bool(item.numeric) for item in compared]),
            _share([bool(item.digests) for item in items]),
        )
        yield f"| {kind} | {len(items)} | {' | '.join(shares)} |"


def _share(hits: list[bool]) -> str:
    return f"{sum(hits)} of {len(hits)} ({sum(hits) / len(hits):.0%})" if hits else "–"


# Why a mutation that no level finds without a digest does no harm, or could not be seen: kind, pattern of ``what``, reason.
_REASONS = (
    ("a bit of a weight", "", "any bits are a weight: only the source or a digest tells another one"),
    ("a bit of a scale", "", "most bits make another good scale: only the source or a digest tells"),
    ("a bit of a header", "__metadata__", "metadata is free text; transformers 4 alone reads `format`, and refuses others"),
    ("a field of the config", "^architectures", "loud: engines refuse a class that they do not know"),
    ("a field of the config", "^(text_config.)?model_type", "loud: engines refuse a type that they do not know"),
    ("a field of the config", "^torch_dtype", "loud: no dtype of torch"),
    ("a field of the config", "observer_kwargs", "used while calibrating, not by engines"),
    ("a field of the config", r"ignore.*\)\?lm_head\$\"$", "the changed pattern finds the same modules"),
    ("a field of the config", r"(targets|ignore).*\|\w+\)\$\"$",
     "a name for a layer that engines fuse: they refuse what no target names, and the parts' own names stand beside it"),
    ("a field of the config", "^quantization_config.version", "says which program wrote it"),
    ("a field of the config", "^(tie_word_embeddings|rope_theta|decoder_sparse_step|num_key_value_heads) .* to nothing$",
     "the value is the one that engines take by default"),
    ("a field of the config", "(rms_norm_eps|rope_theta|max_position_embeddings|num_experts_per_tok|num_local_experts) ",
     "no tensor shows it: only the source's config or a digest tells"),
    ("a tensor", "mtp_layers", "a lone draft layer is compared with layers like it, of which three are needed: here are two"),
)  # fmt: skip


def harmless(item: Seen) -> str | None:
    """Why no level could find it without a digest; None if nothing excuses that."""
    for kind, pattern, reason in _REASONS:
        if item.kind.startswith(kind) and re.search(pattern, item.what):
            return reason
    return None


def page(seen: list[Seen]) -> str:
    """docs/mutations.md."""
    missed: dict[tuple[str, str], int] = defaultdict(int)
    for item in seen:
        if not (item.data or item.numeric):
            missed[item.kind, harmless(item) or "not explained"] += 1
    rows = [f"| {kind} | {reason} | {number} |" for (kind, reason), number in sorted(missed.items())]
    return "\n".join(
        [
            "# What is found of random damage",
            "",
            f"{len(seen)} random single mutations (seed {SEED}) of {len(GOOD)} good checkpoints of many families and "
            "formats, and the",
            "share that `ckptkit verify` finds. Static, data and numeric are without any recorded digest, numeric where",
            "the checkpoint was quantized from a source to compare with; the last column is level data with digests",
            "(`ckptkit hash --per-tensor`, or the manifest that every result of ckptkit has).",
            "Written by `python -m corrupt.mutations ../docs/mutations.md` in `tests`, and held by a test.",
            "",
            *table(seen),
            "",
            "A flipped bit of a weight or scale gives another good number: without a digest only the source tells.",
            "What no level finds without a digest, and why:",
            "",
            "| changed | why it cannot be seen, or does no harm | mutations |",
            "|---|---|---:|",
            *rows,
            "",
        ]
    )


def measure() -> list[Seen]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "goods").mkdir()
        make_goods(root / "goods")
        return list(mutations(root / "goods", root / "work"))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(measure()))
