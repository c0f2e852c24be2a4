"""config.json of a layout: what engines may believe, and how to get the source's config back.

A result that some engine reads declares it. Any other must not be taken for the model it was: engines warn of names
that they do not know and go on, so ``model_type`` and ``architectures`` become ones that none of them has. Either way
``ckptkit_layout`` holds what was there before, and going back restores it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .errors import Finding
from .families.experts import INTERLEAVED

KEY = "ckptkit_layout"
NO_MODEL = "ckptkit_layout"
NO_METHOD = "ckptkit-"  # what the quant_method begins with that such a result declares
NO_ARCHITECTURE = "CkptkitLayout"
# Names of gate, up and down.
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
W_NAMES = ("w1", "w3", "w2")
_W_MODELS = frozenset(
    {"deepseek_v4", "kimi_linear", "lfm2_moe", "minimax", "minimax_m2", "minimax_m3_vl", "mixtral", "phimoe"}
)
# Models whose stacked experts lie transposed, [E, in, out].
_COLUMNS = frozenset({"gpt_oss", "llama4", "llama4_text", "qwen3_vl_moe", "qwen3_vl_moe_text"})

Config = Mapping[str, Any]


# Layouts of experts; the others are of FP4 codes, and one may be changed without the other.
EXPERTS = frozenset({"per-expert", "fused"})


class Change(NamedTuple):
    """A layout change: the layouts before and after, what to note for the way back, and what engines may believe.

    ``back`` is the --layout that undoes it; ``declared`` the quantization table, if there is one that engines read.
    """

    origin: str
    made: str
    back: str
    facts: Config
    declared: Config | None
    loadable: bool


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


def original(config: Config) -> dict[str, Any]:
    """The config as it was before any layout change."""
    current = dict(config)
    while note := noted(current):
        current = _restored(current, note["was"])
    return current


def noted(config: Config) -> Config:
    """What the last layout change left for the way back: ``from``, ``to`` and the facts; empty if there was none.

    So is one that :func:`fault` objects to.
    """
    return {} if fault(config) else config.get(KEY, {})


def fault(config: Config) -> str | None:
    """What of ``ckptkit_layout``, or of one before it, is not as :func:`changed` writes it, if anything is."""
    while KEY in config:
        note = config[KEY]
        if not isinstance(note, Mapping):
            return f"{KEY} is no object"
        wrong = next((key for key, fits in _FITS.items() if not fits(note.get(key))), None)
        if wrong:
            return f"{KEY}.{wrong} is {note.get(wrong)!r}"
        config = {KEY: note["was"][KEY][0]} if note["was"].get(KEY) else {}
    return None


def _is_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == len({*map(str, value)}) == 3 and all(map(_is_text, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_was(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(old, list) and len(old) < 2 for old in value.values())


_FITS: Mapping[str, Callable[[Any], bool]] = {
    "from": _is_text,
    "to": _is_text,
    "names": _is_names,
    "columns": lambda value: isinstance(value, bool),
    "alternate": lambda value: isinstance(value, bool),
    "suffix": lambda value: value in ("", ".weight"),
    "fp4": lambda value: value in ("I8", "F4"),
    "was": _is_was,
}


def facts_of(model_type: str, noted: Mapping[str, object]) -> Facts:
    """By model type, but for what the last change of layout noted."""
    names = W_NAMES if model_type in _W_MODELS else PROJECTIONS
    known = Facts(names, model_type in _COLUMNS, model_type in INTERLEAVED)._asdict()
    known |= {key: value for key, value in noted.items() if key in known}
    return Facts(**{**known, "names": tuple(known["names"])})


def changed(config: Config, change: Change) -> tuple[dict[str, Any], list[Finding]]:
    """The config after ``change``, and a warning where no engine loads the result (``unpack.exchange``)."""
    new = _earlier(config, change) or _new(config, change)
    findings: list[Finding] = []
    if new.get("model_type") == NO_MODEL:
        message = f"no engine loads this model in the layout {change.made}: it is for exchange, and config.json says so"
        hint = f"ckptkit unpack OUT BACK --layout {change.back} gives back what it was made from"
        findings.append(Finding("unpack.exchange", message, severity="warning", file="config.json", hint=hint))
    return new, findings


def _earlier(config: Config, change: Change) -> dict[str, Any] | None:
    """The config of an earlier state in the layout that is made now, if there is one and its tensors were the same."""
    facts = {key: list(value) if isinstance(value, tuple) else value for key, value in change.facts.items()}
    current = dict(config)
    while note := noted(current):
        if (note["to"] in EXPERTS) != (change.made in EXPERTS):
            return None
        current = _restored(current, note["was"])
        if note["from"] == change.made and facts == {key: note[key] for key in facts}:
            return current
    return None


def _new(config: Config, change: Change) -> dict[str, Any]:
    """The config of a state that was not there before."""
    new = original(config)
    if change.declared is not None:
        new["quantization_config"] = dict(change.declared)
    elif change.made not in EXPERTS:
        new["quantization_config"] = {"quant_method": NO_METHOD + change.made.partition(" ")[0]}
    elif "quantization_config" in config:
        new["quantization_config"] = config["quantization_config"]
    if not change.loadable:
        new |= {"model_type": NO_MODEL, "architectures": [NO_ARCHITECTURE]}
        new.pop("auto_map", None)
    was = {key: [config[key]] if key in config else [] for key in _differing(config, new)} | {
        KEY: [config[KEY]] if KEY in config else []
    }
    new[KEY] = {"from": change.origin, "to": change.made, **change.facts, "was": was}
    return new


def _differing(before: Config, after: Config) -> Sequence[str]:
    keys = (before.keys() | after.keys()) - {KEY}
    return sorted(key for key in keys if key not in before or key not in after or before[key] != after[key])


def _restored(config: Config, was: Config) -> dict[str, Any]:
    """``config`` with each key of ``was`` as it was: a list of its value, empty where it was not there."""
    current = {key: value for key, value in config.items() if was.get(key, [value])}
    current |= {key: value[0] for key, value in was.items() if isinstance(value, list) and value}
    return current
