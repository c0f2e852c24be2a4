"""Whether a sample holds what its draft is trained on: keys, dtypes, shapes, lengths, widths. No tensor byte is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from ..errors import Finding
from .draft import Algorithm, Draft
from .sample import AUX, DEEPSPEC, IDS, MASK, SPECFORGE, Dialect, Sample, Stored, matrix

_STATES = frozenset({"bfloat16", "float16", "float32"})
_MASKS = frozenset({"int64", "int32", "int16", "int8", "uint8", "bool", "float64"}) | _STATES
# Which dialects the trainers of a kind of draft read.
_READ = {
    Algorithm.DSPARK: (SPECFORGE, DEEPSPEC),
    Algorithm.DFLASH: (SPECFORGE, DEEPSPEC),
    Algorithm.EAGLE3: (AUX,),
}


class Sound(NamedTuple):
    """The tensors of a sample that are fit to be looked at, states as matrices; None for those that are not."""

    ids: Stored | None
    mask: Stored | None
    taps: Stored | None
    last: Stored | None


def finding(
    id: str,
    sample: Sample,
    text: str,
    key: str | None = None,
    severity: str = "error",
    data: Mapping[str, object] = MappingProxyType({}),
    hint: str | None = None,
) -> Finding:
    """A finding about a sample, or the tensor ``key`` in it; without a ``hint`` it gets its page's."""
    where = f"{sample.name}: {sample.part}" if sample.part else sample.name
    subject = ": ".join(part for part in (sample.part, key) if part) or None
    return Finding(id, f"{where}: {text}", file=sample.name, tensor=subject, hint=hint, severity=severity, data=data)


def about_dialect(dialect: Dialect, draft: Draft) -> Finding | None:
    """Whether a trainer of such drafts reads the dialect at all."""
    if dialect in _READ[draft.algorithm]:
        return None
    read = ", ".join(_READ[draft.algorithm][0].keys[2:])
    message = f"the features have the keys {dialect.taps} and {dialect.last}; trainers of {draft.algorithm} read {read}"
    if dialect is AUX and draft.algorithm is Algorithm.DSPARK:
        message += ", only branches of SpecForge for DeepSeek-V4 these"
        return Finding("features.dialect", message, severity="warning")
    return Finding("features.dialect", message)


def ambiguous_width(draft: Draft) -> Finding | None:
    """Whether widths cannot tell folded taps from the target's streams side by side."""
    if draft.streams == 1 or draft.taps != draft.streams:
        return None
    message = (
        f"{draft.taps} taps of {draft.hidden} and {draft.streams} residual streams of {draft.hidden} are both"
        f" {draft.width} wide: whether taps were folded cannot be told from their width"
    )
    return Finding("features.width-ambiguous", message, severity="warning")


def specs(sample: Sample, dialect: Dialect, draft: Draft, max_len: int | None) -> tuple[Sound, list[Finding]]:
    """What is fit of a sample, and what is wrong with the rest."""
    found = [*_keys(sample, dialect, draft)]
    ids, bad_ids = _vector(sample, IDS, frozenset({"int32" if dialect is DEEPSPEC else "int64"}))
    mask, bad_mask = _vector(sample, MASK, _MASKS)
    taps, bad_taps = _states(sample, dialect.taps, draft.width, draft)
    last, bad_last = _states(sample, dialect.last, draft.hidden, draft)
    found += [*bad_ids, *bad_mask, *bad_taps, *bad_last]
    sound = Sound(ids, mask, taps, last)
    return sound, [*found, *_lengths(sample, dialect, sound, max_len)]


def _keys(sample: Sample, dialect: Dialect, draft: Draft) -> Iterator[Finding]:
    needed = dialect.keys[:3] if draft.algorithm is Algorithm.DFLASH else dialect.keys
    for key in needed:
        if key in sample.others:
            text = f"{key} is a {sample.others[key]}, not a tensor"
            yield finding("features.keys", sample, text, key, hint=f"write {key} as a tensor")
        elif key not in sample.tensors:
            held = ", ".join(sorted([*sample.tensors, *sample.others])) or "nothing"
            text = f"there is no {key}; it holds {held}"
            yield finding("features.keys", sample, text, key, hint=f"capture again with {key}")


def _vector(sample: Sample, key: str, dtypes: frozenset[str]) -> tuple[Stored | None, list[Finding]]:
    stored = sample.tensors.get(key)
    if stored is None:
        return None, []
    found = _dtype(sample, key, stored, dtypes)
    if len(stored.shape) != 1:
        text = f"{key} is {stored.spec}, and [tokens] is read: the first dimension would be taken for the tokens"
        found.append(finding("features.shape", sample, text, key))
    return (None if found else stored), found


def _states(sample: Sample, key: str, width: int, draft: Draft) -> tuple[Stored | None, list[Finding]]:
    stored = sample.tensors.get(key)
    if stored is None:
        return None, []
    found = _dtype(sample, key, stored, _STATES)
    states = matrix(stored)
    if len(states.shape) != 2:
        text = f"{key} is {stored.spec}, and [tokens, {width}] or [1, tokens, {width}] is read"
        return None, [*found, finding("features.shape", sample, text, key)]
    if states.shape[1] != width:
        found.append(_misfit(sample, key, states.shape[1], width, draft))
    return (None if found else states), found


def _dtype(sample: Sample, key: str, stored: Stored, dtypes: frozenset[str]) -> list[Finding]:
    if str(stored.dtype).removeprefix("torch.") in dtypes:
        return []
    text = f"{key} is {stored.spec}; it is read as {', '.join(sorted(dtypes))}"
    return [finding("features.dtype", sample, text, key)]


def _misfit(sample: Sample, key: str, found: int, width: int, draft: Draft) -> Finding:
    meant = f"{draft.taps} x {draft.hidden}" if width != draft.hidden else "one state of the target"
    text = f"{key} is {found} wide, and the draft's config means {width} ({meant})"
    if draft.streams > 1 and found == draft.streams * draft.hidden:
        text += f": these are the {draft.streams} residual streams of one place, flattened and not folded"
    elif found % draft.hidden == 0:
        text += f": {found // draft.hidden} states"
    return finding("features.width", sample, text, key, data={"width": found, "expected": width})


def _lengths(sample: Sample, dialect: Dialect, sound: Sound, max_len: int | None) -> Iterator[Finding]:
    lengths = {key: stored.shape[0] for key, stored in zip(dialect.keys, sound, strict=True) if stored}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{key} {length:,}" for key, length in lengths.items())
        yield finding("features.length", sample, f"lengths differ: {told}", data=lengths)
    longest = max(lengths.values(), default=0)
    if lengths and not min(lengths.values()):
        yield finding("features.length", sample, "there are no tokens", data=lengths)
    if max_len is not None and longest > max_len:
        text = f"{longest:,} tokens, of which trainers read the first {max_len:,}"
        yield finding("features.max-len", sample, text, severity="warning", data={"tokens": longest})
