"""A branch of a model repository on the Hub as a destination: a result is one commit, large files first.

huggingface_hub does the protocol, tokens included. Large files that the Hub has already are not sent again, so the same
command carries on where a cut one stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token, is_offline_mode
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HfUriError, RepositoryNotFoundError
from huggingface_hub.utils import get_session, parse_hf_uri

from ..errors import Finding, UserError, fail
from ..files.source import Source
from ..manifest import NAME as MANIFEST
from ..manifest import read_manifest
from .hub import TOOL, asking_for, open_hub
from .push import Item, Pushed, Told, content_of, is_weights, stale

_NAMES = "org/name, or org/name@branch"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NOT_THERE = {"access.repository", "source.revision", "source.missing"}
_AT_ONCE = 5  # files: as many as huggingface_hub sends side by side
_SMALL = 16 << 20  # bytes: the Hub takes no larger file but as a large one
_PATIENCE = 300.0  # seconds for an answer: the Hub looks through a large commit before it gives one


class Branch(NamedTuple):
    """A branch of a model repository; ``private``: what the repository is to be if it has to be made."""

    id: str
    name: str
    private: bool

    @property
    def uri(self) -> str:
        return self.id if self.name == constants.DEFAULT_REVISION else f"{self.id}@{self.name}"

    @property
    def served(self) -> str | None:
        return self.uri

    def there(self) -> Source | None:
        """The branch at its head; of a branch that is to be made, what it will begin with.

        Raises UserError ``access.*``, also where nobody is logged in.
        """
        if is_offline_mode():
            raise fail("access.offline", f"HF_HUB_OFFLINE forbids to push to {self.uri}", hint="HF_HUB_OFFLINE=0")
        if not get_token():
            message = f"nobody is logged in at {constants.ENDPOINT}, and {self.id} is not written without"
            raise fail("access.denied", message, file=self.id, hint="hf auth login, or set HF_TOKEN")
        return _opened(self.id, self.name) or _opened(self.id, constants.DEFAULT_REVISION)

    def refused(self, there: Source | None, overwrite: bool, manifest: bytes | None) -> Finding | None:
        """``output.exists``: weights that no earlier push put there. Git keeps what a commit replaces."""
        weights = [name for name in there.files if is_weights(name)] if there else []
        if not weights or overwrite or (there and MANIFEST in there.files):
            return None
        message = f"{self.uri} holds {weights[0]}, which ckptkit did not push"
        hint = "name another repository; ckptkit push --overwrite puts a commit with the result on top"
        return Finding("output.exists", message, file=weights[0], hint=hint)

    def publish(self, items: tuple[Item, ...], manifest: Mapping[str, Any], there: Source | None, told: Told) -> Pushed:
        """Raises UserError: ``access.*``, ``output.conflict``, ``output.refused``, ``output.verify``."""
        base = _opened(self.id, self.name)
        if base and there and base.revision != there.revision:
            raise _conflict(self)
        gone = stale(there.files, read_manifest(there), items) if there else []
        new = [item for item in items if not _is_there(item, there)]
        if base and not new and not gone:
            return Pushed(f"{self.id}@{base.revision}", len(items), 0)
        message = f"ckptkit {manifest['command']}: plan {manifest['plan'][:16]}"
        with _writing(self):
            commit = self._commit(new, gone, message, there is None, base.revision if base else None, told)
        told(sum(item.size for item in items) - sum(item.size for item in new))
        _check(open_hub(f"hf://{self.id}@{commit}"), items)
        return Pushed(f"{self.id}@{commit}", len(items), sum(item.size for item in new), tuple(gone))

    def _commit(
        self, new: Sequence[Item], gone: Sequence[str], message: str, is_new: bool, parent: str | None, told: Told
    ) -> str:
        """Send the files, large ones first, and then the commit; gives its id. ``is_new``: the repository is to be made."""
        api = HfApi(**TOOL)
        if is_new:
            api.create_repo(self.id, private=self.private or None, exist_ok=True)
        begins = parent is None and self.name != constants.DEFAULT_REVISION
        additions = _send(api, self.id, constants.DEFAULT_REVISION if begins else self.name, new, told)
        deletions = [CommitOperationDelete(name, is_folder=False) for name in gone]
        if begins:
            api.create_branch(self.id, branch=self.name)
        try:
            made = api.create_commit(
                self.id, [*additions, *deletions], commit_message=message, revision=self.name, parent_commit=parent
            )
        except BaseException:
            if begins:
                with contextlib.suppress(HfHubHTTPError, httpx.HTTPError):
                    api.delete_branch(self.id, branch=self.name)
            raise
        return str(made.oid)


def branch(text: str, private: bool) -> Branch:
    """The branch that ``org/name[@branch]`` names. Raises UserError ``usage.destination``."""
    id, _, name = text.partition("@")
    try:
        parsed = parse_hf_uri(f"hf://{id}")
    except HfUriError as error:
        message = f"{text} is no name of a repository: {error.msg.rstrip('. ')}"
        raise fail("usage.destination", message, hint=_NAMES) from None
    if parsed.type != "model" or parsed.path_in_repo or parsed.id != id or id.count("/") != 1:
        raise fail("usage.destination", f"{text} names no model repository", hint=_NAMES)
    if _COMMIT.fullmatch(name):
        raise fail("usage.destination", f"{text} names a commit, and a result becomes a new one", hint=_NAMES)
    return Branch(id, name or constants.DEFAULT_REVISION, private)


def _opened(id: str, revision: str) -> Source | None:
    try:
        return open_hub(f"hf://{id}@{revision.replace('/', '%2F')}")
    except UserError as error:
        if error.findings[0].id in _NOT_THERE:
            return None
        raise


def _is_there(item: Item, there: Source | None) -> bool:
    """Whether the Hub's record of a file is of these bytes: the sha256 of a large one, git's digest of a small one."""
    found = there.files.get(item.name) if there else None
    if found is None or found.size != item.size:
        return False
    is_small = str(found.tag).startswith("git:")
    return found.tag == (_git_tag(item) if is_small else f"sha256:{item.sha256}")


def _git_tag(item: Item) -> str:
    content = content_of(item)
    digest = hashlib.sha1(b"blob %d\0" % len(content), usedforsecurity=False)
    digest.update(content)
    return f"git:{digest.hexdigest()}"


def _send(api: HfApi, id: str, revision: str, items: Sequence[Item], told: Told) -> list[CommitOperationAdd]:
    """Send the large ones of the files, largest first; gives what a commit needs to hold all of them."""
    additions = []
    ordered = sorted(items, key=attrgetter("size"), reverse=True)
    get_session().timeout = httpx.Timeout(constants.HF_HUB_DOWNLOAD_TIMEOUT, read=_PATIENCE, write=_PATIENCE)
    for start in range(0, len(ordered), _AT_ONCE):
        batch = ordered[start : start + _AT_ONCE]
        sent = [_addition(item) for item in batch]
        # An empty .gitignore: the repository's own would leave files out without a word.
        api.preupload_lfs_files(id, sent, revision=revision, free_memory=False, gitignore_content="")
        additions += sent
        told(sum(item.size for item in batch))
    return additions


def _addition(item: Item) -> CommitOperationAdd:
    """Raises UserError ``push.changed`` where a file is not the one any more that was looked at.

    A small one goes as its bytes, since a commit holds them; of a large one the Hub checks the sha256.
    """
    content = item.content
    try:
        if isinstance(content, Path) and item.size <= _SMALL:
            content = content.read_bytes()
        is_same = isinstance(content, Path) or hashlib.sha256(content).hexdigest() == item.sha256
        addition = CommitOperationAdd(item.name, content)
    except (OSError, ValueError):
        is_same = False
    if not is_same or addition.upload_info.size != item.size:
        message = f"{item.name} was changed while the result was sent"
        raise fail("push.changed", message, file=item.name, hint="make it again")
    addition.upload_info.sha256 = bytes.fromhex(item.sha256)
    return addition


def _check(there: Source, items: Sequence[Item]) -> None:
    """Raises UserError ``output.verify`` where the commit does not hold what was sent."""
    for item in items:
        if not _is_there(item, there):
            message = f"{there.uri} does not have {item.name} as it was sent"
            raise fail("output.verify", message, file=item.name, hint="the same command again")


@contextlib.contextmanager
def _writing(place: Branch) -> Iterator[None]:
    """Turn what is raised while a repository is written into UserError, as :func:`.hub.asking_for` does for reading."""
    with asking_for(place.id, place.name), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of metadata that a card could have besides
        try:
            try:
                yield
            except RuntimeError as error:  # of one large file: what it was lies within
                raise error.__cause__ or error from None
        except HfHubHTTPError as error:
            raise _refusal(place, error) or error from None
        except ValueError as error:  # metadata of a card, or an answer of the storage
            message = f"{place.uri} refuses the result: {' '.join(str(error).split())}"
            raise fail("output.refused", message, file=place.id, hint="mend README.md, then the same command") from None


def _refusal(place: Branch, error: HfHubHTTPError) -> UserError | None:
    """What an answer means for a repository that is written; None: the same as for one that is read."""
    status = error.response.status_code
    if isinstance(error, GatedRepoError) or (isinstance(error, RepositoryNotFoundError) and status != 403):
        return None
    if status in {401, 403}:
        message = f"{place.id} may not be written with this token (HTTP {status})"
        return fail("access.denied", message, file=place.id, hint="hf auth login, with a token that may write there")
    if status in {409, 412}:
        return _conflict(place)
    if status in {400, 413, 422}:
        message = f"{place.uri} refuses the commit: {error.server_message or f'HTTP {status}'}"
        return fail("output.refused", message, file=place.id, hint="mend what the Hub names, then the same command")
    return None


def _conflict(place: Branch) -> UserError:
    message = f"{place.uri} got another commit meanwhile; nothing of this one is visible"
    return fail("output.conflict", message, file=place.id, hint="the same command again: what was sent is kept there")
