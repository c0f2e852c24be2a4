"""What the numbers of a draft vocabulary mean: token ids, offsets, or marks of the tokens that are in it.

A *list* holds absolute token ids. A *map* ``d2t`` has an entry for each draft id ``i``, and two conventions share the
name: offsets, ``token = i + d2t[i]`` (EAGLE-3's reference, SpecForge, SGLang, vLLM, TensorRT-LLM), and absolute ids
(llama.cpp). A *mask* ``t2d`` has an entry for each token of the target: whether the draft has it.

A map that is read in the wrong convention still gives tokens, only others; so it is read in the one that it can be, or
refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import UserError, fail

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_SAY = "say which: --offsets (token = i + d2t[i]) or --absolute; or give t2d beside it"


def tokens_of(values: Array, t2d: Array | None, n_vocab: int | None, offsets: bool | None, file: str) -> Array:
    """The token ids, int64 [n], of the map ``values`` [n]; ``offsets`` says its convention where that is known.

    ``t2d`` is bool [n_vocab]. Raises UserError (``vocab.ambiguous``, ``vocab.mapping``) naming ``file``.
    """
    import numpy as np

    size = len(t2d) if t2d is not None else n_vocab
    readings = {False: values.astype(np.int64), True: values.astype(np.int64) + np.arange(len(values))}
    if offsets is not None:
        return _agreeing(readings[offsets], t2d, file)
    possible = [ids for ids in readings.values() if _is_possible(ids, t2d, size)]
    if not possible:
        raise _neither(t2d, size, file)
    if len(possible) > 1 and not np.array_equal(possible[0], possible[1]):
        message = f"{file}: d2t can be offsets as well as token ids, and nothing in it tells which"
        raise fail("vocab.ambiguous", message, file=file, hint=_SAY)
    return possible[0]


def offsets_of(ids: Array) -> Array:
    """``d2t`` as offsets, int64 [n], of token ids [n] in ascending order."""
    import numpy as np

    return ids.astype(np.int64) - np.arange(len(ids))


def mask_of(ids: Array, n_vocab: int) -> Array:
    """``t2d``, bool [n_vocab], of token ids within it."""
    import numpy as np

    mask = np.zeros(n_vocab, np.bool_)
    mask[ids] = True
    return mask


def _is_possible(ids: Array, t2d: Array | None, size: int | None) -> bool:
    import numpy as np

    ordered = np.unique(ids)
    if len(ordered) < len(ids) or (len(ids) and ordered[0] < 0):
        return False
    if t2d is not None:
        return np.array_equal(ordered, np.flatnonzero(t2d))
    return size is None or not len(ids) or bool(ordered[-1] < size)


def _agreeing(ids: Array, t2d: Array | None, file: str) -> Array:
    import numpy as np

    if t2d is not None and not np.array_equal(np.unique(ids), np.flatnonzero(t2d)):
        message = f"{file}: d2t gives other tokens than t2d marks"
        raise fail(
            "vocab.mapping", message, file=file, hint="take both from the checkpoint that they were trained with"
        )
    return ids


def _neither(t2d: Array | None, size: int | None, file: str) -> UserError:
    if t2d is not None:
        message = f"{file}: d2t gives the tokens that t2d marks neither as offsets nor as token ids"
        hint = "take both from the checkpoint that they were trained with"
        return fail("vocab.mapping", message, file=file, hint=hint)
    within = f" below {size:,}" if size is not None else ""
    message = f"{file}: d2t gives distinct tokens{within} neither as offsets nor as token ids"
    return fail("vocab.mapping", message, file=file, hint="give the map of a draft, and the --n-vocab of its target")
