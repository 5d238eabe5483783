"""`flexor data push DIR USER/NAME`: upload a dataset so that whoever reads it finds all of it or the version before.

Tables and videos are committed first, in groups: an interrupted push continues with the group it was in. The metadata
comes last, in one commit with the card, and then the tag of the format's version, which readers look for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flexor.core.console import Progress
from flexor.core.errors import ConfigError, DatasetError
from flexor.core.hub import CARD, HubEntry, HubRepository
from flexor.core.hub_errors import Content, persist, require_token
from flexor.core.log import log, with_examples
from flexor.core.model_files import is_repo_id
from flexor.core.paths import files_to_push
from flexor.data.format.metadata import Metadata, read_metadata
from flexor.data.format.stats import BACKUP
from flexor.data.push.card import dataset_card
from flexor.data.storage.source import FolderSource

FOLDERS = ("data", "videos", "meta")  # what a dataset consists of; LeRobot does not push images/ either
COMMIT_FILES, COMMIT_BYTES = 200, 5 << 30  # of one commit


@dataclass(frozen=True)
class PushPlan:
    """What a push will do."""

    card: str
    tables_and_videos: dict[str, Path]
    metadata: dict[str, Path]

    @property
    def bytes(self) -> int:
        return _size(self.tables_and_videos | self.metadata)


def plan_push(
    root: Path, repo_id: str, license: str | None = None, tags: Sequence[str] | None = None
) -> PushPlan:
    """Read the dataset in a folder. An error if it is not complete."""
    if not is_repo_id(repo_id):
        raise ConfigError(f"{repo_id} is not the name of a repository on the Hub: give USER/NAME.")
    source = FolderSource(root)
    meta = read_metadata(source)
    _check_complete(root, meta)
    files = files_to_push(root, top=(*FOLDERS, CARD))
    files = {name: path for name, path in files.items() if not name.startswith(f"meta/stats.json{BACKUP}")}
    info = json.loads((root / "meta/info.json").read_text())
    written = files.pop(CARD, None)
    card = written.read_text() if written else dataset_card(info, meta.tasks, repo_id, license, tags)
    metadata = {name: path for name, path in files.items() if name.startswith("meta/")}
    return PushPlan(card, {name: p for name, p in files.items() if name not in metadata}, metadata)


def _check_complete(root: Path, meta: Metadata) -> None:
    missing = [name for name in meta.episodes.files() if not (root / name).is_file()]
    if missing:
        raise DatasetError(
            with_examples(f"{root} is not complete: {len(missing)} of its files are missing.", missing)
            + f"\nRun `flexor data check {root}`; `flexor data repair` writes a complete dataset."
        )


def push_dataset(
    root: Path,
    repo_id: str,
    private: bool | None = None,
    license: str | None = None,
    tags: Sequence[str] | None = None,
    delete_extra: bool = False,
    checking: Progress | None = None,
    uploading: Progress | None = None,
) -> dict[str, Any]:
    """Push a dataset; returns what was done. It can be called again after any interruption."""
    plan = plan_push(root, repo_id, license, tags)
    require_token()
    repository = HubRepository(repo_id, "dataset", private)
    operation = f"pushing {root}"
    persist(operation, repository.create)
    entries = persist(operation, repository.files)
    extra = _extra(plan, entries, repository, delete_extra)
    new = _changed({**plan.tables_and_videos, **plan.metadata}, entries, checking)
    new_bytes = _size(new)
    bar = _Bar(uploading, new_bytes)
    for group in _groups({name: path for name, path in new.items() if name in plan.tables_and_videos}):
        message = f"Upload {len(group)} files"
        persist(operation, partial(repository.commit, group, message, progress=bar.report))
        bar.done += _size(group)
    last: dict[str, Content] = {name: path for name, path in new.items() if name in plan.metadata}
    if (root / CARD).is_file() or not persist(operation, lambda: repository.keeps_card(entries)):
        last[CARD] = plan.card.encode()
    version = str(json.loads((root / "meta/info.json").read_text())["codebase_version"])
    commit = persist(operation, lambda: repository.commit(last, f"Dataset {version}", extra))
    persist(operation, lambda: repository.tag(version, commit))
    bar.report(new_bytes, new_bytes)
    return {
        "repo_id": repo_id,
        "url": repository.url,
        "commit": commit,
        "tag": version,
        "files": len(plan.tables_and_videos) + len(plan.metadata),
        "uploaded_files": len(new),
        "uploaded_bytes": new_bytes,
        "deleted_files": len(extra),
    }


def _size(files: dict[str, Path]) -> int:
    return sum(path.stat().st_size for path in files.values())


class _Bar:
    """One progress bar for several commits."""

    def __init__(self, progress: Progress | None, total: int):
        self.progress, self.total, self.done = progress, total, 0

    def report(self, done: int, _: int) -> None:
        if self.progress is not None and self.total:
            self.progress(min(self.done + done, self.total), self.total)


def _extra(
    plan: PushPlan, entries: dict[str, HubEntry], repository: HubRepository, delete: bool
) -> list[str]:
    """Files of a dataset in the repository that this dataset does not have: readers would take them for part of it."""
    pushed = plan.tables_and_videos.keys() | plan.metadata.keys()
    extra = [name for name in entries if name.split("/")[0] in FOLDERS and name not in pushed]
    if extra and not delete:
        summary = (
            f"{repository.url} has {len(extra)} files of a dataset that are not in this one, so it may be"
        )
        raise ConfigError(
            with_examples(f"{summary} another dataset:", extra)
            + "\nChoose another name, or delete them there with --delete-extra (earlier commits keep them)."
        )
    if extra:
        log.info("deleting %d files in %s that are not in this dataset", len(extra), repository.url)
    return extra


def _changed(
    files: dict[str, Path], entries: dict[str, HubEntry], progress: Progress | None
) -> dict[str, Path]:
    """Files that the repository does not have, or has with other content."""
    changed = {}
    for number, (name, path) in enumerate(files.items(), 1):
        if name not in entries or not entries[name].holds(path):
            changed[name] = path
        if progress:
            progress(number, len(files))
    return changed


def _groups(files: dict[str, Path]) -> Iterator[dict[str, Path]]:
    group: dict[str, Path] = {}
    size = 0
    for name, path in files.items():
        group[name] = path
        size += path.stat().st_size
        if len(group) == COMMIT_FILES or size >= COMMIT_BYTES:
            yield group
            group, size = {}, 0
    if group:
        yield group
