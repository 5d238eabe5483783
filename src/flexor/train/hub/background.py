"""Pushes a run to the Hub from a thread, so that training never waits for the network and never fails because of it.

At most one checkpoint is being uploaded and one is waiting. If a newer one is saved, the one that waits is skipped. A
checkpoint that is uploaded is kept under hard links, so that `checkpoint.keep_last` can remove it meanwhile.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexor.config.schema import TrainConfig, pushes_policy
from flexor.core.console import progress
from flexor.core.errors import FlexorError
from flexor.core.hub_errors import PATIENCE, Backoff, HubError, without_token
from flexor.core.log import log
from flexor.core.run_files import CHECKPOINTS
from flexor.train.checkpoint import folder as checkpoint
from flexor.train.hub.upload import HubSettings, RunOnHub
from flexor.train.stopping import StopSignal

LINKS = ".hub"  # folder in the run: checkpoints that are being uploaded
GRACE_S = 60.0  # for the last upload of a run that stops early: its machine may be taken away
POLL_S = 0.1


@dataclass
class PushJob:
    folder: Path
    name: str
    full: bool = True  # the checkpoint with all that resuming needs, not only its policy
    final: bool = False


class Pusher:
    """Pushes a run: nothing, its policy at the end, or every checkpoint. Use it as a context manager."""

    hub: RunOnHub
    run: Path
    outcome: dict[str, Any] | None = None
    """What was pushed where, filled in when the context ends; None: nothing was to be pushed."""
    every = False  # push every checkpoint, not only the last

    def __init__(self, stop: StopSignal):
        self.stop_signal = stop
        self.change = threading.Condition()
        self.waiting: PushJob | None = None
        self.closing_since: float | None = None
        self.stop = threading.Event()
        self.pushed: str | None = None  # name of the newest full checkpoint on the Hub
        self.thread = threading.Thread(target=self._work, name="push", daemon=True)

    def prepare(self, config: TrainConfig) -> None:
        """Before training, on rank 0: a wrong token is an error now, a network that is down only a warning."""
        if not (pushes_policy(config) or config.save_checkpoint_to_hub):
            return
        assert config.output_dir is not None
        self.run, self.every = Path(config.output_dir), config.save_checkpoint_to_hub
        self.hub = RunOnHub(self.run, HubSettings.of(config))
        repository = self.hub.repository
        try:
            self.hub.prepare()
        except HubError as error:
            if not error.offline:
                raise
            log.warning("The run is not pushed yet: %s", error)
        else:
            content = "every checkpoint" if self.every else "the policy at the end of the run"
            log.info("pushing %s to %s", content, repository.url)
        self.outcome = {"repo_id": repository.repo_id, "url": repository.url, "pushed": False}
        self.outcome |= {"checkpoint": None, "commit": None, "error": None}

    def start(self) -> None:
        """On rank 0, when the run's folder exists."""
        if self.outcome is not None:
            shutil.rmtree(self.run / LINKS, ignore_errors=True)
            self.thread.start()

    def __enter__(self) -> Pusher:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self.thread.is_alive():
            self.finish(complete=error is None)

    def saved(self, folder: Path) -> None:
        """A checkpoint is complete: push it soon, if checkpoints are to be pushed."""
        if not self.every:
            return
        try:
            self._queue(PushJob(self._linked(folder), folder.name))
        except Exception as error:  # never stop training
            log.warning("%s will not be pushed: %s", folder, without_token(str(error)))

    def finish(self, complete: bool) -> None:
        """The final push. If the run is not `complete`, only what is still uploading, for a limited time."""
        assert self.outcome is not None
        newest = checkpoint.newest(self.run / CHECKPOINTS)
        if complete and newest is not None:
            self._queue(PushJob(newest, newest.name, self.every, final=True))
            log.info("waiting until checkpoint %s is pushed; Ctrl-C stops waiting", newest.name)
        with self.change:
            self.closing_since = time.monotonic()
            self.change.notify_all()
        self._wait(None if complete else GRACE_S)
        if not self.thread.is_alive():
            shutil.rmtree(self.run / LINKS, ignore_errors=True)
        if self.outcome["error"] or self.thread.is_alive():
            self.outcome["error"] = self.outcome["error"] or "interrupted"
            command = f"flexor push {self.run}{' --checkpoints' if self.every else ''}"
            log.warning("%s was not pushed completely. Push it later with: %s", self.run, command)

    def _wait(self, seconds: float | None) -> None:
        """Wait for the thread, at most this long. A new signal ends the waiting."""
        received = self.stop_signal.signal
        seconds = GRACE_S if received is not None else seconds
        until = None if seconds is None else time.monotonic() + seconds
        while self.thread.is_alive():
            self.thread.join(POLL_S)
            if self.stop_signal.signal is not received or (until is not None and time.monotonic() > until):
                self.stop.set()
                self.thread.join(1.0)
                return

    def _queue(self, job: PushJob) -> None:
        with self.change:
            skipped, self.waiting = self.waiting, job
            self.change.notify_all()
        if skipped is not None and skipped.name != job.name:
            log.warning("checkpoint %s is not pushed: %s is newer", skipped.name, job.name)
            self._remove_links(skipped)

    def _linked(self, folder: Path) -> Path:
        """The checkpoint under hard links; the checkpoint itself if the file system has none."""
        target = self.run / LINKS / folder.name
        shutil.rmtree(target, ignore_errors=True)
        try:  # symbolic links are refused by the push
            shutil.copytree(folder, target, symlinks=True, copy_function=os.link)
        except (OSError, shutil.Error):
            shutil.rmtree(target, ignore_errors=True)
            return folder
        return target

    def _remove_links(self, job: PushJob) -> None:
        if job.folder.parent.name == LINKS:
            shutil.rmtree(job.folder, ignore_errors=True)

    # The thread

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                self._push_with_retries(job)
            except BaseException as error:  # never stop training
                self._failed(job, without_token(str(error) or repr(error)))
            self._remove_links(job)

    def _next(self) -> PushJob | None:
        """Wait for a job; None if no more will come."""
        with self.change:
            while self.waiting is None and self.closing_since is None:
                self.change.wait()
            job, self.waiting = self.waiting, None
            return job

    def _push_with_retries(self, job: PushJob) -> None:
        """Try until it works, while that may help: during training until a newer checkpoint is saved."""
        assert self.outcome is not None
        backoff = Backoff()
        while not self.stop.is_set():
            try:
                if not self.outcome["pushed"]:
                    self.hub.repository.create()
                new = self.pushed != job.name  # else only the metrics and the card are
                bar = progress(f"pushing checkpoint {job.name}") if job.final else None
                commit = self.hub.push(job.folder, job.name, job.full and new, new, bar, self.stop)
            except FlexorError as error:
                retry = isinstance(error, HubError) and error.may_help and self._pause(backoff, error, job)
                if not retry:
                    self._failed(job, str(error))
                    return
            else:
                self.pushed = job.name if job.full else self.pushed
                self.outcome |= {"pushed": True, "checkpoint": job.name, "commit": commit, "error": None}
                content = "policy" if job.final else f"checkpoint {job.name}"
                log.info("%s pushed to %s", content, self.hub.repository.url)
                return
        self._failed(job, "interrupted")

    def _pause(self, backoff: Backoff, error: HubError, job: PushJob) -> bool:
        """Wait before the next attempt. False: there will be none."""
        seconds = backoff.seconds(error)
        level = logging.WARNING if backoff.failures == 1 else logging.INFO
        message = "checkpoint %s is not pushed yet: %s Trying again in %.0f s."
        log.log(level, message, job.name, error, seconds)
        until = time.monotonic() + seconds
        with self.change:
            closing = self.closing_since is not None
            while (left := until - time.monotonic()) > 0 and not self.stop.is_set():
                self.change.wait(min(left, POLL_S))
                if self.waiting is not None:
                    return False  # the newer one is pushed instead
                if self.closing_since is not None and not closing:
                    return True  # the run ends: try at once
            return self.closing_since is None or time.monotonic() < self.closing_since + PATIENCE

    def _failed(self, job: PushJob, reason: str) -> None:
        assert self.outcome is not None
        self.outcome["error"] = reason
        if job.final:
            self.outcome["pushed"] = False
        log.warning("checkpoint %s was not pushed: %s", job.name, reason)
