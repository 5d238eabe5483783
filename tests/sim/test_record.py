"""Recorded demonstrations: whole, successful, made once."""

import itertools
import json
from concurrent.futures import ThreadPoolExecutor

import av
import numpy as np
import pyarrow.parquet as pq
import pytest

from flexor.core.errors import FlexorError
from flexor.data.dataset import open_dataset
from flexor.sim.record import REST, demonstrate, ensure_builtin_dataset, record_dataset
from flexor.sim.task import PlaceEnv, advance

SMALL = {"episodes": 3, "image_size": 32}


def test_dataset_holds_the_demonstrations(tmp_path) -> None:
    reports = []
    root = record_dataset(tmp_path / "d", progress=lambda *report: reports.append(report), **SMALL)
    assert reports == [(1, 3), (2, 3), (3, 3)]
    expected = [demonstrate(PlaceEnv(image_size=32), seed, 1.0) for seed in range(3)]
    frames = [frame for episode in expected for frame in episode]

    info = json.loads((root / "meta/info.json").read_text())
    assert (info["total_episodes"], info["total_frames"], info["fps"]) == (3, len(frames), 10)
    assert info["features"]["observation.image"]["shape"] == [32, 32, 3]
    table = pq.read_table(next(root.glob("data/*/*.parquet")))
    for name in ("observation.state", "action"):
        np.testing.assert_array_equal(
            np.array(table[name].to_pylist(), np.float32), [f[name] for f in frames]
        )
    rewards = np.array(table["next.reward"].to_pylist(), np.float32).ravel()
    np.testing.assert_array_equal(rewards, [f["next.reward"][0] for f in frames])
    assert info["features"]["next.reward"]["dtype"] == "float32" and rewards[-1] == 1
    done = np.array(table["next.done"].to_pylist()).ravel()
    assert done.sum() == 3 and done[-1]
    success = np.array(table["next.success"].to_pylist()).ravel()
    assert success.sum() >= 3 * REST, "a demonstration goes on for a moment after its success"
    assert success[done].all()

    with av.open(str(next(root.glob("videos/observation.image/*/*.mp4")))) as container:
        decoded = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(decoded) == len(frames)
    errors = [np.abs(image.astype(int) - f["observation.image"]).mean() for image, f in zip(decoded, frames)]
    assert max(errors) < 6


def test_places_instead_of_pictures(tmp_path) -> None:
    root = record_dataset(tmp_path / "d", episodes=2, obs_type="environment_state_agent_pos")
    dataset = open_dataset(root=root)
    assert not any(feature.is_camera for feature in dataset.features.values())
    first = dataset.read(np.array([0]))
    env = PlaceEnv()
    env.reset(seed=0)
    np.testing.assert_allclose(
        first["observation.environment_state"][0], [*env.state.block, *env.state.goal], rtol=1e-6
    )


def test_two_targets(tmp_path) -> None:
    root = record_dataset(
        tmp_path / "d", episodes=6, targets=2, obs_type="environment_state_agent_pos", seed=40
    )
    dataset = open_dataset(root=root)
    assert dataset.features["observation.environment_state"].names == [
        *("block_x", "block_y", "green_disc_x", "green_disc_y", "blue_disc_x", "blue_disc_y")
    ]
    words = [tasks[0] for tasks in dataset.episodes.tasks]
    assert set(words) == {"Put the red block on the green disc.", "Put the red block on the blue disc."}
    env = PlaceEnv(targets=2, obs_type="environment_state_agent_pos")
    for episode, task in enumerate(words):  # no demonstration of these seeds fails
        env.reset(seed=40 + episode)
        assert env.task_description == task


def test_what_is_recorded_is_what_the_expert_wanted() -> None:
    clean, disturbed = demonstrate(PlaceEnv(), 5, 0.0), demonstrate(PlaceEnv(), 5, 1.0)
    assert clean is not None and disturbed is not None
    env = PlaceEnv()
    env.reset(seed=5)
    state = env.state
    for frame in clean:
        np.testing.assert_array_equal(frame["observation.state"][:2], np.float32(state.gripper))
        state = advance(state, frame["action"])
    assert state.success
    np.testing.assert_array_equal(clean[0]["action"], disturbed[0]["action"])
    assert (clean[1]["observation.state"] != disturbed[1]["observation.state"]).any()


def test_executed_actions_lead_to_what_was_recorded_after_them() -> None:
    env = PlaceEnv(obs_type="environment_state_agent_pos")
    frames = demonstrate(env, 5, 1.0, "executed")
    again = PlaceEnv(obs_type="environment_state_agent_pos", reward="sparse")
    again.reset(seed=5)
    rewards = []
    for frame, after in itertools.pairwise(frames):
        observation, reward, *_ = again.step(frame["action"])
        assert np.array_equal(observation["agent_pos"], after["observation.state"])
        rewards.append(reward)
    first = rewards.index(1.0)
    assert rewards[:first] == [0.0] * first and len(frames) - first >= REST
    assert any(
        not np.array_equal(frame["action"], expert["action"])
        for frame, expert in zip(frames, demonstrate(env, 5, 1.0))
    )


def test_made_once_even_by_several_at_a_time(tmp_path) -> None:
    with ThreadPoolExecutor(3) as pool:
        roots = set(pool.map(lambda _: ensure_builtin_dataset(tmp_path, **SMALL), range(3)))
    [root] = roots
    assert list(tmp_path.iterdir()) == [root]
    before = (root / "meta/info.json").stat().st_mtime_ns
    assert ensure_builtin_dataset(tmp_path, **SMALL) == root
    assert (root / "meta/info.json").stat().st_mtime_ns == before
    assert ensure_builtin_dataset(tmp_path, **{**SMALL, "noise": 0.0}) != root


def test_an_interrupted_recording_leaves_nothing(tmp_path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_builtin_dataset(tmp_path, progress=interrupt, **SMALL)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"episodes": 0}, "at least one"),
        ({"noise": 3.0}, "noise"),
        ({"seed": 1_000_000}, "evaluation"),
        ({"image_size": 33}, "even"),
        ({"targets": 3}, "targets=3"),
        ({"colour": 1}, "colour"),
    ],
)
def test_mistakes_are_explained(tmp_path, settings: dict, says: str) -> None:
    with pytest.raises(FlexorError, match=says):
        ensure_builtin_dataset(tmp_path, **settings)
