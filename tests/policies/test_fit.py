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
def test_quantiles_that_an_old_dataset_lacks_are_computed_and_it_says_so(dataset, mode, used, caplog):
    policy = fit_to_dataset(ACTConfig(normalization_mapping=modes(mode)), dataset)
    old = without_quantiles(dataset)
    old.stats["action"]["mean"] = np.array([5.0, 6.0])  # what the dataset has is kept
    with caplog.at_level("INFO", "flexor"):
        fitted = statistics(old, policy, use_imagenet=True)
    assert f"missing in the dataset: observation.state ({used[0]}, {used[1]}); action" in caplog.text
    expected = compute_stats(dataset, ["action", "observation.state"])
    for name in expected:
        for quantile in used:
            np.testing.assert_array_equal(fitted[name][quantile], expected[name][quantile])
    assert fitted["action"]["mean"].tolist() == [5.0, 6.0]
    policy.pipelines(fitted, "cpu")  # which refuses missing ones


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
