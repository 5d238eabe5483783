"""The range of actions in the training data: from every kind of statistics, relative actions too."""

import numpy as np
import pytest

from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.pretrained import Pretrained
from flexor.policies.processing.normalize import Normalize, Unnormalize
from flexor.policies.processing.pipeline import Pipeline
from flexor.policies.processing.relative_actions import AbsoluteActions, RelativeActions
from flexor.serve.action_range import action_range
from flexor_client import LimitError, RealTimePlayer, RemotePolicy
from support.limits import LIMIT_S
from support.serving import STATE, Numbers, numbers, observation, serving

FEATURES = {STATE: PolicyFeature(Kind.STATE, (3,)), "action": PolicyFeature(Kind.ACTION, (2,))}
EXTREMES = {"min": [-2.0, 0.0], "max": [2.0, 1.0]}
QUANTILES = {"q01": [-1.5, 0.0], "q99": [1.5, 0.5]}
MOMENTS = {"mean": [0.0, 1.0], "std": [1.0, 0.5]}
STATES = {"min": [10.0, 20.0, 0.0], "max": [11.0, 22.0, 0.0]}


def policy(action: dict, state: dict | None = None, relative: RelativeActions | None = None) -> Pretrained:
    stats = {"action": action, **({STATE: state} if state else {})}
    norm_map = {"STATE": "IDENTITY", "ACTION": "IDENTITY"}
    before = [relative or RelativeActions(), Normalize(FEATURES, norm_map, stats)]
    after = [Unnormalize(FEATURES, norm_map, stats), AbsoluteActions(relative is not None, relative)]
    plain = numbers()
    assert isinstance(plain.policy, Numbers)
    return Pretrained(plain.policy, Pipeline("before", before), Pipeline("after", after))


@pytest.mark.parametrize(
    ("statistics", "low", "high"),
    [
        (EXTREMES | QUANTILES | MOMENTS, [-2, 0], [2, 1]),
        (QUANTILES | MOMENTS, [-1.5, 0], [1.5, 0.5]),
        (MOMENTS, [-3, -0.5], [3, 2.5]),
    ],
)
def test_the_best_statistics_count(statistics, low, high):
    assert action_range(policy(statistics)) == {"low": low, "high": high}


def test_relative_actions_are_added_to_the_state():
    relative = RelativeActions(True, ["gripper"], ["arm", "gripper"])
    assert action_range(policy(EXTREMES, STATES, relative)) == {"low": [8, 0], "high": [13, 1]}
    assert action_range(policy(EXTREMES, None, relative)) is None


@pytest.mark.parametrize(
    "statistics",
    [
        {},
        {"mean": [0.0, 1.0]},
        {"min": [0.0], "max": [1.0]},
        {"min": [0.0, np.nan], "max": [1.0, 1.0]},
        {"min": [0.0, 2.0], "max": [1.0, 1.0]},
        {"min": [0.0, 0.0], "max": [1.0, np.inf]},
    ],
)
def test_statistics_that_tell_nothing(statistics):
    assert action_range(policy(statistics)) is None


def test_robots_are_told_and_refuse_what_is_absurd():
    with serving(policy(EXTREMES)) as (url, _), RemotePolicy(url, timeout_s=LIMIT_S) as remote:
        assert remote.metadata["action_range"] == {"low": [-2, 0], "high": [2, 1]}
        player = RealTimePlayer(remote, fps=10)
        player.wait(observation(0.5), timeout_s=LIMIT_S)
        assert player.act(observation(0.5)).tolist() == [0.5, -0.5]
        player.reset()
        player.wait(observation(50), timeout_s=LIMIT_S)
        with pytest.raises(LimitError, match="part 0 is 50, but in the training data it is from -2 to 2"):
            player.act(observation(50))
    with serving(numbers()) as (url, _), RemotePolicy(url, timeout_s=LIMIT_S) as remote:
        assert "action_range" not in remote.metadata
