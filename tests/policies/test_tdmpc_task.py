"""TD-MPC on the built-in task: what it learned of rewards shows when it acts."""

from functools import partial

import pytest

from flexor.core.rng import seed_everything
from flexor.evaluate.envs import make_env
from flexor.evaluate.rollout import PolicyActor, Summary, rollout, summarize
from flexor.policies.pretrained import Pretrained, load_pretrained
from flexor.policies.tdmpc.policy import TDMPC
from flexor.sim.record import EVAL_SEED_START, record_dataset
from support import runs

OBS_TYPE = "environment_state_agent_pos"  # where things are instead of pictures: minutes become seconds
FLAGS = [
    "--policy.type=tdmpc",
    "--policy.device=cpu",
    "--policy.horizon=3",
    "--policy.mlp_dim=128",
    "--policy.latent_dim=64",
    "--policy.q_ensemble_size=2",
    "--policy.target_model_momentum=0.99",
    "--policy.pi_coeff=5.0",
    "--policy.advantage_scaling=1.0",
    "--policy.n_action_repeats=1",
    "--policy.use_mpc=false",
]


@pytest.mark.slow
def test_acting_as_learned_from_rewards_beats_acting_untrained(tmp_path):
    data = record_dataset(tmp_path / "data", episodes=50, obs_type=OBS_TYPE)
    more = ("--steps=250", "--batch_size=64", "--save_freq=0", "--log_freq=100", "--optimizer.lr=2e-3")
    trained = load_pretrained(str(runs.train(data, tmp_path / "run", FLAGS, *more)))
    learned = play(trained)
    seed_everything("weights", 0)
    trained.policy = TDMPC(trained.policy.config).eval()
    untrained = play(trained)
    assert learned.mean_max_reward > untrained.mean_max_reward + 0.05, f"{learned} | {untrained}"


def play(pretrained: Pretrained) -> Summary:
    seeds = range(EVAL_SEED_START, EVAL_SEED_START + 20)
    env = partial(make_env, "place", obs_type=OBS_TYPE)
    return summarize(rollout(env, PolicyActor(pretrained), seeds, batch_size=20))
