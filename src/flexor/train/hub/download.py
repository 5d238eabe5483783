"""`flexor resume hub:USER/NAME`: downloads the newest complete checkpoint of a run, to be resumed here.

A checkpoint is complete if the repository has every file of its manifest, with its size and hash. It is downloaded to a
hidden folder, checked again, and renamed.
"""

from __future__ import annotations

import fcntl
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flexor.core.console import progress
from flexor.core.errors import CheckpointError, ConfigError
from flexor.core.hub import HubEntry, HubRepository
from flexor.core.hub_errors import persist
from flexor.core.log import log
from flexor.core.manifest import parse_manifest
from flexor.core.model_files import is_repo_id
from flexor.core.output_paths import check_output_folder, make_parents
from flexor.core.paths import refuse_links_out
from flexor.core.run_files import CHECKPOINTS, METRICS, RUN_CONFIG, RUN_RECORD
from flexor.train.checkpoint import folder as checkpoint
from flexor.train.checkpoint.run_record import id_in, read_record

PREFIX = "hub:"
STEP = r"[0-9]{1,15}"  # a checkpoint's name


def fetch_run(address: str, output: Path | None = None) -> Path:
    """The folder of the run, with its newest checkpoint. `address`: hub:USER/NAME or hub:USER/NAME@REVISION."""
    repo_id, _, revision = address.removeprefix(PREFIX).partition("@")
    if not is_repo_id(repo_id):
        raise ConfigError(f"{address} is not a run on the Hub: give hub:USER/NAME or hub:USER/NAME@REVISION.")
    run = output or Path("runs") / repo_id.partition("/")[2]
    check_output_folder(run, "--output_dir")
    make_parents(run)
    with _one_at_a_time(run):
        _Download(HubRepository(repo_id), revision or None, run).fetch()
    return run


@contextmanager
def _one_at_a_time(run: Path) -> Iterator[None]:
    """Several processes of a run may ask for it: the first one downloads, the others wait and find it."""
    file = run.parent / f".{run.name}.download"
    with file.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    file.unlink(missing_ok=True)


class _Download:
    def __init__(self, repository: HubRepository, revision: str | None, run: Path):
        self.repository, self.run, self.pinned = repository, run, revision is not None
        work = f"looking at {repository.url}"
        self.commit = persist(work, lambda: repository.newest_commit(revision))
        self.remote = persist(work, lambda: repository.files(self.commit))

    def fetch(self) -> None:
        name, files = self._newest_complete()
        self._check_folder()
        local = checkpoint.newest(self.run / CHECKPOINTS)
        if local is not None and int(local.name) >= int(name):
            if self.pinned and local.name != name:
                raise ConfigError(
                    f"{self.run} already has checkpoint {local.name} of this run, which is newer than {name}. Choose "
                    "another folder with --output_dir."
                )
            log.info("%s already has checkpoint %s", self.run, local.name)
            return
        self.run.mkdir(parents=True, exist_ok=True)
        for file in (RUN_RECORD, RUN_CONFIG, METRICS):
            if (text := self._read(file)) is not None:
                (self.run / file).write_bytes(text)
        self._download(name, files)
        log.info("downloaded checkpoint %s of %s to %s", name, self.repository.url, self.run)

    def _newest_complete(self) -> tuple[str, dict[str, int]]:
        """The name of the newest checkpoint of which no file is missing, and the sizes of its files."""
        names = {path.split("/")[1] for path in self.remote if path.startswith(f"{CHECKPOINTS}/")}
        steps = sorted((name for name in names if re.fullmatch(STEP, name)), key=int, reverse=True)
        for name in steps:
            files, wrong = self._files_of(name)
            if wrong is None:
                return name, files
            log.warning("checkpoint %s of %s is not complete: %s", name, self.repository.url, wrong)
        raise CheckpointError(
            f"{self.repository.url} has no complete checkpoint of a Flexor run to resume from "
            f"({len(steps)} that are not complete). Push them with `flexor push RUN --checkpoints`, or train with "
            f"--save_checkpoint_to_hub=true. To start a new run from its policy: "
            f"flexor train --policy.path={self.repository.repo_id}"
        )

    def _files_of(self, name: str) -> tuple[dict[str, int], str | None]:
        """The files of a checkpoint with their sizes, and what is wrong with them."""
        base = f"{CHECKPOINTS}/{name}"
        text = self._read(f"{base}/{checkpoint.MANIFEST}")
        if text is None:
            return {}, f"{checkpoint.MANIFEST} is missing"
        try:
            listed = parse_manifest(text)
        except ValueError as error:
            return {}, str(error)
        for file, expected in listed.items():
            entry: HubEntry | None = self.remote.get(f"{base}/{file}")
            if entry is None:
                return {}, f"{file} is missing"
            if entry.size != expected.size or entry.sha256 not in (None, expected.sha256):
                return {}, f"{file} is not the file that was saved"
        sizes = {f"{base}/{file}": expected.size for file, expected in listed.items()}
        return sizes | {f"{base}/{checkpoint.MANIFEST}": len(text)}, None

    def _check_folder(self) -> None:
        """Refuse a folder that holds something else."""
        if not self.run.exists() or not any(self.run.iterdir()):
            return
        refuse_links_out(self.run)
        run_id = id_in(self._read(RUN_RECORD))
        if run_id is None or read_record(self.run).get("id") != run_id:
            raise ConfigError(
                f"{self.run} exists and is not the run in {self.repository.url}. Choose another folder with "
                "--output_dir."
            )

    def _download(self, name: str, files: dict[str, int]) -> None:
        checkpoints = self.run / CHECKPOINTS
        temporary = checkpoints / f".{name}.downloading"
        temporary.mkdir(parents=True, exist_ok=True)
        self.repository.download(files, temporary, self.commit, progress(f"downloading checkpoint {name}"))
        downloaded = temporary / CHECKPOINTS / name
        try:
            checkpoint.verify(downloaded)
            checkpoint.adopt(downloaded, checkpoints / name)
        except CheckpointError as error:
            raise CheckpointError(
                f"Checkpoint {name} of {self.repository.url} arrived damaged and was removed: {error} Try again."
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _read(self, name: str) -> bytes | None:
        if name not in self.remote:
            return None
        return persist(f"reading {name}", lambda: self.repository.read(name, self.commit))
