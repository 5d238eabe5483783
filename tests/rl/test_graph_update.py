"""What a CUDA graph replays: an update whose noise and bounds are read from memory is the eager one, bit by bit."""

from copy import deepcopy

import numpy as np
import pytest
import torch

from flexor.config.rl import RLConfig
from flexor.core.rng import GraphNoise, NoiseKeys
from flexor.policies import make_policy
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.pretrained import Pretrained
from flexor.policies.sac.config import ActorNetwork, CriticNetwork, SACConfig
from flexor.rl.buffer import ReplayBuffer
from flexor.rl.learner import Learner
from flexor.rl.records import record_type

ACTIONS, SIZE, RECORDS = 3, 48, 30
IMAGE = "observation.images.top"
STATS = {
    "observation.state": {"min": [-1.0] * 4, "max": [1.0] * 4},
    IMAGE: {"mean": [[[0.5]]] * 3, "std": [[[0.25]]] * 3},
    "action": {"min": [-1.0] * ACTIONS, "max": [1.0] * ACTIONS},
}


def learner(**settings) -> Learner:
    torch.manual_seed(0)
    features = {
        "observation.state": PolicyFeature(Kind.STATE, (4,)),
        IMAGE: PolicyFeature(Kind.VISUAL, (3, SIZE, SIZE)),
    }
    config = SACConfig(
        input_features=features,
        output_features={"action": PolicyFeature(Kind.ACTION, (ACTIONS,))},
        latent_dim=8,
        image_encoder_hidden_dim=2,
        actor_network_kwargs=ActorNetwork([8]),
        num_discrete_actions=3,
        discrete_critic_network_kwargs=CriticNetwork([8]),
    )
    before, after = config.pipelines(STATS, "cpu")
    layout = record_type(features, ACTIONS + 1)
    rng = np.random.default_rng(0)
    records = np.zeros(RECORDS, layout)
    records[IMAGE] = rng.integers(0, 256, records[IMAGE].shape)
    records["observation.state"] = rng.random((RECORDS, 4)) * 2 - 1
    records["action"][:, :ACTIONS] = rng.random((RECORDS, ACTIONS)) * 2 - 1
    records["is_step"] = np.arange(RECORDS) % 10 != 0
    records["intervention"] = np.arange(RECORDS) % 5 == 1
    records["reward"] = rng.random(RECORDS)
    buffer = ReplayBuffer(layout, RECORDS, records[: RECORDS // 2], torch.device("cpu"))
    buffer.extend(records)
    rl = RLConfig(batch_size=4, critic_network_kwargs=CriticNetwork([8]), **settings)
    return Learner(Pretrained(make_policy(config), before, after), buffer, rl, seed=5)


@pytest.mark.parametrize(
    "settings", [{}, {"num_critics": 3, "num_subsample_critics": 2, "policy_update_freq": 2}]
)
def test_an_update_from_keys_in_memory_is_the_eager_one(settings):
    eager, replayed = learner(**settings), learner(**settings)
    keys, bounds = NoiseKeys(torch.device("cpu")), replayed.buffer.bounds()
    noise = GraphNoise(keys, replayed.sample_ids)
    for number in range(2):  # as a capture: it finds out the names of what is drawn
        deepcopy(replayed).update(bounds, noise, number)
    for number in range(4):
        eager.update_once()
        keys.write(replayed.seed, number)
        replayed.update(bounds, noise, number)
    expected = {**eager.policy.state_dict(), **eager.algorithm.state_dict()}
    actual = {**replayed.policy.state_dict(), **replayed.algorithm.state_dict()}
    assert all(torch.equal(value, actual[name]) for name, value in expected.items())
    assert all(torch.isfinite(value).all() for value in expected.values())
