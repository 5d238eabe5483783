"""Writes metrics: always to a JSONL file, and to Weights & Biases if enabled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from flexor.config.schema import TrainConfig
from flexor.core.errors import ConfigError
from flexor.core.run_files import METRICS
from flexor.monitor.meters import as_json


class Tracker(Protocol):
    def log(self, step: int, values: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class JsonlTracker:
    """One JSON object per line; each line is flushed as soon as it is logged."""

    def __init__(self, folder: Path):
        self.file = (folder / METRICS).open("a")

    def log(self, step: int, values: dict[str, Any]) -> None:
        self.file.write(json.dumps({"step": step, **as_json(values)}) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class WandBTracker:
    def __init__(self, config: TrainConfig, folder: Path):
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("wandb.enable=true needs the package: pip install 'flexor[wandb]'.") from error
        settings = config.wandb
        self.run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            notes=settings.notes,
            name=config.job_name,
            id=settings.run_id,
            resume="allow" if settings.run_id else None,
            mode=settings.mode,
            config=config.to_dict(),
            dir=str(folder),
        )

    def log(self, step: int, values: dict[str, Any]) -> None:
        self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


class Trackers:
    """All trackers as one; none if `silent`, as on all ranks except rank 0."""

    def __init__(self, config: TrainConfig, folder: Path, silent: bool = False):
        self.all: list[Tracker] = [] if silent else [JsonlTracker(folder)]
        if config.wandb.enable and not silent:
            self.all.append(WandBTracker(config, folder))

    def log(self, step: int, values: dict[str, Any]) -> None:
        for tracker in self.all:
            tracker.log(step, values)

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *_: object) -> None:
        for tracker in self.all:
            tracker.close()
