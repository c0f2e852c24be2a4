"""``ckptkit push``, and the same for commands that make files (``--push``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from shlex import quote
from typing import Any

import click

from ..console import Console, fmt_bytes, fmt_count
from ..errors import Finding, UserError
from ..files.source import Source, open_source
from ..manifest import NAME as MANIFEST
from ..options import command
from ..remote.push import Destination, Made, Pushed, destination, examine, manifest_of, publish


@command
@click.argument("out")
@click.argument("place", metavar="DESTINATION")
@click.option("-n", "--dry-run", is_flag=True, help="Look at OUT and DESTINATION; send nothing.")
@click.option("--private", is_flag=True, help="Make the repository private, if it has to be made.")
@click.option("--include", multiple=True, metavar="PATTERN", help="Take along a file that is no part of the result.")
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint that is there.")
@click.option("-j", "--jobs", type=click.IntRange(0), default=0, metavar="N", help="Threads (default: up to 4).")
def push(
    console: Console,
    out: str,
    place: str,
    dry_run: bool,
    private: bool,
    include: tuple[str, ...],
    overwrite: bool,
    jobs: int,
) -> None:
    """Publish a finished result on the Hub, or in an object store.

    OUT is a folder that a command made. Every byte of it is held against its ckptkit.json first. DESTINATION is org/name or
    org/name@branch: one commit, of which nothing is visible until all is there; or s3://bucket/folder, gs://bucket/folder:
    ckptkit.json last. README.md gets a section that says how the result was made; the rest of it stays.

    The same command carries on where a cut one stopped. Log in with `hf auth login`, or set HF_TOKEN.

    \b
    Examples:
      ckptkit push ./model-w8 org/model-w8
      ckptkit push ./model-w8 org/model@w8 --dry-run
      ckptkit push ./model-w8 s3://bucket/models/model-w8
    """
    target = destination(place, private)
    with open_source(out) as source:
        manifest_of(source)
        there = _let_in(target, source.root, overwrite)
        made = _examined(console, source, include, jobs)
        pushed = None if dry_run else _published(console, made, target, there)
    if pushed is None:
        size = sum(item.size for item in made.items)
        data = {"output": None, "dry_run": True, "files": len(made.items), "bytes": size}
        line = f"{out} → {target.uri}  {fmt_count(len(made.items), 'file')}, {fmt_bytes(size)}"
        console.result(data, [line, "nothing was sent (dry run)"], [target.uri], _left(made))
    else:
        console.result(pushed_data(pushed), pushed_text(pushed), [pushed.uri], _left(made))


def in_the_way(target: Destination, out: Path) -> list[Finding]:
    """What forbids to publish what is going to be OUT; one that is there already may have been pushed in part."""
    try:
        _let_in(target, out, overwrite=False)
    except UserError as error:
        return list(error.findings)
    return []


def push_made(console: Console, out: Path, target: Destination, jobs: int) -> Pushed:
    """Publish what was just made. Raises UserError as :func:`push` does, after a word on how to try again."""
    try:
        with open_source(str(out)) as source:
            there = _let_in(target, out, overwrite=False)
            return _published(console, _examined(console, source, (), jobs), target, there)
    except UserError:
        console.note(f"{out} is made; to publish it: ckptkit push {quote(str(out))} {quote(target.uri)}")
        raise


def pushed_data(pushed: Pushed) -> dict[str, Any]:
    return {"output": pushed.uri, "files": pushed.files, "bytes": pushed.nbytes, "removed": list(pushed.removed)}


def pushed_text(pushed: Pushed) -> Iterator[str]:
    sent = f"sent {fmt_bytes(pushed.nbytes)}" if pushed.nbytes else "all of it was there"
    yield f"{pushed.uri}  {fmt_count(pushed.files, 'file')}, {sent}"
    yield from (f"removed  {name}" for name in pushed.removed)


def _let_in(target: Destination, out: Path, overwrite: bool) -> Source | None:
    """What is at the destination. Raises UserError: ``access.*``, ``output.exists``."""
    there, manifest = target.there(), out / MANIFEST
    refused = target.refused(there, overwrite, manifest.read_bytes() if manifest.is_file() else None)
    if refused:
        raise UserError(refused)
    return there


def _examined(console: Console, source: Source, include: Iterable[str], jobs: int) -> Made:
    with console.progress("read") as progress:
        progress.start(0, sum(info.size for info in source.files.values()))
        made = examine(source, include, progress.advance, jobs)
        progress.done()
    return made


def _published(console: Console, made: Made, target: Destination, there: Source | None) -> Pushed:
    with console.progress("push") as progress:
        progress.start(0, sum(item.size for item in made.items))
        pushed = publish(made, target, there, progress.advance)
        progress.done()
    return pushed


def _left(made: Made) -> Iterator[Finding]:
    for name in made.left:
        message = f"{name} is no part of the result, and is not pushed"
        yield Finding("push.left", message, file=name, severity="warning", hint=f"--include {quote(name)}")
