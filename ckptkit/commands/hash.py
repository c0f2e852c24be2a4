"""``ckptkit hash``: record digests of a checkpoint, or check it against recorded ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from ..console import Console, fmt_count
from ..errors import FOUND, OK, Finding, fail, unreadable
from ..files.checkpoint import open_checkpoint
from ..files.digests import SUMS, TENSORS, ShardDigests, parse_shards, parse_sums, recorded, shards_text, sums_text
from ..files.hashing import differing, gather, take
from ..files.header import Header
from ..files.source import FileInfo, Source, open_source
from ..manifest import NAME as MANIFEST
from ..manifest import described, read_manifest
from ..options import command
from ..provenance import Material
from ..provenance import statement as statement_text


@command
@click.argument("out")
@click.option("--per-tensor", is_flag=True, help=f"Also record each tensor's xxh3-128, in {TENSORS}.")
@click.option("--check", metavar="FILE", help=f"Write nothing; check against FILE, a {SUMS} or a {TENSORS}.")
@click.option(
    "--statement", metavar="FILE", help="Write only FILE: ckptkit.json as an in-toto statement, to be signed."
)
@click.option("--with-source", is_flag=True, help="Read the source too, for its digests in the statement.")
@click.option("--overwrite", is_flag=True, help="Replace what is recorded already.")
@click.option("-j", "--jobs", type=click.IntRange(0), default=0, metavar="N", help="Threads (default: up to 4).")
def hash(
    console: Console,
    out: str,
    per_tensor: bool,
    check: str | None,
    statement: str | None,
    with_source: bool,
    overwrite: bool,
    jobs: int,
) -> int:
    """Record the digests of a checkpoint's files, or check them. Exit code 1 if something is not as recorded.

    OUT is a folder. SHA256SUMS is written there, which sha256sum reads too. With --per-tensor the tensors' own
    digests are recorded as well, so that `ckptkit verify --level data` can name the tensor that has changed, and need
    not wait for sha256. No other file is touched.

    --statement writes what was made, by which plan and of what, as an in-toto statement with SLSA's predicate, over the
    sha256 of every file. `ckptkit verify OUT --provenance FILE` compares it with the bytes later.

    \b
    Examples:
      ckptkit hash ./model --per-tensor
      ckptkit hash ./model --check ./model/SHA256SUMS
      ckptkit hash ./model-w8 --statement model-w8.intoto.json --with-source
      ckptkit hash ./model --check ./recorded-elsewhere/ckptkit.digests.json --json
    """
    if check and (per_tensor or overwrite):
        raise fail("usage.arguments", "--check writes nothing", hint="leave --per-tensor and --overwrite out")
    if statement and (per_tensor or check):
        raise fail("usage.arguments", "--statement is a run of its own", hint="leave --per-tensor and --check out")
    if with_source and not statement:
        raise fail("usage.arguments", "--with-source is about a statement", hint="--statement FILE")
    with open_source(out) as source:
        if statement:
            return _state(console, source, statement, with_source, overwrite, jobs)
        if check:
            return _check(console, source, check, jobs)
        return _record(console, source, per_tensor, overwrite, jobs)


def _record(console: Console, source: Source, per_tensor: bool, overwrite: bool, jobs: int) -> int:
    if source.is_remote or not source.root.is_dir():
        raise fail("usage.arguments", f"{source.uri} is no folder to write {SUMS} into", hint="give its folder")
    written = [SUMS, TENSORS] if per_tensor else [SUMS]
    there = [name for name in written if name in source.files]
    if there and not overwrite:
        message = f"{source.uri} has a {there[0]} already"
        hint = f"ckptkit hash {source.uri} --check {source.root / there[0]}; or replace it with --overwrite"
        raise fail("output.exists", message, file=there[0], hint=hint)
    shards = open_checkpoint(source).shards if per_tensor else {}
    sums, digests = _digests(console, source, source.files.keys() - {SUMS, TENSORS}, shards, jobs)
    _write(source.root / SUMS, sums_text(sums))
    if per_tensor:
        _write(source.root / TENSORS, shards_text(digests))
    count = sum(len(shard.tensors) for shard in digests.values())
    paths = [str(source.root / name) for name in written]
    human = [f"{paths[0]}  {fmt_count(len(sums), 'file')}"]
    human += [f"{paths[1]}  {fmt_count(count, 'tensor')}"] if per_tensor else []
    console.result({"output": paths, "files": len(sums), "tensors": count}, human, paths)
    return OK


def _state(console: Console, source: Source, path: str, with_source: bool, overwrite: bool, jobs: int) -> int:
    made = read_manifest(source)
    if made is None:
        message = f"{source.uri} has no {MANIFEST}: what it was made of is not known"
        raise fail("usage.arguments", message, file=MANIFEST, hint="a statement is of what ckptkit made")
    if Path(path).exists() and not overwrite:
        raise fail("output.exists", f"{path} is there already", file=path, hint="--overwrite replaces it")
    inside = [name for name, info in source.files.items() if info.path.resolve() == Path(path).resolve()]
    sums, _ = _digests(console, source, source.files.keys() - {SUMS, TENSORS, *inside}, {}, jobs)
    materials = _materials(console, made, sums, with_source, jobs)
    _write(Path(path), statement_text(made, sums, materials))
    known = sum(item.sha256 is not None for item in materials.values())
    human = [
        f"{path}  {fmt_count(len(sums), 'file')}, made of {fmt_count(len(materials), 'file')} ({known:,} with digests)"
    ]
    console.result({"output": [path], "files": len(sums), "sources": len(materials), "known": known}, human, [path])
    return OK


def _materials(
    console: Console, made: Mapping[str, Any], sums: Mapping[str, str], with_source: bool, jobs: int
) -> dict[str, Material]:
    """The source's files with what is known of them: from links, from its own records, or from reading it.

    Raises UserError (``source.changed``) where the source is to be read and is no longer the one the result was made of.
    """
    files: Mapping[str, Mapping[str, Any]] = made["source"]["files"]
    linked = {shard["source"]: sums.get(shard["name"]) for shard in made["shards"] if shard["source"]}
    found = {name: Material(name, info["size"], linked.get(name) or info.get("sha256")) for name, info in files.items()}
    for key, uri in {"": made["source"]["uri"], **made["source"].get("others", {})}.items():
        if with_source or Path(uri).exists():
            prefix = f"{key}:" if key else ""
            mine = {name.removeprefix(prefix): info for name, info in files.items() if _is_of(name, key, made)}
            unknown = [name for name in mine if found[prefix + name].sha256 is None]
            known = _sums_of_origin(console, uri, mine, unknown, with_source, jobs)
            found |= {prefix + name: found[prefix + name]._replace(sha256=value) for name, value in known.items()}
    return found


def _is_of(name: str, key: str, made: Mapping[str, Any]) -> bool:
    """Whether a file's name is that of a file of the source with that key; the source itself has none."""
    keys = made["source"].get("others", {})
    return name.startswith(f"{key}:") if key else name.partition(":")[0] not in keys


def _sums_of_origin(
    console: Console, uri: str, files: Mapping[str, Mapping[str, Any]], names: Iterable[str], read: bool, jobs: int
) -> dict[str, str]:
    """The sha256 of ``names`` of a source, read or as recorded there; of files that are as they were."""
    with open_source(uri) as origin:
        other = sorted(name for name, said in files.items() if not _is_as_said(origin.files.get(name), said))
        if read and other:
            message = f"{other[0]} of {uri} is not as it was when the result was made"
            raise fail("source.changed", message, file=other[0], hint="leave --with-source out")
        wanted = sorted(set(names) - set(other))
        known = _digests(console, origin, wanted, {}, jobs)[0] if read else _recorded_sums(origin)
    return {name: known[name] for name in wanted if name in known}


def _is_as_said(info: FileInfo | None, said: Mapping[str, Any]) -> bool:
    """Whether a file is what the manifest says of it. A server's may lie in a cache by now, at the same commit."""
    if info is None:
        return False
    return described(info) == said or (info.tag is None and "mtime_ns" not in said and info.size == said["size"])


def _recorded_sums(source: Source) -> dict[str, str]:
    known = recorded(source, read_manifest(source)).files
    return {name: digest.value for name, digest in known.items() if digest.algorithm == "sha256"}


def _check(console: Console, source: Source, path: str, jobs: int) -> int:
    text = _read(path)
    if text.lstrip().startswith("{"):
        expected = parse_shards(text, path)
        opened = open_checkpoint(source).shards
        shards = {name: header for name, header in opened.items() if name in expected}
        _, digests = _digests(console, source, (), shards, jobs)
        findings = [f for shard in expected for f in _of_shard(expected[shard], digests.get(shard), path, shard)]
        checked = sum(1 + len(shard.tensors) for shard in expected.values())
        unlisted = sorted(opened.keys() - expected.keys())
    else:
        sums = dict(parse_sums(text))
        if not sums:
            raise fail("usage.check", f"{path} holds no line that sha256sum would read", file=path)
        found, _ = _digests(console, source, sums.keys() & source.files.keys(), {}, jobs)
        findings, checked = list(differing(sums, found, path)), len(sums)
        unlisted = sorted(name for name in source.files.keys() - sums.keys() if name.endswith(".safetensors"))
    code = FOUND if findings else OK
    data = {"checked": checked, "differing": len(findings), "unlisted": unlisted}
    console.result(data, _told(path, data), [finding.id for finding in findings], findings, code)
    return code


def _of_shard(expected: ShardDigests, found: ShardDigests | None, path: str, shard: str) -> Iterator[Finding]:
    if found is None:
        yield Finding("data.digest", f"{shard} is not there; its tensors are recorded in {path}", file=shard)
        return
    if found.header != expected.header:
        message = f"the header of {shard} has another digest; it is recorded in {path}"
        yield Finding("data.digest", message, file=shard)
    yield from differing(expected.tensors, found.tensors, path, shard)


def _told(path: str, data: dict[str, Any]) -> Iterator[str]:
    yield f"{path}: {data['checked']:,} checked, {data['differing']:,} not as recorded"
    if data["unlisted"]:
        yield f"not recorded there, so not checked: {', '.join(data['unlisted'])}"


def _digests(
    console: Console, source: Source, files: Iterable[str], shards: Mapping[str, Header], jobs: int
) -> tuple[dict[str, str], dict[str, ShardDigests]]:
    names = sorted(files)
    with console.progress("hash") as progress:
        progress.start(0, sum(source.files[name].size for name in {*names, *shards}))
        found = gather(take(source, names, shards, progress.advance, jobs), shards)
        progress.done()
    return found


def _read(path: str) -> str:
    try:
        return Path(path).read_text("utf-8", "surrogateescape")
    except OSError as error:
        raise unreadable(error, "usage.check", path) from None


def _write(path: Path, text: str) -> None:
    """The file appears whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text, "utf-8", "surrogateescape")
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise fail("output.write", f"{path} cannot be written: {error.strerror}", file=str(path)) from None
