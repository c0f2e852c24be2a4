"""``ckptkit verify --serve``: the run. What is judged, and how, is :mod:`ckptkit.serving`'s."""

from __future__ import annotations

import contextlib
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checks import Level, Outcome, Result, Subject
from ..checks.lint import choose
from ..console import Console, Table
from ..errors import ENGINE, Finding, UserError, fail
from ..files.checkpoint import Checkpoint, open_checkpoint
from ..files.source import open_source
from ..manifest import environment, read_manifest
from ..reports.report import Place, Report, Run, make_report, place_of, stats_of
from ..serving import matrix, process, recording, reference, telling
from ..serving.cell import Also, Cell, Ran, Setting
from ..serving.engine import NONE, Launch, Server
from ..serving.evaluate import Evaluation, evaluation
from ..serving.prompts import counted, prompts
from ..serving.speculative import resolved
from ..serving.temporary import temporary
from .reporting import exit_code, tell, write_files
from .serving import How
from .serving_job import Job, drafts_of, elsewhere, is_folder, is_local, job_of

if TYPE_CHECKING:
    from .verify import Asked

Looked = tuple[Subject, Outcome]
Look = Callable[["Asked", str, contextlib.ExitStack], Looked]

PROBE_GRACE = 5.0  # seconds that a probe may take to stop
_ORDER = ("ok", "skip", "warn", "fail")  # of results, the worst last


def serve(
    console: Console, ckpts: Sequence[str], asked: Asked, how: How, look: Look, wanted: Callable[[str], bool]
) -> int:
    """Check, serve and judge; the exit code. ``look`` runs the checks of one checkpoint, unless told not to."""
    began, started = time.monotonic(), datetime.now(UTC)
    job = job_of(ckpts, asked, how)
    also = _also(how)
    _check_folders([how.record, asked.junit, *asked.reports])
    with temporary("serve") as (scratch, leave), contextlib.ExitStack() as opened, _ended_by_sigterm():
        linted = _linted(job, scratch)
        looked = {label: look(linted, path, opened) for label, path in job.paths.items() if is_folder(path)}
        source = _source(job, looked, opened)
        cells = list(_cells(job, looked))
        refs = _references(console, job, looked, source, scratch)
        setting = _setting(how, scratch, also)
        limits = matrix.Limits(how.tolerance, how.gap, how.min_accept_length)
        keep, say = how.keep_serving, _saying(console)
        judged = list(matrix.run_matrix(cells, refs, setting, limits, how.max_tokens, say, keep))
        if judged[-1].ran.pid is not None:
            leave()
        if how.record:
            _record(how.record, refs)
        outcome = _outcome(job, looked, judged, refs, time.monotonic() - began, wanted)
        not_run = _not_run(outcome, asked)
        code = _exit_code(outcome, asked, not_run)
        report = _report(job, looked, source, outcome, code, started, time.monotonic() - began)
    write_files(report, asked)
    lines: list[str | Table] = [telling.table(judged), *telling.commands(judged)]
    lines += telling.kept(judged) if keep else ()
    tell(console, report, outcome, asked, not_run, lines)
    return code


def _check_folders(paths: Sequence[str | None]) -> None:
    """Raises UserError (``output.write``) where a file could not be written when all is done."""
    for path in filter(None, paths):
        if not Path(path).parent.is_dir():
            raise fail("output.write", f"{path} cannot be written: there is no such folder", file=path)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the run as Ctrl-C does, so that nothing of it is left."""

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# --- what is served -----------------------------------------------------------------------------------------


def _linted(job: Job, scratch: Path) -> Asked:
    """The options as static checks take them: with engine lint of the version that is installed, if it is known."""
    asked, how = replace(job.asked, engine=None, speculative=()), job.how
    if how.url:
        return asked
    launch = _launch(how, scratch)
    with contextlib.suppress(UserError):
        named = f"{job.engine.lint}=={job.engine.version(launch)}"
        choose(named)
        algorithms = tuple(job.engine.methods.get(method.name, "") for method in job.methods if method.name != NONE)
        with contextlib.suppress(UserError):
            choose(named, algorithms)
            return replace(asked, engine=named, speculative=algorithms)
        return replace(asked, engine=named)
    return asked


def _cells(job: Job, looked: Mapping[str, Looked]) -> Iterator[Cell]:
    """What is to be served, without speculation first. Raises UserError where all of it is refused."""
    drafts = drafts_of(job.how.draft)
    refused = {label for label, (_, outcome) in looked.items() if job.how.no_launch_refused and _has_errors(outcome)}
    if refused == job.paths.keys():
        raise UserError(finding for _, outcome in looked.values() for finding in outcome.findings)
    for label, path in job.paths.items():
        checkpoint = looked[label][0].checkpoint if label in looked else None
        if checkpoint and checkpoint.source.stores:
            raise elsewhere(path)
        for method in job.methods if label not in refused else ():
            yield Cell(label, Path(path), checkpoint, job.engine, resolved(method, drafts, Path(path)))


def _has_errors(outcome: Outcome) -> bool:
    return any(finding.severity == "error" for finding in outcome.findings)


def _setting(how: How, scratch: Path, also: Callable[[Server, Ran], Also] | None) -> Setting:
    program = tuple(shlex.split(how.engine_cmd or ""))
    start = (how.engine_python, program, how.engine_arg)
    return Setting(scratch, *start, url=how.url, timeout=how.timeout, gap=how.gap, also=also)


# --- references --------------------------------------------------------------------------------------------


def _source(job: Job, looked: Mapping[str, Looked], opened: contextlib.ExitStack) -> Checkpoint | None:
    """``--against``; without a reference the source that the first ckptkit.json names, if it is still there."""
    if job.asked.against:
        return open_checkpoint(opened.enter_context(open_source(job.asked.against)))
    if job.how.golden or job.how.record or not looked:
        return None
    first = next(iter(looked.values()))[0]
    uri = ((read_manifest(first.checkpoint.source) or {}).get("source") or {}).get("uri")
    if not isinstance(uri, str) or not Path(uri).is_dir():
        return None
    return open_checkpoint(opened.enter_context(open_source(uri)))


def _references(
    console: Console, job: Job, looked: Mapping[str, Looked], source: Checkpoint | None, scratch: Path
) -> matrix.References:
    """Raises UserError where the source cannot be run."""
    how, say = job.how, _saying(console)
    weights = {label: _weights(path, looked.get(label)) for label, path in job.paths.items()}
    golden = recording.read(how.golden) if how.golden else None
    if how.tolerance is not None and source is None and golden is None:
        raise fail("usage.arguments", "--tolerance is about a source, and none is known", hint="--against SRC")
    if golden:
        _check_golden(golden, how.golden, weights)
    asked_for = [*prompts(how.prompts), *([counted(how.long_context)] if how.long_context else ())]
    if reason := _absent(job, scratch):
        return matrix.without_references(job.paths, reason)
    with console.progress("dequantize") as progress:
        making = matrix.Making(asked_for, how.max_tokens, scratch, how.timeout, progress, say)
        try:
            return matrix.references(weights, source, golden, making)
        except reference.Unavailable as error:
            raise fail("source.unusable", f"the source cannot be run in float32: {error}") from None


def _check_golden(
    golden: recording.Recording, file: str | None, weights: Mapping[str, recording.Weights | None]
) -> None:
    """Raises UserError (``usage.golden``) for tokens that a checkpoint does not have."""
    largest = max(max(item.ids) for item in golden.items)
    for label, found in weights.items():
        size = recording.vocabulary(found) if isinstance(found, Checkpoint) else None
        if size is not None and largest >= size:
            message = f"{file} is of another model: it has token {largest}, and {label} {size} tokens"
            raise fail("usage.golden", message, file=file, hint=f"ckptkit verify SRC --serve --record {file}")


def _absent(job: Job, scratch: Path) -> str | None:
    """Why no cell can be started, in which case nothing needs to be run for them to be judged by."""
    if job.how.url or job.how.record:
        return None
    try:
        job.engine.version(_launch(job.how, scratch))
    except UserError as error:
        return error.findings[0].message
    return None


def _launch(how: How, scratch: Path) -> Launch:
    """What an engine's version is asked with."""
    return Launch(Path("."), 0, scratch, how.engine_python, tuple(shlex.split(how.engine_cmd or "")))


def _weights(path: str, looked: Looked | None) -> recording.Weights | None:
    """What a reference is run of; None behind a URL."""
    if looked:
        return looked[0].checkpoint
    return Path(path) if is_local(path) else None


def _record(path: str, refs: matrix.References) -> None:
    """Write the golden file of the first checkpoint. Raises UserError where it has no reference of its own."""
    own = next(iter(refs.own.values()), None)
    if own is None:
        reason = next(iter(refs.unknown.values()), "no checkpoint")
        raise fail("usage.golden", f"there is nothing to record: {reason}", file=path)
    recording.write(own, Path(path))


def _saying(console: Console) -> Callable[[str], None]:
    """Notes on the way, each once in a row."""
    last = ""

    def say(text: str) -> None:
        nonlocal last
        if text != last and not console.settings.no_progress:
            console.note(text)
        last = text

    return say


# --- evaluations and probes --------------------------------------------------------------------------------


def _also(how: How) -> Callable[[Server, Ran], Also] | None:
    """What is asked of every server besides. Raises UserError (``usage.eval``, ``engine.missing``)."""
    journal = Path(how.journal) if how.journal else None
    wanted = Evaluation(how.eval or "", how.min_score, how.eval_runner, journal, how.engine_python)
    asked = evaluation(wanted) if how.eval else None
    return partial(_besides, asked, how.probe) if asked or how.probe else None


def _besides(asked: Callable[[Server, Ran], Also] | None, probe: str | None, server: Server, ran: Ran) -> Also:
    found = asked(server, ran) if asked else Also()
    return found._replace(findings=(*found.findings, *(_probed(probe, server) if probe else ())))


def _probed(command: str, server: Server) -> Iterator[Finding]:
    """``serve.probe``."""
    program = ["env", f"CKPTKIT_URL={server.url}", f"CKPTKIT_MODEL={server.model}", "sh", "-c", command]
    with temporary("probe") as (folder, _):
        log = folder / "log"
        status = process.run(program, log, PROBE_GRACE)
        said = process.last_line(process.read_log(log))
    if status:
        yield Finding("serve.probe", f"{command} ended with status {status}: {said}")


# --- the result --------------------------------------------------------------------------------------------


def _outcome(
    job: Job,
    looked: Mapping[str, Looked],
    judged: Sequence[matrix.Judged],
    refs: matrix.References,
    seconds: float,
    wanted: Callable[[str], bool],
) -> Outcome:
    """All checks as one outcome: of an id, the worst result of all checkpoints."""
    optional = {
        "serve.score": job.how.eval,
        "serve.probe": job.how.probe,
        "serve.accept-length": job.how.min_accept_length,
    }
    asked_for = [id for id, given in optional.items() if given]
    outcomes = [outcome for _, outcome in looked.values()]
    outcomes.append(telling.outcome(judged, refs.source is not None, asked_for, seconds))
    results: dict[str, Result] = {}
    for result in (result for outcome in outcomes for result in outcome.results if wanted(result.id)):
        results[result.id] = _worse(results[result.id], result) if result.id in results else result
    findings = [finding for outcome in outcomes for finding in outcome.findings if wanted(finding.id)]
    return Outcome(list(results.values()), findings, {**outcomes[0].figures, "serve": telling.figures(judged, refs)})


def _worse(a: Result, b: Result) -> Result:
    worst = max(a, b, key=lambda result: _ORDER.index(result.result))
    return worst._replace(
        checked=a.checked + b.checked, findings=a.findings + b.findings, seconds=a.seconds + b.seconds
    )


def _not_run(outcome: Outcome, asked: Asked) -> list[str]:
    """Checks of serving that could not be made, which is no pass."""
    skipped = (result.id for result in outcome.results if result.level == Level.SERVE and result.result == "skip")
    return [] if asked.allow_skipped else list(skipped)


def _exit_code(outcome: Outcome, asked: Asked, not_run: Sequence[str]) -> int:
    """6 where nothing but engines is at fault, else as for all checks."""
    errors = {f.id for f in outcome.findings if f.severity == "error" and f.id not in asked.allowed}
    if errors and all(id.startswith("engine.") for id in errors) and not asked.exit_zero:
        return ENGINE
    return exit_code(outcome, asked, not_run)


def _report(
    job: Job,
    looked: Mapping[str, Looked],
    source: Checkpoint | None,
    outcome: Outcome,
    code: int,
    started: datetime,
    seconds: float,
) -> Report:
    first = next(iter(looked.values()))[0] if looked else None
    versions = {cell["version"] for cell in outcome.figures["serve"]["cells"] if cell["version"]}
    surroundings: dict[str, Any] = {k: v for k, v in environment("", "cpu").items() if k != "backend"}
    about = Run(
        command="verify",
        target=place_of(first.checkpoint.source) if first else Place(uri=next(iter(job.paths.values()))),
        against=place_of(source.source) if source else None,
        level=Level.SERVE.label,
        sample=None,
        started=started,
        seconds=seconds,
        environment=surroundings | {"engine": " ".join([job.engine.name, *sorted(versions)])},
        exit_code=code,
    )
    stats = stats_of(first, outcome.findings) if first else None
    return make_report(about, outcome, job.asked.allowed, stats, job.asked.max_findings)
