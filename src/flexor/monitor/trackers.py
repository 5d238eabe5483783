"""Writes metrics: always to a JSONL file, and from there to W&B, TensorBoard and trackio on request.

Only the file is written by the training process. Each other tracker has a process that follows the file (`forward.py`),
so the loop never waits for a network. At its end a run waits a while for them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from flexor.config.schema import TrainConfig
from flexor.core.errors import ConfigError
from flexor.core.lines import LineFile
from flexor.core.log import log
from flexor.core.published import published
from flexor.core.run_files import METRICS
from flexor.monitor.meters import as_json

FINISH_S = 40.0  # how long the end of a run waits for trackers
STOP_S = 10.0  # the same for a run that is stopped or fails: whoever stopped it may not wait longer


class JsonlTracker:
    """One JSON object per line; each is in the file as soon as it is logged."""

    def __init__(self, folder: Path):
        self.file = LineFile(folder / METRICS)

    def log(self, step: int, values: dict[str, Any]) -> None:
        self.file.write(json.dumps({"step": step, "time": round(time.time(), 3), **as_json(values)}))

    def close(self) -> None:
        self.file.close()


def requested_trackers(config: TrainConfig) -> list[str]:
    """The trackers besides the file."""
    return [*dict.fromkeys(config.trackers), *(["wandb"] if config.wandb.enable else [])]


def check_trackers(config: TrainConfig) -> None:
    """Raise an error, before anything is built, for a tracker that can't work here."""
    for name in requested_trackers(config):
        flag = "wandb.enable=true" if name == "wandb" else f"trackers=[{name}]"
        if not _is_installed(name):
            raise ConfigError(f"{flag} needs the package: pip install 'flexor[{name}]'.")
    mode = config.wandb.mode or os.environ.get("WANDB_MODE", "online")
    if config.wandb.enable and mode == "online" and not _has_wandb_key():
        raise ConfigError(
            "wandb.enable=true needs an account: run `wandb login` once or set WANDB_API_KEY, or keep the metrics "
            "on this machine with --wandb.mode=offline."
        )


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:
        return False


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    import wandb

    try:
        return bool(wandb.login(prompt=False))
    except TypeError:  # older versions
        return bool(wandb.api.api_key)
    except wandb.Error:
        return False


def settings_of(name: str, config: TrainConfig, run_id: str) -> dict[str, Any]:
    """Settings of a tracker's run. Its name follows from the run's id, so that a resumed run finds it."""
    if name == "tensorboard":
        return {}
    title = config.job_name or config.policy.type
    shared: dict[str, Any] = {"config": config.to_saved()}
    if name == "trackio":
        shared = published(shared)  # a Space is public, unless its owner makes it private
        trackio = config.trackio
        return {
            "project": trackio.project,
            "name": f"{title}-{run_id[:8]}",
            "space_id": trackio.space_id,
            **shared,
        }
    wandb = config.wandb
    return {
        "project": wandb.project,
        "entity": wandb.entity,
        "notes": wandb.notes,
        "name": title,
        "id": wandb.run_id or run_id,
        "mode": wandb.mode,
        **shared,
    }


class Forwarder:
    """The process of one tracker."""

    def __init__(self, name: str, folder: Path, settings: dict[str, Any]):
        self.name, self.folder, self.warned = name, folder, False
        package = str(Path(__file__).parents[2])
        paths = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "flexor.monitor.forward"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths},
            text=True,
            start_new_session=True,
        )
        assert self.process.stdin is not None
        task = {"folder": str(folder.absolute()), "tracker": name, "settings": settings}
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(task) + "\n")
            self.process.stdin.flush()

    def check(self) -> None:
        """Warn once if the process has ended."""
        code = self.process.poll()
        if code and not self.warned:
            self.warned = True
            text = "%s stopped (code %s): training continues, and %s has all metrics"
            log.warning(text, self.name, code, METRICS)

    def close_input(self) -> None:
        """Tell the process that the run is over."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()

    def wait(self, until: float) -> None:
        """Wait for its end, and kill it if that takes too long."""
        try:
            self.process.wait(max(until - time.monotonic(), 0.1))
            self.check()
        except subprocess.TimeoutExpired:
            sync = f"Upload them with `wandb sync {self.folder / 'wandb' / '*run-*'}`"
            fix = sync if self.name == "wandb" else "A resumed run sends the rest"
            log.warning("%s did not get all metrics in time; %s has them. %s", self.name, METRICS, fix)
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Trackers:
    """All trackers as one; none if `silent`, as on all ranks except rank 0."""

    def __init__(self, config: TrainConfig, folder: Path, run_id: str = "run", silent: bool = False):
        self.file = None if silent else JsonlTracker(folder)
        names = [] if silent else requested_trackers(config)
        self.forwarders = [Forwarder(name, folder, settings_of(name, config, run_id)) for name in names]

    def log(self, step: int, values: dict[str, Any]) -> None:
        if self.file is not None:
            self.file.log(step, values)
        for forwarder in self.forwarders:
            forwarder.check()

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self.file is not None:
            self.file.close()
        for forwarder in self.forwarders:
            forwarder.close_input()
        until = time.monotonic() + (FINISH_S if error is None else STOP_S)
        for forwarder in self.forwarders:
            forwarder.wait(until)
