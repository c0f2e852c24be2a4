"""Broken controls for SGLang 0.5.17, which drops a packed head whatever else is wrong:   sglang_controls.py CONTROLS

Theirs is dense. CONTROLS is what fixtures/controls.py made, whose modules are on PYTHONPATH.
"""

from __future__ import annotations

import sys
from pathlib import Path

from controls_broken import no_layer, no_linears, write_broken

BROKEN = {
    "bad-layer-bf16": ("walk", no_layer),
    "bad-layer-w4": ("walk-w4", no_layer),
    "bad-linears-w4": ("walk-w4", no_linears),
}

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for name, (source, change) in BROKEN.items():
        write_broken(folder / source, folder / name, change)
