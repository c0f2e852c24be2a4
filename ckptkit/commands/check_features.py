"""``ckptkit check-features``: whether captured hidden states are what a draft is to be trained on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from ..checks import WHOLE, Level, Outcome, run_probes
from ..console import Console
from ..errors import Finding, UserError, fail, unreadable
from ..features.draft import WANTED, Draft, draft_of
from ..features.pages import PAGES
from ..features.probes import PROBES, Captured
from ..files.checkpoint import CONFIG, open_checkpoint, parse_json
from ..files.source import Source, open_source
from ..manifest import environment
from ..options import command
from ..reports.report import Report, Run, make_report, place_of
from .reporting import ReportOptions, check_allowed, check_reports, exit_code, reporting_options, tell, write_files
from .verify import sample_of


@dataclass(frozen=True, slots=True)
class Asked(ReportOptions):
    """All options as they were given."""

    draft_config: str
    target: str | None
    max_len: int | None
    sample: str | None


@command
@click.argument("folder", metavar="DIR")
@click.option(
    "--draft-config", required=True, metavar="FILE", help="The config.json of the draft that is to be trained."
)
@click.option("--target", metavar="CKPT", help="The target: also whether the last states are what its head reads.")
@click.option(
    "--max-len", type=click.IntRange(1), metavar="N", help="The longest sample that is trained on, in tokens."
)
@click.option("--sample", metavar="P%|n/t", help="Look at a part of the samples: 2%, or part n of t.")
@click.option("--allow", multiple=True, metavar="ID[,ID]", help="Count errors of these ids as warnings.")
@click.option("--strict", is_flag=True, help="Exit 1 on warnings too.")
@click.option("--allow-skipped", is_flag=True, help="Exit 0 though checks that --target asks for could not run.")
@click.option("--exit-zero", is_flag=True, help="Exit 0 whatever is found.")
@reporting_options
@click.option("-j", "--jobs", type=click.IntRange(0), default=0, metavar="N", help="Threads (default: up to 4).")
def check_features(console: Console, folder: str, **given: Any) -> int:
    """Check captured training features. Exit code 1 if something is wrong with them.

    DIR holds what a capture of the target has written: .ckpt or .ckpt.gz files (SpecForge, either set of keys; EAGLE-3),
    or a DeepSpec target cache with its manifest.json. Every sample is read once, in bounded memory; no code that
    a file names is run. `ckptkit checks features` lists what is looked for.

    \b
    Examples:
      ckptkit check-features ./features --draft-config ./draft/config.json
      ckptkit check-features ./features --draft-config ./draft/config.json --target ./Qwen3-4B --max-len 4096
      ckptkit check-features ./features --draft-config ./draft/config.json --sample 2% --report report.html
    """
    asked = Asked(**given)
    console.settings.json |= asked.form == "json"
    check_reports(asked.reports)
    check_allowed(asked.allowed, {page.id: page for page in PAGES})
    draft = _draft(asked.draft_config)
    began, started = time.monotonic(), datetime.now(UTC)
    with contextlib.ExitStack() as opened:
        captured = _captured(console, folder, asked, draft, opened)
        outcome = run_probes(captured, [probe for probe in PROBES if _wanted(probe.level, asked)], PAGES)
        not_run = [] if asked.allow_skipped else [found.id for found in outcome.results if found.result == "skip"]
        code = exit_code(outcome, asked, not_run)
        report = _report(captured, outcome, asked, code, started, time.monotonic() - began)
        write_files(report, asked)
    tell(console, report, outcome, asked, not_run, list(_lines(report)))
    return code


def _wanted(level: Level, asked: Asked) -> bool:
    return level < Level.NUMERIC or asked.target is not None


def _draft(path: str) -> Draft:
    hint = f"--draft-config {path}/{CONFIG}" if Path(path, CONFIG).is_file() else WANTED
    try:
        text = Path(path).read_text("utf-8")
    except OSError as error:
        raise unreadable(error, "source.missing", path, hint) from None
    except UnicodeDecodeError as error:
        raise fail("config.parse", f"{path} is not UTF-8 text (byte {error.start})", file=path, hint=hint) from None
    try:
        config = parse_json(text, path, "config.parse")
    except UserError as error:
        raise UserError(replace(finding, hint=finding.hint or hint) for finding in error.findings) from None
    if not isinstance(config, dict):
        raise fail("config.parse", f"{path} is a JSON {type(config).__name__}, not an object", file=path, hint=hint)
    return draft_of(config, path)


def _features(folder: str) -> Source:
    """The folder of features: nothing else is, and no name on the Hub. Raises UserError (``source.*``)."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        missing = not path.exists()
        message = f"{folder} does not exist" if missing else f"{folder} is not a folder"
        hint = "give the folder that a capture of the target has written"
        raise fail("source.missing" if missing else "source.kind", message, file=folder, hint=hint)
    return open_source(folder)


def _captured(console: Console, folder: str, asked: Asked, draft: Draft, opened: contextlib.ExitStack) -> Captured:
    source = opened.enter_context(_features(folder))
    target, misfits = None, list[Finding]()
    if asked.target:
        from ..features.target import target_of

        target, misfits = target_of(open_checkpoint(opened.enter_context(open_source(asked.target))), draft)
    captured = Captured(
        source,
        draft,
        target,
        tuple(misfits),
        asked.max_len,
        sample_of(asked.sample) if asked.sample else WHOLE,
        asked.jobs,
        opened.enter_context(console.progress("check-features")),
    )
    captured.files  # noqa: B018 (raises where there are none)
    return captured


def _report(captured: Captured, outcome: Outcome, asked: Asked, code: int, started: datetime, seconds: float) -> Report:
    surroundings = {key: value for key, value in environment("", "cpu").items() if key != "backend"}
    about = Run(
        command="check-features",
        target=place_of(captured.source),
        against=place_of(captured.target.checkpoint.source) if captured.target else None,
        level=(Level.NUMERIC if captured.target else Level.DATA).label,
        sample=captured.sample.text,
        started=started,
        seconds=seconds,
        environment=surroundings | {"draft_config": asked.draft_config},
        exit_code=code,
    )
    return make_report(about, outcome, asked.allowed, None, asked.max_findings)


def _lines(report: Report) -> Iterator[str]:
    match report.figures.get("next_token"):
        case {"states": int(states), "agreement": float(share)}:
            yield f"the target's head puts the next token first for {share:.1%} of {states} last states"
