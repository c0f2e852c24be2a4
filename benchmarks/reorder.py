"""Reorder the rows of a head of 248,320 tokens by a draft vocabulary of 66,000: against a plain copy of the same bytes.

    python benchmarks/reorder.py [--folder .cache/bench] [--pairs 5]

Two heads of BF16: rows of 10 KiB (2.5 GB) and of 4 KiB (1 GB). The list is dense where ids are low and thin where they are
high, as those of BPE vocabularies are. Each pair is a copy through a buffer of 1 MiB and a run of ckptkit, one after the
other, both over a source that is in the page cache; the fixed cost is that of the same command on a head of one row in a thousand. Peak
anonymous memory is sampled in the process, above what it holds once all modules are imported. Prints the table of docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from dequantize import COPY, warm
from measure import Usage, apart, clean, median, run

TOKENS, LISTED, SLICES = 248_320, 66_000, 2
WIDTHS = {"10 KiB": 5120, "4 KiB": 2048}
ALLOWED = {"10 KiB": 1.15, "4 KiB": 1.3}
# Runs the command line after the first argument, a file for the bytes of anonymous memory: peak, and before the run.
WATCHED = """
import re, sys, threading, time
import numpy
from ckptkit.cli import main
import ckptkit.commands.reorder_vocab, ckptkit.checks.inherited
def anonymous():
    return int(re.search(r"RssAnon:\\s*(\\d+)", open("/proc/self/status").read())[1]) << 10
def watch():
    while not done.wait(0.01):
        seen.append(anonymous())
done, seen = threading.Event(), [anonymous()]
watching = threading.Thread(target=watch)
watching.start()
code = main(sys.argv[2:])
done.set()
watching.join()
open(sys.argv[1], "w").write(f"{max(seen)} {seen[0]}")
sys.exit(code)
"""


def make(folder: Path, tokens: int, width: int) -> Path:
    """A checkpoint of one head of random bits, and ``list.txt`` beside it; made once."""
    if (folder / "config.json").exists():
        return folder
    import numpy as np

    from ckptkit.files.header import Spec, lay_out

    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(7)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(lay_out([Spec("lm_head.weight", "BF16", (tokens, width))], {"format": "pt"})[0])
        for start in range(0, tokens, 4096):
            file.write(rng.integers(0, 1 << 16, (min(4096, tokens - start), width), np.uint16).tobytes())
    ids, listed = np.arange(tokens), LISTED * tokens // TOKENS
    likely = 1 / (1 + np.exp((ids - 0.9 * listed) / (0.35 * listed))) + 0.02
    likely[-max(1, 280 * tokens // TOKENS) :] = 1e6
    chosen = np.sort(np.argsort(rng.exponential(size=tokens) / likely)[:listed])
    (folder / "list.txt").write_text("\n".join(map(str, chosen.tolist())))
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width, "vocab_size": tokens}
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    return folder


def command(src: Path, out: Path, *options: str) -> list[str]:
    listed = ["--draft-vocab", str(src / "list.txt"), "--slices", str(SLICES), "--engine", "sglang"]
    return ["reorder-vocab", str(src), str(out), *listed, "--no-progress", *options]


def ours(src: Path, out: Path, *options: str) -> Usage:
    clean(out)
    return run([sys.executable, "-m", "ckptkit", *command(src, out, *options)])


def copied(src: Path, out: Path) -> Usage:
    clean(out)
    return run([sys.executable, "-c", COPY, str(src), str(src / "model.safetensors"), str(out)])


class Row(NamedTuple):
    """Medians of a case; ``ratio`` is the median of the pairs' CPU seconds, the fixed cost taken off."""

    ours: Usage
    copy: Usage
    fixed: Usage
    ratio: float
    streaming: Usage
    anonymous: tuple[int, int]


def measured(folder: Path, name: str, pairs: int) -> Row:
    src, small, out = folder / "src", folder / "small", folder / "out"
    apart(make, src, TOKENS, WIDTHS[name])
    apart(make, small, TOKENS // 1000, WIDTHS[name])
    warm(src, small)
    fixed = median(ours(small, out) for _ in range(pairs))
    found = [(copied(src, out), ours(src, out)) for _ in range(pairs)]
    ratio = statistics.median((made.cpu - fixed.cpu) / copy.cpu for copy, made in found)
    streaming = ours(src, out, "--streaming")
    row = Row(median(m for _, m in found), median(c for c, _ in found), fixed, ratio, streaming, _watched(src, out))
    clean(out)
    return row


def _watched(src: Path, out: Path) -> tuple[int, int]:
    """Peak anonymous bytes of a run, and what there was before it."""
    clean(out)
    with tempfile.NamedTemporaryFile("r") as told:
        run([sys.executable, "-c", WATCHED, told.name, *command(src, out)])
        peak, before = map(int, told.read().split())
    return peak, before


def show(usage: Usage) -> str:
    return f"{usage.wall:.1f} / {usage.cpu:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(".cache/bench"))
    parser.add_argument("--pairs", type=int, default=5)
    options: Any = parser.parse_args()
    print("| rows | ckptkit | copy | the fixed cost | CPU against the copy | asked | --streaming | anonymous memory |")
    print("|---|---|---|---|---|---|---|---|")
    for name in WIDTHS:
        row = measured(options.folder / f"reorder-{name.replace(' ', '')}", name, options.pairs)
        beyond = (row.anonymous[0] - row.anonymous[1]) / (1 << 20)
        cells = [show(row.ours), show(row.copy), show(row.fixed), f"{row.ratio:.2f}", f"≤ {ALLOWED[name]}"]
        print(f"| {name} | {' | '.join(cells)} | {show(row.streaming)} | {beyond:.0f} MiB |", flush=True)


if __name__ == "__main__":
    main()
