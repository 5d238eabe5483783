"""Samples of a dataset for the application, as a policy sees them in training."""

from __future__ import annotations

import json
import shlex
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from flexor.config.parse import build_config, code_in, flatten, parse_flags
from flexor.config.schema import TrainConfig
from flexor.core.errors import ConfigError
from flexor.core.text import one_line
from flexor.core.trust import require_trust
from flexor.data.dataset import Dataset
from flexor.pages.images import as_base64, png, scaled
from flexor.policies import POLICIES
from flexor.train.sample_view import CameraView, SampleViewer
from flexor.ui.replies import NotFound

DRAWS = 3  # steps of a training whose augmentation is shown
MOST_VIEWERS = 4  # settings whose statistics stay in memory
LARGEST = 320  # pixels of an image across
SETTINGS = ("policy.", "dataset.image_transforms.", "dataset.use_imagenet_stats", "rename_map", "seed")
"""What may be changed on the page, by how names begin: nothing that names files or code."""


class SampleShelf:
    """`runs`: the name and the settings of each run; `datasets`: opens a dataset by its id."""

    def __init__(
        self,
        runs: Callable[[], Mapping[str, tuple[str, Mapping[str, Any]]]],
        datasets: Callable[[str], tuple[Dataset, Path]],
    ):
        self.runs, self.datasets = runs, datasets
        self._viewers: OrderedDict[str, SampleViewer] = OrderedDict()
        self._lock = Lock()

    def choices(self, dataset_id: str) -> dict[str, Any]:
        """The runs that were trained on a dataset, and all policies."""
        _, root = self.datasets(dataset_id)
        runs = [
            {"id": run_id, "name": name}
            for run_id, (name, config) in self.runs().items()
            if _is_trained_on(config, root)
        ]
        return {"runs": runs, "policies": [*POLICIES]}

    def sample(self, dataset_id: str, episode: int, query: Mapping[str, str]) -> dict[str, Any]:
        """What the policy of a run (`run`) or of a type (`policy`) sees of a frame, with further `settings`."""
        dataset, root = self.datasets(dataset_id)
        frame, draw = (_count(query, name) for name in ("frame", "draw"))
        positions = [n for n, index in enumerate(dataset.episodes.index.tolist()) if index == episode]
        if not positions or frame >= int(dataset.episodes.length[positions[0]]):
            raise NotFound(f"There is no frame {frame} of an episode {episode} that can be read.")
        row = int(dataset.episodes.start[positions[0]]) + frame
        with self._lock:
            viewer = self._viewer(dataset, root, query)
            cameras, values = viewer.view(row, range(draw * DRAWS, (draw + 1) * DRAWS))
        return {
            "images": viewer.describe(),
            "resizes": bool(getattr(viewer.config.policy, "resizes_images", False)),
            "steps": [*range(draw * DRAWS, (draw + 1) * DRAWS)],
            "cameras": [_camera_to_json(name, view) for name, view in cameras.items()],
            "values": [vars(each) for each in values],
        }

    def _viewer(self, dataset: Dataset, root: Path, query: Mapping[str, str]) -> SampleViewer:
        choice = [query.get(name, "") for name in ("run", "policy", "settings")]
        key = json.dumps([str(root), *choice])
        viewer = self._viewers.pop(key, None) or SampleViewer(self._config(root, *choice), dataset)
        self._viewers[key] = viewer
        while len(self._viewers) > MOST_VIEWERS:
            self._viewers.popitem(last=False)
        return viewer

    def _config(self, root: Path, run: str, policy: str, settings: str) -> TrainConfig:
        try:
            more = parse_flags(shlex.split(settings))
        except ValueError as error:  # of shlex
            raise ConfigError(f"{settings}: {error}") from error
        for name in more:
            if not name.startswith(SETTINGS) or name in ("policy.type", "policy.path"):
                raise ConfigError(
                    f"{name}: only settings of the policy and of dataset.image_transforms change this."
                )
        data = {"dataset.root": str(root)}
        if not run:
            if policy not in POLICIES:
                raise ConfigError(f"There is no policy {policy!r}.")
            return build_config(data, {"policy.type": policy}, more)
        name, saved = self.runs().get(run, ("", None))
        if saved is None:
            raise NotFound("This run no longer exists.")
        settings_of_run = {**flatten(dict(saved)), "policy_path": None}
        require_trust(code_in(settings_of_run), name)
        return build_config(settings_of_run, data, more)


def _count(query: Mapping[str, str], name: str) -> int:
    text = query.get(name) or "0"
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise ConfigError(f"{name}={text} must be a whole number.")
    return int(text)


def _camera_to_json(name: str, view: CameraView) -> dict[str, Any]:
    return {
        "name": one_line(name),
        "size": [*view.recorded.shape[:2]],
        "input": [*view.views[-1].shape[:2]],
        "low": view.low,
        "high": view.high,
        "recorded": _as_png(view.recorded),
        "views": [_as_png(each) for each in view.views],
    }


def _as_png(pixels: np.ndarray) -> str:
    height, width = pixels.shape[:2]
    if width > LARGEST:
        pixels = scaled(pixels, max(1, round(height * LARGEST / width)), LARGEST)
    return f"data:image/png;base64,{as_base64(png(pixels))}"


def _is_trained_on(config: Mapping[str, Any], root: Path) -> bool:
    dataset = config.get("dataset")
    folder = dataset.get("root") if isinstance(dataset, Mapping) else None
    return isinstance(folder, str) and "://" not in folder and Path(folder).resolve() == root
