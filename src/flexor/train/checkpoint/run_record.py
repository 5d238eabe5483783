"""`run.json` of a run: its id, its data and machine, and how it compares with its plan. The model card shows it."""

from __future__ import annotations

import json
import platform
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from flexor.core.foreign_files import MALFORMED, parse_json, read_json_object
from flexor.core.log import warn_once
from flexor.core.run_files import DATA_FILES, RUN_RECORD
from flexor.core.secrets import redacted_values
from flexor.core.version import VERSION
from flexor.data.dataset import Dataset
from flexor.data.identity import DataIdentity
from flexor.train.engine.base import Engine


def read_record(folder: Path) -> dict[str, Any]:
    """The record; empty if there is none that can be read."""
    try:
        return read_json_object(folder / RUN_RECORD)
    except (OSError, ValueError):
        return {}


def id_in(record: bytes | None) -> str | None:
    """The run's id in a record from the Hub; None if it has none that can be read."""
    try:
        return str(parse_json(record or b"")["id"])
    except MALFORMED:
        return None


def note(folder: Path, **values: Any) -> dict[str, Any]:
    """Add to the record. Its first entry gives the run an id."""
    record: dict[str, Any] = {"id": uuid.uuid4().hex, **read_record(folder), **redacted_values(values)}
    _write(folder / RUN_RECORD, json.dumps(record, indent=2))
    return record


def _write(path: Path, text: str) -> None:
    """Replace a file that tells about the run. A full disk does not end the run, which can do without."""
    temporary = path.with_name(f".{path.name}")
    try:
        temporary.write_text(text)
        temporary.rename(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        warn_once("can't write %s (%s): the run continues without", path, error.strerror)


def note_data_files(folder: Path, identity: DataIdentity) -> None:
    """Save the hashes of the data's files, so that a resume can name the one that has changed."""
    _write(folder / DATA_FILES, json.dumps(identity.to_json(), indent=0))


def read_data_files(folder: Path) -> dict[str, dict[str, str] | None]:
    """What `note_data_files` saved; empty if there is nothing that can be read."""
    try:
        saved = read_json_object(folder / DATA_FILES)
    except (OSError, ValueError):
        return {}
    return {kind: part for kind, part in saved.items() if isinstance(part, dict | None)}


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
