"""Quantize a 4 GB checkpoint, ckptkit and llmcompressor's model_free_ptq in turn, in one run.

    python benchmarks/quantize.py [--folder .cache/bench] [--pairs 3] [--case head body …]

Makes its own checkpoint: bf16, four shards of about 1 GB, 12 layers of Qwen3-4B's shapes, a vocabulary of 151,936 x
2,560, normal weights of deviation 0.02, lm_head in the last shard. The first case is run in pairs (ckptkit, peer,
ckptkit, peer …) and the medians are given, the others once. Prints the tables of docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from measure import Usage, apart, clean, median, run

VOCAB, HIDDEN, INTER, LAYERS, SHARDS = 151_936, 2560, 9728, 12, 4
PROJECTIONS = {
    "self_attn.q_proj": (4096, HIDDEN),
    "self_attn.k_proj": (1024, HIDDEN),
    "self_attn.v_proj": (1024, HIDDEN),
    "self_attn.o_proj": (HIDDEN, 4096),
    "mlp.gate_proj": (INTER, HIDDEN),
    "mlp.up_proj": (INTER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTER),
}
NORMS = ("input_layernorm", "post_attention_layernorm")


class Case(NamedTuple):
    """A recipe for ckptkit and the same for the peer: groups by name, and what the peer must be told to ignore."""

    title: str
    recipe: str
    groups: dict[str, object]
    ignore: list[str]
    options: list[str]
    least: str


def group(targets: list[str], **weights: object) -> dict[str, object]:
    return {"targets": targets, "weights": {"symmetric": True, **weights}}


HEAD = group(["re:.*lm_head$"], num_bits=8, type="int", strategy="channel")
BODY = group(["Linear"], num_bits=4, type="int", strategy="group", group_size=128)
EDGES = ["re:.*embed_tokens", "re:.*lm_head"]
CASES = {
    "head": Case("head W8A16 channel only, `--link hard`", "lm_head-w8a16", {"head": HEAD}, [], ["--link", "hard"], "4x CPU, 3.5x wall, 350 MB"),
    "body": Case("body W4A16 g128 + head W8A16", "w4a16-lm_head-w8a16", {"head": HEAD, "body": BODY}, EDGES[:1], [], "5x CPU, 350 MB"),
    "fp8-block": Case("FP8_BLOCK body", "fp8-block", {"FP8_BLOCK": ["Linear"]}, EDGES, [], "5x CPU, 350 MB"),
    "nvfp4a16": Case("NVFP4A16 body", "nvfp4a16", {"NVFP4A16": ["Linear"]}, EDGES, [], "5x CPU, 600 MB"),
}  # fmt: skip

PEER = """
import json, sys
from compressed_tensors.quantization import QuantizationConfig
from llmcompressor.entrypoints.model_free import model_free_ptq
src, out, groups, ignore = sys.argv[1:]
model_free_ptq(src, out, config=QuantizationConfig(config_groups=json.loads(groups)), ignore=json.loads(ignore), device="cpu")
"""


# --- the checkpoint ------------------------------------------------------------------------------------------


def shapes(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for layer in range(layers):
        stem = f"model.layers.{layer}."
        yield from ((f"{stem}{name}.weight", (HIDDEN,)) for name in NORMS)
        yield from ((f"{stem}{name}.weight", shape) for name, shape in PROJECTIONS.items())
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB, HIDDEN)


def config(layers: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": HIDDEN, "intermediate_size": INTER,
        "num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": VOCAB, "tie_word_embeddings": False, "dtype": "bfloat16",
    }  # fmt: skip


def parts(layers: int, count: int) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Tensors in order, in ``count`` shards of about equal size, cut between layers: the peer's NVFP4 demands it."""
    listed = list(shapes(layers))
    sizes = [2 * rows_cols(shape) for _, shape in listed]
    share, found, filled = sum(sizes) / count, [[]], 0
    for item, size in zip(listed, sizes, strict=True):
        cut = "input_layernorm" in item[0] or item[0] == "lm_head.weight"
        if cut and filled + size > share * len(found) and len(found) < count:
            found.append([])
        found[-1].append(item)
        filled += size
    return found


def rows_cols(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def make(folder: Path, layers: int = LAYERS, count: int = SHARDS, sparse: bool = False) -> Path:
    """The checkpoint, made once. ``sparse``: every shard but the last is a file of holes (zeros without blocks)."""
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    divided = parts(layers, count)
    for number, part in enumerate(divided, 1):
        name = f"model-{number:05}-of-{len(divided):05}.safetensors"
        apart(write_shard, folder / name, part, number, sparse and number < len(divided))
        weight_map |= {tensor: name for tensor, _ in part}
    total = sum(2 * rows_cols(shape) for _, shape in shapes(layers))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config(layers), indent=2))
    return folder


def write_shard(path: Path, part: list[tuple[str, tuple[int, ...]]], seed: int, sparse: bool) -> None:
    """Written tensor by tensor, with the layout that the safetensors package would give it."""
    from ckptkit.files.header import Spec, lay_out

    head, header = lay_out([Spec(name, "BF16", shape) for name, shape in part], {"format": "pt"})
    with path.open("wb") as file:
        file.write(head)
        if not sparse:
            import torch

            generator = torch.Generator().manual_seed(seed)
            for entry in header.entries:
                weight = torch.empty(entry.shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
                file.write(weight.view(torch.uint8).numpy().tobytes())
        file.truncate(header.file_size)


# --- the runs ------------------------------------------------------------------------------------------------


def ours(src: Path, out: Path, recipe: str, options: list[str]) -> Usage:
    clean(out)
    command = [sys.executable, "-m", "ckptkit", "quantize", str(src), str(out), "--recipe", recipe, "--no-progress"]
    return run([*command, *options])


def peers(src: Path, out: Path, case: Case) -> Usage:
    clean(out)
    return run([sys.executable, "-c", PEER, str(src), str(out), json.dumps(case.groups), json.dumps(case.ignore)])


def compare(src: Path, scratch: Path, names: list[str], pairs: int) -> None:
    print("| case | ckptkit wall / CPU s / RSS MB | peer wall / CPU s / RSS MB | wall ratio | CPU ratio | at least |")
    print("|---|---|---|---|---|---|")
    for name in names:
        case, runs = CASES[name], []
        for _ in range(pairs if name == "head" else 1):
            runs.append((ours(src, scratch / "ours", case.recipe, case.options), peers(src, scratch / "peer", case)))
        mine, theirs = (median(side) for side in zip(*runs, strict=True))
        apart(check_same, scratch / "ours", scratch / "peer")
        ratios = f"{theirs.wall / mine.wall:.1f}x | {theirs.cpu / mine.cpu:.1f}x"
        print(f"| {case.title} | {tell(mine)} | {tell(theirs)} | {ratios} | {case.least} |", flush=True)
        clean(scratch / "ours", scratch / "peer")


def tell(usage: Usage) -> str:
    return f"{usage.wall:.1f} / {usage.cpu:.1f} / {usage.rss:.0f}"


def check_same(ours: Path, theirs: Path) -> None:
    """Both made the same tensors, bit for bit: a ratio between different results would say nothing."""
    from safetensors import safe_open

    where = {name: path for path in sorted(ours.glob("*.safetensors")) for name in names_in(path)}
    count = 0
    for path in sorted(theirs.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                with safe_open(where[name], "pt") as mine:
                    if not same(file.get_tensor(name), mine.get_tensor(name)):
                        sys.exit(f"{name} differs between ckptkit and the peer")
                count += 1
    if count != len(where):
        sys.exit(f"ckptkit made {len(where)} tensors, the peer {count}")


def names_in(path: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return list(file.keys())


def same(a: object, b: object) -> bool:
    import torch

    assert isinstance(a, torch.Tensor)
    assert isinstance(b, torch.Tensor)
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def startup() -> None:
    print("\n| start-up | wall / CPU s / RSS MB |\n|---|---|")
    for title, code in (
        ("ckptkit --help", "import sys; from ckptkit.cli import main; main(['--help'])"),
        ("import torch", "import torch"),
        ("import llmcompressor's model_free_ptq", "from llmcompressor.entrypoints.model_free import model_free_ptq"),
    ):
        print(f"| {title} | {tell(median(run([sys.executable, '-c', code]) for _ in range(3)))} |", flush=True)


def growth(folder: Path, scratch: Path) -> None:
    """Head-only cost beside bodies of 1, 2, 4, 8 times the size, and in shards of 1, 2 and 4 GB."""
    print("\n| head-only, `--link hard` | checkpoint | wall / CPU s / RSS MB |\n|---|---|---|")
    for times in (1, 2, 4, 8):
        layers = LAYERS * times
        src = make(folder / f"sparse-{times}", layers, SHARDS * times, sparse=True)
        usage = median(ours(src, scratch / "ours", "lm_head-w8a16", ["--link", "hard"]) for _ in range(3))
        size = sum(path.stat().st_size for path in src.glob("*.safetensors"))
        print(f"| body x{times} | {size / 1e9:.1f} GB, {SHARDS * times} shards | {tell(usage)} |", flush=True)
        clean(scratch / "ours")
    print("\n| body W4A16 + head, by shard size | wall / CPU s / RSS MB |\n|---|---|")
    for count in (4, 2, 1):
        src = make(folder / f"shards-{count}", LAYERS, count)
        usage = ours(src, scratch / "ours", "w4a16-lm_head-w8a16", [])
        print(f"| {count} shards of {4 / count:.0f} GB | {tell(usage)} |", flush=True)
        clean(scratch / "ours", *([src] if count < 4 else []))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(".cache/bench"))
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--case", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--no-growth", action="store_true", help="leave out the tables on body and shard size")
    arguments = parser.parse_args()
    scratch = arguments.folder / "out"
    scratch.mkdir(parents=True, exist_ok=True)
    if arguments.case:
        compare(make(arguments.folder / f"shards-{SHARDS}"), scratch, arguments.case, arguments.pairs)
    startup()
    if not arguments.no_growth:
        growth(arguments.folder, scratch)


if __name__ == "__main__":
    main()
