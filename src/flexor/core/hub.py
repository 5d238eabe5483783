"""Repositories on the Hugging Face Hub: create, list, upload to, download from. Reading datasets is `data/storage`.

Every error is a `HubError` that says what went wrong and how to fix it, and whether another attempt may help. No
message contains the token, and no file that contains it is uploaded.
"""

from __future__ import annotations

import json
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from flexor.core.console import Progress
from flexor.core.errors import FlexorError
from flexor.core.http_errors import http_status, retry_after
from flexor.core.log import log

if TYPE_CHECKING:
    from huggingface_hub import HfApi

T = TypeVar("T")
Kind = Literal["model", "dataset"]
Content = Path | bytes

CARD = "README.md"
MADE_BY = "<!-- Made by Flexor. The next push replaces this card; remove this line to keep your changes. -->"
LICENSE = "apache-2.0"  # of a card, unless given; LeRobot's default

FIRST_WAIT = 2.0
"""Seconds before the second attempt; doubled for each further attempt, with random jitter in the upper half."""
LONGEST_WAIT = 300.0
PATIENCE = 300.0
"""Seconds after the first failure of a command during which it tries again."""
GROUP_FILES, GROUP_BYTES = 64, 1 << 30
"""How much is uploaded between two updates of the progress bar, and between two checks whether to stop."""
TEXTS = (".json", ".jsonl", ".yaml", ".yml", ".md", ".txt")
SHORTEST_SECRET = 8  # a shorter token may occur in a text by chance
FULL = ("storage limit", "quota", "storage is full", "exceeded your storage")


class HubError(FlexorError):
    """The Hub can't be reached or rejects a request."""

    def __init__(self, text: str, may_help: bool = False, wait: float | None = None, offline: bool = False):
        super().__init__(text)
        self.may_help = may_help  # whether another attempt may
        self.wait = wait  # seconds that the server asks to wait
        self.offline = offline or may_help  # nothing is wrong but the network


class Interrupted(FlexorError):
    """An upload was told to stop."""


@dataclass(frozen=True)
class HubEntry:
    """A file in a repository."""

    size: int
    sha256: str | None  # of a large file
    blob: str  # git's hash, of a small file


class Backoff:
    """How long to wait before the next attempt."""

    def __init__(self) -> None:
        self.failures = 0

    def seconds(self, error: HubError) -> float:
        self.failures += 1
        if error.wait is not None:
            return min(error.wait, LONGEST_WAIT)
        return random.uniform(0.5, 1) * min(FIRST_WAIT * 2 ** (self.failures - 1), LONGEST_WAIT)


def persist(
    what: str,
    action: Callable[[], T],
    patience: float | None = None,
    stop: threading.Event | None = None,
) -> T:
    """The result of `action`. Tries again while that may help, until `patience` seconds after the first failure."""
    stop, backoff, first = stop or threading.Event(), Backoff(), None
    limit = PATIENCE if patience is None else patience
    while True:
        try:
            return action()
        except HubError as error:
            first = time.monotonic() if first is None else first
            wait = backoff.seconds(error)
            if not error.may_help or time.monotonic() + wait > first + limit:
                raise
            log.warning("%s: %s Trying again in %.0f s.", what, error, wait)
            if stop.wait(wait):
                raise Interrupted(f"{what} was interrupted.") from error


class HubRepository:
    """One repository. `private` is only used when it is created; None: the default of its owner."""

    def __init__(self, repo_id: str, kind: Kind = "model", private: bool | None = None):
        self.repo_id, self.kind, self.private = repo_id, kind, private

    @property
    def url(self) -> str:
        from huggingface_hub import constants

        return f"{constants.ENDPOINT}/{'datasets/' if self.kind == 'dataset' else ''}{self.repo_id}"

    def create(self) -> None:
        """Create the repository unless it exists."""
        with self._explained() as api:
            api.create_repo(self.repo_id, repo_type=self.kind, private=self.private, exist_ok=True)

    def newest_commit(self, revision: str | None = None) -> str:
        with self._explained() as api:
            return str(api.repo_info(self.repo_id, repo_type=self.kind, revision=revision).sha)

    def files(self, revision: str | None = None) -> dict[str, HubEntry]:
        """All files at a revision, by name."""
        from huggingface_hub.hf_api import RepoFile

        with self._explained() as api:
            tree = api.list_repo_tree(
                self.repo_id, recursive=True, revision=revision or "main", repo_type=self.kind
            )
            return {
                entry.path: HubEntry(entry.size, entry.lfs.sha256 if entry.lfs else None, entry.blob_id)
                for entry in tree
                if isinstance(entry, RepoFile)
            }

    def read(self, name: str, revision: str | None = None) -> bytes | None:
        """A small file; None if there is none."""
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        with self._explained():
            url = hf_hub_url(self.repo_id, name, repo_type=self.kind, revision=revision)
            answer = get_session().get(url, headers=build_hf_headers(), follow_redirects=True)
            if answer.status_code == 404:
                return None
            hf_raise_for_status(answer)
            return bytes(answer.content)

    def keeps_card(self, there: Mapping[str, HubEntry]) -> bool:
        """Whether the repository has a card that somebody has written there, or changed."""
        return CARD in there and MADE_BY.encode() not in (self.read(CARD) or b"")

    def commit(
        self,
        files: Mapping[str, Content],
        message: str,
        deleted: Collection[str] = (),
        progress: Progress | None = None,
        stop: threading.Event | None = None,
    ) -> str:
        """Upload files and make them visible together, in one commit; returns its hash.

        What an interrupted call has uploaded is not uploaded again by the next one.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        refuse_token(files)
        with self._explained() as api:
            added = [CommitOperationAdd(name, content) for name, content in files.items()]
            for group, done, total in _groups(added):
                if stop is not None and stop.is_set():
                    raise Interrupted(f"The upload to {self.url} was interrupted.")
                api.preupload_lfs_files(self.repo_id, additions=group, repo_type=self.kind, free_memory=False)
                if progress is not None:
                    progress(done, total)
            operations: list[Any] = [CommitOperationDelete(name) for name in deleted]
            made = api.create_commit(
                self.repo_id, [*operations, *added], commit_message=message, repo_type=self.kind
            )
            return str(made.oid)

    def tag(self, name: str, commit: str) -> None:
        """Point a tag at a commit, whatever it pointed at before."""
        from huggingface_hub.errors import HfHubHTTPError

        with self._explained() as api:
            try:
                api.create_tag(self.repo_id, tag=name, revision=commit, repo_type=self.kind)
            except HfHubHTTPError as error:
                if http_status(error) != 409:
                    raise
                api.delete_tag(self.repo_id, tag=name, repo_type=self.kind)
                api.create_tag(self.repo_id, tag=name, revision=commit, repo_type=self.kind)

    def download(self, names: Mapping[str, int], folder: Path, revision: str, progress: Progress) -> None:
        """Download files (name -> size) into a folder. An interrupted download continues where it stopped."""
        done, total = 0, sum(names.values())
        for name, size in names.items():
            persist(f"downloading {name}", lambda name=name: self._download(name, folder, revision))  # type: ignore[misc]
            done += size
            progress(done, total)

    def _download(self, name: str, folder: Path, revision: str) -> None:
        with self._explained() as api:
            api.hf_hub_download(
                self.repo_id, name, repo_type=self.kind, revision=revision, local_dir=str(folder)
            )

    @contextmanager
    def _explained(self) -> Iterator[HfApi]:
        """The client of the Hub; its errors become `HubError`."""
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars

        # its log names addresses that anybody may upload to
        logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
        if "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ:
            disable_progress_bars()  # Flexor draws its own
        try:
            yield HfApi()
        except FlexorError:
            raise
        except Exception as error:
            raise explain(error, self) from None  # a traceback could show headers


def _groups(added: list[Any]) -> Iterator[tuple[list[Any], int, int]]:
    """The files in groups, each with how many bytes are done after it, and how many there are."""
    total, done = sum(op.upload_info.size for op in added), 0
    group: list[Any] = []
    for op in added:
        group.append(op)
        size = sum(member.upload_info.size for member in group)
        if len(group) == GROUP_FILES or size >= GROUP_BYTES or op is added[-1]:
            done += size
            yield group, done, total
            group = []


def token() -> str | None:
    """The user's token: from HF_TOKEN, or from `hf auth login`."""
    from huggingface_hub import get_token

    return get_token()


def redacted(text: str) -> str:
    """The text without the token."""
    secret = token()
    return text.replace(secret, "***") if secret and len(secret) >= SHORTEST_SECRET else text


def refuse_token(files: Mapping[str, Content]) -> None:
    """Refuse to upload a text that contains the token: others could read it."""
    secret = (token() or "").encode()
    if len(secret) < SHORTEST_SECRET:
        return
    for name, content in files.items():
        if not name.endswith(TEXTS):
            continue
        text = content if isinstance(content, bytes) else content.read_bytes()
        if secret in text:
            raise HubError(
                f"{name} contains your Hub token, so nothing was uploaded. Remove the token from the settings, and "
                "log in with `hf auth login` instead."
            )


def require_token() -> None:
    if token() is None:
        raise HubError(
            "You are not logged in to the Hugging Face Hub. Log in with `hf auth login`, or set HF_TOKEN, to a token "
            "with write access."
        )


def explain(error: Exception, repository: HubRepository) -> HubError:
    """What an error of the Hub's client means, and whether another attempt may help."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    chain = list(_causes(error))
    answer = next((e for e in chain if isinstance(e, HfHubHTTPError)), None)
    if answer is not None:
        return _rejected(answer, repository)
    if any(isinstance(e, OfflineModeIsEnabled) for e in chain):
        return HubError("HF_HUB_OFFLINE is set, so the Hub can't be used. Unset it.", offline=True)
    said = redacted(_first_line(chain[-1]))
    if isinstance(error, ValueError) and "metadata in README" in str(error):
        return HubError(
            f"The Hub rejects the card (README.md): {redacted(' '.join(str(error).split()))} Check the licence and the "
            "tags."
        )
    unreachable = isinstance(
        error, json.JSONDecodeError | LocalEntryNotFoundError
    )  # an error page; no answer
    if isinstance(error, ValueError | FileNotFoundError | PermissionError) and not unreachable:
        return HubError(f"The upload to {repository.url} failed: {said}")
    return HubError(f"Can't reach {repository.url}: {said}. Check the network.", may_help=True)


def _rejected(error: Any, repository: HubRepository) -> HubError:
    status = http_status(error) or 0
    said = redacted(error.server_message or _first_line(error)).rstrip(".")
    full = status in (402, 403, 413, 507) and any(word in said.lower() for word in FULL)
    owner = repository.repo_id.partition("/")[0]
    advice = {
        401: "The Hub does not accept your token. Log in with `hf auth login`, or set HF_TOKEN to a valid one.",
        403: f"Your token has no permission to write to {repository.url}. It needs write access to {owner}.",
        404: f"{repository.url} does not exist, or your token can't read it. Check the name.",
        429: "The Hub gets too many requests from you.",
    }.get(status, "The Hub fails." if status >= 500 else "The Hub rejects the request.")
    if full:
        advice = f"The storage of {owner} on the Hub is full. Delete what is not needed there, or get more."
    may_help = not full and (status in (408, 409, 412, 425, 429) or status >= 500)
    return HubError(f"{advice} Its answer: {status} {said}.", may_help, retry_after(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]
