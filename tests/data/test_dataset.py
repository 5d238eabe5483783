import json
import logging
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from flexor.core.errors import DatasetError
from flexor.data.check.check import check_dataset
from flexor.data.dataset import open_dataset
from flexor.data.format.metadata import Feature
from support.legacy import to_v2
from support.samples import FEATURES, LENGTHS, picture, write_sample

TOP, WRIST = "observation.images.top", "observation.images.wrist"
START = np.cumsum(LENGTHS) - LENGTHS
VERSIONS = ["v3.0", "v2.1", "v2.0"]


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


def shows(pixels, episode, frame):
    """Whether a picture [C, H, W] is the one written for this frame, and no other frame's."""
    size = pixels.shape[1:]
    rest = [picture(e, f, *size) for e, n in enumerate(LENGTHS) for f in range(n)]
    where = [(e, f) for e, n in enumerate(LENGTHS) for f in range(n)]
    distance = [np.abs(pixels.transpose(1, 2, 0).astype(int) - other).mean() for other in rest]
    return where[int(np.argmin(distance))] == (episode, frame)


@pytest.mark.parametrize("version", VERSIONS)
def test_all_versions_read_the_same(samples, version):
    dataset = open_dataset(root=samples[version])
    assert dataset.version == version and dataset.fps == 10
    assert len(dataset) == sum(LENGTHS) and dataset.episodes.length.tolist() == list(LENGTHS)
    assert dataset.cameras == [TOP, WRIST] and dataset.absent == {}
    assert dataset.tasks == ["pull", "push"]
    assert dataset.episodes.tasks == [["pull"], ["push"], ["pull"], ["push"]]
    assert dataset.features["action"].shape == (2,) and dataset.features[TOP].chw == (3, 48, 64)
    columns = dataset.columns
    assert columns["index"].tolist() == list(range(len(dataset)))
    assert columns["frame_index"].tolist() == [f for n in LENGTHS for f in range(n)]
    assert columns["mode"].tolist() == [f % 3 for n in LENGTHS for f in range(n)]
    assert columns["observation.matrix"].shape == (len(dataset), 2, 3)
    rows = np.array([0, 6, 7, 20, 37])
    batch = dataset.read(rows)
    for i, row in enumerate(rows):
        episode = int(dataset.episode_of(rows)[i])
        frame = row - START[episode]
        assert batch["comment"][i] == f"episode {episode} frame {frame}"
        assert batch["task"][i] == ["pull", "push"][episode % 2]
        assert shows(batch[TOP][i], episode, frame) and shows(batch[WRIST][i], episode, frame)


def test_versions_agree_to_the_bit(samples):
    first, *rest = [open_dataset(root=samples[version]) for version in VERSIONS]
    rows = np.arange(len(first))
    expected = first.read(rows)
    for other in rest:
        got = other.read(rows)
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(got[name], value, name)
    assert first.fingerprint() != rest[0].fingerprint()


def test_dtypes_are_those_of_lerobots_items(samples):
    columns = open_dataset(root=samples["v3.0"]).columns
    assert columns["action"].dtype == np.float32  # declared float64; its items are made of Python floats
    assert columns["mode"].dtype == np.int64 and columns["next.done"].dtype == np.bool_
    assert columns["timestamp"].dtype == np.float32 and columns["timestamp"].ndim == 1


def test_statistics(samples):
    stats = {version: open_dataset(root=samples[version]).stats for version in VERSIONS}
    assert stats["v3.0"][TOP]["mean"].shape == (3, 1, 1) and stats["v3.0"]["action"]["std"].shape == (2,)
    for version in ("v2.1", "v2.0"):
        assert stats[version].keys() == stats["v3.0"].keys()
        for name, group in stats["v3.0"].items():
            for key, value in group.items():
                np.testing.assert_allclose(
                    stats[version][name][key], value, rtol=1e-9, err_msg=f"{name} {key}"
                )


def test_windows(samples):
    dataset = open_dataset(root=samples["v3.0"])
    deltas = {"action": [-1, 0, 2], TOP: [-2, 0], "comment": [0, 1], WRIST: [0]}
    rows = np.array([7, 18, 25])  # first and last frame of episode 1, a middle one of episode 2
    batch = dataset.read(rows, deltas)
    assert batch["action"].shape == (3, 3, 2) and batch[TOP].shape == (3, 2, 3, 48, 64)
    assert batch["action_is_pad"].tolist() == [[True, False, False], [False, False, True], [False] * 3]
    np.testing.assert_array_equal(batch["action"][0], dataset.columns["action"][[7, 7, 9]])
    np.testing.assert_array_equal(batch["action"][1], dataset.columns["action"][[17, 18, 18]])
    assert shows(batch[TOP][0, 0], 1, 0) and shows(batch[TOP][1, 0], 1, 9) and shows(batch[TOP][2, 1], 2, 6)
    assert batch[f"{TOP}_is_pad"].tolist() == [[True, False], [False, False], [False, False]]
    assert batch["comment"][1] == ["episode 1 frame 11", "episode 1 frame 11"]
    assert batch[WRIST].shape == (3, 1, 3, 24, 32) and shows(batch[WRIST][2, 0], 2, 6)
    assert batch["observation.state"].shape == (3, 3)


def test_an_item_is_like_lerobots(samples):
    item = open_dataset(root=samples["v3.0"])[-1]
    assert item["action"].dtype == torch.float32 and item["timestamp"].shape == ()
    assert item[TOP].shape == (3, 48, 64) and item[TOP].dtype == torch.uint8
    assert item["task"] == "push" and item["comment"] == "episode 3 frame 9" and item["next.done"]


def test_cameras_can_be_left_out(samples):
    dataset = open_dataset(root=samples["v3.0"])
    batch = dataset.read(np.array([0]), cameras=[WRIST])
    assert TOP not in batch and WRIST in batch
    assert not {TOP, WRIST} & dataset.read(np.array([0]), cameras=[]).keys()


@pytest.mark.parametrize("version", VERSIONS)
def test_episodes_are_selected_in_any_order_and_lie_in_that_of_the_files(samples, version):
    full = open_dataset(root=samples[version])
    some = open_dataset(root=samples[version], episodes=[3, 1, 3])
    assert some.episodes.index.tolist() == [1, 3]
    assert some.episodes.start.tolist() == [0, 12] and some.episodes.end.tolist() == [12, 22]
    view = full.select([3, 1])
    expected = full.read(np.r_[7:19, 28:38])
    for dataset in (some, view):
        batch = dataset.read(np.arange(22))
        for name, value in expected.items():
            np.testing.assert_array_equal(batch[name], value, name)
    assert some.fingerprint() == view.fingerprint() != full.fingerprint()


def test_a_view_shares_memory_and_frames(samples):
    full = open_dataset(root=samples["v3.0"])
    view = full.select([1, 2])
    assert np.shares_memory(view.columns["action"], full.columns["action"])
    assert view.store is full.store
    assert view.select([2]).episodes.index.tolist() == [2]
    with pytest.raises(DatasetError, match=r"no episodes \[0\]: valid episodes are 1 to 2"):
        view.select([0])


def test_fingerprint_is_that_of_the_content(samples, tmp_path):
    copy = shutil.copytree(samples["v3.0"], tmp_path / "elsewhere")
    assert open_dataset(root=copy).fingerprint() == open_dataset(root=samples["v3.0"]).fingerprint()


def test_threads(samples):
    dataset = open_dataset(root=samples["v3.0"])
    expected = open_dataset(root=samples["v3.0"]).read(np.arange(38))[TOP]
    batches = [np.random.default_rng(i).permutation(38)[:8] for i in range(24)]
    with ThreadPoolExecutor(6) as pool:
        for rows, batch in zip(batches, pool.map(dataset.read, batches)):
            np.testing.assert_array_equal(batch[TOP], expected[rows])


def test_camera_shapes():
    def chw(shape, names):
        return Feature("cam", "video", shape, names).chw

    assert chw((480, 640, 3), ["height", "width", "channels"]) == (3, 480, 640)
    assert chw((3, 480, 640), ["channels", "height", "width"]) == (3, 480, 640)
    assert chw((3, 480, 640), None) == chw((480, 640, 3), None) == (3, 480, 640)


# What is not there


def test_a_declared_camera_without_files_is_left_out_and_named(broken, caplog):
    shutil.rmtree(broken / "videos")
    dataset = open_dataset(root=broken)
    assert dataset.cameras == [WRIST] and TOP not in dataset.features
    assert "has no video files" in dataset.absent[TOP]
    assert caplog.text.count(TOP) >= 1
    with pytest.raises(DatasetError, match=r"no readable feature .*top.*no video files"):
        dataset.read(np.array([0]), cameras=[TOP])


def test_depth_maps_of_several_channels_are_left_out_and_named(broken):
    features = json.loads((broken / "meta/info.json").read_text())["features"]
    features[TOP]["info"]["is_depth_map"] = True
    edit_info(broken, features=features)
    dataset = open_dataset(root=broken)
    assert dataset.cameras == [WRIST] and "depth map" in dataset.absent[TOP]


def test_unknown_dtypes_and_missing_columns_are_named(broken):
    features = json.loads((broken / "meta/info.json").read_text())["features"]
    features["language_events"] = {"dtype": "language", "shape": [1], "names": None}
    features["pose"] = {"dtype": "quaternion", "shape": [4], "names": None}
    features["torque"] = {"dtype": "float32", "shape": [3], "names": None}
    edit_info(broken, features=features)
    dataset = open_dataset(root=broken)
    assert "annotations are not used" in dataset.absent["language_events"]
    assert "dtype 'quaternion'" in dataset.absent["pose"]
    assert "no such column" in dataset.absent["torque"]


def test_index_columns_are_derived_where_missing(samples, tmp_path, caplog):
    root = shutil.copytree(samples["v2.1"], tmp_path / "bare")
    derived = ["frame_index", "index", "task_index", "episode_index", "timestamp"]
    for file in (root / "data").rglob("*.parquet"):
        pq.write_table(pq.read_table(file).drop_columns(derived), file)
    expected = open_dataset(root=samples["v2.1"])
    dataset = open_dataset(root=root)
    for name in derived:
        np.testing.assert_array_equal(dataset.columns[name], expected.columns[name], name)
    assert "derived" in caplog.text


def test_an_episode_whose_clock_starts_late(samples, tmp_path, caplog):
    """Timestamps one period late and as many frames as rows, as in some GR00T datasets."""
    root = shutil.copytree(samples["v2.1"], tmp_path / "late")
    for file in (root / "data").rglob("*.parquet"):
        table = pq.read_table(file)
        late = table["timestamp"].to_numpy() + np.float32(0.1)
        position = table.column_names.index("timestamp")
        pq.write_table(table.set_column(position, table.schema.field("timestamp"), [late]), file)
    dataset = open_dataset(root=root)
    with caplog.at_level(logging.WARNING, "flexor"):
        frames = dataset.read(np.arange(len(dataset)))[TOP]
    np.testing.assert_array_equal(frames, open_dataset(root=samples["v2.1"]).read(np.arange(38))[TOP])
    assert caplog.text.count("4 clips have timestamps that do not match their video") == 1
    assert (
        "episode 0, observation.images.top: up to 0.10 s off" in caplog.text and "and 1 more" in caplog.text
    )


def test_sample_has_several_files(samples):
    """Guards the tests above: with one file of each kind they would prove little."""
    assert len(list((samples["v3.0"] / "data").rglob("*.parquet"))) > 1
    assert len(list((samples["v3.0"] / "videos").rglob("*.mp4"))) > 1
    assert len(FEATURES) == 8


# As robots leave them


def test_a_template_with_the_other_versions_field(samples, tmp_path):
    root = shutil.copytree(samples["v2.1"], tmp_path / "data")
    info = json.loads((root / "meta/info.json").read_text())
    names = {key: info[key].replace("episode_chunk", "chunk_index") for key in ("data_path", "video_path")}
    edit_info(root, **names)
    rows = np.arange(sum(LENGTHS))
    np.testing.assert_array_equal(
        open_dataset(root=root).read(rows)[TOP], open_dataset(root=samples["v2.1"]).read(rows)[TOP]
    )
    assert check_dataset(root, deep=False).ok
    edit_info(root, data_path="data/file-{file_index:03d}.parquet")
    message = r"\{file_index\} is unknown\. The valid fields in this version are \{episode_chunk\}, \{episode_index\}"
    with pytest.raises(DatasetError, match=rf"meta/info\.json: data_path is .*{message}"):
        open_dataset(root=root)
    (problem,) = [p for p in check_dataset(root, deep=False).errors if p.name == "path-template"]
    assert "{file_index} is unknown" in problem.evidence and problem.file == "meta/info.json"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_wall_clock_beside_a_video_with_a_frame_for_every_row(samples, version, tmp_path, caplog):
    """Most episodes of a real arm's dataset: up to two seconds off, and not steadily."""
    root = shutil.copytree(samples[version], tmp_path / "data")
    rng = np.random.default_rng(0)
    for file in (root / "data").rglob("*.parquet"):
        table = pq.read_table(file)
        clock = np.cumsum(rng.uniform(0.05, 0.4, len(table))).astype(np.float32)
        position = table.column_names.index("timestamp")
        pq.write_table(table.set_column(position, table.schema.field("timestamp"), [clock]), file)
    rows = np.arange(sum(LENGTHS))
    with caplog.at_level(logging.WARNING, "flexor"):
        frames = open_dataset(root=root).read(rows)[TOP]
    np.testing.assert_array_equal(frames, open_dataset(root=samples[version]).read(rows)[TOP])
    assert caplog.text.count("clips have timestamps that do not match their video") == 1
    assert check_dataset(root, deep=False).ok
    with pytest.raises(DatasetError, match="rows have no frame at their time"):
        open_dataset(root=root, frame_by="time").read(rows)


def test_metadata_that_has_episodes_twice(samples, tmp_path, caplog):
    root = shutil.copytree(samples["v2.1"], tmp_path / "data")
    path = root / "meta/episodes.jsonl"
    path.write_text(path.read_text() + path.read_text().splitlines()[1] + "\n")
    with caplog.at_level(logging.WARNING, "flexor"):
        assert open_dataset(root=root).episodes.index.tolist() == [0, 1, 2, 3]
    assert "lists 1 episodes twice" in caplog.text
    path.write_text(path.read_text() + json.dumps({"episode_index": 2, "length": 3, "tasks": []}) + "\n")
    with pytest.raises(DatasetError, match="indices are not 0 to 4, each once"):
        open_dataset(root=root)
