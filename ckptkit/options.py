"""How every command is declared: :func:`command` gives it the console and the global options.

A global option is accepted before the command and after it; given twice, the later one counts. Only the ones before
the command are also read from the environment (``CKPTKIT_JSON``, …), so that an option always wins over a variable.
A command's own options are set by ``CKPTKIT_<COMMAND>_<OPTION>``, whatever their parameters are called here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import click

from . import __version__
from .errors import fail

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?")

# The help page is the console's to print, as all else is: see ``_show_help``.
CONTEXT: dict[str, Any] = {"help_option_names": [], "max_content_width": 100}


def _set(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value and param.name:
        setattr(ctx.obj.settings, param.name, value)


def _show_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.obj.result({"version": __version__}, [f"ckptkit {__version__}"], quiet=[__version__])
        ctx.exit()


def _show_help(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.obj.page(ctx.get_help())
        ctx.exit()


def global_options(*, environment: bool) -> list[click.Option]:
    """The options that every command has; ``environment`` says if variables set them too."""

    def option(*declarations: str, help: str, **changes: Any) -> click.Option:
        attributes = {"callback": _set, "is_flag": True, "allow_from_autoenv": environment, **changes}
        return click.Option(declarations, help=help, expose_value=False, **attributes)

    colors = click.Choice(["auto", "always", "never"])
    return [
        option("--json", help="Print one JSON document on stdout, also on failure."),
        option("-q", "--quiet", help="Print bare values, one a line; on stderr only errors."),
        option("-v", "--verbose", help="List everything that is shortened otherwise."),
        option("--color", type=colors, is_flag=False, help="Colour the output (default: on a terminal)."),
        option("--no-progress", help="Show no progress."),
        option("--debug", help="Show the traceback of an error."),
        option("--version", help="Print the version.", callback=_show_version, allow_from_autoenv=False),
        option("-h", "--help", help="Show this page.", callback=_show_help, is_eager=True, allow_from_autoenv=False),
    ]


class Command(click.Command):
    """A command with the global options, listed apart from its own in the help page."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for param in self.params:
            if isinstance(param, click.Option):
                param.envvar, param.allow_from_autoenv = variable(self.name or "", param), False
        self._globals = global_options(environment=False)
        self.params += self._globals

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        own = [option for option in options if option not in self._globals]
        for title, listed in (("Options", own), ("Global options", self._globals)):
            records = [record for option in listed if (record := option.get_help_record(ctx))]
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class Group(Command, click.Group):
    """A command that is several, each listed in its help page."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _first_line(member.help)) for name, member in self.commands.items()])
        super().format_options(ctx, formatter)


def _first_line(help: str | None) -> str:
    return (help or "").partition("\n")[0]


def variable(command: str, option: click.Option) -> str:
    """The environment variable that sets a command's option: ``CKPTKIT_QUANTIZE_DRY_RUN``."""
    words = ["ckptkit", command, max(option.opts, key=len).lstrip("-")]
    return "_".join(words).replace("-", "_").upper()


def listed(texts: Iterable[str]) -> Iterator[str]:
    """The values of an option that takes several, with commas or given again."""
    return (value.strip() for text in texts for value in text.split(",") if value.strip())


def size(text: str) -> int:
    """Bytes: ``5GB`` is 5 x 10^9, ``5GiB`` 5 x 2^30. Raises UserError ``usage.size``."""
    found = _SIZE.fullmatch(text.strip().upper())
    count = found and int(float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2] or " "))
    if not count:
        raise fail("usage.size", f"{text!r} is no size", hint="5GB is 5,000,000,000 bytes, 5GiB is 5,368,709,120")
    return count


def resume_command(arguments: Sequence[str]) -> str:
    """What to type to go on with an interrupted run of ``ckptkit ARGUMENTS``."""
    left_out = {"--resume", "--overwrite", "--no-progress"}
    again = [argument for argument in arguments if argument not in left_out]
    return shlex.join(["ckptkit", *again, "--resume"])


def command(function: Callable[..., int | None]) -> click.Command:
    """Make ``function(console, …)`` a command of its own name, with its docstring as the help page.

    The function gives the exit code; None is 0.
    """
    name = function.__name__.replace("_", "-")
    made: click.Command = click.command(name, cls=Command, context_settings=CONTEXT)(click.pass_obj(function))
    return made


def group(*members: click.Command) -> Callable[[Callable[[], None]], click.Command]:
    """Make ``members`` the commands of one that has a function's name and, as its help page, its docstring."""

    def made(function: Callable[[], None]) -> click.Command:
        name = function.__name__.replace("_", "-")
        for member in members:
            for param in member.params:
                if isinstance(param, click.Option) and param.envvar:
                    param.envvar = variable(f"{name}-{member.name}", param)
        commands = {str(member.name): member for member in members}
        return Group(name, commands=commands, help=function.__doc__, no_args_is_help=False, context_settings=CONTEXT)

    return made
