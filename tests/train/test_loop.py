"""What the loop does besides resuming: accumulation, divergence, held-out loss, evaluation, retention."""

import copy
import json
import math
import shutil
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexor.cli.main import main
from flexor.config.parse import load_config
from flexor.core.errors import ConfigError
from flexor.core.rng import Noise
from flexor.data.dataset import open_dataset
from flexor.policies.fit import fit_to_dataset
from flexor.train.build import build_state
from flexor.train.checkpoint import folder as checkpoint
from flexor.train.checkpoint import run_folder
from flexor.train.datasets import split_episodes
from flexor.train.engine.base import Engine
from flexor.train.loop import train
from flexor.train.ranks.split import split_batch
from flexor.train.validate import held_out_loss
from support import runs

# Gradient accumulation


def test_accumulation_is_the_larger_batch(lowdim, tiny_act, tmp_path):
    """The same samples, noise and masked mean; sums in another order, hence the tolerance of 1e-5."""
    more = ["--steps=4", "--policy.dropout=0", "--optimizer.type=sgd", "--optimizer.lr=0.01"]
    results = []
    for batch, accumulation in ((8, 1), (4, 2), (2, 4)):
        split = [f"--batch_size={batch}", f"--gradient_accumulation_steps={accumulation}"]
        run = runs.train(lowdim, tmp_path / f"{batch}", tiny_act, *more, *split)
        results.append((runs.figures(run), runs.tensors(run, 4)))
    (figures, weights), *rest = results
    for other_figures, other_weights in rest:
        for line, expected in zip(figures, other_figures, strict=True):
            assert line == pytest.approx(expected, rel=1e-5)
        for name, value in weights.items():
            torch.testing.assert_close(value, other_weights[name], rtol=1e-5, atol=1e-6)


def test_accumulation_draws_the_same_noise(lowdim, tiny_act, tmp_path, monkeypatch):
    """Noise depends on the sample and the step, so splitting the batch splits the noise."""
    noises: dict[int, dict[tuple[int, int], list[float]]] = {}
    original = Noise.normal
    batch = 0

    def spy(self, name, shape):
        values = original(self, name, shape)
        for sample, row in zip(self.sample_ids.tolist(), values):
            noises.setdefault(batch, {})[self.step, sample] = row.tolist()
        return values

    monkeypatch.setattr(Noise, "normal", spy)
    for batch in (8, 2):
        split = [f"--batch_size={batch}", f"--gradient_accumulation_steps={8 // batch}"]
        runs.train(lowdim, tmp_path / f"{batch}", tiny_act, "--steps=3", *split)
    assert noises[8] == noises[2] and len(noises[8]) == 24


def test_dropout_depends_on_the_step_and_not_on_what_was_drawn_before():
    engine = Engine(torch.device("cpu"))

    def draw(*place: int) -> list[float]:
        torch.rand(3)
        engine.seed_dropout(*place)
        with engine.forward():
            return torch.rand(4).tolist()

    assert draw(1, 2, 0) == draw(1, 2, 0)
    assert len({tuple(draw(*place)) for place in ((1, 2, 0), (1, 2, 1), (1, 3, 0), (2, 2, 0))}) == 4


# Divergence


def poison(lowdim: Path, root: Path, value: float, column: str = "action") -> Path:
    shutil.copytree(lowdim, root)
    file = next((root / "data").rglob("*.parquet"))
    table = pq.read_table(file)
    values = [list(row) for row in table[column].to_pylist()]
    values[20][0] = value
    index = table.schema.get_field_index(column)
    field = table.schema.field(index)
    pq.write_table(table.set_column(index, field, pa.array(values, field.type)), file)
    return root


@pytest.mark.parametrize(
    "value, column", [(math.nan, "action"), (math.inf, "action"), (math.nan, "observation.state")]
)
@pytest.mark.parametrize("log_freq", [1, 50])
def test_not_a_number_stops_the_run(value, column, log_freq, lowdim, tiny_act, tmp_path, capsys):
    data = poison(lowdim, tmp_path / "data", value, column)
    run = tmp_path / "run"
    flags = runs.flags(data, run, tiny_act, "--steps=60", "--save_freq=1", f"--log_freq={log_freq}")
    assert main(["train", *flags]) == 1
    error = capsys.readouterr().err
    good = checkpoint.newest(run / "checkpoints")
    step = int(good.name) + 1 if good else 1
    assert f"of step {step} is" in error
    ids = json.loads(error.partition("Sample ids of that batch: ")[2].partition(". Last good")[0])
    assert len(ids) == 4 and {17, 18, 19, 20} & set(ids)  # chunks of 4 that hold frame 20
    assert str(good or "none yet") in error and "flexor data check" in error
    for number in checkpoint.complete(run / "checkpoints"):
        assert all(torch.isfinite(value).all() for value in runs.tensors(run, number).values())
    assert all(math.isfinite(line["loss"]) for line in runs.metrics(run)) if log_freq == 1 else True


def test_exploding_loss_stops_the_run(lowdim, tiny_act, tmp_path, capsys):
    run = tmp_path / "run"
    more = ["--steps=50", "--optimizer.type=sgd", "--optimizer.lr=1e30", "--optimizer.grad_clip_norm=0"]
    assert main(["train", *runs.flags(lowdim, run, tiny_act, *more)]) == 1
    assert "lower --optimizer.lr" in capsys.readouterr().err
    assert checkpoint.newest(run / "checkpoints") is None


def test_metrics_are_json_even_when_fp16_overflows(lowdim, tiny_act, tmp_path):
    """The scaler tries a scale that is too large now and then; the gradient is infinite in that step."""
    more = ["--steps=3", "--precision=fp16", "--policy.kl_weight=100"]
    run = runs.train(lowdim, tmp_path / "run", tiny_act, *more)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    losses = [
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON")) for line in lines
    ]
    assert None in [line["grad_norm"] for line in losses]


# Held-out episodes and evaluation


def test_a_run_does_not_change_its_settings(lowdim, tiny_act, tmp_path):
    config = load_config(runs.flags(lowdim, tmp_path / "run", tiny_act, "--epochs=0.1"))
    before = copy.deepcopy(config)
    assert train(config).step > 0
    assert config == before and not config.policy.input_features


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.floats(0.01, 0.99))
def test_split_is_lerobots(tasks, share):
    class Episodes:
        index = np.arange(len(tasks)) * 2

    class Data:
        episodes = Episodes

    Data.episodes.tasks = [[f"task {t}"] for t in tasks]
    by_task: dict[int, list[int]] = {}
    for number, task in enumerate(tasks):
        by_task.setdefault(task, []).append(number * 2)
    expected = [e for task in by_task.values() for e in task[len(task) - math.ceil(len(task) * share) :]]
    if len(expected) == len(tasks):
        with pytest.raises(ConfigError, match="eval_split"):
            split_episodes(Data, share)
        return
    training, held_out = split_episodes(Data, share)
    assert held_out == expected
    assert sorted(training + held_out) == [2 * n for n in range(len(tasks))]


def state_of(lowdim, tiny_act, tmp_path, *more):
    config = load_config(runs.flags(lowdim, tmp_path / "run", tiny_act, *more))
    dataset = open_dataset(root=lowdim)
    config = replace(config, policy=fit_to_dataset(config.policy, dataset))
    return build_state(config, dataset, Engine(torch.device("cpu")), split_batch(config, 1)), dataset


def test_held_out_loss_is_one_number_whatever_the_batch(lowdim, tiny_act, tmp_path):
    losses = []
    for batch in (1, 4, 7, 100):
        state, dataset = state_of(lowdim, tiny_act, tmp_path, f"--batch_size={batch}")
        losses += [held_out_loss(state, dataset)["held_out_loss"] for _ in range(2)]
        assert state.policy.training
    assert losses[0] == losses[1] and losses == pytest.approx([losses[0]] * 8, rel=1e-5)


def test_held_out_samples_can_be_limited(lowdim, tiny_act, tmp_path, monkeypatch):
    state, dataset = state_of(lowdim, tiny_act, tmp_path)
    read = []
    original = type(dataset).read
    monkeypatch.setattr(
        type(dataset), "read", lambda self, rows, *a: read.extend(rows) or original(self, rows, *a)
    )
    held_out_loss(state, dataset, 10)
    assert len(read) == len(set(read)) == 10 and min(read) == 0 and max(read) == len(dataset) - 1


def test_held_out_loss_in_the_loop(lowdim, tiny_act, tmp_path):
    more = ["--steps=5", "--dataset.eval_split=0.5", "--eval_steps=2", "--ema.enable"]
    run = runs.train(lowdim, tmp_path / "run", tiny_act, *more)
    assert [line["step"] for line in runs.metrics(run) if "held_out_loss" in line] == [2, 4, 5]


def test_no_episode_left_to_train_on(lowdim, tiny_act, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["train", *runs.flags(lowdim, run, tiny_act, "--dataset.eval_split=0.9")]) == 2
    assert "eval_split=0.9" in capsys.readouterr().err and not run.exists()


@pytest.mark.slow
def test_evaluation_in_the_loop(dataset, tiny_act, tmp_path):
    environment = ["--env.type=place", "--env.kwargs.image_size=32", "--env.max_steps=6", "--env_eval_freq=1"]
    evaluation = ["--eval.n_episodes=2", "--eval.batch_size=2", "--eval.videos=1", "--save_checkpoint=false"]
    run = runs.train(dataset, tmp_path / "run", tiny_act, "--steps=2", *environment, *evaluation)
    scores = [line for line in runs.metrics(run) if "eval_success_rate" in line]
    assert [line["step"] for line in scores] == [1, 2]
    assert all(0 <= line["eval_success_rate"] <= 1 for line in scores)
    assert len(list((run / "videos").rglob("*.mp4"))) == 2


# Retention


@given(
    st.integers(1, 9),
    st.integers(1, 40),
    st.none() | st.integers(1, 5),
    st.none() | st.integers(1, 12),
)
@settings(max_examples=60)
def test_retention(every, steps, keep_last, keep_every):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        saved = list(range(every, steps + 1, every)) or [steps]
        for step in saved:
            made = root / checkpoint.folder_name(step, steps) / checkpoint.MANIFEST
            made.parent.mkdir(parents=True)
            made.write_text("{}")
            checkpoint.point_last_at(made.parent.parent)
            before = list(checkpoint.complete(root))
            removed = checkpoint.prune(root, keep_last, keep_every)
            left = list(checkpoint.complete(root))
            assert sorted(left + removed) == before
            assert step in left and (root / "last").resolve().name == f"{step:06d}"
        always = {s for s in saved if keep_every and s % keep_every == 0}
        expected = set(saved) if keep_last is None else set(saved[-keep_last:]) | always
        assert set(left) == expected


def test_names_of_checkpoints_are_lerobots():
    assert checkpoint.folder_name(5, 100_000) == "000005"
    assert checkpoint.folder_name(5, 10_000_000) == "00000005"


def test_last_step_is_always_saved(lowdim, tiny_act, tmp_path):
    for number, (frequency, expected) in enumerate([(0, [5]), (2, [2, 4, 5]), (9, [5])]):
        run = runs.train(lowdim, tmp_path / f"{number}", tiny_act, "--steps=5", f"--save_freq={frequency}")
        assert list(checkpoint.complete(run / "checkpoints")) == expected


def test_no_checkpoints_when_not_wanted(lowdim, tiny_act, tmp_path):
    run = runs.train(lowdim, tmp_path / "run", tiny_act, "--steps=2", "--save_checkpoint=false")
    assert not (run / "checkpoints").exists()


def test_starting_from_a_checkpoint(lowdim, tiny_act, tmp_path):
    first = runs.train(lowdim, tmp_path / "first", tiny_act, "--steps=2")
    common = [f"--dataset.root={lowdim}", "--num_workers=0", "--steps=1", "--optimizer.lr=0"]
    more = [
        f"--policy.path={first}",
        "--policy.optimizer_lr_backbone=0",
        f"--output_dir={tmp_path / 'second'}",
    ]
    assert main(["train", *common, *more]) == 0
    name = "pretrained_model/model.safetensors:"
    before, after = (
        {k: v for k, v in runs.tensors(run, step).items() if k.startswith(name)}
        for run, step in ((first, 2), (tmp_path / "second", 1))
    )
    # a learning rate of 0 changes nothing
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)


def test_another_type_than_the_checkpoints_is_refused(lowdim, tiny_act, tmp_path, capsys):
    first = runs.train(lowdim, tmp_path / "first", tiny_act, "--steps=1")
    flags = [f"--dataset.root={lowdim}", f"--policy.path={first}", "--policy.type=diffusion"]
    assert main(["train", *flags, f"--output_dir={tmp_path / 'second'}"]) == 2
    assert "policy.type=diffusion" in capsys.readouterr().err


def test_runs_of_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    now = datetime(2026, 1, 2, 3, 4, 5)
    monkeypatch.setattr(run_folder, "datetime", SimpleNamespace(now=lambda: now))
    for expected in ("2026-01-02_03-04-05_act", "2026-01-02_03-04-05_act_2", "2026-01-02_03-04-05_act_3"):
        folder = run_folder.default_folder("act")
        assert folder == Path("runs") / expected
        folder.mkdir(parents=True)
    assert run_folder.default_folder("../../x").name == "2026-01-02_03-04-05_.._.._x"
