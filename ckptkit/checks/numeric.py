"""Values against the source: copies are equal, conversions within the bound of their format and arithmetic."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ..decode import Coding
from ..errors import Finding
from ..files.parallel import on_threads
from ..files.source import Source
from . import Level, Page, Probe, Seen, Subject, bounds
from .folding import fold
from .matching import Copy, Matched, Pair
from .oracle import oracle, oracle_unfit
from .watching import watched

if TYPE_CHECKING:
    from .compare import Measured

ELEMENTS = 1 << 21  # numbers that a thread compares at a time
COPIED = 32 << 20  # bytes of copies

# A quantizer that calibrates does not take the nearest number: it moves many a little. More than this share of a
# tensor beyond the bound, and the error's RMS at most so many times the allowed RMS, and its codes were chosen.
CHOSEN_SHARE = 0.01
CHOSEN_RMS = 2.0

# The share of a weight's magnitude, as RMS, from which on its error is worth a word though the format explains it.
# Weights that a scheme suits keep below half of that, 4-bit ones too (0.09 to 0.13).
LOST = 0.25


class Task(NamedTuple):
    """Some copies to compare, or rows of a weight: its name, what to call, and the bytes that are read of the source."""

    tensor: str | None
    run: Callable[[], Any]
    nbytes: int


def _numeric(subject: Subject) -> Seen:
    matched = subject.matched
    findings = [*matched.findings]
    pairs = {pair.made.name: pair for pair in reversed(matched.pairs)}
    measured: dict[str, Measured] = {}
    tasks = list(_tasks(subject, matched))
    results = on_threads((task.run for task in tasks), subject.options.get("jobs", 0))
    for task, result in zip(tasks, watched(subject, results, [task.nbytes for task in tasks]), strict=True):
        if task.tensor is None:
            findings += result
        else:
            measured[task.tensor] = measured[task.tensor].plus(result) if task.tensor in measured else result
    judged = {name: f for name, found in measured.items() if (f := _judge(pairs[name], found, subject.manifest or {}))}
    findings += judged.values()
    lines = [_figures(name, found, judged.get(name)) for name, found in measured.items()]
    figures = {"numeric": {"tensors": lines}}
    reason = _unreadable(matched.unreadable)
    checked = len(matched.copies) + len(measured)
    return Seen(list(fold(findings)), checked, figures, {"numeric.error": reason} if reason else {})


def _unreadable(found: Mapping[str, str]) -> str | None:
    if not found:
        return None
    return f"{len(found):,} weights cannot be decoded ({next(iter(found.values()))})"


# --- the work ----------------------------------------------------------------------------------------------


def _tasks(subject: Subject, matched: Matched) -> Iterator[Task]:
    """Everything to be compared that belongs to the sample."""
    assert subject.against is not None
    sources = subject.checkpoint.source, subject.against.source
    copies = [c for c in matched.copies if subject.sample.holds(c.made.name) and not _is_one(subject, c)]
    for run in _runs(copies):
        yield Task(None, partial(_unequal, run, *sources), sum(copy.made.nbytes for copy in run))
    for pair in matched.pairs:
        yield from _rows(pair, subject)


def _is_one(subject: Subject, copy: Copy) -> bool:
    """Whether both are the same bytes of one file (a linked shard)."""
    assert subject.against is not None
    mine = subject.checkpoint.source.files[copy.made.file]
    theirs = subject.against.source.files[copy.source.file]
    linked = mine.identity == theirs.identity and copy.made.start == copy.source.start
    return linked and os.path.samefile(mine.path, theirs.path)


def _runs(copies: Iterable[Copy]) -> Iterator[list[Copy]]:
    """Copies taken together until they have :data:`COPIED` bytes."""
    run: list[Copy] = []
    nbytes = 0
    for copy in copies:
        run.append(copy)
        nbytes += copy.made.nbytes
        if nbytes >= COPIED:
            yield run
            run, nbytes = [], 0
    if run:
        yield run


def _unequal(copies: Sequence[Copy], made: Source, source: Source) -> list[Finding]:
    from .compare import first_difference

    found = []
    for mine, theirs in copies:
        at = first_difference(made, mine, source, theirs)
        if at is not None:
            message = f"{mine.name} is a copy of the source's {theirs.name} and differs from it, first in byte {at:,}"
            data = {"byte": at, "source": theirs.name}
            found.append(Finding("numeric.exact", message, file=mine.file, tensor=mine.name, data=data))
    return found


def _rows(pair: Pair, subject: Subject) -> Iterator[Task]:
    from .compare import compare_rows, rows_at_once

    assert subject.against is not None
    sources = subject.checkpoint.source, subject.against.source
    step = max(ELEMENTS // max(pair.made.cols, 1) // rows_at_once(pair), 1) * rows_at_once(pair)
    limit = _limit(pair, subject.manifest or {})
    for start in range(0, pair.made.rows, step):
        stop = min(start + step, pair.made.rows)
        if subject.sample.holds(f"{pair.made.name}:{pair.made.first + start}"):
            nbytes = (stop - start) * pair.source.row_bytes
            yield Task(pair.made.name, partial(compare_rows, pair, *sources, limit, start, stop), nbytes)


def _limit(pair: Pair, manifest: Mapping[str, Any]) -> bounds.Bound:
    """How far a weight may be off: not at all if it was only put elsewhere, or dequantized here and rounded once."""
    made, source = pair.made.stored, pair.source.stored
    once = _is_rounded_once(manifest) and source.coding is not Coding.DENSE
    if bounds.same_numbers(made, source) or (once and made.coding in {Coding.DENSE, Coding.FP8}):
        return bounds.EXACT
    return bounds.bound(made, source, arithmetic_of(manifest))


def _is_rounded_once(manifest: Mapping[str, Any]) -> bool:
    """Whether values were dequantized here; what was to be block FP8 is then exact, unless the options say otherwise."""
    match manifest:
        case {"command": "dequantize", "settings": {"dtype": "fp8", "inexact": "round"}}:
            return False
    return manifest.get("command") == "dequantize"


def arithmetic_of(manifest: Mapping[str, Any] | None) -> str:
    """The arithmetic of the recipe that the manifest holds; compressed-tensors' where it holds none."""
    match manifest or {}:
        case {"settings": {"recipe": {"recipe": {"arithmetic": str(arithmetic)}}}}:
            return arithmetic
    return "compat"


# --- what it means -----------------------------------------------------------------------------------------


def _judge(pair: Pair, found: Measured, manifest: Mapping[str, Any]) -> Finding | None:
    sums = found.sums
    if not sums.beyond:
        return _lossy(pair, sums.rel_rms)
    if _limit(pair, manifest) == bounds.EXACT:
        return _unlike(pair, found)
    ours = "command" in manifest  # no command here calibrates
    share = sums.beyond / found.elements
    rms = math.sqrt(sums.dd / found.allowed) if found.allowed else math.inf
    chosen = not ours and not sums.odd and share >= CHOSEN_SHARE and rms <= CHOSEN_RMS
    worst = found.worst
    where = f"; the worst, [{worst.row}, {worst.column}], is off by {worst.ratio:.3g} times that" if worst else ""
    text = "is further from its source than rounding to the nearest can be"
    message = f"{pair.made.name} {text}: {sums.beyond:,} of {found.elements:,} numbers{where}"
    if chosen:
        message += "; many are a little off, as codes are that a calibration chose"
    if sums.odd:
        message += f"; {sums.odd:,} are NaN or Inf"
    data = {
        "beyond": sums.beyond, "elements": found.elements, "rel_rms": sums.rel_rms, "rms_over_allowed": round(rms, 4),
        "source": worst.source if worst else pair.source.name, "worst": worst and worst._asdict(),
    }  # fmt: skip
    severity = "warning" if chosen else "error"
    return Finding("numeric.error", message, pair.made.stored.codes.file, pair.made.name, None, severity, data)


def _unlike(pair: Pair, found: Measured) -> Finding:
    """What should have been the source's values, in another place or rounded once, and is not."""
    worst = found.worst
    assert worst is not None
    message = (
        f"{pair.made.name} is not what {worst.source} holds: {found.sums.beyond:,} of {found.elements:,} numbers differ;"
        f" the worst is [{worst.row}, {worst.column}]"
    )
    data = {"beyond": found.sums.beyond, "elements": found.elements, "source": worst.source, "worst": worst._asdict()}
    return Finding("numeric.exact", message, file=pair.made.stored.codes.file, tensor=pair.made.name, data=data)


def _lossy(pair: Pair, rel_rms: float | None) -> Finding | None:
    if rel_rms is None or rel_rms < LOST:
        return None
    message = f"{pair.made.name} has lost {rel_rms:.0%} of its magnitude, no number by more than its format allows"
    data = {"rel_rms": rel_rms, "source": pair.source.name}
    return Finding("numeric.loss", message, pair.made.stored.codes.file, pair.made.name, None, "warning", data)


def _figures(tensor: str, found: Measured, finding: Finding | None) -> dict[str, Any]:
    """A tensor's line in the report; what a calibration chose counts as within the bound."""
    sums = found.sums
    wrong = finding is not None and finding.severity == "error"
    return {
        "tensor": tensor, "rel_rms": sums.rel_rms, "max_abs": sums.max_abs, "cos": sums.cosine,
        "bound": found.rel_bound, "beyond": sums.beyond if wrong else 0,
    }  # fmt: skip


def _unfit(subject: Subject) -> str | None:
    return "no --against" if subject.against is None else subject.unknown


_IDS = ("numeric.exact", "numeric.error", "numeric.loss", "numeric.missing", "numeric.shape")

PROBES = (
    Probe(_IDS, Level.NUMERIC, _numeric, _unfit),
    Probe(("numeric.oracle",), Level.NUMERIC, oracle, oracle_unfit),
)

PAGES = (
    Page(
        "numeric.exact", Level.NUMERIC, "error", "A copy differs from its source",
        "A tensor of the source's dtype and shape must be the source's bytes: nothing was asked to change it. That "
        "holds for tensors left alone and for a head that was made of the embedding it was tied to. A shard that is a "
        "link to the source's file is equal without being read.\n"
        "Weights that were only put elsewhere must have the source's values, signs of zeros included: pieces of stacked "
        "experts, and numbers and scales of one kind in another layout (ckptkit unpack). So must those that "
        "ckptkit dequantize made, each rounded once to the nearest number of its dtype, ties to even. The report "
        "gives the place in the tensor as it is stored, leading dimensions flattened.",
        "model.norm.weight is a copy of the source's and differs from it, first in byte 512",
        "If --against is the right source: ckptkit diff ./source ./model --level values shows by how much. Make the "
        "file again.",
    ),
    Page(
        "numeric.error", Level.NUMERIC, "error", "A converted weight is further from its source than its format explains",
        "Every converted weight is decoded by code that the quantizers do not share, and each number compared with the "
        "source. Allowed is what rounding to the nearest number can do, worked out from format and arithmetic:\n"
        + bounds.DERIVATION +
        "Where many numbers are beyond the bound by a little (1 % of them or more, their error's RMS at most twice the "
        "allowed one), the codes were chosen by a calibration, as GPTQ and AWQ do: a warning, unless ckptkit made the "
        "checkpoint.",
        "model.layers.61.mlp.down_proj.weight_packed is further from its source than rounding to the nearest can be: "
        "128 of 45,088,768 numbers; the worst, [77, 1024], is off by 14.9 times that: one scale was damaged.",
        "Quantize the module again. If all weights are off, --against is not the source, or a convention differs "
        "(order of nibbles, a scale that divides or multiplies).",
    ),
    Page(
        "numeric.loss", Level.NUMERIC, "warning", "Much of a weight is lost, though its format explains it",
        "Every number is as near to its source as the format can bring it, and still the error's RMS is a quarter of "
        "the weight's magnitude or more. Either the scheme does not suit the weight (few bits, one scale for rows that "
        "differ widely), or its numbers are so small that the scale leaves its dtype: a float16 scale is never "
        "below 6e-8, so in FP8, whose codes reach 448, numbers below about 1e-7 become zero.",
        "model.layers.0.mlp.up_proj.weight has lost 55% of its magnitude: weights of about 1e-6 in float16",
        "Leave the module as it is, take smaller groups, or cast the source to bfloat16 first, whose scales reach "
        "further: ckptkit reshard SRC OUT --cast '*=bf16'",
    ),
    Page(
        "numeric.missing", Level.NUMERIC, "error", "A tensor without a counterpart",
        "Every tensor of the source must be in the result, converted or not, and every one of the result come from the "
        "source. What a manifest says was dropped is not missed, nor a second copy of a tied head. Drafts (MTP "
        "layers) that vanish when a model class is loaded and saved are found here.",
        "model.layers.61.eh_proj.weight of the source has no counterpart",
        "Convert from files, not through a model class: ckptkit quantize ./source ./out --recipe RECIPE",
    ),
    Page(
        "numeric.shape", Level.NUMERIC, "error", "A weight has another shape than its source",
        "Unpacked, a weight has the rows and columns of its source. Otherwise it was made of another tensor, cut, or "
        "padded; or config.json gives the wrong number of bits for packed numbers.",
        "lm_head.weight_packed holds [151936, 1280], its source lm_head.weight [151936, 2560]",
        "Correct num_bits in config.json, or quantize the module again.",
    ),
    Page(
        "numeric.oracle", Level.NUMERIC, "error", "Bits are not those that llmcompressor makes",
        "With --oracle llmcompressor every weight that a compressed-tensors group reaches is quantized again, whole, "
        "by that library, and codes, scales and zero points are compared bit by bit. Recipes with arithmetic: float32 "
        "differ on purpose and are not compared. NVFP4 of float16 weights below about 0.04 differs too: there that "
        "library's global scale overflows.",
        "model.layers.0.mlp.up_proj.weight_scale differs from what llmcompressor makes, first in byte 6",
        "ckptkit quantize ./source ./out --recipe RECIPE --backend llmcompressor makes them by that library.",
    ),
)  # fmt: skip
