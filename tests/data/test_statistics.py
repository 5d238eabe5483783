import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexor.core.errors import DatasetError
from flexor.data.dataset import open_dataset
from flexor.data.format import stats
from flexor.data.statistics import compute_stats, with_own_stats
from support.small_datasets import TOP, write

WAVE = np.sin(np.arange(120, dtype=np.float64)).reshape(40, 3).astype(np.float32)

# LeRobot 0.6.1: RunningQuantileStats over WAVE[:15], WAVE[15:].
LEROBOT_RUNNING = {
    "min": [-0.9992068409919739, -0.9997551441192627, -0.9999902248382568],
    "max": [0.9999118447303772, 0.9928726553916931, 0.9995201826095581],
    "mean": [-0.007092919200658798, -0.001444725668989122, 0.005531745031476021],
    "std": [0.732931911945343, 0.6724936366081238, 0.7088526487350464],
    "count": [40],
    "q01": [-0.9992068409919739, -0.9997551441192627, -0.9999902248382568],
    "q10": [-0.9704195261001587, -0.9535261988639832, -0.9611997008323669],
    "q50": [-0.026435673236846924, -0.008622050285339355, -0.04422426223754883],
    "q90": [0.9563310742378235, 0.9020088911056519, 0.95113205909729],
    "q99": [0.9997519135475159, 0.9927132248878479, 0.9993602514266968],
}

# LeRobot 0.6.1: aggregate_stats of WAVE[:10] and WAVE[10:] taken as two episodes.
LEROBOT_MERGED = {
    "mean": [-0.0070929196663200855, -0.0014447239227592945, 0.005531746137421578],
    "std": [0.7329318521528125, 0.6724936380338359, 0.7088526622672641],
    "count": [40],
    "q01": [-0.9757997244596481, -0.9390169829130173, -0.995414063334465],
    "q50": [-0.08577863872051239, -0.13420473039150238, -0.19906631112098694],
    "q99": [0.9889286011457443, 0.954924562573433, 0.9971923515200615],
}

# LeRobot 0.6.1: get_feature_stats over four images, divided by 255.
LEROBOT_IMAGE = {
    "min": [0.0, 0.0, 0.0],
    "max": [0.9803921580314636, 0.9803921580314636, 0.9764705896377563],
    "mean": [0.41229572892189026, 0.4944240152835846, 0.5560457706451416],
    "std": [0.2855762243270874, 0.2506105601787567, 0.2985369563102722],
    "count": [4],
    "q01": [0.004101961042366775, 0.00802352923972934, 0.003995717703127393],
    "q10": [0.0745294122134938, 0.13337254842122395, 0.09807671042049633],
    "q50": [0.3335294237323836, 0.49823530608532474, 0.6196682200712316],
    "q90": [0.8511372644761029, 0.847215695848652, 0.9137421372357536],
    "q99": [0.9764862754672181, 0.9686431382123162, 0.9724748810412837],
}


def test_running_stats_are_lerobots():
    running = stats.RunningStats()
    running.update(WAVE[:15])
    running.update(WAVE[15:])
    for key, expected in LEROBOT_RUNNING.items():
        np.testing.assert_allclose(running.result()[key], expected, rtol=1e-6, atol=1e-7, err_msg=key)


def test_merged_stats_are_lerobots():
    episodes = [{"a": stats.vector_stats(WAVE[:10])}, {"a": stats.vector_stats(WAVE[10:])}]
    merged = stats.aggregate_stats(episodes)["a"]
    for key, expected in LEROBOT_MERGED.items():
        np.testing.assert_allclose(merged[key], expected, rtol=1e-6, atol=1e-7, err_msg=key)


def test_image_stats_are_lerobots():
    images = (np.arange(4 * 3 * 8 * 6).reshape(4, 3, 8, 6) * 7 % 251).astype(np.uint8)
    counts = sum(stats.pixel_counts(image.transpose(1, 2, 0)) for image in images)
    result = stats.image_stats(np.asarray(counts), len(images))
    for key, expected in LEROBOT_IMAGE.items():
        np.testing.assert_allclose(result[key].reshape(-1), expected, rtol=2e-6, atol=1e-7, err_msg=key)
    assert result["mean"].shape == (3, 1, 1)


def test_the_same_frames_are_sampled_as_lerobot_samples():
    lengths = (1, 99, 100, 101, 464, 465, 2000, 400000)
    samples = [stats.sample_indices(n) for n in lengths]
    assert [len(s) for s in samples] == [1, 99, 100, 100, 100, 100, 299, 10000]
    assert [int(s.sum()) for s in samples] == [0, 4851, 4950, 5000, 23150, 23200, 298850, 1999995000]


def test_large_images_are_thinned_out():
    assert stats.pixel_counts(np.zeros((299, 200, 3), np.uint8)).sum() == 299 * 200 * 3
    assert stats.pixel_counts(np.zeros((480, 640, 3), np.uint8)).sum() == 120 * 160 * 3


@settings(max_examples=40)
@given(
    values=st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=60),
    cut=st.integers(1, 59),
    offset=st.sampled_from([0.0, 1e5]),
)
def test_running_equals_whole(values, cut, offset):
    all_values = np.array(values, np.float64)[:, None] + offset
    running = stats.RunningStats()
    running.update(all_values[:cut])
    running.update(all_values[cut:])
    result = running.result()
    np.testing.assert_allclose(result["mean"], all_values.mean(0), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(result["std"], all_values.std(0), rtol=1e-6, atol=1e-9)
    assert result["min"] == all_values.min(0) and result["max"] == all_values.max(0)
    quantiles = [float(result[key][0]) for key in stats.QUANTILES]
    assert quantiles == sorted(quantiles)
    width = (all_values.max() - all_values.min()) / stats.BINS + 1e-6
    assert all_values.min() - width <= quantiles[0] and quantiles[-1] <= all_values.max() + width


@settings(max_examples=30)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_merged_moments_equal_those_of_all_frames(lengths, seed):
    data = np.random.default_rng(seed).normal(3, 2, (sum(lengths), 4))
    parts = np.split(data, np.cumsum(lengths)[:-1])
    merged = stats.aggregate_stats([{"a": stats.vector_stats(part)} for part in parts])["a"]
    np.testing.assert_allclose(merged["mean"], data.mean(0), rtol=1e-9)
    np.testing.assert_allclose(merged["std"], data.std(0), rtol=1e-6, atol=1e-9)
    assert merged["count"] == len(data)


def test_a_small_spread_around_a_large_value_survives():
    values = (1e4 + np.random.default_rng(0).normal(0, 0.01, (1000, 1))).astype(np.float32)
    np.testing.assert_allclose(stats.vector_stats(values)["std"], values.astype(np.float64).std(0), rtol=1e-6)


def test_one_frame_has_statistics():
    result = stats.vector_stats(np.array([[1.0, 2.0]]))
    assert result["q01"].tolist() == [1.0, 2.0] and result["std"].tolist() == [0.0, 0.0]


def test_not_a_number_is_refused():
    with pytest.raises(DatasetError, match="1 of 4 values are NaN"):
        stats.RunningStats().update(np.array([[1.0, np.nan], [0.0, 1.0]]))


def test_json_round_trip():
    original = {"a": stats.vector_stats(WAVE)}
    back = stats.from_json(stats.to_json(original))
    for key, value in original["a"].items():
        np.testing.assert_array_equal(back["a"][key], value)


def test_compute_stats_gives_what_the_writer_wrote(tmp_path):
    dataset = open_dataset(root=write(tmp_path / "d"))
    computed = compute_stats(dataset)
    assert set(computed) == set(dataset.stats)
    for name, part in dataset.stats.items():
        for key, value in part.items():
            # The writer saw the pictures before they were encoded, which shows most in the extremes.
            tolerance = 1e-6 if name not in dataset.cameras else 0.08 if key in ("min", "max") else 0.02
            np.testing.assert_allclose(computed[name][key], value, rtol=1e-6, atol=tolerance, err_msg=name)


def test_compute_stats_decodes_nothing_it_is_not_asked_for(tmp_path, monkeypatch):
    dataset = open_dataset(root=write(tmp_path / "d"))
    monkeypatch.setattr(dataset.store, "get", lambda *args: pytest.fail("decoded"))
    assert list(compute_stats(dataset, ["action"])) == ["action"]
    with pytest.raises(DatasetError, match="can't compute statistics of nothing"):
        compute_stats(dataset, ["nothing", TOP])


def test_statistics_of_a_selection_leave_out_the_other_episodes(tmp_path):
    """Those of images are merged from the episodes' own, those of rows computed."""
    root = write(tmp_path / "data")
    dataset = open_dataset(root=root)
    assert with_own_stats(dataset) is dataset
    selection = with_own_stats(open_dataset(root=root, exclude_episodes=[1]))
    expected = compute_stats(selection)
    for name, tolerance in (
        ("action", 1e-6),
        ("observation.state", 1e-6),
        (TOP, 0.01),
    ):  # images change when encoded
        for key in ("mean", "std"):
            value, other = selection.stats[name][key], dataset.stats[name][key]
            np.testing.assert_allclose(value, expected[name][key], rtol=1e-5, atol=tolerance)
            assert value.shape == other.shape and not np.array_equal(value, other)
        assert selection.stats[name]["count"] == expected[name]["count"]
    rows = selection.columns["action"].astype(np.float64)
    np.testing.assert_allclose(selection.stats["action"]["q10"], np.quantile(rows, 0.1, axis=0))


def test_images_of_a_selection_without_episode_statistics_use_those_of_all(tmp_path):
    root = write(tmp_path / "data")
    for file in (root / "meta/episodes").rglob("*.parquet"):
        table = pq.read_table(file)
        pq.write_table(table.select([n for n in table.column_names if not n.startswith("stats/")]), file)
    recorded = open_dataset(root=root).stats[TOP]
    selection = with_own_stats(open_dataset(root=root, episodes=[0, 2]))
    np.testing.assert_array_equal(selection.stats[TOP]["mean"], recorded["mean"])
    assert selection.stats["action"]["count"] == len(selection)
