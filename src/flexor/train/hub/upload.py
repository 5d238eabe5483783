"""What a run's repository on the Hub contains, and how it gets there.

    README.md             the model card
    config.json, ...      the policy of the newest checkpoint, as in its pretrained_model folder
    config.yaml, metrics.jsonl, run.json      of the run
    checkpoints/020000/   the whole checkpoint, if asked for: LeRobot's place for it, also tagged 020000

A checkpoint and the policy in it become visible in one commit, or not at all.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexor.config.parse import read_run
from flexor.config.schema import TrainConfig
from flexor.core.console import Progress
from flexor.core.hub import CARD, HubEntry, HubRepository
from flexor.core.hub_errors import Content, HubError, require_token
from flexor.core.manifest import read_manifest
from flexor.core.paths import inside
from flexor.core.run_files import CHECKPOINTS, MANIFEST, METRICS, PRETRAINED, RUN_CONFIG, RUN_RECORD, WEIGHTS
from flexor.train.checkpoint import folder as checkpoint
from flexor.train.checkpoint.run_record import note, read_record
from flexor.train.hub.card import model_card

POLICY_SUFFIXES = (".json", ".safetensors")


@dataclass(frozen=True)
class HubSettings:
    """Where a run is pushed, and what its card says."""

    repo_id: str
    private: bool | None = None
    tags: Sequence[str] | None = None
    license: str | None = None

    @classmethod
    def of(cls, config: TrainConfig) -> HubSettings:
        policy = config.policy
        assert policy.repo_id is not None
        return cls(policy.repo_id, policy.private, policy.tags, policy.license)


class RunOnHub:
    """A run and its repository."""

    def __init__(self, run: Path, settings: HubSettings):
        self.run, self.settings = run, settings
        self.repository = HubRepository(settings.repo_id, private=settings.private)

    def prepare(self) -> None:
        """Create the repository. Raises an error if the run can't be pushed there."""
        require_token()
        self.repository.create()
        self._there()

    def push(
        self,
        folder: Path,
        name: str,
        whole: bool = False,
        policy: bool = True,
        progress: Progress | None = None,
        stop: threading.Event | None = None,
    ) -> str:
        """Push the checkpoint in `folder`, called `name`; returns the commit.

        `whole`: with all that resuming needs. `policy`: with the policy; else only the card, metrics and settings.
        """
        there = self._there()
        resumable = whole or f"{CHECKPOINTS}/{name}/{checkpoint.MANIFEST}" in there
        files: dict[str, Content] = self._texts(name, there, resumable)
        files |= policy_files(folder) if policy else {}
        if whole:
            files |= {f"{CHECKPOINTS}/{name}/{n}": path for n, path in checkpoint_files(folder).items()}
        old = [n for n in there if n not in files and _is_replaced(n, name, whole, WEIGHTS in files)]
        commit = self.repository.commit(files, f"Checkpoint {name}", old, progress, stop)
        if whole:
            self._check_pushed(folder, name, commit)
            self.repository.tag(name, commit)
        return commit

    def _check_pushed(self, folder: Path, name: str, commit: str) -> None:
        """Refuse to call a checkpoint pushed that could not be resumed from: the Hub must have all of its files."""
        entries = self.repository.files(commit)
        for file, listed in {**read_manifest(folder), MANIFEST: None}.items():
            path, entry = folder / file, entries.get(f"{CHECKPOINTS}/{name}/{file}")
            size = path.stat().st_size if listed is None else listed.size
            if entry is None or entry.size != size or not entry.holds(path, listed and listed.sha256):
                raise HubError(
                    f"{self.repository.url} does not have {file} of checkpoint {name} as it is here, after it was "
                    "pushed. Push it again.",
                    may_help=True,
                )

    def missing(self) -> list[Path]:
        """Complete checkpoints of the run that the repository does not have, oldest first."""
        there = self._there()
        return [
            folder
            for folder in checkpoint.complete(self.run / CHECKPOINTS).values()
            if f"{CHECKPOINTS}/{folder.name}/{checkpoint.MANIFEST}" not in there
        ]

    def _there(self) -> dict[str, HubEntry]:
        """The files in the repository. Refuses one that has checkpoints of another run: the two would be mixed."""
        there = self.repository.files()
        taken = any(name.startswith(f"{CHECKPOINTS}/") for name in there)
        owner = self._owner(there) if taken else None
        if taken and (owner is None or owner != read_record(self.run).get("id")):
            raise HubError(
                f"{self.repository.url} already holds the checkpoints of another run. Choose another "
                "--policy.repo_id, or delete that repository."
            )
        return there

    def _owner(self, there: dict[str, HubEntry]) -> str | None:
        text = self.repository.read(RUN_RECORD) if RUN_RECORD in there else None
        try:
            return str(json.loads(text or b"")["id"])
        except (ValueError, KeyError, TypeError):
            return None

    def _texts(self, name: str, there: dict[str, HubEntry], resumable: bool) -> dict[str, Content]:
        step = int(name)
        record = {**note(self.run), "checkpoint": name, "step": step}
        files: dict[str, Content] = {
            RUN_CONFIG: (self.run / RUN_CONFIG).read_bytes(),
            RUN_RECORD: json.dumps(record, indent=2).encode(),
        }
        if (self.run / METRICS).is_file():
            text = (self.run / METRICS).read_bytes()
            files[METRICS] = text[: text.rfind(b"\n") + 1]  # without a line that is being written
        if not self.repository.keeps_card(there):
            files[CARD] = self.card(step, resumable).encode()
        return files

    def card(self, step: int, resumable: bool) -> str:
        settings = self.settings
        return model_card(self.run, step, settings.repo_id, settings.license, settings.tags, resumable)


def policy_files(folder: Path) -> dict[str, Content]:
    """The policy of a checkpoint, for the root of the repository; none if its weights were not exported."""
    files = _files(folder / PRETRAINED)
    return dict(files) if WEIGHTS in files else {}


def checkpoint_files(folder: Path) -> dict[str, Path]:
    """All files of a checkpoint: those that it was saved with, and weights that were exported later."""
    return _files(folder) | {name: inside(folder, name) for name in read_manifest(folder)}


def _files(folder: Path) -> dict[str, Path]:
    """All files of a folder by name, without hidden ones."""
    found = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {path.relative_to(folder).as_posix(): path for path in found}


def _is_replaced(there: str, name: str, whole: bool, policy: bool) -> bool:
    """Whether a file in the repository belongs to what is pushed now: if it is not pushed again, it is old."""
    if there.startswith(f"{CHECKPOINTS}/{name}/"):
        return whole
    top = there.removeprefix("adapter/")
    return policy and "/" not in top and top.endswith(POLICY_SUFFIXES) and there != RUN_RECORD


def settings_of(run: Path, **given: Any) -> HubSettings:
    """Where a run was to be pushed by its own settings, with changes that are not None."""
    policy = read_run(run)["policy"]
    values = {name: policy.get(name) for name in ("repo_id", "private", "tags", "license")}
    values |= {name: value for name, value in given.items() if value is not None}
    if values["repo_id"] is None:
        raise HubError(f"{run} was trained without a repository: name it with --repo_id=USER/NAME.")
    return HubSettings(**values)
