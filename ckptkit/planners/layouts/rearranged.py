"""What each way of arranging gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...errors import Finding
from ...families.experts import INTERLEAVED
from ...plan import Step

# Names of gate, up and down.
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
W_NAMES = ("w1", "w3", "w2")
_W_MODELS = frozenset({"deepseek_v4", "mixtral", "phimoe"})
# Models whose stacked experts lie transposed, [E, in, out].
_COLUMNS = frozenset({"gpt_oss", "llama4", "llama4_text", "qwen3_vl_moe", "qwen3_vl_moe_text"})


class Facts(NamedTuple):
    """What tensors in one layout do not show, and the way back to another needs to know.

    ``names`` of an expert's gate, up and down; whether stacked weights of floats lie transposed (``columns``), gate and
    up in turn (``alternate``), their names with ``suffix``; ``fp4``: the dtype of DeepSeek's FP4 codes.
    """

    names: tuple[str, ...] = PROJECTIONS
    columns: bool = False
    alternate: bool = False
    suffix: str = ""
    fp4: str = "I8"


def facts_of(model_type: str, noted: Mapping[str, object]) -> Facts:
    """By model type, but for what the last change of layout noted."""
    names = W_NAMES if model_type in _W_MODELS else PROJECTIONS
    known = Facts(names, model_type in _COLUMNS, model_type in INTERLEAVED)._asdict()
    known |= {key: value for key, value in noted.items() if key in known}
    return Facts(**{**known, "names": tuple(known["names"])})


class Rearranged(NamedTuple):
    """Steps by the tensor they replace, the layout there was and the one made, what to note, what is in the way.

    The layout ``codes`` is called by what held them before too: ``codes of dsv4``.
    """

    steps: Mapping[str, Sequence[Step]]
    origin: str
    made: str
    facts: Facts
    problems: Sequence[Finding] = ()
