"""TD-MPC on the built-in task: what it learned of rewards shows when it acts."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import runs

from flexor.data.writer import DatasetWriter
from flexor.policies.actor import PolicyActor
from flexor.policies.pretrained import load_pretrained
from flexor.policies.tdmpc import TDMPC
from flexor.rng import seed_everything
from flexor.sim.envs import make_env
from flexor.sim.expert import Disturbance, expert_action
from flexor.sim.record import EVAL_SEED_START, REST
from flexor.sim.rollout import Summary, rollout, summarize
from flexor.sim.task import TASK, TIME_LIMIT, PlaceEnv

SEEN = "environment_state_agent_pos"  # where things are instead of pictures: minutes become seconds
VECTOR = {"dtype": "float32", "names": None}
FLAGS = [
    "--policy.type=tdmpc",
    "--policy.device=cpu",
    "--policy.mlp_dim=64",
    "--policy.state_encoder_hidden_dim=64",
    "--policy.cem_iterations=3",
    "--policy.n_gaussian_samples=64",
    "--policy.n_pi_samples=24",
    "--policy.n_elites=16",
]


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("datasets") / "place"
    features = {
        "observation.environment_state": {**VECTOR, "shape": (4,)},
        "observation.state": {**VECTOR, "shape": (3,)},
        "action": {**VECTOR, "shape": (3,)},
        "next.reward": {**VECTOR, "shape": (1,)},
    }
    env = PlaceEnv(obs_type=SEEN)
    with DatasetWriter(root, 10, features) as writer:
        for seed in range(80):
            for frame in demonstrate(env, seed):
                writer.add_frame(frame)
            writer.save_episode(TASK)
    return root


def demonstrate(env: PlaceEnv, seed: int) -> list[dict[str, np.ndarray]]:
    seen, _ = env.reset(seed=seed)
    disturbance = Disturbance(seed, 1.0)
    frames, rest = [], REST
    while rest and len(frames) < TIME_LIMIT:
        action = expert_action(env.state)
        before = seen
        seen, reward, success, _, _ = env.step(disturbance.apply(action))
        rest -= success
        frames.append(
            {
                "observation.environment_state": before["environment_state"],
                "observation.state": before["agent_pos"],
                "action": action,
                "next.reward": np.array([reward], np.float32),
            }
        )
    return frames


@pytest.mark.slow
def test_planning_with_what_was_learned_beats_planning_without(demonstrations, tmp_path):
    more = ("--steps=600", "--batch_size=64", "--save_freq=0", "--log_freq=100")
    trained = load_pretrained(str(runs.train(demonstrations, tmp_path / "run", FLAGS, *more)))
    learned = play(PolicyActor(trained))
    seed_everything("weights", 0)
    trained.policy = TDMPC(trained.policy.config).eval()
    guessed = play(PolicyActor(trained))
    assert learned.mean_max_reward > guessed.mean_max_reward + 0.15, f"{learned} | {guessed}"


def play(actor: PolicyActor) -> Summary:
    seeds = range(EVAL_SEED_START, EVAL_SEED_START + 20)
    return summarize(rollout(partial(make_env, "place", obs_type=SEEN), actor, seeds, batch_size=20))
