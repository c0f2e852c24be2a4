"""The matrix: every checkpoint with every way to speculate, each judged by its references."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import Finding
from ..execute.options import Progress
from ..files.checkpoint import Checkpoint
from ..stored import declared_quantization
from . import client, judge, reference
from .cell import Cell, Ran, Say, Setting, run_cell
from .engine import NONE
from .judge import Difference, Divergence
from .prompts import Prompt
from .recording import TOKENIZER, Item, Recording, Weights, digest, vocabulary

# Asked where nothing is known of a checkpoint's tokens: whether it decodes at all.
_BLIND = Recording({}, (Item("blind", (1, 2, 3, 4, 5), (), (), ()),))


class References(NamedTuple):
    """What cells are judged by. ``texts`` and ``own`` are by the checkpoints' labels, ``unknown`` why one has no own.

    ``found`` are findings of making them: what a checkpoint lacks, and how its tokenizer differs.
    """

    texts: Mapping[str, Recording]
    source: Recording | None
    own: Mapping[str, Recording]
    unknown: Mapping[str, str]
    found: Mapping[str, Sequence[Finding]]


class Limits(NamedTuple):
    """What is asked of figures; None is the default of each."""

    tolerance: float | None = None
    gap: float = judge.GAP
    min_accept_length: float | None = None


class Judged(NamedTuple):
    """A cell with its findings; ``skipped`` says of ids why they could not be judged.

    ``expected`` are the texts that completions should be: without speculation the reference's.
    """

    ran: Ran
    findings: list[Finding]
    skipped: Mapping[str, str]
    expected: Mapping[str, str] = {}
    own: Difference | None = None
    source: Difference | None = None
    tolerance: float | None = None
    divergences: Sequence[Divergence] = ()
    from_plain: Sequence[Divergence] = ()


class Making(NamedTuple):
    """What references are made with."""

    prompts: Sequence[Prompt]
    max_tokens: int
    scratch: Path
    timeout: float
    progress: Progress
    say: Say


def references(
    checkpoints: Mapping[str, Weights | None], source: Checkpoint | None, golden: Recording | None, making: Making
) -> References:
    """Run the source and each checkpoint in float32, one after another, or take a golden file in place of one of them.

    A golden file of the checkpoint itself is its own reference; of another one, its source's.
    """
    refs = References({}, None, {}, {}, {})
    if source is not None:
        refs = refs._replace(source=_source(source, making))
    for label, weights in checkpoints.items():
        if golden is not None:
            is_own = weights is None or digest(weights) == golden.about.get("source")
            refs = _with(refs, label, golden, golden) if is_own else refs._replace(source=golden)
        if label not in refs.own and weights is not None:
            refs = _with_own(refs, label, weights, source, making)
        elif weights is None and label not in refs.own:
            refs = _without(refs, label, "its values are not known to ckptkit", ())
    return refs


def without_references(labels: Iterable[str], reason: str) -> References:
    """Where nothing can be served, so that there will be nothing to judge."""
    refs = References({}, None, {}, {}, {})
    for label in labels:
        refs = _without(refs, label, reason, ())
    return refs


def _source(source: Checkpoint, making: Making) -> Recording:
    """Raises reference.Unavailable."""
    making.say("the source runs in float32")
    scratch = _folder(making, "source")
    with reference.running(source, scratch, making.timeout, making.progress, making.say) as server:
        try:
            rendered = reference.rendered(server, making.prompts)
            return reference.record(server, source, rendered, making.max_tokens)
        except client.Failed as error:
            raise reference.Unavailable(f"the reference did not answer: {error}") from None


def _with_own(refs: References, label: str, weights: Weights, source: Checkpoint | None, making: Making) -> References:
    """Run a checkpoint's own values."""
    if refs.source and source and isinstance(weights, Checkpoint) and weights.source.root == source.source.root:
        return _with(refs, label, refs.source, refs.source)
    making.say(f"{label} runs in float32")
    try:
        with reference.running(weights, _folder(making, label), making.timeout, making.progress, making.say) as server:
            rendered = reference.rendered(server, making.prompts)
            if refs.source is None:
                own = reference.record(server, weights, rendered, making.max_tokens)
                found = list(_round_trips(rendered, making.prompts))
            else:
                own = reference.follow(server, weights, refs.source)
                found = list(_round_trips(rendered, making.prompts))
                found += _tokenizer(rendered, weights, refs.source, is_golden=source is None)
    except reference.Unavailable as error:
        return _without(refs, label, str(error), error.findings)
    except client.Failed as error:
        return _without(refs, label, f"the reference did not answer: {error}", ())
    return _with(refs, label, refs.source or own, own, found)


def _with(refs: References, label: str, texts: Recording, own: Recording, found: Sequence[Finding] = ()) -> References:
    return refs._replace(
        texts={**refs.texts, label: texts}, own={**refs.own, label: own}, found={**refs.found, label: found}
    )


def _without(refs: References, label: str, reason: str, found: Sequence[Finding]) -> References:
    return refs._replace(
        texts={**refs.texts, label: refs.source or _BLIND},
        unknown={**refs.unknown, label: reason},
        found={**refs.found, label: found},
    )


def _folder(making: Making, label: str) -> Path:
    folder = making.scratch / f"reference-{label.replace('/', '_')}"
    folder.mkdir(exist_ok=True)
    return folder


def _tokenizer(
    rendered: Sequence[reference.Rendered], weights: Weights, source: Recording, is_golden: bool
) -> Iterator[Finding]:
    """``serve.tokenizer``: other ids than the source's. A golden file may be of other prompts: its files' digest counts."""
    theirs = {item.name: item.prompt for item in source.items}
    mine = {prompt.name: prompt.ids for prompt in rendered}
    for name, ids in theirs.items() if not is_golden else ():
        if name not in mine:
            yield Finding("serve.tokenizer", f"{name}: there is no chat template, and the source has one")
        elif mine[name] != ids:
            message = f"{name}: {len(mine[name])} tokens, other than the source's {len(ids)}"
            yield Finding("serve.tokenizer", message)
    has_files = isinstance(weights, Checkpoint)
    if is_golden and has_files and digest(weights, TOKENIZER) != source.about.get("tokenizer"):
        yield Finding("serve.tokenizer", "the tokenizer's files are not those of the source", severity="warning")


def _round_trips(rendered: Sequence[reference.Rendered], prompts: Sequence[Prompt]) -> Iterator[Finding]:
    """``serve.tokenizer``: a text that does not come back; special tokens that were put before it do not count."""
    texts = {prompt.name: prompt.body.get("prompt") for prompt in prompts}
    for mine in rendered:
        if texts[mine.name] not in {None, mine.text}:
            message = f"{mine.name}: the tokens give back {mine.text[:80]!r}"
            yield Finding("serve.tokenizer", message, severity="warning")


# --- cells -------------------------------------------------------------------------------------------------


def run_matrix(
    cells: Sequence[Cell], refs: References, setting: Setting, limits: Limits, max_tokens: int, say: Say, keep: bool
) -> Iterator[Judged]:
    """Run and judge the cells in their order, in which a checkpoint's plain one comes first.

    ``keep``: the server of the last one runs on.
    """
    plain: dict[str, Ran] = {}
    for number, cell in enumerate(cells, 1):
        say(f"{cell.label} on {cell.engine.label}, speculation: {cell.method.name}")
        if cell.method.name not in cell.engine.methods:
            message = f"{cell.engine.label} cannot speculate by {cell.method.name}"
            ran = Ran(cell, None, (), None, (Finding("serve.unsupported", message),))
        else:
            ran = run_cell(cell, setting, refs.texts[cell.label], max_tokens, say, keep and number == len(cells))
        if cell.method.name == NONE:
            plain[cell.label] = ran
        yield judge_cell(ran, plain.get(cell.label), refs, limits)


def judge_cell(ran: Ran, plain: Ran | None, refs: References, limits: Limits) -> Judged:
    """Everything that the figures of one cell show."""
    known = refs.found.get(ran.cell.label, ())
    about = {(finding.id, finding.tensor) for finding in known if finding.tensor}
    judged = Judged(ran, [*known, *(found for found in ran.findings if (found.id, found.tensor) not in about)], {})
    if not ran.serves:
        return judged
    texts = {item.name: item.completion for item in refs.texts[ran.cell.label].items}
    judged = judged._replace(expected=texts)
    judged.findings.extend(_always(ran, refs))
    judged = _stored(judged, plain, refs)
    if refs.source is not None:
        judged = _converted(judged, plain, refs.source, limits)
    if ran.cell.method.name != NONE:
        judged = _speculated(judged, plain, refs, limits)
    elif limits.min_accept_length is not None and not ran.command:
        judged.findings.extend(judge.accept_length(ran.speculation, limits.min_accept_length))
    return judged


def _always(ran: Ran, refs: References) -> Iterator[Finding]:
    texts = refs.texts[ran.cell.label]
    expected = {item.name: item for item in texts.items}
    for name, answer in ran.answers.items():
        yield from judge.degenerate(name, answer, expected.get(name))
    size = vocabulary(ran.cell.checkpoint) if ran.cell.checkpoint else texts.about.get("vocabulary")
    yield from judge.uniform(ran.answers, size)


def _logprobs(ran: Ran, plain: Ran | None, texts: Recording) -> Mapping[str, Sequence[float]]:
    """Those that the server gives for the texts; where speculation refuses them, those of the plain one.

    Where it only gives those of its own completions, these count as far as they are the text's.
    """
    if ran.scores:
        return ran.scores
    told = {}
    for item in texts.items:
        answer = ran.answers.get(item.name)
        if answer and answer.logprobs and answer.tokens:
            end = judge.first_difference(answer.tokens, item.tokens)
            values = answer.logprobs[: len(item.tokens) if end is None else end]
            told[item.name] = values
    if told:
        return told
    return _logprobs(plain, None, texts) if plain and plain is not ran else {}


def _stored(judged: Judged, plain: Ran | None, refs: References) -> Judged:
    """Against the checkpoint's own values."""
    label, engine = judged.ran.cell.label, judged.ran.cell.engine
    own = refs.own.get(label)
    if own is None:
        return _skipping(judged, "serve.logprob", refs.unknown.get(label, "no reference"))
    found = _difference(judged.ran, plain, own)
    if found is None:
        return _skipping(judged, "serve.logprob", f"{engine.label} gives no logprobs")
    judged.findings.extend(judge.stored(found, judge.limits(own.rounding, engine.is_exact(judged.ran.command))))
    return judged._replace(own=found)


def _difference(ran: Ran, plain: Ran | None, recording: Recording) -> Difference | None:
    ours = _logprobs(ran, plain, recording)
    theirs = judge.logprobs_of(recording)
    of_completions = {item.name: item.logprobs[len(item.prompt) - 1 :] for item in recording.items}
    is_whole = all(len(values) == len(theirs.get(name, ())) for name, values in ours.items())
    return judge.difference(ours, theirs if is_whole else of_completions)


def _converted(judged: Judged, plain: Ran | None, source: Recording, limits: Limits) -> Judged:
    """Against the source."""
    found = _difference(judged.ran, plain, source)
    parted = list(judge.divergences(judged.ran.answers, source))
    if found is None:
        judged = _skipping(judged, "serve.tolerance", f"{judged.ran.cell.engine.label} gives no logprobs")
        return judged._replace(divergences=parted)
    by_format = judge.tolerance(bits(judged.ran.cell.checkpoint))
    allowed = by_format if limits.tolerance is None else limits.tolerance
    judged.findings.extend([*judge.converted(found, allowed), *judge.greedy(parted, found.p99)])
    return judged._replace(source=found, tolerance=allowed, divergences=parted)


def bits(checkpoint: Checkpoint | None) -> str:
    """How many bits the narrowest weights have, as the table of tolerances has it."""
    quantization = declared_quantization(checkpoint.config or {})[0] if checkpoint else None
    if checkpoint is not None and quantization is None:
        return "dense"
    groups = quantization.table.get("config_groups") if quantization else None
    names = list(groups) if isinstance(groups, Mapping) else [None]
    found = [quantization.bits(name) or 8 for name in names] if quantization else [4]
    return "8" if min(found, default=8) > 4 else "4"


def _speculated(judged: Judged, plain: Ran | None, refs: References, limits: Limits) -> Judged:
    ran = judged.ran
    judged.findings.extend(judge.accept_length(ran.speculation, limits.min_accept_length))
    if plain is None or not plain.serves:
        return _skipping(judged, "serve.spec-mismatch", "the checkpoint was not served without speculation")
    parted = list(judge.against_plain(ran.answers, plain.answers, refs.own.get(ran.cell.label)))
    judged.findings.extend(judge.mismatches(parted, limits.gap))
    return judged._replace(from_plain=parted, expected={name: found.text for name, found in plain.answers.items()})


def _skipping(judged: Judged, id: str, reason: str) -> Judged:
    return judged._replace(skipped={**judged.skipped, id: reason})
