"""Runs episodes of an actor in an environment, with videos."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import av
import torch

from flexor.config.schema import EnvConfig, EvalConfig
from flexor.core.console import Progress
from flexor.core.log import log
from flexor.evaluate.envs import open_env
from flexor.evaluate.film import write_video
from flexor.evaluate.rollout import Actor, Episode, rollout


@contextmanager
def full_float32() -> Iterator[None]:
    """Inside, GPUs do not round float32 to TF32: its effect on an action would depend on the batch size."""
    settings: tuple[Any, Any] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [part.allow_tf32 for part in settings]
    for part in settings:
        part.allow_tf32 = False
    try:
        yield
    finally:
        for part, allowed in zip(settings, before):
            part.allow_tf32 = allowed


def play(
    actor: Actor,
    env: EnvConfig,
    settings: EvalConfig,
    videos: Path | None = None,
    progress: Progress | None = None,
) -> list[Episode]:
    """Run episodes in the environment, and save videos of the first few."""
    seeds = [settings.seed + i for i in range(settings.n_episodes)]
    recorded = seeds[: settings.videos] if videos else []
    assert env.type is not None

    make = functools.partial(open_env, env)
    with full_float32():
        episodes = rollout(
            make,
            actor,
            seeds,
            env.max_steps,
            batch_size=settings.batch_size or min(25, settings.n_episodes),
            record=recorded,
            progress=progress,
        )
    if videos:
        try:
            _write_videos(videos, episodes)
        except (OSError, av.FFmpegError) as error:  # a full disk costs the videos, not what was measured
            log.warning("can't write videos to %s: %s", videos, error)
    return episodes


def _write_videos(folder: Path, episodes: Sequence[Episode]) -> None:
    for episode in episodes:
        if episode.frames:
            outcome = "success" if episode.success else "failure"
            write_video(folder / f"episode_{episode.seed}_{outcome}.mp4", episode.frames, episode.fps)
