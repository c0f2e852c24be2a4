"""The only printer. stdout carries the result, stderr the talk: progress, notes, warnings, errors, hints.

Three forms: text for people, one JSON document (``--json``), bare values one a line (``--quiet``). Status is said in
words, never by colour alone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TextIO

from .errors import OK, Finding, UserError, fail
from .scheduling import Part

SHOWN_PER_ID = 20
SECONDS_BETWEEN_LINES = 10.0

_STYLES = {"error": "1;31", "warning": "1;33", "hint": "36", "header": "1"}
_ASCII = str.maketrans({"→": "->", "×": "x", "…": "...", "≠": "!=", "≤": "<=", "≥": ">=", "–": "-", "−": "-", "·": "-"})


@dataclass(slots=True)
class Settings:
    """The global options and the command's name, filled in while the command line is parsed.

    ``part``: which of several workers this is, by its scheduler's variables.
    """

    json: bool = False
    quiet: bool = False
    verbose: bool = False
    color: str = "auto"
    no_progress: bool = False
    debug: bool = False
    command: str | None = None
    part: Part | None = None


class Table(NamedTuple):
    """Rows of cells under a header. ``align`` has ``<`` or ``>`` for each column; columns are never cut short."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    align: str


class Console:
    """What a command talks to. The streams are looked up at each write: a live progress bar replaces them."""

    def __init__(self, settings: Settings):
        self.settings = settings

    def result(
        self,
        data: Mapping[str, Any],
        human: Iterable[str | Table],
        quiet: Iterable[str] = (),
        warnings: Iterable[Finding] = (),
        exit_code: int = OK,
    ) -> None:
        """Print what a command found or made: ``data`` for programs, ``human`` for people, ``quiet`` for shells."""
        warnings = list(warnings)
        if self.settings.json:
            self._document(exit_code, warnings, data)
            return
        lines = quiet if self.settings.quiet else self._lines(human)
        self._write_result("".join(f"{line}\n" for line in lines))
        if not self.settings.quiet:
            self.warn(warnings)

    def page(self, text: str) -> None:
        """Print a help page."""
        self._write_result(f"{text}\n")

    def failure(self, findings: Sequence[Finding], exit_code: int) -> None:
        """Print why a run ended early."""
        if self.settings.json:
            with contextlib.suppress(UserError):  # unless stdout itself is what failed
                self._document(exit_code, findings, {})
                return
        self._talk(self._finding_lines(findings))

    def warn(self, findings: Iterable[Finding]) -> None:
        """Print findings that do not end the run; under ``--json`` they go into the result's document instead."""
        if not self.settings.quiet and not self.settings.json:
            self._talk(self._finding_lines(list(findings)))

    def note(self, text: str) -> None:
        """Say something on the way."""
        if not self.settings.quiet:
            self._talk([text])

    def traceback(self, error: BaseException) -> None:
        """Print where an exception came from (``--debug``)."""
        self._talk(["".join(traceback.format_exception(error)).rstrip()])

    @contextlib.contextmanager
    def progress(self, label: str) -> Iterator[Progress]:
        """A meter that is drawn as a bar on a terminal, else as a plain line now and then."""
        if self.settings.quiet or self.settings.no_progress:
            yield Progress(lambda meter, last: None)
        elif self.settings.json or not _is_terminal(sys.stderr):
            yield Progress(_throttled(lambda meter: self._talk([f"{label}: {meter}"])))
        else:
            with _bar(label, "standard" if self._coloured(sys.stderr) else None) as draw:
                yield Progress(draw)

    def _document(self, exit_code: int, findings: Sequence[Finding], data: Mapping[str, Any]) -> None:
        document: dict[str, Any] = {
            "schema": 1,
            "command": self.settings.command,
            "ok": exit_code == OK,
            "exit_code": exit_code,
            "findings": [finding.as_dict() for finding in findings],
        }
        self._write_result(json.dumps({**document, **data}) + "\n")

    def _lines(self, blocks: Iterable[str | Table]) -> Iterator[str]:
        for block in blocks:
            if isinstance(block, str):
                yield block
            else:
                header, *rows = table_lines(block)
                yield self._paint(header, "header", sys.stdout)
                yield from rows

    def _finding_lines(self, findings: Sequence[Finding]) -> Iterator[str]:
        limit = None if self.settings.verbose else SHOWN_PER_ID
        for group in by_id(findings).values():
            shown = group[:limit]
            for finding, following in zip(shown, [*shown[1:], None], strict=True):
                yield f"{self._paint(finding.severity, finding.severity, sys.stderr)}: {finding_text(finding)}"
                if finding.hint and (following is None or following.hint != finding.hint):
                    yield f"{self._paint('hint', 'hint', sys.stderr)}: {finding.hint}"
            if len(group) > len(shown):
                yield f"… and {len(group) - len(shown):,} more {group[0].id} (-v or --json: all of them)"

    def _coloured(self, stream: TextIO | None) -> bool:
        return self.settings.color == "always" or (self.settings.color == "auto" and _is_terminal(stream))

    def _paint(self, text: str, style: str, stream: TextIO | None) -> str:
        return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if self._coloured(stream) else text

    def _write_result(self, text: str) -> None:
        try:
            _write(sys.stdout, text)
        except BrokenPipeError:
            # The reader has seen what it wanted: no fault of the run, whose exit code stands. Nothing may fail when
            # Python flushes the stream at exit either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except OSError as error:
            raise fail("output.stdout", f"the result cannot be written to stdout: {error.strerror}") from error

    def _talk(self, lines: Iterable[str]) -> None:
        # A run is not given up because nobody listens to its talk.
        with contextlib.suppress(OSError):
            _write(sys.stderr, "".join(f"{line}\n" for line in lines))


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def _write(stream: TextIO | None, text: str) -> None:
    """Write all of ``text``, now. Raises OSError; ``stream`` is None where the process was started without it."""
    if stream is None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    encoding = stream.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_ASCII).encode(encoding, "backslashreplace").decode(encoding)
    stream.write(text)
    stream.flush()


# --- findings and tables -----------------------------------------------------------------------------------


def by_id(findings: Iterable[Finding]) -> dict[str, list[Finding]]:
    """Findings grouped by id, ids in the order of their first finding."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.id, []).append(finding)
    return groups


def finding_text(finding: Finding) -> str:
    """A finding in one line: file and tensor first, unless the message names them itself."""
    subjects = (finding.file, finding.tensor)
    return ": ".join([*(part for part in subjects if part and part not in finding.message), finding.message])


def table_lines(table: Table) -> list[str]:
    """The header and the rows, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(table.header, *table.rows, strict=True)]
    pattern = "  ".join(f"{{:{align}{width}}}" for align, width in zip(table.align, widths, strict=True))
    return [pattern.format(*row).rstrip() for row in (table.header, *table.rows)]


# --- numbers -----------------------------------------------------------------------------------------------


def _scaled(value: float, units: str) -> str:
    """``value`` in the first unit that needs at most three digits before the point."""
    steps = 0
    while round(value, 1) >= 1000 and steps < len(units) - 1:
        value, steps = value / 1000, steps + 1
    return f"{value:.1f} {units[steps]}"


def fmt_bytes(count: int) -> str:
    """Bytes in decimal units: ``812 B``, ``1.6 GB``."""
    return f"{count} B" if count < 1000 else f"{_scaled(count / 1000, 'kMGTP')}B"


def fmt_count(count: int, noun: str) -> str:
    """A count of things: ``1 shard``, ``1,000 shards``."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def fmt_parameters(count: int) -> str:
    """Parameters as model cards write them: ``576``, ``134.5 M``, ``1.1 B``."""
    return f"{count}" if count < 1000 else _scaled(count / 1000, "KMBT")


def fmt_duration(seconds: float) -> str:
    """Seconds as ``m:ss`` or ``h:mm:ss``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# --- progress ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Progress:
    """Counts of a running job. ``draw(meter, last)`` is called at each change; ``str()`` is the meter in words."""

    draw: Callable[[Progress, bool], None]
    shards: int = 0
    total_shards: int = 0
    bytes: int = 0
    total_bytes: int = 0
    began: float = field(default_factory=time.monotonic)

    def start(self, total_shards: int, total_bytes: int) -> None:
        """The job's size; the clock starts."""
        self.shards = self.bytes = 0
        self.total_shards, self.total_bytes, self.began = total_shards, total_bytes, time.monotonic()
        self.draw(self, False)

    def shard(self, name: str) -> None:
        """A shard is finished."""
        self.shards += 1
        self.draw(self, False)

    def advance(self, nbytes: int) -> None:
        """So many bytes more are done."""
        self.bytes += nbytes
        self.draw(self, False)

    def done(self) -> None:
        """The whole job is finished."""
        self.draw(self, True)

    def __str__(self) -> str:
        seconds = time.monotonic() - self.began
        shards = f"{self.shards:,}/{fmt_count(self.total_shards, 'shard')}  " if self.total_shards else ""
        size = f"{shards}{fmt_bytes(self.bytes)} of {fmt_bytes(self.total_bytes)}"
        if not self.bytes or not seconds:
            return size
        rate = self.bytes / seconds
        left = max(self.total_bytes - self.bytes, 0) / rate
        clock = f"eta {fmt_duration(left)}" if left else f"in {fmt_duration(seconds)}"
        return f"{size}  {fmt_bytes(round(rate))}/s  {clock}"


def _throttled(say: Callable[[Progress], None]) -> Callable[[Progress, bool], None]:
    """Draw at the end, and on the way at most every ten seconds."""
    latest = time.monotonic()

    def draw(meter: Progress, last: bool) -> None:
        nonlocal latest
        if last or time.monotonic() - latest >= SECONDS_BETWEEN_LINES:
            latest = time.monotonic()
            say(meter)

    return draw


@contextlib.contextmanager
def _bar(label: str, color_system: Any) -> Iterator[Callable[[Progress, bool], None]]:
    from rich.console import Console as Terminal
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn
    from rich.progress import Progress as Bars

    terminal = Terminal(stderr=True, color_system=color_system, no_color=color_system is None)
    words = TextColumn("{task.fields[words]}", markup=False)
    bar = BarColumn(max(5, min(40, terminal.width - 80)))
    with Bars(TextColumn(label, markup=False), bar, TaskProgressColumn(), words, console=terminal) as bars:
        task = bars.add_task(label, total=None, words="")
        yield lambda meter, last: bars.update(
            task, completed=meter.bytes, total=meter.total_bytes or None, words=str(meter)
        )
