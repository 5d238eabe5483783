"""A run on two datasets that is killed, and resumed on another number of processes, sees the same samples."""

import pytest
from test_sameness import LOSS_TOLERANCE

from support import ranks, runs, trouble
from support.samples import write_lowdim

pytestmark = pytest.mark.ranks

STEPS, LEG = 9, 3


@pytest.fixture(scope="module")
def both(lowdim, tmp_path_factory):
    return f"{lowdim},{write_lowdim(tmp_path_factory.mktemp('other') / 'other', (9, 14, 8))}"


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2)])
def test_killed_run_goes_on_on_other_processes(first, second, both, tiny_act, tmp_path):
    more = [f"--steps={STEPS}", f"--save_freq={LEG}", "--dataset.weights=3,1", "--policy.dropout=0"]
    more += ["--optimizer.eps=1e-5", "--dataset.stats=per_dataset", "--sample_weighting.type=column"]
    more += ["--sample_weighting.column=next.reward"]

    def train(folder, batch):
        return ["train", *runs.flags(both, folder / "run", tiny_act, *more, f"--batch_size={batch}")]

    ranks.run(tmp_path / "alone", 1, train(tmp_path / "alone", 8))
    run = tmp_path / "run"
    trouble.interrupted(tmp_path / "0", first, train(tmp_path, 8 // first), run, LEG, LEG + 2)
    ranks.run(tmp_path / "1", second, ["resume", str(run), f"--batch_size={8 // second}"])
    assert ranks.computed(tmp_path / "0", tmp_path / "1") == ranks.computed(tmp_path / "alone")
    assert ranks.losses(run) == pytest.approx(
        ranks.losses(tmp_path / "alone" / "run"), rel=20 * LOSS_TOLERANCE
    )
    counts = [
        [line["datasets"] for line in runs.metrics(each) if "loss" in line]
        for each in (run, tmp_path / "alone" / "run")
    ]
    assert counts[0] == counts[1]


@pytest.mark.slow
def test_streamed_images_of_two_datasets_go_on_elsewhere(dataset, tiny_act, tmp_path):
    """Two ranks, then one: videos of both datasets are read by other ranks, and every sample is the same."""
    from flexor.sim.record import record_dataset

    other = record_dataset(tmp_path / "other", episodes=3, image_size=32, seed=50)
    more = ["--steps=6", "--save_freq=2", "--policy.dropout=0", "--dataset.cache.tier=stream"]
    more += ["--dataset.order.pool=5", "--dataset.weights=1,2"]

    def train(folder, batch):
        flags = runs.flags(f"{dataset},{other}", folder / "run", tiny_act, *more, f"--batch_size={batch}")
        return ["train", *flags]

    ranks.run(tmp_path / "alone", 1, train(tmp_path / "alone", 4))
    run = tmp_path / "run"
    trouble.interrupted(tmp_path / "0", 2, train(tmp_path, 2), run, 2, 3)
    ranks.run(tmp_path / "1", 1, ["resume", str(run), "--batch_size=4"])
    assert ranks.computed(tmp_path / "0", tmp_path / "1") == ranks.computed(tmp_path / "alone")
    assert ranks.losses(run) == pytest.approx(ranks.losses(tmp_path / "alone" / "run"), rel=1e-3)
