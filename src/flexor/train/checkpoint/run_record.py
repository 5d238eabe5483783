"""`run.json` of a run: its id, its data and machine, and how it compares with its plan. The model card shows it."""

from __future__ import annotations

import json
import platform
import uuid
from pathlib import Path
from typing import Any

import torch

from flexor.core.run_files import RUN_RECORD
from flexor.core.secrets import redacted_values
from flexor.core.version import VERSION
from flexor.data.dataset import Dataset
from flexor.train.engine.base import Engine


def read_record(folder: Path) -> dict[str, Any]:
    """The record; empty if there is none that can be read."""
    try:
        found = json.loads((folder / RUN_RECORD).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def note(folder: Path, **values: Any) -> dict[str, Any]:
    """Add to the record. Its first entry gives the run an id."""
    record: dict[str, Any] = {"id": uuid.uuid4().hex, **read_record(folder), **redacted_values(values)}
    aside = folder / f".{RUN_RECORD}"
    aside.write_text(json.dumps(record, indent=2))
    aside.rename(folder / RUN_RECORD)
    return record


def describe_dataset(training: Dataset) -> dict[str, Any]:
    return {
        "name": Path(training.repo_id).name if Path(training.repo_id).is_absolute() else training.repo_id,
        "episodes": len(training.episodes),
        "frames": len(training),
        "fps": training.fps,
        "robot_type": training.robot_type,
        "cameras": training.cameras,
        "tasks": training.tasks[:20],
    }


def describe_machine(engine: Engine) -> dict[str, Any]:
    cuda = engine.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(engine.device) if cuda else f"CPU ({platform.machine()})",
        "processes": engine.world_size,
        "strategy": engine.strategy,
        "precision": engine.precision,
        "flexor": VERSION,
        "torch": torch.__version__,
    }
