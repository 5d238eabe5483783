"""Runs on several datasets, and with weights of samples: exact on resume, and every line says what was seen."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from flexor.cli.main import main
from flexor.config.parse import load_config, read_run
from flexor.core.batch import ACTION, DATASET_NUMBER, SAMPLE_WEIGHT, STATE
from flexor.data.dataset import open_dataset
from flexor.policies.pretrained import load_pretrained
from flexor.train.datasets import build_datasets, weigh_samples
from support import runs
from support.samples import write_lowdim

STEPS = 8


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """A second dataset, with other numbers."""
    root = write_lowdim(tmp_path_factory.mktemp("other") / "other", (9, 14, 8))
    file = next((root / "data").rglob("*.parquet"))
    table = pq.read_table(file)
    moved = [[3 * x + 5 for x in row] for row in table["action"].to_pylist()]
    kind = table.schema.field("action").type
    table = table.set_column(table.schema.get_field_index("action"), "action", pa.array(moved, kind))
    pq.write_table(table, file)
    (root / "meta" / "stats.json").unlink()  # computed anew
    return root


WAYS = {
    "by size": [],
    "weights": ["--dataset.weights=3,1"],
    "per dataset": ["--dataset.weights=1,2", "--dataset.stats=per_dataset", "--dataset.save_stats_of=other"],
    "held out": ["--dataset.eval_split=0.3", "--eval_steps=2", "--dataset.order.kind=uniform"],
}


@pytest.mark.parametrize("way", WAYS)
def test_resumed_run_is_bitwise_the_uninterrupted_one(way, lowdim, other, tiny_act, tmp_path, log_lines):
    both = f"{lowdim},{other}"
    more = [f"--steps={STEPS}", "--save_freq=3", *WAYS[way]]
    uninterrupted = runs.train(both, tmp_path / "whole", tiny_act, *more)
    cut = runs.cut_back(uninterrupted, tmp_path / "cut", 3)
    assert main(["resume", str(cut)]) == 0
    runs.assert_same(uninterrupted, cut, STEPS)
    counts = [line["datasets"] for line in runs.metrics(uninterrupted) if "loss" in line]
    assert counts == [line["datasets"] for line in runs.metrics(cut) if "loss" in line]
    assert [sum(each["samples"] for each in line.values()) for line in counts] == [
        4 * n for n in range(1, STEPS + 1)
    ]
    share = {"by size": 43 / 74, "weights": 0.75, "per dataset": 1 / 3}.get(way)
    assert share is None or counts[-1]["lowdim"]["share"] == pytest.approx(share, abs=0.05)
    told = [line for line in log_lines if f"step {STEPS}  loss" in line]
    assert told and all("lowdim" in line and "other" in line and "epochs" in line for line in told)


def test_what_changed_is_refused(lowdim, other, tiny_act, tmp_path, capsys):
    run = runs.train(f"{lowdim},{other}", tmp_path / "run", tiny_act, "--steps=2", "--dataset.weights=1,1")
    for change, why in (
        (f"--dataset.root={other},{lowdim}", "not the one that"),
        (f"--dataset.root={lowdim}", "2 weights, but there are 1 datasets"),
        ("--dataset.weights=1,2", "dataset.weights can't change"),
        ("--dataset.stats=per_dataset", "dataset.stats can't change"),
    ):
        assert main(["resume", str(run), "--steps=3", change]) != 0
        assert why in capsys.readouterr().err
    assert main(["resume", str(run), "--steps=3"]) == 0


def test_no_dataset_is_held_out_as_a_whole(lowdim, tmp_path, tiny_act, capsys):
    short = write_lowdim(tmp_path / "one", (9,))
    flags = runs.flags(
        f"{lowdim},{short}", tmp_path / "run", tiny_act, "--steps=1", "--dataset.eval_split=0.1"
    )
    assert main(["train", *flags]) != 0
    assert "holds out all episodes of one" in capsys.readouterr().err


def test_each_dataset_is_normalised_by_its_own_statistics(lowdim, other, tiny_act, tmp_path):
    more = ["--steps=1", "--dataset.stats=per_dataset", "--dataset.save_stats_of=other"]
    run = runs.train(f"{lowdim},{other}", tmp_path / "run", tiny_act, *more)
    saved = load_pretrained(run).preprocessor
    normalize = next(step for step in saved.steps if step.name == "normalizer_processor")
    theirs = open_dataset(root=other).columns["action"]
    assert np.allclose(normalize.stats[ACTION]["mean"], theirs.mean(0), atol=1e-4)


def test_normalisation_of_a_batch_from_both(lowdim, other):
    from flexor.policies.features import Kind, PolicyFeature
    from flexor.policies.processing.normalize import Normalize, NormalizeByDataset

    features = {STATE: PolicyFeature(Kind.STATE, (2,)), ACTION: PolicyFeature(Kind.ACTION, (2,))}
    modes = {Kind.STATE: "MEAN_STD", Kind.ACTION: "MIN_MAX"}
    rng = np.random.default_rng(0)

    def stats():
        low = rng.normal(size=2)
        return {"mean": rng.normal(size=2), "std": rng.uniform(1, 2, 2), "min": low, "max": low + 1}

    each = [Normalize(features, modes, {name: stats() for name in features}) for _ in range(3)]
    batch = {STATE: torch.randn(6, 2), ACTION: torch.randn(6, 4, 2), "x": torch.ones(6)}
    which = torch.tensor([0, 2, 1, 1, 0, 2])
    step = NormalizeByDataset(each[1], each)
    mixed = step({**batch, DATASET_NUMBER: which})
    for i, number in enumerate(which.tolist()):
        alone = each[number]({key: value[i : i + 1] for key, value in batch.items()})
        for name in features:
            assert torch.equal(mixed[name][i], alone[name][0])
    shapes = {key: value.to("meta") for key, value in {**batch, DATASET_NUMBER: which}.items()}
    assert NormalizeByDataset(each[1], each)(shapes)[ACTION].shape == (6, 4, 2)  # without looking at values
    acting = step(batch)  # a robot does not say which dataset it is
    assert torch.equal(acting[STATE], each[1](batch)[STATE])
    assert all(torch.equal(step.state()[key], value) for key, value in each[1].state().items())


def test_other_lengths_need_a_policy_that_pads(lowdim, tmp_path, tiny_act, capsys):
    from support.samples import DatasetWriter

    vector = {"dtype": "float32", "names": None}
    features = {
        "observation.environment_state": {**vector, "shape": (4,)},
        "observation.state": {**vector, "shape": (3,)},
        "action": {**vector, "shape": (2,)},
    }
    with DatasetWriter(tmp_path / "longer", 10, features) as writer:
        for _ in range(5):
            writer.add_frame({k: np.ones(f["shape"], np.float32) for k, f in features.items()})
        writer.save_episode("push")
    flags = runs.flags(f"{lowdim},{tmp_path / 'longer'}", tmp_path / "run", tiny_act, "--steps=1")
    assert main(["train", *flags]) != 0
    assert "[2] in lowdim, [3] in longer" in (error := capsys.readouterr().err)
    assert "pi0, pi05, pi0_fast, smolvla, eo1, xvla, groot and wall_x" in error


def test_plan_of_several_datasets(lowdim, other, tiny_act, capsys):
    flags = [f"--dataset.root={lowdim},{other}", "--dataset.weights=2,1", *tiny_act, "--steps=10", "--json"]
    assert main(["plan", *flags]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("weights", ["3", "1,2,3"])
@pytest.mark.parametrize("verb", ["plan", "train"])
def test_a_wrong_number_of_weights_is_refused(verb, weights, lowdim, other, tiny_act, capsys):
    """Not: training on the first dataset alone."""
    flags = [f"--dataset.root={lowdim},{other}", f"--dataset.weights={weights}", *tiny_act, "--steps=1"]
    assert main([verb, *flags]) == 2
    assert "weights, but there are 2 datasets: lowdim, other" in capsys.readouterr().err


def test_a_run_is_named_after_the_data_it_was_trained_on(lowdim, tiny_act, tmp_path, log_lines):
    """The file's dataset is not used, so that neither log, record nor model card name it."""
    from flexor.train.hub.card import model_card

    (tmp_path / "run.yaml").write_text("dataset: {repo_id: someone/else, revision: v1}\n")
    run = runs.train(lowdim, tmp_path / "run", tiny_act, "--steps=1", f"--config={tmp_path / 'run.yaml'}")
    assert json.loads((run / "run.json").read_text())["dataset"]["name"] == "lowdim"
    card = model_card(run, 1, "me/policy")
    assert "trained on lowdim" in card
    texts = [card, (run / "config.yaml").read_text(), *log_lines]
    texts.append((run / "checkpoints/last/pretrained_model/train_config.json").read_text())
    assert not any("someone/else" in text for text in texts)


def test_a_resumed_run_keeps_the_name_of_its_data(lowdim, tiny_act, tmp_path):
    """Its data is now in another folder, which is checked: it is the same data."""
    run = runs.train(lowdim, tmp_path / "run", tiny_act, "--steps=1", "--dataset.repo_id=lab/lowdim")
    moved = shutil.copytree(lowdim, tmp_path / "moved")
    assert main(["resume", str(run), "--steps=2", f"--dataset.root={moved}"]) == 0
    saved = read_run(run)["dataset"]
    assert (saved["repo_id"], saved["root"]) == ("lab/lowdim", str(moved))


# Weights of samples


def weights_file(path: Path, frames: int) -> Path:
    table = {"index": np.arange(frames), "weight": np.arange(frames) % 4 / 2}
    pq.write_table(pa.table(table), path)
    return path


def test_weighted_loss_is_exact_on_resume_and_what_it_should_be(lowdim, tiny_act, tmp_path):
    file = weights_file(tmp_path / "weights.parquet", 43)
    more = [f"--steps={STEPS}", "--save_freq=3", "--policy.dropout=0"]
    weighting = ["--sample_weighting.type=file", f"--sample_weighting.progress_path={file}"]
    uninterrupted = runs.train(lowdim, tmp_path / "whole", tiny_act, *more, *weighting)
    cut = runs.cut_back(uninterrupted, tmp_path / "cut", 3)
    assert main(["resume", str(cut)]) == 0
    runs.assert_same(uninterrupted, cut, STEPS)
    plain = runs.train(lowdim, tmp_path / "plain", tiny_act, *more)
    assert runs.figures(plain)[0]["loss"] != runs.figures(uninterrupted)[0]["loss"]
    same = tmp_path / "same.parquet"
    pq.write_table(pa.table({"index": np.arange(43), "weight": np.full(43, 7.0)}), same)
    weighting[1] = f"--sample_weighting.progress_path={same}"
    equal = runs.train(lowdim, tmp_path / "equal", tiny_act, *more, *weighting)
    losses = [[line["loss"] for line in runs.figures(run)] for run in (plain, equal)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)  # only how they compare matters


def test_changed_weights_are_refused(lowdim, tiny_act, tmp_path, capsys):
    file = weights_file(tmp_path / "weights.parquet", 43)
    weighting = ["--sample_weighting.type=file", f"--sample_weighting.progress_path={file}"]
    run = runs.train(lowdim, tmp_path / "run", tiny_act, "--steps=1", *weighting)
    pq.write_table(pa.table({"index": np.arange(43), "weight": np.ones(43)}), file)
    assert main(["resume", str(run), "--steps=2"]) != 0
    assert "weights differ" in capsys.readouterr().err


def weighed(root, *flags):
    config = load_config(
        [
            f"--dataset.root={root}",
            "--policy.type=act",
            "--policy.chunk_size=5",
            "--policy.n_action_steps=5",
            *flags,
        ]
    )
    dataset, _ = build_datasets(config.dataset)
    return weigh_samples(config, dataset).columns.get(SAMPLE_WEIGHT)


def test_where_weights_come_from(lowdim, other, tmp_path):
    assert weighed(lowdim) is None
    column = ["--sample_weighting.type=column", "--sample_weighting.column=next.reward"]
    assert np.array_equal(weighed(lowdim, *column), open_dataset(root=lowdim).columns["next.reward"])
    file = weights_file(tmp_path / "weights.parquet", 43)
    weighting = ["--sample_weighting.type=file", f"--sample_weighting.progress_path={file}"]
    some = weighed(lowdim, *weighting, "--dataset.episodes=1,3")
    assert np.array_equal(some, (np.arange(43) % 4 / 2)[[*range(11, 20), *range(33, 43)]])
    mix = f"--dataset.mix=[{{root: {lowdim}, weights_path: {file}}}, {{root: {other}, weights_path: {file}}}]"
    config = load_config([mix, "--policy.type=act", "--sample_weighting.type=file"])
    dataset, _ = build_datasets(config.dataset)
    weights = np.arange(43) % 4 / 2
    column = weigh_samples(config, dataset).columns[SAMPLE_WEIGHT]
    assert np.array_equal(column, np.concatenate([weights, weights[:31]]))


def test_progress_of_the_dataset_itself(lowdim, tmp_path):
    import shutil

    root = shutil.copytree(lowdim, tmp_path / "copy")
    rising = pa.table(
        {"index": np.arange(11), "episode_index": np.zeros(11, int), "progress_sparse": np.linspace(0, 1, 11)}
    )
    pq.write_table(rising, root / "sarm_progress.parquet")
    weights = weighed(root, "--sample_weighting.type=rabc")
    assert weights[:10].tolist() == [1] * 10 and weights[10] < 1  # the last frame has no progress to come
    assert weights[11:].tolist() == [1] * 32  # not in the file


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--sample_weighting.type=rabc"], "has no sarm_progress.parquet"),
        (["--sample_weighting.type=file"], "give the file with --sample_weighting.progress_path"),
        (
            ["--sample_weighting.type=file", "--sample_weighting.progress_path=nowhere"],
            "Can't read sample weights",
        ),
        (["--sample_weighting.type=column"], "column=weight is no column of .*next.reward"),
        (
            [
                "--sample_weighting.type=column",
                "--sample_weighting.column=frame_index",
                "--dataset.episodes=0",
            ],
            None,
        ),
        (
            ["--sample_weighting.type=rabc", "--sample_weighting.progress_path=FILE"],
            "no column episode_index, progress_sparse",
        ),
        (
            ["--sample_weighting.type=file", "--sample_weighting.progress_path=SHORT"],
            "no weight for 33 of the 43",
        ),
        (
            [
                "--sample_weighting.type=column",
                "--sample_weighting.column=task_index",
                "--dataset.tasks=pull",
            ],
            "all weights are 0",
        ),
    ],
)
def test_weights_that_can_not_be_used(flags, message, lowdim, tmp_path):
    from flexor.core.errors import FlexorError

    files = {
        "FILE": weights_file(tmp_path / "a.parquet", 43),
        "SHORT": weights_file(tmp_path / "b.parquet", 10),
    }
    for name, file in files.items():
        flags = [flag.replace(name, str(file)) for flag in flags]
    if message is None:
        assert weighed(lowdim, *flags) is not None
        return
    with pytest.raises(FlexorError, match=message):
        weighed(lowdim, *flags)
