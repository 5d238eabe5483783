"""Trackers besides `metrics.jsonl`. They run in processes of their own: see `forward.py`.

`begin_at`: the first step that the tracker lacks.
"""

from __future__ import annotations

import inspect
import math
import time
from pathlib import Path
from typing import Any

from flexor.core.log import log
from flexor.core.run_files import TENSORBOARD

CONNECT_S = 25.0  # how long to try to reach W&B; less than a run waits at its end


class Service:
    begin_at = 0

    def log(self, step: int, values: dict[str, float]) -> None:
        raise NotImplementedError

    def flush(self) -> None: ...
    def close(self) -> None: ...


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Nested figures as `system/cpu`; only numbers that are finite."""
    figures: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            figures |= flat(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and math.isfinite(value):
            figures[f"{prefix}{name}"] = value
    return figures


class WandBService(Service):
    """Weights & Biases. If it can't be reached, its files are written for `wandb sync`."""

    def __init__(self, folder: Path, settings: dict[str, Any]):
        import wandb

        quiet = wandb.Settings(silent=True, console="off", x_disable_stats=True, init_timeout=CONNECT_S)
        options = {**settings, "dir": str(folder), "resume": "allow", "settings": quiet}
        try:
            self.run = wandb.init(**options)
        except (wandb.Error, OSError) as error:
            log.warning(
                "W&B can't be reached (%s). Metrics are kept in files: upload them with `wandb sync %s`",
                " ".join(str(error).split()),
                folder / "wandb" / "offline-run-*",
            )
            wandb.teardown()
            self.run = wandb.init(**{**options, "mode": "offline"})
        self.begin_at = self.run.step  # in a resumed run, the first that W&B lacks
        if not self.run.offline and self.run.url:
            log.info("W&B: %s", self.run.url)

    def log(self, step: int, values: dict[str, float]) -> None:
        self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


class TensorBoardService(Service):
    """Event files in the run's folder, with the package's own writer: it needs no torch."""

    def __init__(self, folder: Path, settings: dict[str, Any]):
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.make_event, self.make_summary = Event, Summary
        self.writer = EventFileWriter(str(folder / TENSORBOARD))

    def log(self, step: int, values: dict[str, float]) -> None:
        scalars = [self.make_summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        summary = self.make_summary(value=scalars)
        self.writer.add_event(self.make_event(wall_time=time.time(), step=step, summary=summary))

    def flush(self) -> None:
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class TrackioService(Service):
    """trackio: a database of its own, and a Space on the Hub if one is named."""

    def __init__(self, folder: Path, settings: dict[str, Any]):
        import trackio

        self.trackio = trackio
        parameters = inspect.signature(trackio.init).parameters
        off = {name: False for name in ("embed", "auto_log_gpu", "auto_log_cpu") if name in parameters}
        trackio.init(**settings, resume="allow", **off)

    def log(self, step: int, values: dict[str, float]) -> None:
        self.trackio.log(values, step=step)

    def close(self) -> None:
        self.trackio.finish()


SERVICES: dict[str, type] = {
    "wandb": WandBService,
    "tensorboard": TensorBoardService,
    "trackio": TrackioService,
}
