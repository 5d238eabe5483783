"""What a policy takes from a dataset: statistics that are missing are computed, and nothing else is."""

from dataclasses import replace

import numpy as np
import pytest

from flexor.data.dataset import open_dataset
from flexor.data.statistics import compute_stats
from flexor.policies.act.config import ACTConfig
from flexor.policies.fit import fit_to_dataset, statistics
from support.small_datasets import write


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return open_dataset(root=write(tmp_path_factory.mktemp("fit") / "data"))


def modes(vector: str, image: str = "IDENTITY") -> dict:
    return {"STATE": vector, "ACTION": vector, "VISUAL": image}


def without_quantiles(dataset):
    stats = {
        name: {key: value for key, value in part.items() if not key.startswith("q")}
        for name, part in dataset.stats.items()
    }
    return replace(dataset, stats=stats)


@pytest.mark.parametrize(("mode", "used"), [("QUANTILES", ("q01", "q99")), ("QUANTILE10", ("q10", "q90"))])
@pytest.mark.parametrize("lacking", [True, False])
def test_quantiles_are_those_of_all_frames(dataset, mode, used, lacking):
    """Recorded ones are averages over episodes; an old dataset has none."""
    policy = fit_to_dataset(ACTConfig(normalization_mapping=modes(mode)), dataset)
    recorded = without_quantiles(dataset) if lacking else replace(dataset, stats=dict(dataset.stats))
    recorded.stats["action"] = recorded.stats["action"] | {"mean": np.array([5.0, 6.0])}  # stays as it is
    fitted = statistics(recorded, policy, use_imagenet=True)
    for name in ("action", "observation.state"):
        for quantile in used:
            expected = np.quantile(dataset.columns[name], int(quantile[1:]) / 100, axis=0)
            np.testing.assert_allclose(fitted[name][quantile], expected, rtol=1e-6)
            assert not np.allclose(expected, dataset.stats[name][quantile], rtol=1e-3)
    assert fitted["action"]["mean"].tolist() == [5.0, 6.0]
    policy.pipelines(fitted, "cpu")  # which refuses missing ones


def test_other_modes_use_what_is_recorded(dataset):
    """As in LeRobot."""
    policy = fit_to_dataset(ACTConfig(normalization_mapping=modes("MEAN_STD")), dataset)
    fitted = statistics(dataset, policy, use_imagenet=True)
    for name in ("action", "observation.state"):
        for key, value in dataset.stats[name].items():
            np.testing.assert_array_equal(fitted[name][key], value)


def test_a_cameras_quantiles_that_an_old_dataset_lacks_are_computed_and_it_says_so(dataset, caplog):
    policy = fit_to_dataset(ACTConfig(normalization_mapping=modes("IDENTITY", "QUANTILES")), dataset)
    with caplog.at_level("INFO", "flexor"):
        fitted = statistics(without_quantiles(dataset), policy, use_imagenet=False)
    assert "missing in the dataset: observation.images.top (q01, q99)" in caplog.text
    expected = compute_stats(dataset, ["observation.images.top"])["observation.images.top"]
    np.testing.assert_array_equal(fitted["observation.images.top"]["q99"], expected["q99"])


def test_nothing_is_computed_or_decoded_that_no_mode_uses(dataset, monkeypatch):
    monkeypatch.setattr("flexor.policies.fit.compute_stats", lambda *_: pytest.fail("computed"))
    bare = without_quantiles(dataset)
    bare.stats.pop("observation.images.top")
    policy = fit_to_dataset(ACTConfig(normalization_mapping=modes("MEAN_STD")), dataset)
    statistics(bare, policy, use_imagenet=False)


def test_a_camera_without_statistics_is_decoded_if_its_mode_needs_them(dataset):
    bare = without_quantiles(dataset)
    bare.stats.pop("observation.images.top")
    policy = fit_to_dataset(ACTConfig(normalization_mapping=modes("MEAN_STD", "MEAN_STD")), dataset)
    fitted = statistics(bare, policy, use_imagenet=False)
    assert fitted["observation.images.top"]["mean"].shape == (3, 1, 1)
