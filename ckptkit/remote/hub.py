"""A repository of the Hub as a source, pinned to the commit that its revision is when it is opened.

huggingface_hub does the protocol: names, tokens, endpoint, cache, offline mode (its HF_* variables). Files that its
cache has at that commit are read there.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_download, hf_hub_url, is_offline_mode
from huggingface_hub import logging as hub_logging
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HfUriError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, disable_progress_bars, get_session, parse_hf_uri

from .. import __version__
from ..errors import UserError, fail
from ..files.source import FileInfo, Source, file_info, is_of_checkpoint, is_plain, scan_folder
from .proof import proving
from .ranges import Address, Asked, Traffic, fetch, patiently
from .store import RemoteStore

_PIECE = 4 << 20
TOOL: dict[str, Any] = {"library_name": "ckptkit", "library_version": __version__}


class Repository(NamedTuple):
    """A model repository at one commit. ``path`` is what of it is meant: a folder, a file, or "" for all."""

    id: str
    commit: str
    path: str

    @property
    def uri(self) -> str:
        name = f"{self.id}@{self.commit}"
        return f"hf://{name}/{self.path}" if self.path else name

    @property
    def snapshot(self) -> Path:
        """Where the Hub cache has this commit's files."""
        return _cache_of(self.id) / "snapshots" / self.commit


def is_of_hub(url: str) -> bool:
    """Whether a web address is one of the Hub's pages."""
    return urlsplit(url).netloc in {*constants.HF_URL_HOSTS, urlsplit(constants.ENDPOINT).netloc}


def open_hub(uri: str) -> Source:
    """The source that ``hf://org/name[@revision][/path]`` names; what is listed of it, and no content, is fetched.

    Raises UserError: ``access.*``, ``source.missing``, ``source.revision``, ``usage.source``.
    """
    _be_quiet()
    try:
        named = parse_hf_uri(uri, endpoint=constants.ENDPOINT)
    except HfUriError as error:
        message = f"{uri.removeprefix('hf://')} is no name that the Hub has: {error.msg.rstrip('. ')}"
        raise fail("usage.source", message, hint=_NAMES) from None
    if named.type != "model":
        raise fail("usage.source", f"{uri} names a {named.type}; checkpoints are model repositories", hint=_NAMES)
    if is_offline_mode():
        return _open_cached(named.id, named.revision or constants.DEFAULT_REVISION, named.path_in_repo)
    commit, listed = _listed(named.id, named.revision)
    return _source(Repository(named.id, commit, named.path_in_repo.rstrip("/")), listed)


def _listed(id: str, revision: str | None) -> tuple[str, list[RepoFile]]:
    """The commit that a revision is now, and its files. Raises UserError."""
    api = HfApi(**TOOL)
    with asking_for(id, revision):
        try:
            commit = patiently(partial(api.model_info, id, revision=revision)).sha
            entries = patiently(lambda: list(api.list_repo_tree(id, recursive=True, revision=commit)))
            if not commit or not is_plain(commit):
                raise ValueError(commit)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            message = f"{constants.ENDPOINT} answered with what is no listing of {id} ({type(error).__name__})"
            hint = "is HF_ENDPOINT a Hub, and no proxy's page between?"
            raise fail("access.unreachable", message, file=id, hint=hint) from None
    return commit, [entry for entry in entries if isinstance(entry, RepoFile) and is_of_checkpoint(entry.path)]


_NAMES = "org/name, org/name@revision, or hf://org/name@revision/folder"


def _source(repository: Repository, listed: Sequence[RepoFile]) -> Source:
    """The files at or below the repository's path, by their names from there on."""
    path = repository.path
    is_file = any(entry.path == path for entry in listed)
    prefix = path[: path.rfind("/") + 1] if is_file else path and f"{path}/"
    meant = [entry for entry in listed if (entry.path == path if is_file else entry.path.startswith(prefix))]
    if not meant:
        message = f"{repository.uri} names nothing that the repository holds"
        raise fail("source.missing", message, file=repository.uri, hint=f"hf models ls {repository.id}")
    files = {entry.path.removeprefix(prefix): _info(repository, entry) for entry in sorted(meant, key=_path)}
    addresses, traffic = _Addresses(repository), Traffic()

    def fetch_range(file: str, start: int, view: memoryview) -> None:
        fetch(Asked(file, files[file].size, partial(addresses.of, prefix + file)), start, view, traffic)

    def fetch_whole(file: str) -> Path:
        return _downloaded(repository, prefix + file, files[file], traffic)

    store = RemoteStore(files, fetch_range, fetch_whole, lambda: dict(files), traffic)
    return Source(repository.uri, repository.snapshot / path, files, store=store, revision=repository.commit)


def _path(entry: RepoFile) -> str:
    return entry.path


def _info(repository: Repository, entry: RepoFile) -> FileInfo:
    """A listed file: in the cache, or still on the server."""
    tag = f"sha256:{entry.lfs.sha256}" if entry.lfs else f"git:{entry.blob_id}"
    path = repository.snapshot / entry.path
    with contextlib.suppress(OSError):
        cached = file_info(path)
        if cached.size == entry.size:
            return replace(cached, tag=tag)
    return FileInfo(path, entry.size, 0, 0, 0o644, tag, here=False)


class _Addresses:
    """Where each file's bytes are got: asked once, and again when a signed address has expired."""

    def __init__(self, repository: Repository):
        self._repository = repository
        self._known: dict[str, Address] = {}

    def of(self, path: str, anew: bool) -> Address:
        if anew or path not in self._known:
            self._known[path] = _address(self._repository, path)
        return self._known[path]


def _address(repository: Repository, path: str) -> Address:
    """Raises UserError. The token is for the Hub alone: an address elsewhere is signed and gets none."""
    url = hf_hub_url(repository.id, path, revision=repository.commit)
    with asking_for(repository.id, repository.commit):
        location = get_hf_file_metadata(url, retry_on_errors=True, **TOOL).location
    signed = urlsplit(location).netloc != urlsplit(url).netloc
    return Address(location, {} if signed else build_hf_headers(**TOOL), signed)


def _downloaded(repository: Repository, path: str, info: FileInfo, traffic: Traffic) -> Path:
    """The file in the Hub cache, fetched if need be, and held against the Hub's record; a wrong one is fetched again."""
    for attempt in (1, 2):
        with asking_for(repository.id, repository.commit):
            options: dict[str, Any] = {"revision": repository.commit, "force_download": attempt == 2, **TOOL}
            named = Path(patiently(partial(hf_hub_download, repository.id, path, **options), traffic))
            found = named.resolve()
        traffic.add(info.size, 1)
        try:
            with proving(info, path) as digest, open(found, "rb") as file:
                while piece := file.read(_PIECE):
                    digest.update(piece)
            return found
        except UserError:
            for wrong in (named, found):
                wrong.unlink(missing_ok=True)
            if attempt == 2:
                raise
    raise AssertionError  # the second attempt returns or raises


# --- without a network -------------------------------------------------------------------------------------


def _open_cached(id: str, revision: str, path: str) -> Source:
    """What the Hub cache has of a revision, whole or not: whatever is missing, the checkpoint's index tells."""
    folder, commit = _cache_of(id), revision
    with contextlib.suppress(OSError):
        commit = (folder / "refs" / revision).read_text("utf-8").strip() if is_plain(revision) else revision
    repository = Repository(id, commit, path.rstrip("/"))
    root = repository.snapshot / path
    if not is_plain(commit) or not is_plain(repository.path or commit) or not root.exists():
        what = f"{path} of {id}" if path else id
        message = f"{what} at {revision} is not in the Hub cache ({folder}), and HF_HUB_OFFLINE forbids to fetch it"
        hint = f"HF_HUB_OFFLINE=0 hf download {id} --revision {revision}"
        raise fail("access.offline", message, file=id, hint=hint)
    return Source(repository.uri, root, *scan_folder(root), revision=commit)


def _cache_of(id: str) -> Path:
    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=id, repo_type="model")


# --- what can be wrong -------------------------------------------------------------------------------------


def _be_quiet() -> None:
    """The console alone prints; what huggingface_hub would warn of ends in a finding, or was a retry that helped.

    Nor is it told what this is run by: that takes a request of its own, and is nobody's business.
    """
    constants.HF_HUB_DISABLE_TELEMETRY = True
    get_session().timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT  # it has none of its own, and a server may go silent
    hub_logging.set_verbosity(logging.CRITICAL)
    disable_progress_bars()


@contextlib.contextmanager
def asking_for(id: str, revision: str | None) -> Iterator[None]:
    """Turn what huggingface_hub and the network raise into UserError, without the addresses and tokens in its text."""
    try:
        yield
    except GatedRepoError:
        page = f"{constants.ENDPOINT}/{id}"
        message = f"{id} is gated: who was granted access at {page} may read it, once logged in"
        raise fail("access.gated", message, file=id, hint="hf auth login") from None
    except RepositoryNotFoundError:
        message = f"{id} is not on {constants.ENDPOINT}, or is private and not yours to read"
        raise fail("access.repository", message, file=id, hint="hf auth login, or correct the name") from None
    except RevisionNotFoundError:
        message = f"{id} has no revision {revision}"
        raise fail("source.revision", message, file=id, hint=f"a branch, a tag or a commit: {id}@main") from None
    except RemoteEntryNotFoundError:
        raise fail("source.changed", f"a file of {id} is gone", file=id, hint="the same command again") from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in {401, 403}:
            raise fail(
                "access.denied", f"{id} may not be read (HTTP {status})", file=id, hint="hf auth login"
            ) from None
        message = f"{constants.ENDPOINT} answered HTTP {status} for {id}"
        raise fail("access.unreachable", message, file=id, hint="the same command again, later") from None
    except (httpx.TransportError, OfflineModeIsEnabled, LocalEntryNotFoundError) as error:
        message = f"{constants.ENDPOINT} cannot be reached for {id} ({type(error).__name__})"
        raise fail("access.unreachable", message, file=id, hint="HF_HUB_OFFLINE=1 takes what the cache has") from None
