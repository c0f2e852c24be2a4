"""What a draft's config says of the features that it is trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from ..errors import UserError, fail

Config = Mapping[str, Any]

# Where config.json may say what a draft is, those of the draft itself before those of the language model.
_HOMES = ("dspark_config", "dflash_config", "eagle_config")
_TEXTS = ("text_config", "transformer_layer_config")
_TAPS = ("dspark_target_layer_ids", "target_layer_ids", "eagle_aux_hidden_state_layer_ids")
_TAPS_AFTER = "aux_hidden_state_layer_ids"  # speculators numbers hidden states: one more than the layer
_NOISE = ("dspark_noise_token_id", "mask_token_id", "noise_token_id")
_EAGLE3_TAPS = 3  # a low, a middle and a high layer of the target, where the config names none


WANTED = "--draft-config takes the config.json of the draft, or of the target that carries it"


class Algorithm(StrEnum):
    """What trains the draft: it decides which states are needed."""

    DSPARK = "dspark"
    DFLASH = "dflash"
    EAGLE3 = "eagle3"


class Draft(NamedTuple):
    """A draft as its features must suit it.

    ``hidden`` is the width of one state of the target; ``layers`` are the layers tapped, outputs counted from 0, None
    where the config names none; ``streams`` is the number of residual streams of the target (``hc_mult``), which must
    be folded into one; ``noise`` is the token that stands for those not drafted yet.
    """

    algorithm: Algorithm
    hidden: int
    taps: int
    layers: tuple[int, ...] | None
    vocab: int
    noise: int | None
    streams: int

    @property
    def width(self) -> int:
        """Numbers of the tapped states of a token."""
        return self.taps * self.hidden


def draft_of(config: Config, file: str) -> Draft:
    """What ``config``, a config.json in any known layout, says. Raises UserError (``config.draft``)."""
    algorithm = _algorithm(config)
    if algorithm is None:
        raise _lacks(file, "is not the config of a DSpark, DFlash or EAGLE-3 draft")
    layers = _layers(config, file)
    if layers is None and algorithm is not Algorithm.EAGLE3:
        raise _lacks(file, f"names no tapped layers ({', '.join((*_TAPS, _TAPS_AFTER))})")
    hidden = _positive(config, "target_hidden_size") or _positive(config, "hidden_size")
    vocab = _positive(config, "vocab_size")
    if not hidden or not vocab:
        raise _lacks(file, f"has no {'vocab_size' if hidden else 'hidden_size'}")
    noise = next((value for key in _NOISE if (value := _first(config, key)) is not None), None)
    if noise is not None and type(noise) is not int:
        raise _lacks(file, f"gives {noise!r} as the noise token")
    taps = len(layers) if layers is not None else _EAGLE3_TAPS
    return Draft(algorithm, hidden, taps, layers, vocab, noise, _positive(config, "hc_mult") or 1)


def _algorithm(config: Config) -> Algorithm | None:
    names = config.get("architectures")
    stated = " ".join([*map(str, names if isinstance(names, list) else ()), *_kinds(config)]).lower()
    dspark = any(_first(config, key) is not None for key in ("dspark_target_layer_ids", "markov_rank"))
    if "eagle3" in stated or isinstance(config.get("eagle_config"), Mapping):
        return Algorithm.EAGLE3
    if dspark or "dspark" in stated:
        return Algorithm.DSPARK
    return Algorithm.DFLASH if "dflash" in stated or isinstance(config.get("dflash_config"), Mapping) else None


def _kinds(config: Config) -> list[str]:
    keys = ("model_type", "speculators_model_type", "projector_type")
    return [value for key in keys if isinstance(value := _first(config, key), str)]


def _layers(config: Config, file: str) -> tuple[int, ...] | None:
    found = next((value for key in _TAPS if (value := _first(config, key)) is not None), None)
    after = _first(config, _TAPS_AFTER) if found is None else None
    listed = after if found is None else found
    if listed is None:
        return None
    if not isinstance(listed, list) or not listed or not all(type(layer) is int for layer in listed):
        raise _lacks(file, f"gives {listed!r} as the tapped layers, which is no list of layers")
    return tuple(layer - (found is None) for layer in listed)


def _positive(config: Config, key: str) -> int | None:
    value = _first(config, key)
    return value if type(value) is int and value > 0 else None


def _first(config: Config, key: str) -> Any:
    """The first value of ``key`` that is not null in any of the places where it may stand."""
    return next((value for home in _homes(config) if (value := home.get(key)) is not None), None)


def _homes(config: Config) -> Iterator[Config]:
    tops = [config, *(config.get(name) for name in _TEXTS)]
    for top in tops:
        if isinstance(top, Mapping):
            yield from (home for name in _HOMES if isinstance(home := top.get(name), Mapping))
            yield top


def _lacks(file: str, what: str) -> UserError:
    return fail("config.draft", f"{file} {what}", file=file, hint=WANTED)
