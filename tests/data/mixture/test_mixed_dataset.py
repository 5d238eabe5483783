"""Several datasets as one: rows, episodes, frames and features, and what is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexor.core.batch import DATASET_NUMBER
from flexor.core.errors import ConfigError
from flexor.data.dataset import open_dataset
from flexor.data.format.stats import aggregate_stats
from flexor.data.format.writer import DatasetWriter
from flexor.data.loader.open import open_loader
from flexor.data.mixture.mixed import Member, join_datasets, without_padding
from flexor.data.settings import CacheConfig, DatasetConfig
from support.samples import FEATURES, picture, write_sample

TOP, WRIST = "observation.images.top", "observation.images.wrist"
VECTOR = {"dtype": "float32", "names": None}


def _size(camera, size):
    return size if camera == TOP else (24, 32)


def write(root, lengths, state=2, cameras=(TOP,), fps=10, size=(48, 64), first=100, task="stack"):
    features = {
        "observation.state": {**VECTOR, "shape": [state]},
        "action": {**VECTOR, "shape": [2]},
        **{
            c: {"dtype": "image", "shape": [*_size(c, size), 3], "names": FEATURES[TOP]["names"]}
            for c in cameras
        },
    }
    rng = np.random.default_rng(first)
    with DatasetWriter(root, fps, features) as writer:
        for episode, length in enumerate(lengths):
            for frame in range(length):
                values = {
                    "observation.state": rng.normal(first, 3, size=state).astype(np.float32),
                    "action": rng.normal(size=2).astype(np.float32),
                    **{c: picture(episode + 1, frame % 13, *_size(c, size)) for c in cameras},
                }
                writer.add_frame(values)
            writer.save_episode(task)
    return root


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("several")
    return {
        "sample": write_sample(folder / "sample"),
        "other": write(folder / "other", (5, 8), state=3, cameras=(TOP, WRIST[:-1])),
        "short": write(folder / "short", (6, 4), state=2),
    }


def members(folders, *names, **more):
    return [Member(name, open_dataset(root=folders[name]), **more.get(name, {})) for name in names]


RENAMED = {"other": {"rename_map": {WRIST[:-1]: WRIST}}}


def test_rows_episodes_and_frames_are_numbered_through(folders):
    sample, other = (open_dataset(root=folders[name]) for name in ("sample", "other"))
    both = join_datasets([Member("sample", sample), Member("other", other, **RENAMED["other"])])
    assert len(both) == len(sample) + len(other)
    assert both.episodes.index.tolist() == [0, 1, 2, 3, 4, 5]
    assert both.columns["index"].tolist() == [*range(len(both))]
    assert both.columns[DATASET_NUMBER].tolist() == [0] * len(sample) + [1] * len(other)
    assert "next.done" not in both.columns and "comment" not in both.strings  # not all have it
    rows = np.array([3, len(sample) - 1, len(sample), len(both) - 1])
    deltas = {"action": [0, 1, 30], TOP: [-1, 0]}
    read, mine, theirs = (
        both.read(rows, deltas),
        sample.read(rows[:2], deltas),
        other.read(rows[2:] - len(sample), deltas),
    )
    for name in ("action", "action_is_pad", "observation.state", TOP):
        assert np.array_equal(read[name], np.concatenate([mine[name], theirs[name]])), name
    assert np.array_equal(read[WRIST][2:], theirs[WRIST[:-1]])
    assert read["task"] == [*mine["task"], *theirs["task"]]


@given(
    lengths=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=2, max_size=3),
    data=st.data(),
)
@settings(max_examples=10)
def test_any_selection_of_any_datasets_reads_what_each_has(lengths, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("any")
    opened = []
    for number, each in enumerate(lengths):
        write(folder / str(number), each, cameras=(), first=100 * number, task=f"task {number % 2}")
        subset = data.draw(st.sets(st.integers(0, len(each) - 1), min_size=1))
        opened.append(open_dataset(root=folder / str(number), episodes=sorted(subset)))
    both = join_datasets([Member(str(n), dataset) for n, dataset in enumerate(opened)])
    assert np.array_equal(
        both.columns["action"], np.concatenate([dataset.columns["action"] for dataset in opened])
    )
    assert both.read(np.arange(len(both)))["task"] == [
        task for dataset in opened for task in dataset.read(np.arange(len(dataset)))["task"]
    ]
    assert len(set(both.columns["index"].tolist())) == len(both)
    assert np.array_equal(both.columns["index"], both.frame_ids(np.arange(len(both))))
    assert [len(both.only(n)) for n in range(len(opened))] == [len(dataset) for dataset in opened]
    some = data.draw(st.sets(st.sampled_from(both.episodes.index.tolist()), min_size=1))
    part = both.select(sorted(some))
    assert np.array_equal(part.columns["episode_index"], np.repeat(part.episodes.index, part.episodes.length))
    assert part.fingerprint() == both.select(sorted(some)).fingerprint()
    assert (part.fingerprint() == both.fingerprint()) == (len(part) == len(both))


def test_statistics_are_merged_as_lerobot_does(folders):
    both = join_datasets(members(folders, "sample", "other"), on_missing_camera="drop")
    stats_of_each = [open_dataset(root=folders[name]).stats for name in ("sample", "other")]
    merged = aggregate_stats([{"action": stats["action"]} for stats in stats_of_each])["action"]
    for key, value in merged.items():
        assert np.allclose(both.stats["action"][key], value)
    assert np.array_equal(both.only(1).stats["action"]["mean"], stats_of_each[1]["action"]["mean"])
    assert both.features["action"].dtype == "float32"  # float64 in one of them


def test_states_of_different_lengths_are_padded(folders):
    both = join_datasets(members(folders, "other", "short"), on_missing_camera="drop")
    assert both.features["observation.state"].shape == (3,)
    assert (both.columns["observation.state"][-10:, 2] == 0).all()
    assert both.stats_of(1)["observation.state"]["std"][2] == 0
    assert "[3] in other, [2] in short" in both.schema.padded["observation.state"]


def test_padded_zeros_are_no_data(folders):
    both = join_datasets(members(folders, "other", "short"), on_missing_camera="drop")
    rows = without_padding(both, "observation.state")
    assert np.isnan(rows[-10:, 2]).all() and np.isfinite(rows[:, :2]).all()
    alone = open_dataset(root=folders["other"]).stats["observation.state"]
    merged = both.stats["observation.state"]
    for key in ("mean", "std", "min", "max"):
        assert merged[key][2] == pytest.approx(float(alone[key][2]))
    np.testing.assert_allclose(merged["mean"], np.nanmean(rows, axis=0), rtol=1e-5)
    assert merged["count"].tolist() == [len(both)]


def test_camera_that_one_lacks(folders, caplog):
    with pytest.raises(
        ConfigError, match=r"short has observation.images.top\. .*rename_map.*on_missing_camera"
    ):
        join_datasets(members(folders, "sample", "short"))
    dropped = join_datasets(members(folders, "sample", "short"), on_missing_camera="drop")
    assert dropped.cameras == [TOP]
    masked = join_datasets(members(folders, "sample", "short"), on_missing_camera="mask")
    assert masked.cameras == [TOP, WRIST]
    read = masked.read(np.array([0, len(masked) - 1]))
    assert read[f"{WRIST}_padding_mask"].tolist() == [True, False]
    assert f"{WRIST}_padding_mask" not in masked.features  # it is no input of a policy
    assert read[WRIST][0].any() and not read[WRIST][1].any()
    assert read[TOP][1].any()


def test_what_can_not_be_joined_is_refused(folders, tmp_path):
    fast = Member("fast", open_dataset(root=write(tmp_path / "fast", (3,), fps=20)))
    (short,) = members(folders, "short")
    with pytest.raises(ConfigError, match=r"short has 10, fast has 20.*allow_different_fps"):
        join_datasets([short, fast])
    assert join_datasets([short, fast], allow_different_fps=True).fps == 10
    small = Member("small", open_dataset(root=write(tmp_path / "small", (3,), size=(24, 32))))
    with pytest.raises(ConfigError, match=r"48x64 with 3 channels in short, 24x32.*cache.size=HEIGHTxWIDTH"):
        join_datasets([short, small])
    wrong = {"rename_map": {"observation.image": TOP}}
    with pytest.raises(
        ConfigError, match=r"rename_map of short: it has no feature 'observation.image', but .*top"
    ):
        join_datasets([Member("short", short.dataset, **wrong)])
    taken = {"rename_map": {"observation.state": "action"}}
    with pytest.raises(ConfigError, match="'action' already"):
        join_datasets([Member("short", short.dataset, **taken)])
    renamed = {"rename_map": {"observation.state": "observation.joints"}}
    with pytest.raises(ConfigError, match=r"observation.state is missing in other"):
        join_datasets([short, Member("other", short.dataset, **renamed)])


@pytest.mark.parametrize("tier", ["stream", "ram"])
@pytest.mark.parametrize("weights", [(None, None), (3.0, 1.0)])
def test_frames_are_decoded_once_in_each_epoch_of_each(tier, weights, folders):
    more = {"sample": {"weight": weights[0]}, "other": {**RENAMED["other"], "weight": weights[1]}}
    both = join_datasets(members(folders, "sample", "other", **more))
    config = DatasetConfig(cache=CacheConfig(tier=tier))
    loader = open_loader(both, config, {TOP: [-1, 0]}, cameras=[TOP, WRIST], batch_size=4)
    steps = len(both) // 4
    samples = dict.fromkeys(both.names, 0)
    for (batch,) in loader.steps(0, steps):
        rows = batch["index"].numpy()
        expected = both.read(rows, {TOP: [-1, 0]})
        assert torch.equal(batch[TOP], torch.from_numpy(expected[TOP]))
        for number in batch[DATASET_NUMBER].tolist():
            samples[both.names[number]] += 1
    told = loader.progress(steps)
    assert {name: counts.samples for name, counts in told.items()} == samples
    if weights[0]:
        assert told["sample"].share == pytest.approx(0.75, abs=0.05)
        assert told["sample"].epochs == pytest.approx(samples["sample"] / 38)
    else:
        assert told["sample"].epochs == pytest.approx(told["other"].epochs, abs=0.15)
        assert loader.counters()["decoded"] <= 2 * len(both) * 1.1
    loader.close()


def test_weights_of_episodes(folders):
    (member,) = members(folders, "sample", sample={"episode_weights": {1: 3.0}})
    both = join_datasets([member])
    assert [(part.episodes, part.weight) for part in both.parts()] == [([0, 2, 3], 1.0), ([1], 3.0)]
    loader = open_loader(
        both, DatasetConfig(), {}, cameras=[], batch_size=62
    )  # 26 frames, and 12 three times
    (batch,) = next(loader.steps(0, 1))
    times = torch.bincount(batch["index"], minlength=len(both))
    assert times[7:19].tolist() == [3] * 12
    assert times[:7].tolist() == [1] * 7 and times[19:].tolist() == [1] * 19
    assert loader.progress(1) == {}  # one dataset


def test_what_differs_shows_in_the_fingerprint_and_the_cache(folders):
    def joined(**more):
        return join_datasets(members(folders, "sample", "other", **more), on_missing_camera="drop")

    plain, renamed = joined(), joined(**RENAMED)
    weighted = joined(sample={"weight": 1.0}, other={"weight": 2.0})
    assert len({each.fingerprint() for each in (plain, renamed, weighted)}) == 3
    assert plain.content() == weighted.content() != renamed.content()
    single = members(folders, "sample")
    assert join_datasets(single).content() == single[0].dataset.content()  # cached frames are shared
