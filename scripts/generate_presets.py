"""Write ckptkit/data/presets.json from the presets of the installed compressed-tensors.

    python scripts/generate_presets.py

The table is the project's own, so that reading a recipe does not import compressed-tensors; a test holds the two equal.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[1] / "ckptkit" / "data" / "presets.json"


def presets() -> dict[str, dict[str, Any]]:
    """Name to ``{"weights": …, "input_activations": …}``, each part with every field as the library dumps it."""
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

    return {
        name: {part: json.loads(arguments.model_dump_json()) for part, arguments in scheme.items()}
        for name, scheme in PRESET_SCHEMES.items()
    }


def render() -> str:
    """The file's text: one preset a line, in the library's order."""
    rows = ",\n".join(f" {json.dumps(name)}: {json.dumps(scheme)}" for name, scheme in presets().items())
    return f"{{\n{rows}\n}}\n"


if __name__ == "__main__":
    TABLE.write_text(render())
