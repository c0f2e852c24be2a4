"""Object stores and plain web servers as sources, through fsspec: ``s3://``, ``gs://``, ``https://`` and what else it
knows. Credentials are those of the store's own library: its variables, its files.

What is there is listed once; what a store says of a file (its ETag, else its time) tells if it was replaced meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ..errors import UserError, fail
from ..files.source import FileInfo, Source, is_of_checkpoint
from .ranges import Address, Asked, Traffic, fetch
from .store import RemoteStore

_WEB = ("http", "https")
_TAGS = ("ETag", "etag", "md5Hash", "content_md5", "LastModified", "last_modified", "mtime")


class Folder(NamedTuple):
    """A place in a store: its URL, the filesystem that fsspec has for it, and the path there."""

    url: str
    system: Any
    path: str

    @property
    def prefix(self) -> str:
        return self.path.rstrip("/") + "/"


def open_objects(url: str) -> Source:
    """The source at ``url``: all files below it, or the one ``.safetensors`` file that it names.

    Raises UserError: ``access.*``, ``source.missing``, ``usage.source``, ``usage.extra``.
    """
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query:
        message = f"a URL of {parts.hostname} with credentials in it: they would be in logs and manifests"
        raise fail("usage.source", message, hint="leave them to the store's own variables or files")
    folder = folder_at(url.rstrip("/"))
    files = _listed(folder)
    if not files:
        raise fail("source.missing", f"there is nothing at {url}", file=url, hint="correct the URL")
    traffic = Traffic()
    read = partial(_fetch_web if parts.scheme in _WEB else _fetch, folder, files, traffic)
    store = RemoteStore(files, read, lambda file: None, partial(_listed_now, folder), traffic)
    return Source(folder.url, Path(folder.url), files, store=store)


def folder_at(url: str) -> Folder:
    import fsspec

    scheme, _, rest = url.partition("://")
    url = f"{scheme.lower()}://{rest}"
    with asking_store(url):
        try:
            system, path = fsspec.url_to_fs(url)
        except ImportError as error:
            hint = "pip install 'ckptkit[remote]'"
            raise fail("usage.extra", f"{url} needs a library that is not here: {error}", hint=hint) from None
        except ValueError as error:
            raise fail("usage.source", f"{url}: {error}", hint="s3://bucket/folder, gs://…, https://…") from None
    return Folder(url, system, path)


def _listed_now(folder: Folder) -> dict[str, FileInfo]:
    folder.system.invalidate_cache()
    return _listed(folder)


def _listed(folder: Folder) -> dict[str, FileInfo]:
    """The files by their names below the folder; of a ``.safetensors`` file itself."""
    system, prefix = folder.system, folder.prefix
    with asking_store(folder.url):
        if folder.path.endswith(".safetensors"):
            return {folder.path.rpartition("/")[2]: file_at(folder, system.info(folder.path))}
        names = {path: path.removeprefix(prefix) for path in system.find(folder.path) if path.startswith(prefix)}
        kept = [(path, name) for path, name in sorted(names.items()) if is_of_checkpoint(name)]
        return {name: file_at(folder, system.info(path)) for path, name in kept}


def file_at(folder: Folder, info: dict[str, Any]) -> FileInfo:
    size = info["size"]
    if size is None:
        message = f"{info['name']}: the server does not say how many bytes it has"
        raise fail("source.kind", message, file=info["name"], hint="fetch the files into a folder first")
    said = next((str(info[key]) for key in _TAGS if info.get(key)), "")
    tag = f"etag:{said.strip(chr(34))}"
    return FileInfo(Path(folder.url), int(size), 0, 0, 0o644, tag, here=False)


def _full(folder: Folder, file: str) -> str:
    return folder.path if folder.path.endswith(".safetensors") else folder.prefix + file


def _fetch(
    folder: Folder, files: dict[str, FileInfo], traffic: Traffic, file: str, start: int, view: memoryview
) -> None:
    if not view:
        return
    with asking_store(f"{folder.url}/{file}"):
        found = folder.system.cat_file(_full(folder, file), start=start, end=start + len(view))
    traffic.add(len(found), 1)
    if len(found) != len(view):
        message = f"{file}: {len(view):,} bytes from {start:,} on were asked for, {len(found):,} came"
        raise fail("source.range", message, file=file, hint="the same command again")
    view[:] = found


def _fetch_web(
    folder: Folder, files: dict[str, FileInfo], traffic: Traffic, file: str, start: int, view: memoryview
) -> None:
    """Over HTTP by this package's own ranges, which hold the answers against what was asked."""
    address = Address(_full(folder, file), {}, signed=False)
    fetch(Asked(file, files[file].size, lambda anew: address), start, view, traffic)


@contextlib.contextmanager
def asking_store(url: str, what: str = "read") -> Iterator[None]:
    """Turn whatever a store's library raises into UserError; its text is left out, since it may hold what is secret."""
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError:
        raise fail("source.missing", f"there is nothing at {url}", file=url, hint="correct the URL") from None
    except PermissionError:
        hint = "give the store's library its credentials: aws configure, gcloud auth application-default login"
        raise fail("access.denied", f"{url} may not be {what}", file=url, hint=hint) from None
    except Exception as error:
        hint = "are address and credentials right? the store's own variables and files say"
        message = f"{url} cannot be {what}: {type(error).__name__}"
        raise fail("access.unreachable", message, file=url, hint=hint) from None
