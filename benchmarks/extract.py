"""Extract a draft of 1 GB from a target of 4 GB, and put it back: against a plain copy, and against the dequantizer.

    python benchmarks/extract.py [--folder .cache/bench] [--pairs 3]

Makes its own DeepSeek-V4 checkpoint: three DSpark stages of 96 FP4 experts with random codes, and layers whose files are
sparse, since nothing of them is to be read. The copy writes files as large as the result's, as that of dequantize.py
does. ``bf16`` is compared with ``ckptkit dequantize`` on the draft alone, which makes the same floats. What is read of
the source is counted in the process itself, by file. Prints the tables of docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dequantize import COPY, THREADS, script, warm
from measure import Usage, apart, clean, median, run
from quantize import tell

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "vocab_size": 32768, "hidden_size": 2048, "num_hidden_layers": 9, "num_attention_heads": 32,
    "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_lora_rank": 1024,
    "o_groups": 8, "n_routed_experts": 96, "n_shared_experts": 1, "num_experts_per_tok": 6,
    "moe_intermediate_size": 1024, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "num_hash_layers": 0,
    "hc_mult": 4, "compress_ratios": [0] * 12, "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
    "dspark_block_size": 5, "dspark_noise_token_id": 32767, "dspark_markov_rank": 256,
    "dspark_target_layer_ids": [6, 7, 8],
}  # fmt: skip
STAGES = 3
# The same names over next to no bytes: what a run costs whatever its size.
TINY = {
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "vocab_size": 256,
    "q_lora_rank": 128,
    "o_lora_rank": 16,
    "dspark_noise_token_id": 255,
}

# Runs the command line after the first argument, which is a file for the bytes read of each file of the source.
COUNTED = """
import json, sys
from collections import Counter
from ckptkit.cli import main
from ckptkit.files.source import Source
read, real = Counter(), Source.read_into
def read_into(self, file, start, view):
    read[file] += len(view)
    real(self, file, start, view)
Source.read_into = read_into
code = main(sys.argv[2:])
open(sys.argv[1], "w").write(json.dumps(read))
sys.exit(code)
"""


# --- the checkpoint ----------------------------------------------------------------------------------------


def make(folder: Path, config: Mapping[str, Any]) -> Path:
    """The target with its draft, made once: a file for each layer, for what is of none, and for each stage."""
    if (folder / "config.json").exists():
        return folder
    from ckptkit.drafts.tables import dspark, target

    folder.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {}
    for name, expected in (target(config) | dspark(config, STAGES)).items():
        part = ".".join(name.split(".")[:2]) if name.startswith(("layers.", "mtp.")) else "rest"
        parts.setdefault(part, []).append((name, expected.dtypes[0], expected.shape))
    files = {part: f"model-{number + 1:05}-of-{len(parts):05}.safetensors" for number, part in enumerate(parts)}
    for part, listed in parts.items():
        apart(write_shard, folder / files[part], listed, not part.startswith("layers."))
    weight_map = {name: files[part] for part, listed in parts.items() for name, *_ in listed}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def write_shard(path: Path, listed: list[tuple[str, str, tuple[int, ...]]], filled: bool) -> None:
    import numpy as np

    from ckptkit.files.header import Spec, lay_out

    head, header = lay_out([Spec(*item) for item in listed], {"format": "pt"})
    rng = np.random.default_rng(len(listed))
    with path.open("wb") as file:
        file.write(head)
        for entry in header.entries if filled else ():
            file.write(content(entry.dtype, entry.nbytes, rng))
        file.truncate(header.file_size)


def content(dtype: str, nbytes: int, rng: Any) -> bytes:
    """Random codes, none of them NaN, under scales of common size; ones for what is not quantized."""
    import numpy as np

    if dtype in ("BF16", "F32"):
        return b"\x80\x3f" * (nbytes // 2) if dtype == "BF16" else b"\x00\x00\x80\x3f" * (nbytes // 4)
    low, high = (112, 124) if dtype == "F8_E8M0" else (0, 256)
    codes = rng.integers(low, high, nbytes, dtype=np.uint8)
    if dtype == "F8_E4M3":
        codes[codes & 0x7F == 0x7F] -= 1
    return bytes(codes)


# --- whole processes ---------------------------------------------------------------------------------------


def ours(command: str, src: Path, out: Path, *options: str) -> Usage:
    clean(out)
    line = [sys.executable, "-m", "ckptkit", command, str(src), *options[:1], str(out), *options[1:]]
    return run([*[part for part in line if part], "--no-progress", "-j", str(THREADS)])


def counted(src: Path, out: Path, log: Path) -> dict[str, int]:
    """Bytes read of each file of ``src`` to extract the serving layout."""
    clean(out)
    run([sys.executable, "-c", COUNTED, str(log), "extract-dspark", str(src), str(out), "--no-progress"])
    found: dict[str, int] = json.loads(log.read_text())
    return found


def speed(folder: Path, src: Path, tiny: Path, pairs: int) -> None:
    out, small = folder / "out", folder / "64MiB"
    small.write_bytes(bytes(range(256)) * (1 << 18))
    warm(src, small)
    runs: dict[str, list[Usage]] = {
        name: [] for name in ("fixed", "serving", "copy", "bf16", "dequantize", "hf", "attach")
    }
    for _ in range(pairs):
        runs["fixed"].append(ours("extract-dspark", tiny, out / "tiny", ""))
        clean(out / "tiny")
        runs["serving"].append(ours("extract-dspark", src, out / "serving", ""))
        runs["copy"].append(script(COPY, small, out / "copy", str(out / "serving")))
        clean(out / "copy")
        runs["bf16"].append(ours("extract-dspark", src, out / "bf16", "", "--dequantize", "bf16"))
        clean(out / "dequantized")
        runs["dequantize"].append(ours("dequantize", out / "serving", out / "dequantized", ""))
        clean(out / "dequantized")
        runs["hf"].append(ours("extract-dspark", src, out / "hf", "", "--layout", "hf"))
        clean(out / "hf")
        runs["attach"].append(ours("attach-dspark", src, out / "attached", str(out / "bf16"), "--link", "hard"))
        clean(out / "attached", out / "bf16")
    found = {name: median(of) for name, of in runs.items()}
    fixed = found["fixed"].wall
    print(
        "| a draft of 1.2 GB | ckptkit, 2 threads | against | ratio | without the fixed cost |\n|---|---|---|---|---|"
    )
    for name, other in (("serving", "copy"), ("bf16", "dequantize"), ("hf", "dequantize")):
        mine, theirs = found[name].wall, found[other].wall
        alone = (theirs if other == "copy" else theirs - fixed) / (mine - fixed)
        print(f"| {name} | {tell(found[name])} | {other} {tell(found[other])} | {theirs / mine:.2f} | {alone:.2f} |")
    print(f"| attach, nothing trained | {tell(found['attach'])} | | | |")
    print(f"| a draft of 1 MB: the fixed cost | {tell(found['fixed'])} | | | |", flush=True)


def reads(folder: Path, src: Path) -> None:
    found = counted(src, folder / "out" / "serving", folder / "reads.json")
    index = json.loads((src / "model.safetensors.index.json").read_text())["weight_map"]
    drafted = {file for name, file in index.items() if name.startswith("mtp.")}
    headers = sum(8 + int.from_bytes((src / file).open("rb").read(8), "little") for file in set(index.values()))
    size = sum((src / file).stat().st_size for file in drafted)
    others = sum(count for file, count in found.items() if file not in drafted)
    print(f"\nread: {sum(found.values()):,} bytes; files of the draft {size:,}, headers of all {headers:,}")
    print(f"read of files of the target: {others:,} bytes (headers, index, config, sampled rows)")
    clean(folder / "out")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(".cache/bench"))
    parser.add_argument("--pairs", type=int, default=3)
    chosen = parser.parse_args()
    src, tiny = make(chosen.folder / "extract", CONFIG), make(chosen.folder / "extract-tiny", CONFIG | TINY)
    speed(chosen.folder, src, tiny, chosen.pairs)
    reads(chosen.folder, src)


if __name__ == "__main__":
    main()
