"""A camera whose images are arrays of bytes in the tables is read as a camera; other bytes are not."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flexor.data.check.check import check_dataset
from flexor.data.dataset import Dataset, open_dataset
from flexor.data.edit.edit import delete_episodes
from flexor.data.repair.repair import repair_dataset
from flexor.policies.act.config import ACTConfig
from flexor.policies.features import Kind
from flexor.policies.fit import fit_to_dataset
from support.small_datasets import LENGTHS, STILL, picture, write

SHAPES = {"hwc": (32, 48, 3), "chw": (3, 32, 48)}


def with_arrays(root: Path, layout: str, kind: pa.DataType, stats: float | None = None) -> Path:
    """The dataset with the images of one camera as arrays. `stats`: of values up to 255, or none."""
    write(root, still=True)
    info = json.loads((root / "meta/info.json").read_text())
    info["features"][STILL] |= {"dtype": "uint8", "shape": SHAPES[layout]}
    info["features"][STILL]["names"] = None
    (root / "meta/info.json").write_text(json.dumps(info))
    path = root / "meta/stats.json"
    recorded = json.loads(path.read_text())
    part = recorded.pop(STILL)
    if stats is not None:
        recorded[STILL] = {
            k: (np.ravel(v) * (1 if k == "count" else stats)).tolist() for k, v in part.items()
        }
    path.write_text(json.dumps(recorded))
    images = [picture(episode, frame, 4) for episode, length in enumerate(LENGTHS) for frame in range(length)]
    images = [image.transpose(2, 0, 1) if layout == "chw" else image for image in images]
    (file,) = (root / "data").rglob("*.parquet")
    table = pq.read_table(file).replace_schema_metadata(None)
    column = pa.array([image.tolist() for image in images], pa.list_(pa.list_(pa.list_(kind))))
    pq.write_table(table.set_column(table.column_names.index(STILL), STILL, column), file)
    return root


def assert_same_images(dataset: Dataset, original: Dataset) -> None:
    rows = np.array([0, 7, 20, 37])
    np.testing.assert_array_equal(dataset.read(rows)[STILL], original.read(rows)[STILL])


@pytest.mark.parametrize(("layout", "kind"), [("hwc", pa.uint8()), ("chw", pa.uint8()), ("hwc", pa.int64())])
def test_it_is_read_checked_and_repaired(tmp_path, layout, kind):
    original = open_dataset(root=write(tmp_path / "original", still=True))
    root = with_arrays(tmp_path / "data", layout, kind, stats=255)
    dataset = open_dataset(root=root)
    assert STILL in dataset.cameras and STILL not in dataset.columns
    assert_same_images(dataset, original)
    np.testing.assert_allclose(dataset.stats[STILL]["mean"], original.stats[STILL]["mean"])
    policy = fit_to_dataset(ACTConfig(), dataset)
    assert (policy.input_features[STILL].type, policy.input_features[STILL].shape) == (
        Kind.VISUAL,
        (3, 32, 48),
    )
    assert check_dataset(root).findings == []
    report = repair_dataset(root, tmp_path / "repaired")
    assert report.ok and len(report.included) == 4 and "written as PNG images" in str(report)
    repaired = open_dataset(root=tmp_path / "repaired")
    assert repaired.features[STILL].dtype == "image" and repaired.features[STILL].shape == (32, 48, 3)
    assert_same_images(repaired, original)


def test_edits_write_it_as_images_too(tmp_path):
    root = with_arrays(tmp_path / "data", "hwc", pa.uint8())
    delete_episodes(root, tmp_path / "edited", "0")
    edited, dataset = open_dataset(root=tmp_path / "edited"), open_dataset(root=root)
    assert edited.features[STILL].dtype == "image" and check_dataset(tmp_path / "edited").findings == []
    rows = np.arange(len(edited))
    np.testing.assert_array_equal(edited.read(rows)[STILL], dataset.read(rows + LENGTHS[0])[STILL])


def test_images_of_another_size_than_declared(tmp_path):
    root = with_arrays(tmp_path / "data", "hwc", pa.uint8())
    info = json.loads((root / "meta/info.json").read_text())
    info["features"][STILL]["shape"] = [32, 40, 3]
    (root / "meta/info.json").write_text(json.dumps(info))
    errors = check_dataset(root).errors
    assert {(error.name, error.feature) for error in errors} == {("image-undecodable", STILL)}
    assert "it has 4608 values, not 3840" in errors[0].evidence


def test_bytes_that_are_no_camera_are_numbers(tmp_path):
    root = with_arrays(tmp_path / "data", "hwc", pa.uint8())
    info = json.loads((root / "meta/info.json").read_text())
    info["features"]["observation.touch"] = info["features"].pop(STILL) | {"shape": [32, 72, 2]}
    (root / "meta/info.json").write_text(json.dumps(info))
    (file,) = (root / "data").rglob("*.parquet")
    table = pq.read_table(file)
    pq.write_table(table.rename_columns({STILL: "observation.touch"}), file)
    dataset = open_dataset(root=root)
    assert dataset.columns["observation.touch"].shape == (sum(LENGTHS), 32, 72, 2)
