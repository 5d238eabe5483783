"""Making environments and naming their observations."""

import sys

import gymnasium
import numpy as np
import pytest

from flexor.core.errors import FlexorError
from flexor.evaluate.envs import check_env, make_env, observation_to_batch, stack_batch


def test_built_in_by_id_and_by_short_name() -> None:
    for name in ("flexor/Place-v0", "place"):
        env = make_env(name, image_size=32)
        observation, _ = env.reset(seed=0)
        batch = observation_to_batch(observation)
        assert batch["observation.image"].shape == (3, 32, 32)
        assert batch["observation.state"].dtype == np.float32
        assert env.render().shape == (384, 384, 3)


def test_any_registered_environment() -> None:
    env = make_env("CartPole-v1", render_mode=None)
    observation, _ = env.reset(seed=0)
    assert observation_to_batch(observation)["observation.state"].shape == (4,)


def test_package_is_imported_first(tmp_path, monkeypatch) -> None:
    (tmp_path / "gym_example.py").write_text(
        "import gymnasium\n"
        "from flexor.sim.task import PlaceEnv\n"
        "gymnasium.register('gym_example/Thing-v0', entry_point=PlaceEnv)\n"
        "gymnasium.register('Other-v0', entry_point=PlaceEnv)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert make_env("gym_example/Thing-v0", render_mode=None)  # the namespace is the package
        assert make_env("Other-v0", package="gym_example")
    finally:
        gymnasium.registry.pop("gym_example/Thing-v0", None)
        gymnasium.registry.pop("Other-v0", None)


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("flexor/Plaice-v0", {}, "flexor/Place-v0"),
        ("PLACE", {}, "Similar names: place"),
        ("gym_nowhere/Thing-v0", {}, "pip install gym-nowhere"),
        ("Thing-v0", {"package": "gym_nowhere"}, "pip install gym-nowhere"),
        ("place", {"colour": "red"}, "colour"),
        ("place", {"image_size": 3}, "image_size"),
    ],
)
def test_mistakes_are_explained(name: str, settings: dict, says: str) -> None:
    with pytest.raises(FlexorError, match=says):
        make_env(name, **settings)


def test_lerobot_names() -> None:
    picture = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    batch = observation_to_batch(
        {
            "pixels": {"top": picture, "wrist": picture},
            "agent_pos": np.zeros(2, np.float64),
            "environment_state": np.ones(5),
            "force": 2.0,
        }
    )
    assert {name: (value.dtype.name, value.shape) for name, value in batch.items()} == {
        "observation.images.top": ("uint8", (3, 4, 6)),
        "observation.images.wrist": ("uint8", (3, 4, 6)),
        "observation.state": ("float32", (2,)),
        "observation.environment_state": ("float32", (5,)),
        "observation.force": ("float32", (1,)),
    }
    np.testing.assert_array_equal(batch["observation.images.top"].transpose(1, 2, 0), picture)
    assert observation_to_batch({"pixels": picture})["observation.image"].shape == (3, 4, 6)
    assert observation_to_batch(picture)["observation.image"].shape == (3, 4, 6)
    assert observation_to_batch(picture.transpose(2, 0, 1))["observation.image"].shape == (3, 4, 6)
    assert stack_batch([batch, batch])["observation.images.top"].shape == (2, 3, 4, 6)


@pytest.mark.parametrize(
    ("observation", "says"),
    [
        ({"pixels": np.zeros((4, 4, 3), np.float32)}, "uint8"),
        ({"pixels": np.zeros((4, 4, 4), np.uint8)}, "channels"),
        ({"agent_pos": {"x": 1}}, "not numbers"),
    ],
)
def test_odd_observations_are_explained(observation: dict, says: str) -> None:
    with pytest.raises(FlexorError, match=says):
        observation_to_batch(observation)


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gym_pusht", None)  # as if it were not installed
    monkeypatch.setitem(sys.modules, "gym_aloha", None)
    with pytest.raises(
        FlexorError, match=r"needs the Python package gym_pusht.*pip install 'flexor\[sim\]'$"
    ):
        check_env("pusht")
    with pytest.raises(FlexorError, match=r"pip install gym-aloha$"):
        make_env("aloha")
