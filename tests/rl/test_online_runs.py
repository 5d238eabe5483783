"""Runs that learn while they act: bitwise after kill -9, with demonstrations and help."""

import json
import signal
import time

import numpy as np
import pytest
import torch

from flexor.cli.main import main
from flexor.core.errors import ConfigError
from flexor.data.dataset import open_dataset
from flexor.evaluate.report import evaluate_policy
from flexor.policies.features import Kind, PolicyFeature
from flexor.rl.demonstrations import demonstration_records
from flexor.rl.records import RECORDS, observed_names
from support import online

STEPS = 120
KILLS = 6


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return online.demonstrations(tmp_path_factory.mktemp("demonstrations") / "data")


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    result = online.train(folder, data, f"--steps={STEPS}", "--save_freq=50", "--rl.intervener=scripted")
    assert result.step == STEPS
    return folder


def test_a_run_records_each_step_and_how_many_updates_it_was_allowed(undisturbed):
    records = online.records(undisturbed)
    steps = records[records["is_step"] == 1]
    assert len(steps) == STEPS
    assert steps["update"].tolist() == [max(0, number - 19) for number in range(STEPS)]
    lines = [json.loads(line) for line in (undisturbed / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["updates"] == STEPS - 19
    assert {"success_rate", "intervention_rate", "q", "entropy", "temperature"} <= lines[-1].keys()


def test_help_is_recorded_and_begins_after_30_steps(undisturbed):
    records = online.records(undisturbed)
    firsts = np.flatnonzero(records["is_step"] == 0)
    helped = [np.flatnonzero(part["intervention"]) for part in np.split(records, firsts[1:])]
    assert helped[0].min() == 31  # the first record of an episode is no step
    assert sum(len(part) for part in helped) > 10


@pytest.mark.ranks
def test_a_run_that_was_killed_is_bitwise_the_run_that_was_not(data, undisturbed, tmp_path):
    """Killed again and again, at instants that depend on nothing."""
    folder = tmp_path / "run"
    more = (f"--steps={STEPS}", "--save_freq=50", "--rl.intervener=scripted", "--resume=auto")
    file = folder / "records" / RECORDS
    size = online.records(undisturbed).dtype.itemsize
    rng = np.random.default_rng(time.time_ns())
    for kill in range(KILLS):
        process = online.start(tmp_path / f"killed-{kill}", folder, data, *more)
        instant = (kill + 1) * STEPS // (KILLS + 1) + int(rng.integers(10))
        process.wait_for(lambda instant=instant: file.exists() and file.stat().st_size >= instant * size)
        process.send_signal(signal.SIGKILL)
        process.end()
        assert process.returncode == -signal.SIGKILL
    process = online.start(tmp_path / "last", folder, data, *more)
    process.end()
    assert process.returncode == 0
    online.assert_same(undisturbed, folder, STEPS)


def test_an_environment_that_does_not_repeat_itself_begins_a_new_episode(data, undisturbed, tmp_path):
    """What was recorded stays, and is learned from."""
    folder = tmp_path / "run"
    online.train(folder, data, "--steps=60", "--save_freq=0")
    records = online.records(folder)
    last = records[-1:].copy()
    last["observation.state"] += 0.25  # the environment will not do that again
    (folder / "records" / RECORDS).write_bytes(records[:-1].tobytes() + checked(last).tobytes())
    assert main(["resume", str(folder), "--steps=100"]) == 0
    resumed = online.records(folder)
    assert resumed[: len(records) - 1].tobytes() == records[:-1].tobytes()
    assert resumed["is_step"][len(records)] == 0
    assert (resumed["is_step"] == 1).sum() == 100


def checked(record: np.ndarray) -> np.ndarray:
    from flexor.rl.records import _checksums

    record["checksum"] = _checksums(record)
    return record


def test_records_are_exported_as_a_dataset_that_is_sound(undisturbed, tmp_path, capsys):
    """And that is read as the same transitions, where each episode ended with success."""
    assert main(["export", str(undisturbed), f"--records={tmp_path / 'exported'}"]) == 0
    assert main(["data", "check", str(tmp_path / "exported")]) == 0
    dataset, records = open_dataset(None, tmp_path / "exported"), online.records(undisturbed)
    steps = records[records["is_step"] == 1]
    assert len(dataset) == len(steps)
    assert np.array_equal(dataset.columns["action"], steps["action"])
    assert np.array_equal(dataset.columns["next.reward"].ravel(), steps["reward"])
    helped = dataset.columns["complementary_info.is_intervention"].ravel()
    assert np.array_equal(helped, steps["intervention"].astype(bool))
    observed = {name: dataset.features[name] for name in observed_names(records.dtype)}
    kinds = {name: PolicyFeature(Kind.STATE, tuple(f.shape)) for name, f in observed.items()}
    again = demonstration_records(dataset, kinds, records.dtype, "recorded")
    assert len(again) and steps["terminated"].sum() >= 1
    # a dataset does not have what followed the last step of an episode
    same = records[: len(again)]
    follows = same["terminated"] == 0
    assert np.array_equal(again["observation.state"][follows], same["observation.state"][follows])
    assert np.array_equal(again["terminated"], same["terminated"])
    assert len(again) >= len(records) - 2


def test_a_policy_is_evaluated_without_noise(undisturbed):
    settings = ["--eval.n_episodes=3", "--policy.device=cpu"]
    first, _ = evaluate_policy(str(undisturbed), [*settings, "--seed=1"])
    again, _ = evaluate_policy(str(undisturbed), [*settings, "--seed=2"])  # the seed of the policy's noise
    assert first == again


def test_without_demonstrations_and_without_a_checkpoint(tmp_path):
    result = online.train(tmp_path / "run", None, "--steps=40", "--save_checkpoint=false")
    assert result.checkpoint is None and "loss" in result.metrics


def test_any_environment_with_limits_of_its_actions(tmp_path):
    """Its observation is one vector, and its actions are in [-2, 2]."""
    more = ("--env.type=Pendulum-v1", "--env.kwargs={}", "--env.max_steps=15", "--steps=40")
    online.train(tmp_path / "run", None, *more)
    records = online.records(tmp_path / "run")
    steps = records[records["is_step"] == 1]
    assert np.abs(steps["action"]).max() > 1 and np.abs(steps["action"]).max() <= 2
    assert np.flatnonzero(steps["truncated"]).tolist() == [14, 29] and not steps["terminated"].any()


@pytest.mark.parametrize("storage", ["cpu", "file"])
def test_images_in_the_buffer(storage, tmp_path):
    more = [
        "--env.kwargs={image_size: 48, reward: sparse}",
        "--policy.image_encoder_hidden_dim=4",
        "--rl.capacity=100",
        f"--rl.storage={storage}",
        "--steps=24",
    ]
    online.train(tmp_path / "run", None, *more)
    assert torch.isfinite(
        torch.cat([t.float().flatten() for t in online.tensors(tmp_path / "run", 24).values()])
    ).all()
    records = online.records(tmp_path / "run")
    assert records["observation.image"].dtype == np.uint8 and records["observation.image"].std() > 10


def test_what_can_not_work_is_refused(data, tmp_path):
    for flags, message in (
        (["--env.type=null"], "learns while it acts"),
        (["--rl.num_critics=2", "--rl.num_subsample_critics=3"], "more than rl.num_critics"),
        (["--env.kwargs={reward: sparse, image_size: 48}"], "observes"),
        (["--rl.storage=cuda"], "rl.storage=cuda"),
        (["--ema.enable=true"], "ema.enable=True has no effect"),
        (["--precision=bf16"], "precision=bf16 has no effect"),
        (["--rl.serve.port=0", "--rl.intervener=scripted"], "give it to `flexor collect`"),
    ):
        with pytest.raises(ConfigError, match=message):
            online.train(
                tmp_path / "refused", data, *flags, "--steps=30", "--policy.image_encoder_hidden_dim=2"
            )
