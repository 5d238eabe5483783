"""Rollouts: the same episodes whatever they run next to, counted and filmed."""

from functools import partial

import av
import gymnasium
import numpy as np
import pytest

from flexor.core.errors import FlexorError
from flexor.evaluate.envs import make_env
from flexor.evaluate.film import write_video
from flexor.evaluate.rollout import (
    Episode,
    ExpertActor,
    rollout,
    succeeded,
    summarize,
    wilson_interval,
)
from flexor.sim.record import EVAL_SEED_START
from flexor.sim.task import PlaceEnv

SEEDS = list(range(EVAL_SEED_START, EVAL_SEED_START + 7))
place = partial(make_env, "place")


class QueueActor:
    """Looks only every few steps and plays a queue per row, as a policy with action chunks does."""

    def reset(self, num_envs: int) -> None:
        self.queue: list[np.ndarray] = []

    def act(self, batch: dict[str, np.ndarray], task: list[str]) -> np.ndarray:
        if not self.queue:
            pixels = batch["observation.image"].reshape(len(task), -1).astype(np.int64)
            column = (pixels * np.arange(pixels.shape[1])).sum(
                1
            ) % 1000  # integers, so that no rounding differs
            self.queue = [
                np.stack([np.sin(column + k), np.cos(column * k), np.sin(k * column)], 1) for k in range(5)
            ]
        return self.queue.pop()


class RandomActor:
    """Random actions, uniform over the environment's action space."""

    def attach(self, envs, seeds) -> None:
        self.space = envs[0].action_space
        self.rngs = [np.random.default_rng([0xAC70, seed]) for seed in seeds]

    def reset(self, num_envs: int) -> None:
        assert num_envs == len(self.rngs)

    def act(self, batch: dict[str, np.ndarray], task: list[str]) -> np.ndarray:
        low, high = self.space.low, self.space.high
        return np.stack([rng.uniform(low, high).astype(np.float32) for rng in self.rngs])


@pytest.mark.parametrize("actor", [ExpertActor(), RandomActor(), QueueActor()])
def test_an_episode_does_not_depend_on_its_batch(actor) -> None:
    alone = rollout(place, actor, SEEDS, batch_size=1)
    together = rollout(place, actor, SEEDS, batch_size=5)
    assert alone == together
    assert [episode.seed for episode in alone] == SEEDS
    assert rollout(place, actor, SEEDS[::-1], batch_size=3)[::-1] == alone


def test_expert_succeeds_and_chance_does_not() -> None:
    expert = summarize(rollout(place, ExpertActor(), SEEDS))
    assert expert.success_rate == 1 and expert.mean_max_reward == 1 and 20 < expert.mean_steps < 50
    chance = summarize(rollout(place, RandomActor(), SEEDS))
    assert chance.success_rate == 0 and chance.mean_steps == 80
    assert "100.0%" in str(expert)


def test_max_steps_frames_and_progress() -> None:
    reports: list[tuple[int, int]] = []
    episodes = rollout(
        place,
        ExpertActor(),
        SEEDS,
        max_steps=4,
        batch_size=2,
        record=SEEDS[1:2],
        progress=lambda done, total: reports.append((done, total)),
    )
    assert [episode.steps for episode in episodes] == [4] * 7
    assert [len(episode.frames or []) for episode in episodes] == [0, 5, 0, 0, 0, 0, 0]
    assert reports[-1] == (7, 7) and reports == sorted(reports)


def test_mistakes_are_explained() -> None:
    with pytest.raises(FlexorError, match="not in `seeds`"):
        rollout(place, ExpertActor(), SEEDS, record=[0])
    with pytest.raises(FlexorError, match="render_mode"):
        rollout(partial(place, render_mode=None), ExpertActor(), SEEDS, record=SEEDS[:1])
    with pytest.raises(FlexorError, match="built-in task"):
        rollout(partial(make_env, "CartPole-v1"), ExpertActor(), SEEDS)
    with pytest.raises(FlexorError, match="max_steps"):
        rollout(lambda: gymnasium.make("flexor/Place-v0").unwrapped, ExpertActor(), SEEDS)
    with pytest.raises(FlexorError, match="at least one"):
        summarize([])


def test_success_is_what_the_environment_says() -> None:
    assert succeeded({"is_success": True}, 0.0, False)
    assert not succeeded({"is_success": False, "success": True}, 1.0, True)
    assert succeeded({"success": np.array(True)}, 0.0, False)
    assert succeeded({}, 1.0, True)
    assert not succeeded({}, 1.0, False) and not succeeded({}, 0.0, True)


def test_wilson_interval() -> None:
    # Figures from Newcombe (1998), Statistics in Medicine 17, table I, method 3.
    for successes, trials, low, high in [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0, 0.1611),
    ]:
        assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=6e-5)
    assert wilson_interval(29, 29)[1] == 1
    summary = summarize([Episode(0, True, 2.0, 1.0, 10), Episode(1, False, 1.0, 0.5, 20)])
    assert (summary.success_rate, summary.mean_return, summary.mean_steps) == (0.5, 1.5, 15)


def test_video_holds_the_frames(tmp_path) -> None:
    [episode] = rollout(place, ExpertActor(), SEEDS[:1], record=SEEDS[:1])
    frames = episode.frames
    assert frames is not None
    path = tmp_path / "videos" / "expert.mp4"
    write_video(path, frames, fps=10)
    assert [each.name for each in path.parent.iterdir()] == ["expert.mp4"]
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.pix_fmt, stream.average_rate) == ("h264", "yuv420p", 10)
        decoded = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(decoded) == len(frames) == episode.steps + 1
    assert np.abs(decoded[-1].astype(int) - frames[-1]).mean() < 4


def test_video_of_odd_size_and_of_nothing(tmp_path) -> None:
    write_video(tmp_path / "odd.mp4", [np.full((33, 47, 3), 90, np.uint8)] * 3, fps=29.97)
    with av.open(str(tmp_path / "odd.mp4")) as container:
        assert (container.streams.video[0].width, container.streams.video[0].height) == (48, 34)
    with pytest.raises(FlexorError, match="no frames"):
        write_video(tmp_path / "none.mp4", [], fps=10)


def test_an_episode_knows_how_fast_its_film_runs() -> None:
    class Fast(PlaceEnv):
        metadata = {"render_modes": ["rgb_array"], "render_fps": 25}  # noqa: RUF012

    def make() -> Fast:
        return Fast(render_mode="rgb_array")

    (episode,) = rollout(make, RandomActor(), [1], max_steps=2, record=[1])
    assert episode.fps == 25
