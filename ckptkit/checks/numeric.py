"""Values against the source: copies are equal, conversions within the bound of their format and arithmetic."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import Finding
from ..parallel import on_threads
from ..source import Source
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


class Task(NamedTuple):
    """Some copies to compare, or rows of a pair: which, what to call, and the bytes that are read of the source."""

    pair: int | None
    run: Callable[[], Any]
    nbytes: int


def _numeric(subject: Subject) -> Seen:
    matched = subject.matched
    findings = [*matched.findings]
    measured: dict[int, Measured] = {}
    tasks = list(_tasks(subject, matched))
    results = on_threads((task.run for task in tasks), subject.options.get("jobs", 0))
    for task, result in zip(tasks, watched(subject, results, [task.nbytes for task in tasks]), strict=True):
        if task.pair is None:
            findings += result
        else:
            measured[task.pair] = measured[task.pair].plus(result) if task.pair in measured else result
    ours = (subject.manifest or {}).get("command") in {"quantize", "reshard"}
    judged = {at: f for at, found in measured.items() if (f := _judge(matched.pairs[at], found, ours))}
    findings += judged.values()
    lines = [_figures(matched.pairs[at], found, judged.get(at)) for at, found in measured.items()]
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
    arithmetic = arithmetic_of(subject.manifest)
    for at, pair in enumerate(matched.pairs):
        yield from _rows(at, pair, arithmetic, subject)


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


def _rows(at: int, pair: Pair, arithmetic: str, subject: Subject) -> Iterator[Task]:
    from .compare import compare_rows, rows_at_once

    assert subject.against is not None
    sources = subject.checkpoint.source, subject.against.source
    step = max(ELEMENTS // max(pair.made.cols, 1) // rows_at_once(pair), 1) * rows_at_once(pair)
    limit = bounds.bound(pair.made, pair.source, arithmetic)
    width = pair.source.codes.nbytes // max(pair.made.rows, 1)
    for start in range(0, pair.made.rows, step):
        stop = min(start + step, pair.made.rows)
        if subject.sample.holds(f"{pair.made.name}:{start}"):
            yield Task(at, partial(compare_rows, pair, *sources, limit, start, stop), (stop - start) * width)


def arithmetic_of(manifest: Mapping[str, Any] | None) -> str:
    """The arithmetic of the recipe that the manifest holds; compressed-tensors' where it holds none."""
    match manifest or {}:
        case {"settings": {"recipe": {"recipe": {"arithmetic": str(arithmetic)}}}}:
            return arithmetic
    return "compat"


# --- what it means -----------------------------------------------------------------------------------------


def _judge(pair: Pair, found: Measured, ours: bool) -> Finding | None:
    sums = found.sums
    if not sums.beyond:
        return None
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
        "source": pair.source.name, "worst": worst and worst._asdict(),
    }  # fmt: skip
    severity = "warning" if chosen else "error"
    return Finding("numeric.error", message, pair.made.codes.file, pair.made.name, None, severity, data)


def _figures(pair: Pair, found: Measured, finding: Finding | None) -> dict[str, Any]:
    """A tensor's line in the report; what a calibration chose counts as within the bound."""
    sums = found.sums
    wrong = finding is not None and finding.severity == "error"
    return {
        "tensor": pair.made.name, "rel_rms": sums.rel_rms, "max_abs": sums.max_abs, "cos": sums.cosine,
        "bound": found.rel_bound, "beyond": sums.beyond if wrong else 0,
    }  # fmt: skip


def _unfit(subject: Subject) -> str | None:
    return "no --against" if subject.against is None else subject.unknown


PROBES = (
    Probe(("numeric.exact", "numeric.error", "numeric.missing", "numeric.shape"), Level.NUMERIC, _numeric, _unfit),
    Probe(("numeric.oracle",), Level.NUMERIC, oracle, oracle_unfit),
)

PAGES = (
    Page(
        "numeric.exact", Level.NUMERIC, "error", "A copy differs from its source",
        "A tensor of the source's dtype and shape must be the source's bytes: nothing was asked to change it. That "
        "holds for tensors left alone, for a head that was made of the embedding it was tied to, and for slices of "
        "stacked experts. A shard that is a link to the source's file is equal without being read.",
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
