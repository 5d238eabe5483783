"""What a run's repository on the Hub contains, and how it gets there.

    README.md             the model card
    config.json, ...      the policy of the newest checkpoint, as in its pretrained_model folder
    config.yaml, metrics.jsonl, run.json      of the run
    checkpoints/020000/   the whole checkpoint, if asked for: LeRobot's place for it, also tagged 020000

A checkpoint and the policy in it become visible in one commit, or not at all.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexor.config.parse import read_run
from flexor.config.schema import TrainConfig
from flexor.core.console import Progress
from flexor.core.errors import CheckpointError
from flexor.core.hub import CARD, HubEntry, HubRepository
from flexor.core.hub_errors import Content, HubError, require_token
from flexor.core.manifest import EXPORTED, read_manifest
from flexor.core.paths import files_to_push
from flexor.core.published import published
from flexor.core.run_files import CHECKPOINTS, METRICS, PRETRAINED, RUN_CONFIG, RUN_RECORD, WEIGHTS
from flexor.train.checkpoint import folder as checkpoint
from flexor.train.checkpoint.export import write_weights_to_act
from flexor.train.checkpoint.run_record import id_in, note, read_record
from flexor.train.hub.card import model_card
from flexor.train.hub.settings_files import published_file, with_published_settings

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
        self._remote_files()

    def push(
        self,
        folder: Path,
        name: str,
        full: bool = False,
        policy: bool = True,
        progress: Progress | None = None,
        stop: threading.Event | None = None,
    ) -> str:
        """Push the checkpoint in `folder`, called `name`; returns the commit.

        `full`: with all that resuming needs. `policy`: with the policy; else only the card, metrics and settings.
        """
        remote = self._remote_files()
        resumable = full or f"{CHECKPOINTS}/{name}/{checkpoint.MANIFEST}" in remote
        files: dict[str, Content] = self._texts(name, remote, resumable)
        files |= policy_files(folder) if policy else {}
        with tempfile.TemporaryDirectory(prefix="flexor-") as temporary:
            cast = Path(temporary) / WEIGHTS
            if WEIGHTS in files and write_weights_to_act(folder, folder / PRETRAINED, cast):
                files[WEIGHTS] = cast
            if full:
                contents = checkpoint_files(folder)
                files |= {f"{CHECKPOINTS}/{name}/{file}": content for file, content in contents.items()}
            old = [n for n in remote if n not in files and _is_replaced(n, name, full, WEIGHTS in files)]
            commit = self.repository.commit(files, f"Checkpoint {name}", old, progress, stop)
            saved = {file: content for file, content in files.items() if content != cast}
            self._check_pushed(files, _manifest_hashes(folder, name, saved), commit)
        if full:
            self.repository.tag(name, commit)
        return commit

    def _check_pushed(self, files: Mapping[str, Content], hashes: Mapping[str, str], commit: str) -> None:
        """Raise an error if the Hub does not have the files as the manifest lists them."""
        entries = self.repository.files(commit)
        for name, content in files.items():
            if name not in entries or not entries[name].holds(content, hashes.get(name)):
                raise HubError(
                    f"{self.repository.url} does not have {name} as it was saved here, after it was pushed. Push it "
                    "again.",
                    may_help=True,
                )

    def missing(self) -> list[Path]:
        """Complete checkpoints of the run that the repository does not have, oldest first."""
        remote, local = self._remote_files(), checkpoint.complete(self.run / CHECKPOINTS).values()
        return [f for f in local if f"{CHECKPOINTS}/{f.name}/{checkpoint.MANIFEST}" not in remote]

    def _remote_files(self) -> dict[str, HubEntry]:
        """The files in the repository. Refuses one that has checkpoints of another run: the two would be mixed."""
        remote = self.repository.files()
        if any(name.startswith(f"{CHECKPOINTS}/") for name in remote):
            run_id = id_in(self.repository.read(RUN_RECORD) if RUN_RECORD in remote else None)
            if run_id is None or run_id != read_record(self.run).get("id"):
                raise HubError(
                    f"{self.repository.url} already holds the checkpoints of another run. Choose another "
                    "--policy.repo_id, or delete that repository."
                )
        return remote

    def _texts(self, name: str, remote: dict[str, HubEntry], resumable: bool) -> dict[str, Content]:
        step = int(name)
        record = {**note(self.run), "checkpoint": name, "step": step}
        files: dict[str, Content] = {
            RUN_CONFIG: published_file(RUN_CONFIG, self.run / RUN_CONFIG),
            RUN_RECORD: json.dumps(published(record), indent=2).encode(),
        }
        if (self.run / METRICS).is_file():
            text = (self.run / METRICS).read_bytes()
            files[METRICS] = text[: text.rfind(b"\n") + 1]  # without a line that is being written
        if not self.repository.keeps_card(remote):
            files[CARD] = self.card(step, resumable).encode()
        return files

    def card(self, step: int, resumable: bool) -> str:
        settings = self.settings
        return model_card(self.run, step, settings.repo_id, settings.license, settings.tags, resumable)


def policy_files(folder: Path) -> dict[str, Content]:
    """The policy of a checkpoint, for the root of the repository; none if its weights were not exported."""
    files = files_to_push(folder / PRETRAINED)
    return with_published_settings(files) if WEIGHTS in files else {}


def checkpoint_files(folder: Path) -> dict[str, Content]:
    """All files of a checkpoint: those that it was saved with, and weights that were exported later."""
    listed = read_manifest(folder)
    files = files_to_push(folder, hidden=True)
    if missing := listed.keys() - files.keys():
        raise CheckpointError(f"{folder} is damaged: {min(missing)} is missing. Push another checkpoint.")
    visible = (name for name in files if not any(part.startswith(".") for part in name.split("/")))
    return with_published_settings({name: files[name] for name in sorted({*visible, *listed})})


def _manifest_hashes(folder: Path, name: str, files: Mapping[str, Content]) -> dict[str, str]:
    """The hashes in the manifest of the checkpoint in `folder`, by the names on the Hub. New contents have none."""
    hashes = {}
    for file, entry in {**read_manifest(folder), **read_manifest(folder, EXPORTED)}.items():
        for remote in (file.removeprefix(f"{PRETRAINED}/"), f"{CHECKPOINTS}/{name}/{file}"):
            if isinstance(files.get(remote), Path):
                hashes[remote] = entry.sha256
    return hashes


def _is_replaced(file: str, name: str, full: bool, policy: bool) -> bool:
    """Whether a file in the repository is part of what is pushed now: it is old if it is not pushed again."""
    if file.startswith(f"{CHECKPOINTS}/{name}/"):
        return full
    top = file.removeprefix("adapter/")
    return policy and "/" not in top and top.endswith(POLICY_SUFFIXES) and file != RUN_RECORD


def settings_of(run: Path, **changes: Any) -> HubSettings:
    """Where a run's own settings push it, with changes that are not None."""
    policy = read_run(run)["policy"]
    values = {name: policy.get(name) for name in ("repo_id", "private", "tags", "license")}
    values |= {name: value for name, value in changes.items() if value is not None}
    if values["repo_id"] is None:
        raise HubError(f"{run} was trained without a repository: name it with --repo_id=USER/NAME.")
    return HubSettings(**values)
