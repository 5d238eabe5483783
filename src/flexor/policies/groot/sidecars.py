"""The files beside the weights of a base model, which say how NVIDIA processed its inputs: as settings of ours.

As in LeRobot they are read from a local folder only. From a repository on the Hub come the weights, and states and
actions are scaled by the dataset.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flexor.core.errors import ConfigError
from flexor.core.foreign_files import read_json_object
from flexor.core.paths import inside

PROCESSOR, STATISTICS, EMBODIMENT_IDS = "processor_config.json", "statistics.json", "embodiment_id.json"


def settings_of_base(folder: Path, tag: str) -> dict[str, Any]:
    """Settings of GR00T that the files in a base model's folder make for an embodiment."""
    kwargs = _read(folder, PROCESSOR).get("processor_kwargs") or {}
    modality = _mapping(_mapping(kwargs.get("modality_configs")).get(tag))
    settings: dict[str, Any] = {
        "embodiment_ids": {str(n): int(i) for n, i in _read(folder, EMBODIMENT_IDS).items()} or None,
        "formalize_language": kwargs.get("formalize_language"),
        "clip_outliers": kwargs.get("clip_outliers"),
        "video_modality_keys": _mapping(modality.get("video")).get("modality_keys"),
        "use_albumentations": kwargs.get("use_albumentations"),
        "letter_box_transform": kwargs.get("letter_box_transform"),
    }
    if kwargs.get("image_target_size"):
        names = ("image_target_size", "image_crop_size", "shortest_image_edge", "crop_fraction")
        settings |= {name: kwargs.get(name) for name in names}
        settings["image_crop_size"] = settings["image_crop_size"] or ()
    if kwargs:
        settings["modalities"] = {
            "raw_stats": _mapping(_read(folder, STATISTICS).get(tag)),
            "modality_config": modality,
            "use_percentiles": bool(kwargs.get("use_percentiles", False)),
            "use_relative_action": bool(kwargs.get("use_relative_action", False)),
            "state_dropout_prob": float(kwargs.get("state_dropout_prob") or 0.0),
            "max_action_horizon": kwargs.get("max_action_horizon"),
        }
    sizes = ("image_target_size", "image_crop_size")
    present = {name: value for name, value in settings.items() if value is not None}
    return {name: tuple(v) or None if name in sizes else v for name, v in present.items()}


def settings_of_steps(
    pack: Mapping[str, Any], encode: Mapping[str, Any], decode: Mapping[str, Any]
) -> dict[str, Any]:
    """The same of the steps in a checkpoint."""
    settings: dict[str, Any] = {
        "embodiment_ids": pack.get("embodiment_mapping"),
        "formalize_language": pack.get("formalize_language"),
        "clip_outliers": pack.get("clip_outliers"),
        "video_modality_keys": pack.get("video_modality_keys"),
        "processor_name": encode.get("model_name"),
        "use_albumentations": encode.get("use_albumentations"),
        "letter_box_transform": encode.get("letter_box_transform"),
    }
    present = {name: value for name, value in settings.items() if value is not None}
    if encode.get("image_target_size"):
        present["image_target_size"] = tuple(encode["image_target_size"])
        present["image_crop_size"] = tuple(encode.get("image_crop_size") or ()) or None
        present |= {name: encode.get(name) for name in ("shortest_image_edge", "crop_fraction")}
    if pack.get("modality_config") is not None:
        names = ("raw_stats", "modality_config", "use_percentiles", "state_dropout_prob")
        present["modalities"] = {
            **{name: pack.get(name) for name in names},
            "use_relative_action": bool(decode.get("use_relative_action", False)),
            "max_action_horizon": pack.get("action_horizon"),
        }
    return present


def _read(folder: Path, name: str) -> Mapping[str, Any]:
    file = inside(folder, name)
    if not file.is_file():
        return {}
    try:
        return read_json_object(file)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{file} can't be read: {error!r}") from error


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}
