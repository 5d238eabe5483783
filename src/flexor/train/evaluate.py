"""How good a policy is: its loss on held-out episodes, its success in an environment."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from flexor.batch import SAMPLE_ID, VALID_STEPS
from flexor.config import EnvConfig, EvalConfig
from flexor.console import Progress
from flexor.data.dataset import Dataset
from flexor.data.loader import sample_rows, to_tensors, valid_steps
from flexor.policies.actor import PolicyActor
from flexor.policies.pretrained import Pretrained
from flexor.rng import Noise
from flexor.sim.envs import make_env
from flexor.sim.film import write_video
from flexor.sim.rollout import Actor, Episode, rollout
from flexor.train.build import deltas_of
from flexor.train.state import TrainState


@contextmanager
def exported_weights(state: TrainState) -> Iterator[None]:
    """Inside, the policy has the weights a checkpoint would export: the moving average if there is one."""
    was_training = state.policy.training
    state.policy.eval()
    raw = None
    if state.ema:
        raw = {name: value.detach().clone() for name, value in state.policy.state_dict().items()}
        state.policy.load_state_dict(state.ema.average)
    try:
        yield
    finally:
        if raw is not None:
            state.policy.load_state_dict(raw)
        state.policy.train(was_training)


@torch.no_grad()
def held_out_loss(state: TrainState, dataset: Dataset, max_samples: int = 0) -> float:
    """Mean loss over held-out samples, evenly spread if there are more than `max_samples`."""
    config = state.config
    rows = sample_rows(dataset, config.policy.drop_last_frames)
    if max_samples and len(rows) > max_samples:
        rows = rows[np.linspace(0, len(rows) - 1, max_samples).astype(int)]
    deltas, cameras = deltas_of(config.policy), list(config.policy.images)
    valid = valid_steps(dataset, rows, deltas)  # over all rows, or the loss would depend on the batch size
    total = torch.zeros((), device=state.engine.device)
    with exported_weights(state):
        for part in np.split(rows, range(config.batch_size, len(rows), config.batch_size)):
            batch = state.preprocessor(
                {**to_tensors(dataset.read(part, deltas, cameras)), VALID_STEPS: valid}
            )
            noise = Noise(config.seed, 0, batch[SAMPLE_ID])
            with state.engine.autocast():
                total += state.policy.loss(batch, noise).per_sample.float().sum()
    return float(total) / len(rows)


def play(
    actor: Actor,
    env: EnvConfig,
    settings: EvalConfig,
    videos: Path | None = None,
    progress: Progress | None = None,
) -> list[Episode]:
    """Episodes in the environment, with videos of the first few."""
    seeds = [settings.seed + i for i in range(settings.n_episodes)]
    recorded = seeds[: settings.videos] if videos else []
    assert env.type is not None

    make = functools.partial(make_env, env.type, task=env.task, package=env.package, **env.kwargs)
    episodes = rollout(
        make,
        actor,
        seeds,
        env.max_steps,
        batch_size=settings.batch_size or min(25, settings.n_episodes),
        record=recorded,
        progress=progress,
    )
    for episode in episodes:
        if videos and episode.frames:
            outcome = "success" if episode.success else "failure"
            write_video(videos / f"episode_{episode.seed}_{outcome}.mp4", episode.frames, episode.fps)
    return episodes


def actor_of(state: TrainState) -> PolicyActor:
    """The run's policy as it would be after export; use it inside `exported_weights`."""
    trained = Pretrained(state.policy, state.preprocessor, state.postprocessor)
    return PolicyActor(trained, state.config.seed)
