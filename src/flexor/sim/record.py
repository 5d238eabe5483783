"""Records demonstrations of the built-in task as a LeRobot dataset, so that nothing has to be downloaded."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flexor.core.console import Progress, progress
from flexor.core.errors import ConfigError
from flexor.core.log import log
from flexor.core.machine import cache_folder
from flexor.data.format.writer import DatasetWriter
from flexor.sim.expert import Disturbance, expert_action
from flexor.sim.task import COLOURS, FPS, TIME_LIMIT, PlaceEnv

# names of datasets that are recorded on first use -> their settings
BUILTIN: dict[str, dict[str, Any]] = {
    "builtin/place": {},
    # with 300 episodes, words are learned, but not all places
    "builtin/place_words": {"targets": 2, "episodes": 1000},
    # for learning from rewards
    "builtin/place_rl": {"obs_type": "environment_state_agent_pos", "episodes": 20, "actions": "executed"},
    "builtin/place_rl_images": {"image_size": 128, "cameras": 2, "episodes": 20, "actions": "executed"},
}
TRAIN_SEED_START = 0
EVAL_SEED_START = 1_000_000  # evaluation never uses the start state of a demonstration

PIXELS = "pixels_agent_pos"
CAMERAS = ("top", "wrist")  # where there are two
# the environment's observation type -> the feature of the dataset besides the robot's own state
OBSERVED = {
    PIXELS: ("observation.image", "pixels"),
    "environment_state_agent_pos": ("observation.environment_state", "environment_state"),
}

# what both kinds of recordings have of a step's outcome
OUTCOME: dict[str, dict[str, Any]] = {
    "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
    "next.done": {"dtype": "bool", "shape": (1,), "names": None},
    "next.success": {"dtype": "bool", "shape": (1,), "names": None},
}
REST = 8  # steps recorded after the block was put down

# Increase it if the files of a dataset change although settings and demonstrations do not.
FORMAT_VERSION = 3


@dataclass(frozen=True)
class RecordSettings:
    """The settings of a recorded dataset."""

    episodes: int = 300
    # The first episode's seed; the others follow.
    seed: int = TRAIN_SEED_START
    image_size: int = 32
    # What is observed besides the gripper: images, or object positions.
    obs_type: str = PIXELS
    # "h264" or "av1". H.264 encodes small images faster; AV1 is LeRobot's default.
    codec: str = "h264"
    # Video quality: lower is sharper. Small images need little space, so this is nearly lossless.
    crf: int = 12
    # How much the executed actions differ from the expert's; 0: not at all.
    noise: float = 1.0
    # Discs on the table: with 2, the task description says which one is meant.
    targets: int = 1
    # Which action is recorded where it is disturbed: the expert's, to imitate, or the one that was executed, whose
    # outcome is recorded: to learn from rewards.
    actions: str = "expert"
    # Cameras of the images: above the table, and at the gripper.
    cameras: int = 1

    def check(self) -> None:
        if self.episodes < 1:
            raise ConfigError(f"episodes={self.episodes}: record at least one")
        if self.image_size % 2:
            raise ConfigError(f"image_size={self.image_size}: video needs an even number")
        if self.obs_type not in OBSERVED:
            raise ConfigError(f"obs_type={self.obs_type!r}: use {' or '.join(OBSERVED)}")
        if not 0 <= self.noise <= 1.5:
            raise ConfigError(f"noise={self.noise}: use 0 (none) to 1.5; with more, the expert often fails")
        if self.targets not in (1, 2):
            raise ConfigError(f"targets={self.targets}: use 1 or 2")
        if self.cameras not in (1, 2):
            raise ConfigError(f"cameras={self.cameras}: use 1 or 2")
        if self.actions not in ("expert", "executed"):
            raise ConfigError(f"actions={self.actions!r}: use 'expert' or 'executed'")
        if self.seed < 0 or self.seed + 2 * self.episodes > EVAL_SEED_START:
            raise ConfigError(
                f"seed={self.seed}: use 0 to {EVAL_SEED_START - 2 * self.episodes}, so that training does not use "
                f"the seeds of the evaluation, which start at {EVAL_SEED_START}"
            )


def features(
    image_size: int, obs_type: str = PIXELS, targets: int = 1, cameras: int = 1
) -> dict[str, dict[str, Any]]:
    """The dataset's features in LeRobot's format."""
    axes, size = ["x", "y", "opening"], (image_size, image_size, 3)
    picture = {"dtype": "video", "shape": size, "names": ["height", "width", "channels"]}
    discs = ["disc"] if targets == 1 else [f"{colour}_disc" for colour in COLOURS]
    names = [f"{thing}_{axis}" for thing in ("block", *discs) for axis in "xy"]
    places = {"dtype": "float32", "shape": (len(names),), "names": names}
    name, _ = OBSERVED[obs_type]
    pictures = {name: picture} if cameras == 1 else {f"observation.images.{c}": picture for c in CAMERAS}
    return {
        **(pictures if obs_type == PIXELS else {name: places}),
        "observation.state": {"dtype": "float32", "shape": (3,), "names": axes},
        "action": {"dtype": "float32", "shape": (3,), "names": axes},
        **OUTCOME,
    }


def demonstrate(
    env: PlaceEnv, seed: int, noise: float, actions: str = "expert"
) -> list[dict[str, np.ndarray]] | None:
    """One demonstration as a list of frames; None if it did not succeed in time.

    Recording continues for a moment after the success. Opening the gripper is the shortest part of the task;
    without that moment, so few recorded actions would show it that a policy might never learn it.
    """
    name, key = OBSERVED[env.obs_type]
    disturbance = Disturbance(seed, noise)
    observation, _ = env.reset(seed=seed)
    frames = []
    rest = REST
    for _ in range(TIME_LIMIT + REST):
        action = expert_action(env.state)
        previous, executed = observation, disturbance.apply(action)
        observation, reward, success, _, _ = env.step(executed)
        rest = rest - 1 if success else REST
        frames.append(
            {
                **_observed(name, previous[key]),
                "observation.state": previous["agent_pos"],
                "action": action if actions == "expert" else executed,
                "next.reward": np.array([reward], np.float32),
                "next.done": np.array([rest == 0]),
                "next.success": np.array([success]),
            }
        )
        if rest == 0:
            return frames
    return None


def _observed(name: str, value: Any) -> dict[str, np.ndarray]:
    """An observation under its name, or images under those of their cameras."""
    if isinstance(value, dict):
        return {f"observation.images.{camera}": image for camera, image in value.items()}
    return {name: value}


def record_dataset(root: str | Path, *, progress: Progress | None = None, **settings: Any) -> Path:
    """Write demonstrations into the new folder `root`; `settings` are those of RecordSettings.

    A demonstration that fails is left out, and the next seed is tried.
    """
    config = _settings(settings)
    env = PlaceEnv(config.image_size, config.obs_type, targets=config.targets, cameras=config.cameras)
    recorded, seed = 0, config.seed
    with DatasetWriter(
        Path(root),
        FPS,
        features(config.image_size, config.obs_type, config.targets, config.cameras),
        robot_type="flexor_place",
        codec=config.codec,
        crf=config.crf,
        # In such a small image, colour at half the resolution would blur the edges of coloured objects.
        pix_fmt="yuv444p" if config.codec == "h264" else "yuv420p",
    ) as writer:
        while recorded < config.episodes:
            frames = demonstrate(env, seed, config.noise, config.actions)
            seed += 1
            if frames is None:
                continue
            for frame in frames:
                writer.add_frame(frame)
            writer.save_episode(env.task_description)
            recorded += 1
            if progress is not None:
                progress(recorded, config.episodes)
    tried = seed - config.seed
    if tried > recorded:
        log.info("left out %d of %d demonstrations that did not succeed in time", tried - recorded, tried)
    return Path(root)


def ensure_builtin_dataset(
    cache_dir: str | Path, *, progress: Progress | None = None, **settings: Any
) -> Path:
    """The folder of the dataset with these settings; it is recorded now if it does not exist yet.

    It is written to a temporary folder and renamed: if two processes do this at once, both record it, and
    the first to finish wins.
    """
    config = _settings(settings)
    target = Path(cache_dir) / f"place-{_key(config)}"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        built = record_dataset(aside / "dataset", progress=progress, **asdict(config))
        try:
            built.rename(target)
        except OSError:
            # Renaming fails if the target is not empty: another process was faster.
            if not target.exists():
                raise
    finally:
        shutil.rmtree(aside)
    return target


def builtin_dataset(name: str) -> Path:
    """The dataset with one of the names in BUILTIN."""
    where = cache_folder() / "datasets"
    return ensure_builtin_dataset(where, progress=progress("recording"), **BUILTIN[name])


def _settings(settings: dict[str, Any]) -> RecordSettings:
    fields = RecordSettings.__dataclass_fields__
    unknown = sorted(set(settings) - set(fields))
    if unknown:
        raise ConfigError(
            f"unknown setting of the built-in dataset: {', '.join(unknown)}. Available: {', '.join(fields)}"
        )
    config = RecordSettings(**settings)
    config.check()
    return config


def _key(config: RecordSettings) -> str:
    """A key for the dataset's content: its settings and, to detect changes of the code, the first episode.

    So a change in the physics, the drawing or the expert gives a new dataset, never an outdated one.
    """
    settings = asdict(config)
    if config.actions == "expert":
        del settings["actions"]  # datasets from before there was a choice keep their names
    if config.cameras == 1:
        del settings["cameras"]
    digest = hashlib.sha256(json.dumps([FORMAT_VERSION, settings], sort_keys=True).encode())
    env = PlaceEnv(config.image_size, config.obs_type, targets=config.targets, cameras=config.cameras)
    for frame in demonstrate(env, config.seed, config.noise, config.actions) or []:
        for name in sorted(frame):
            digest.update(frame[name].tobytes())
    return digest.hexdigest()[:12]
