"""The command line: the table of commands, and the one place that reads the environment and sets the exit code."""

from __future__ import annotations

import gc
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import takewhile
from typing import NamedTuple

import click

from .console import Console, Settings
from .errors import BUG, INTERRUPTED, USAGE, Finding, Interrupted, UserError, fail, unreadable
from .options import CONTEXT, global_options, resume_command
from .scheduling import part_here


class Entry(NamedTuple):
    """A command's section of the help page and its one line there."""

    section: str
    summary: str


# Each command is the function of its name in the module of its name; nothing is imported before it is used.
COMMANDS = {
    "quantize": Entry("Make", "Quantize a checkpoint by recipe, without calibration data."),
    "dequantize": Entry("Make", "Make quantized weights dense, or FP4 block FP8."),
    "extract-dspark": Entry("Make", "Cut a DSpark draft out of its target, or bring one into another layout."),
    "attach-dspark": Entry("Make", "Put a DSpark draft into a target, in its own formats."),
    "extract-mtp": Entry("Make", "Cut the layers that predict further tokens out of their target."),
    "unpack": Entry("Make", "Arrange the same values otherwise: FP4 codes, stacked experts."),
    "reshard": Entry("Make", "Repair an index, split or join shards, rename, drop and cast tensors."),
    "config": Entry("Make", "Repair config.json with every shard linked: set keys, or state what tensors show."),
    "draft-vocab": Entry("Make", "Make, convert and check draft vocabularies, and cut draft heads by them."),
    "reorder-vocab": Entry("Make", "Write a head's rows in an order of which a draft head is a view."),
    "apply": Entry("Make", "Run a plan that was written with --plan."),
    "push": Entry("Make", "Publish a result on the Hub, as one commit, or in an object store."),
    "inspect": Entry("Look", "What a checkpoint holds, read from its headers."),
    "diff": Entry("Look", "What differs between two checkpoints: names, specs, bytes, values, configs."),
    "verify": Entry("Check", "Check a checkpoint: headers, index, config; bytes; values against a source."),
    "will-it-serve": Entry("Check", "Say whether an engine takes a checkpoint, and the first version that does."),
    "check-features": Entry("Check", "Check captured hidden states before a draft is trained on them."),
    "bench": Entry("Check", "Time how candidates of a vocabulary-parallel head are chosen and exchanged."),
    "checks": Entry("Check", "List every check of verify and check-features, or explain one."),
    "hash": Entry("Check", "Record the digests of a checkpoint's files and tensors, or check them."),
    "recipes": Entry("Help", "List the built-in recipes, or print one."),
    "schema": Entry("Help", "Print the JSON Schema of a report, a recipe or a plan file."),
}


class CommandTable(click.Group):
    """A group whose commands are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        found: click.Command = getattr(import_module(f".commands.{name}", __package__), name)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-") and not ctx.resilient_parsing:
            raise click.exceptions.NoSuchCommand(args[0], possibilities=COMMANDS, ctx=ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section in dict.fromkeys(entry.section for entry in COMMANDS.values()):
            with formatter.section(section):
                formatter.write_dl([(name, e.summary) for name, e in COMMANDS.items() if e.section == section])


EPILOG = """\b
Examples:
  ckptkit inspect ./model
  ckptkit quantize ./model ./model-w8 --recipe lm_head-w8a16 --dry-run

\b
Exit codes: 0 done, 1 found something, 2 usage or refused, 3 source missing or broken,
4 no access, 5 output blocked, 6 engine could not run, 70 bug, 130 interrupted.
Any option can be set by a variable: CKPTKIT_JSON, CKPTKIT_QUANTIZE_RECIPE, CKPTKIT_<COMMAND>_<OPTION>;
values of an option that may be repeated are separated by spaces.
Completion: eval "$(_CKPTKIT_COMPLETE=bash_source ckptkit)" (or zsh_source, fish_source).
"""


@click.command(
    "ckptkit",
    cls=CommandTable,
    params=global_options(environment=True),
    context_settings=CONTEXT | {"auto_envvar_prefix": "CKPTKIT"},
    epilog=EPILOG,
)
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Convert and validate LLM checkpoints: planned, streamed, all or nothing."""
    ctx.obj.settings.command = ctx.invoked_subcommand


def main(args: Sequence[str] | None = None) -> int:
    """Run a command line (without the program's name) and give its exit code."""
    arguments = list(sys.argv[1:] if args is None else args)
    settings = Settings(part=part_here(os.environ))
    console = Console(settings)
    # A big checkpoint is hundreds of thousands of small tuples that live to the end: no use looking through them often.
    gc.set_threshold(100_000, 50, 100)
    try:
        _check_platform()
        color = {"color": _color_by_environment(os.environ)}
        return cli.main(arguments, "ckptkit", standalone_mode=False, obj=console, default_map=color) or 0
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return USAGE
    except Exception as error:
        if isinstance(error, click.UsageError):
            # Parsing failed, perhaps before it reached --json.
            settings.json |= "--json" in takewhile(lambda argument: argument != "--", arguments)
        if settings.debug:
            console.traceback(error)
        findings, exit_code = explain(error, arguments)
        console.failure(findings, exit_code)
        return exit_code


def explain(error: Exception, arguments: Sequence[str]) -> tuple[Sequence[Finding], int]:
    """The findings and the exit code that an exception of a run stands for."""
    match error:
        case UserError():
            return error.findings, error.exit_code
        case Interrupted():
            return [Finding("run.interrupted", str(error), hint=resume_command(arguments))], INTERRUPTED
        case PermissionError():
            denied = unreadable(error, "access.denied", str(error.filename or ""))
            return denied.findings, denied.exit_code
        case click.Abort():
            return [Finding("run.interrupted", "interrupted")], INTERRUPTED
        case click.ClickException():
            path = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "ckptkit"
            return [Finding("usage.arguments", error.format_message(), hint=f"{path} --help")], USAGE
        case MemoryError():
            message = f"out of memory: {error}".rstrip(": ")
            found = Finding("output.memory", message, hint="--jobs 1 takes the least; or more memory")
            return [found], found.exit_code
        case _:
            message = f"unexpected {type(error).__name__}: {error}".rstrip(": ")
            again = [argument for argument in arguments if argument != "--debug"]
            hint = f"this is a bug in ckptkit; to see where: {shlex.join(['ckptkit', '--debug', *again])}"
            return [Finding("bug.unexpected", message, hint=hint)], BUG


def _check_platform() -> None:
    if os.name == "nt":
        raise fail("usage.platform", "ckptkit runs on Linux and macOS, not on Windows", hint="run it inside WSL")


def _color_by_environment(environment: Mapping[str, str]) -> str:
    """What the common variables ask for; ``--color`` and ``CKPTKIT_COLOR`` win over it."""
    if environment.get("NO_COLOR") or environment.get("TERM") == "dumb":
        return "never"
    return "always" if environment.get("FORCE_COLOR") else "auto"
