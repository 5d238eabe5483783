"""Repositories on the Hugging Face Hub: create, list, upload to, download from. Reading datasets is `data/storage`.

Every error is a `HubError` that says what went wrong and how to fix it, and whether another attempt may help. No
message contains a token, and no file that contains one, or a password, is uploaded.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flexor.core.console import Progress
from flexor.core.errors import FlexorError
from flexor.core.http_errors import http_status
from flexor.core.hub_errors import Content, HubError, Interrupted, explain, persist, refuse_secrets
from flexor.core.manifest import hash_file
from flexor.core.paths import safe_name

if TYPE_CHECKING:
    from huggingface_hub import HfApi

Kind = Literal["model", "dataset"]

CARD = "README.md"
MADE_BY = "<!-- Made by Flexor. The next push replaces this card; remove this line to keep your changes. -->"
LICENSE = "apache-2.0"  # of a card, unless given; LeRobot's default

LARGEST_TEXT = 256 << 20  # bytes; a line of metrics.jsonl has one or two thousand

GROUP_FILES, GROUP_BYTES = 64, 1 << 30
"""How much is uploaded between two updates of the progress bar, and between two checks whether to stop."""


@dataclass(frozen=True)
class HubEntry:
    """A file in a repository."""

    size: int
    sha256: str | None  # of a large file
    blob: str  # git's hash, of a small file

    def holds(self, content: Content, sha256: str | None = None) -> bool:
        """Whether it has this content. `sha256`: what its hash is to be, if that is known."""
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        if self.size != size:
            return False
        if self.sha256 is not None:
            return self.sha256 == (sha256 or _sha256(content))
        data = content.read_bytes() if isinstance(content, Path) else content
        if sha256 not in (None, _sha256(data)):
            return False
        return self.blob == hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _sha256(content: Content) -> str:
    return hash_file(content) if isinstance(content, Path) else hashlib.sha256(content).hexdigest()


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
        """A text, such as a card or metrics, of at most LARGEST_TEXT bytes; None if there is none."""
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        with self._explained():
            url = hf_hub_url(self.repo_id, name, repo_type=self.kind, revision=revision)
            options: dict[str, Any] = {"headers": build_hf_headers(), "follow_redirects": True}
            with get_session().stream("GET", url, **options) as answer:
                if answer.status_code == 404:
                    return None
                if answer.status_code >= 400:
                    answer.read()  # the reason
                hf_raise_for_status(answer)
                content = bytearray()
                for part in answer.iter_bytes():
                    content += part
                    if len(content) > LARGEST_TEXT:
                        raise HubError(
                            f"{name} in {self.url} has more than {LARGEST_TEXT >> 20} MB, so it is not the text that "
                            "Flexor wrote. Check the repository."
                        )
                return bytes(content)

    def keeps_card(self, entries: Mapping[str, HubEntry]) -> bool:
        """Whether the repository has a card that somebody has written there, or changed."""
        return CARD in entries and MADE_BY.encode() not in (self.read(CARD) or b"")

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

        refuse_secrets(files)
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
            safe_name(name)
            persist(f"downloading {name}", lambda name=name: self._download(name, folder, revision))  # type: ignore[misc]
            done += size
            progress(done, total)

    def _download(self, name: str, folder: Path, revision: str) -> None:
        options: dict[str, Any] = {"repo_type": self.kind, "revision": revision, "local_dir": str(folder)}
        with self._explained() as api:
            api.hf_hub_download(self.repo_id, name, **options)

    @contextmanager
    def _explained(self) -> Iterator[HfApi]:
        """The client of the Hub; its errors become `HubError`."""
        from huggingface_hub import HfApi

        try:
            with _quiet():
                yield HfApi()
        except FlexorError:
            raise
        except Exception as error:
            raise explain(error, self.url) from None  # a traceback could show headers


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the client's own progress bars and log, which names addresses that anybody may upload to."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    logger = logging.getLogger("huggingface_hub")
    level, bars = logger.level, not are_progress_bars_disabled()
    logger.setLevel(logging.CRITICAL)
    if bars:
        disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if bars:
            enable_progress_bars()


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
