"""Datasets with something wrong: which file or episode, and why, is said in one line."""

import json
import logging
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest

from flexor.core.errors import DatasetError
from flexor.data.dataset import open_dataset
from support.legacy import to_v2
from support.samples import LENGTHS, write_sample
from support.small_datasets import write

TOP, WRIST = "observation.images.top", "observation.images.wrist"


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    root = write_sample(folder / "v3.0")
    return {"v3.0": root} | {v: to_v2(root, folder / v, v) for v in ("v2.1", "v2.0")}


@pytest.fixture
def broken(samples, tmp_path):
    """A copy of the v3.0 sample to damage."""
    shutil.copytree(samples["v3.0"], tmp_path / "broken")
    return tmp_path / "broken"


def edit_info(root, **changes):
    path = root / "meta/info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_episodes_out_of_range(samples):
    with pytest.raises(DatasetError, match=r"no episodes \[-1, 4, 9\]: valid episodes are 0 to 3"):
        open_dataset(root=samples["v3.0"], episodes=[2, 9, 4, -1])
    with pytest.raises(DatasetError, match="list of episodes is empty"):
        open_dataset(root=samples["v3.0"], episodes=[])


def test_rows_out_of_range(samples):
    dataset = open_dataset(root=samples["v3.0"])
    for rows in ([38], [-1], []):
        with pytest.raises(IndexError):
            dataset.read(np.array(rows, int))


def test_unknown_feature(samples):
    with pytest.raises(DatasetError, match=r"no readable feature 'actoin'.*action"):
        open_dataset(root=samples["v3.0"]).read(np.array([0]), {"actoin": [0]})


def test_no_dataset(tmp_path):
    with pytest.raises(DatasetError, match=r"no meta/info\.json"):
        open_dataset(root=tmp_path)
    with pytest.raises(DatasetError, match="No dataset given"):
        open_dataset()


def test_unknown_version(broken):
    edit_info(broken, codebase_version="v1.6")
    with pytest.raises(DatasetError, match=r"'v1\.6', but Flexor supports only v3\.0, v2\.1, v2\.0"):
        open_dataset(root=broken)


def test_metadata_that_is_not_json(broken):
    (broken / "meta/info.json").write_text('{"fps": ')
    with pytest.raises(DatasetError, match=r"meta/info\.json: the file is not valid JSON.*flexor data check"):
        open_dataset(root=broken)


def test_metadata_without_features(broken):
    (broken / "meta/info.json").write_text("{}")
    with pytest.raises(DatasetError, match=r"meta/info\.json: field 'features'"):
        open_dataset(root=broken)


@pytest.mark.parametrize("total", ["total_frames", "total_episodes"])
def test_totals_that_do_not_add_up_are_said_and_what_is_there_is_read(broken, total, caplog):
    edit_info(broken, **{total: 5})
    with caplog.at_level(logging.WARNING, "flexor"):
        assert len(open_dataset(root=broken)) == sum(LENGTHS)
    assert f"{total}=5, not " in caplog.text


def first_file(root, kind, suffix):
    return sorted((root / kind).rglob(f"*{suffix}"))[0]


def test_an_episode_with_too_few_rows(broken):
    file = first_file(broken, "data", ".parquet")
    pq.write_table(pq.read_table(file).slice(2), file)
    with pytest.raises(
        DatasetError, match=r"episode 0: .*file-000\.parquet has 5 rows of this episode.* says 7"
    ):
        open_dataset(root=broken)


def test_an_episode_torn_apart(tmp_path):
    root = write(tmp_path / "d")
    (file,) = (root / "data").rglob("*.parquet")
    table = pq.read_table(file)
    length = table["episode_index"].to_pylist().count(0)
    order = [*range(length // 2), *range(length, len(table)), *range(length // 2, length)]
    pq.write_table(table.take(order), file)
    with pytest.raises(DatasetError, match=r"episode 0: its rows are not contiguous in .*file-000\.parquet"):
        open_dataset(root=root)


@pytest.mark.parametrize("kind", ["data", "meta/episodes"])
def test_missing_parquet(broken, kind):
    first_file(broken, kind, ".parquet").unlink()
    with pytest.raises(DatasetError, match=r"missing|no parquet"):
        open_dataset(root=broken)


@pytest.mark.parametrize("kind", ["data", "meta/episodes"])
def test_truncated_parquet(broken, kind):
    file = first_file(broken, kind, ".parquet")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DatasetError, match=r"(?s)file-000\.parquet: the file is damaged.*flexor data check"):
        open_dataset(root=broken)


def test_wrong_shape(broken):
    features = json.loads((broken / "meta/info.json").read_text())["features"]
    features["action"]["shape"] = [7]
    edit_info(broken, features=features)
    with pytest.raises(
        DatasetError, match=r"column action has 14 values in 7 rows, not shape\s+\(7,\)\s+per row"
    ):
        open_dataset(root=broken)


def test_wrong_picture_size(broken):
    features = json.loads((broken / "meta/info.json").read_text())["features"]
    features[TOP]["shape"] = [480, 640, 3]
    edit_info(broken, features=features)
    dataset = open_dataset(root=broken)
    with pytest.raises(DatasetError, match=r"images are 48x64, but .* declares 480x640"):
        dataset.read(np.array([0]))


def test_one_video_missing(broken):
    first_file(broken, "videos", ".mp4").unlink()
    with pytest.raises(DatasetError, match=r"episode 0: .*file-000\.mp4 is missing"):
        open_dataset(root=broken)


def test_truncated_video(broken):
    file = first_file(broken, "videos", ".mp4")
    file.write_bytes(file.read_bytes()[:-500])  # the writer puts the index in front: the tail is lost
    dataset = open_dataset(root=broken)
    last = np.array([18])
    with pytest.raises(DatasetError, match=r"episode 1.*file-000\.mp4|file-000\.mp4.*episode 1"):
        dataset.read(last)


def test_a_video_too_short_for_its_episode(samples, tmp_path):
    root = shutil.copytree(samples["v2.1"], tmp_path / "short")
    videos = sorted((root / "videos").rglob("*.mp4"))
    shutil.copy(videos[0], videos[1])  # 7 frames where 12 belong
    dataset = open_dataset(root=root)
    with pytest.raises(
        DatasetError, match=r"episode 1: 5 of 12 rows .* \(first row 7, 0\.100 s off\), .* 7 frames"
    ):
        dataset.read(np.array([8]))
    assert len(open_dataset(root=root, tolerance_s=1.0).read(np.array([8]))[TOP]) == 1


def test_a_damaged_picture(broken):
    file = first_file(broken, "data", ".parquet")
    table = pq.read_table(file)
    rows = table[WRIST].to_pylist()
    rows[3]["bytes"] = b"not a picture"
    field = table.schema.field(WRIST)
    import pyarrow as pa

    column = pa.array(rows, field.type)
    pq.write_table(table.set_column(table.column_names.index(WRIST), field, column), file)
    dataset = open_dataset(root=broken)
    with pytest.raises(DatasetError, match=r"wrist, .*file-000\.parquet, .*frame 3: row 3: not a PNG"):
        dataset.read(np.array([3]), cameras=[WRIST])
