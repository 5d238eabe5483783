import json
import os
import subprocess
import sys

import av
import numpy as np
import pyarrow.parquet as pq
import pytest

from flexor.core.errors import DatasetError
from flexor.data.dataset import open_dataset
from flexor.data.format.encode import EpisodeEncoder, VideoSettings
from flexor.data.format.writer import DatasetWriter
from flexor.data.video.decode import index_video
from flexor.data.video.frame_match import nearest
from flexor.pages.images import png
from support.small_datasets import FPS, LENGTHS, SIDE, STILL, TASKS, TOP, features, frame, write


def assert_reads_back(root, still=False):
    dataset = open_dataset(root=root)
    assert dataset.episodes.length.tolist() == list(LENGTHS)
    batch = dataset.read(np.arange(len(dataset)))
    row = 0
    for episode, length in enumerate(LENGTHS):
        for number in range(length):
            written = frame(episode, number, still)
            for name in ("observation.state", "action"):
                np.testing.assert_array_equal(batch[name][row], written[name])
            for name in (TOP, SIDE):
                error = np.abs(batch[name][row].astype(int) - written[name].transpose(2, 0, 1)).mean()
                assert error < 6, f"{name}, row {row}: off by {error:.1f} of 255"
            if still:
                np.testing.assert_array_equal(batch[STILL][row], written[STILL].transpose(2, 0, 1))
            assert batch["next.done"][row] == written["next.done"][0]
            assert batch["task"][row] == TASKS[episode]
            assert batch["timestamp"][row] == np.float32(number / FPS)
            row += 1
    assert batch["index"].tolist() == list(range(sum(LENGTHS)))
    return dataset


@pytest.mark.parametrize("codec", ["av1", "h264"])
@pytest.mark.parametrize("gop", [2, 30])
def test_what_is_written_is_read_back(tmp_path, codec, gop):
    root = write(tmp_path / "d", codec=codec, gop=gop)
    assert_reads_back(root)
    info = json.loads((root / "meta/info.json").read_text())
    video = info["features"][TOP]["info"]
    expected = {"video.codec": codec, "video.height": 32, "video.width": 48, "video.pix_fmt": "yuv420p"}
    expected |= {"video.fps": FPS, "video.channels": 3, "video.is_depth_map": False, "has_audio": False}
    assert expected.items() <= video.items()
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (4, sum(LENGTHS), 3)
    assert info["splits"] == {"train": "0:4"}


def test_pictures_in_the_table(tmp_path):
    root = write(tmp_path / "d", still=True)
    assert_reads_back(root, still=True)
    described = json.loads(pq.read_schema(root / "data/chunk-000/file-000.parquet").metadata[b"huggingface"])
    assert described["info"]["features"][STILL] == {"_type": "Image"}
    assert described["info"]["features"]["action"]["_type"] == "List"


def test_full_files_are_followed_by_new_ones(tmp_path):
    root = write(tmp_path / "d", data_files_mb=0.001, video_files_mb=0.001, chunk_size=3)
    assert_reads_back(root)
    data = sorted(p.relative_to(root).as_posix() for p in root.glob("data/*/*"))
    assert data == [
        "data/chunk-000/file-000.parquet",
        "data/chunk-000/file-001.parquet",
        "data/chunk-000/file-002.parquet",
        "data/chunk-001/file-000.parquet",
    ]
    assert len(list(root.glob(f"videos/{TOP}/*/*.mp4"))) == 4


@pytest.mark.parametrize("codec", ["av1", "h264"])
@pytest.mark.parametrize("fps", [10, 30, 29.97])
def test_frames_lie_where_the_metadata_says(tmp_path, codec, fps):
    root = tmp_path / "d"
    with DatasetWriter(root, fps, {TOP: features()[TOP]}, codec=codec, gop=4) as writer:
        for episode, length in enumerate(LENGTHS):
            for number in range(length):
                writer.add_frame({TOP: frame(episode, number)[TOP]})
            writer.save_episode("task")
    index = index_video(root / f"videos/{TOP}/chunk-000/file-000.mp4")
    keys = index.times[index.key]
    assert len(index) == sum(LENGTHS)
    rows = pq.read_table(root / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    for row in rows:
        expected_times = row[f"videos/{TOP}/from_timestamp"] + np.arange(row["length"]) / fps
        assert nearest(index.times, expected_times)[1].max() < 1e-4
        assert np.abs(keys - expected_times[0]).min() < 1e-9, "an episode begins on a key frame"
        span = row[f"videos/{TOP}/to_timestamp"] - row[f"videos/{TOP}/from_timestamp"]
        assert span == pytest.approx(row["length"] / fps, abs=1e-6)


def test_metadata_has_every_column_of_lerobots(tmp_path):
    root = write(tmp_path / "d")
    table = pq.read_table(root / "meta/episodes/chunk-000/file-000.parquet")
    names = {"episode_index", "tasks", "length", "dataset_from_index", "dataset_to_index"}
    names |= {f"data/{part}" for part in ("chunk_index", "file_index")}
    names |= {f"meta/episodes/{part}" for part in ("chunk_index", "file_index")}
    parts = ("chunk_index", "file_index", "from_timestamp", "to_timestamp")
    names |= {f"videos/{camera}/{part}" for camera in (TOP, SIDE) for part in parts}
    statistics = ("min", "max", "mean", "std", "count", "q01", "q10", "q50", "q90", "q99")
    columns = [*features(), "timestamp", "frame_index", "episode_index", "index", "task_index"]
    names |= {f"stats/{name}/{key}" for name in columns for key in statistics}
    assert set(table.column_names) == names
    assert table["dataset_to_index"].to_pylist() == np.cumsum(LENGTHS).tolist()
    stats = json.loads((root / "meta/stats.json").read_text())
    assert set(stats) == set(columns) and np.shape(stats[TOP]["mean"]) == (3, 1, 1)


def test_pandas_takes_the_task_as_index(tmp_path):
    root = write(tmp_path / "d")
    table = pq.read_table(root / "meta/tasks.parquet")
    assert json.loads(table.schema.metadata[b"pandas"])["index_columns"] == ["task"]
    assert table.to_pydict() == {"task_index": [0, 1, 2], "task": ["push", "pull", "lift"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"action": np.zeros(3, np.float32)}, r"'action' must have shape \(2,\), got \(3,\)"),
        ({"action": np.zeros(2)}, "'action' must be float32, got float64"),
        ({"action": np.array([1, np.nan], np.float32)}, "1 of 2 values are NaN"),
        ({"action": [1.5, "a"]}, "'action' must be float32, got"),
        ({TOP: np.zeros((3, 32, 48), np.uint8)}, r"height x width x channels: use transpose\(1, 2, 0\)"),
        ({TOP: np.zeros((32, 48, 3), np.float32)}, "must be uint8, got float32"),
        ({"reward": 1.0}, "unknown feature 'reward'. The features are observation.state"),
        ({"timestamp": 0.0}, "'timestamp' is filled in by the writer"),
    ],
)
def test_a_wrong_frame_is_refused_with_its_place(tmp_path, change, message):
    writer = DatasetWriter(tmp_path / "d", FPS, features(), codec="h264")
    writer.add_frame(frame(0, 0))
    with pytest.raises(DatasetError, match=message) as caught:
        writer.add_frame(frame(0, 1) | change)
    assert "episode 0, frame 1" in str(caught.value)
    assert writer.length == 1, "a refused frame leaves no trace"
    writer.add_frame(frame(0, 1))


def test_a_missing_feature_is_named(tmp_path):
    writer = DatasetWriter(tmp_path / "d", FPS, features())
    with pytest.raises(DatasetError, match="no value for action"):
        writer.add_frame({name: value for name, value in frame(0, 0).items() if name != "action"})


@pytest.mark.parametrize(
    ("feature", "options", "message"),
    [
        ({"a/b": {"dtype": "float32", "shape": [1]}}, {}, "must not contain '/'"),
        ({"a": {"dtype": "float", "shape": [1]}}, {}, "unknown dtype 'float'"),
        ({"a": {"dtype": "float32", "shape": []}}, {}, "must be positive integers"),
        ({"a": {"dtype": "video", "shape": [3, 32, 32]}}, {}, r"\[height, width, 3\]"),
        (
            {"a": {"dtype": "video", "shape": [33, 32, 3]}},
            {"codec": "h264"},
            "even width and height, got 33x32",
        ),
        ({"a": {"dtype": "video", "shape": [32, 32, 3]}}, {"codec": "vp9"}, "unknown codec 'vp9'"),
        ({"a": {"dtype": "video", "shape": [32, 32, 3]}}, {"gop": 0}, "gop=0"),
        ({"a": {"dtype": "float32", "shape": [1]}}, {"fps": 0}, "fps=0"),
        ({}, {}, "No features given"),
    ],
)
def test_wrong_features_are_refused(tmp_path, feature, options, message):
    with pytest.raises(DatasetError, match=message):
        DatasetWriter(tmp_path / "d", **({"fps": 10, "features": feature} | options))


def test_full_colour_resolution(tmp_path):
    """4:4:4 keeps a picture of single coloured pixels, which 4:2:0 smears over their neighbours."""
    rng = np.random.default_rng(0)
    image = rng.choice(np.array([[230, 30, 30], [30, 200, 30], [30, 30, 220]], np.uint8), (31, 33))
    shape = {"observation.image": {"dtype": "video", "shape": (31, 33, 3), "names": ["h", "w", "c"]}}
    with DatasetWriter(tmp_path / "d", 10, shape, codec="h264", crf=4, pix_fmt="yuv444p") as writer:
        writer.add_frame({"observation.image": image})
        writer.save_episode("look")
    read = open_dataset(root=tmp_path / "d").read(np.arange(1))["observation.image"][0]
    assert np.abs(read.astype(int) - image.transpose(2, 0, 1)).mean() < 4
    with pytest.raises(DatasetError, match="yuv420p"):
        DatasetWriter(tmp_path / "e", 10, shape, codec="av1", pix_fmt="yuv444p")


def test_av1_takes_odd_sizes(tmp_path):
    shape = {"a": {"dtype": "video", "shape": [33, 47, 3]}}
    with DatasetWriter(tmp_path / "d", 10, shape, codec="av1") as writer:
        writer.add_frame({"a": np.full((33, 47, 3), 90, np.uint8)})
        writer.save_episode("task")
    pixels = open_dataset(root=tmp_path / "d").read([0])["a"]
    assert pixels.shape == (1, 3, 33, 47) and abs(int(pixels.mean()) - 90) < 4


def test_numbers_lists_matrices_and_text(tmp_path):
    kinds = {
        "count": {"dtype": "int64", "shape": [1]},
        "ratio": {"dtype": "float32", "shape": [1]},
        "pair": {"dtype": "float32", "shape": [2]},
        "grid": {"dtype": "float32", "shape": [2, 2]},
        "note": {"dtype": "string", "shape": [1]},
    }
    with DatasetWriter(tmp_path / "d", 10, kinds) as writer:
        for i in range(3):
            row = {"count": i, "ratio": 0.5 * i, "pair": [i, 1.5], "grid": np.full((2, 2), i, np.float32)}
            writer.add_frame(row | {"note": f"n{i}"})
        with pytest.raises(DatasetError, match="'count' must be int64, got float64"):
            writer.add_frame(row | {"count": 0.5, "note": ""})
        writer.save_episode("task")
    table = pq.read_table(tmp_path / "d/data/chunk-000/file-000.parquet")
    assert table["pair"].to_pylist() == [[0.0, 1.5], [1.0, 1.5], [2.0, 1.5]]
    assert table["grid"].to_pylist()[2] == [[2.0, 2.0], [2.0, 2.0]]
    assert table["note"].to_pylist() == ["n0", "n1", "n2"]
    info = json.loads((tmp_path / "d/meta/info.json").read_text())
    assert info["video_path"] is None


def test_a_folder_that_is_not_empty_is_refused(tmp_path):
    root = write(tmp_path / "d")
    with pytest.raises(DatasetError, match="exists and is not empty"):
        DatasetWriter(root, FPS, features())
    (root / "meta/info.json").unlink()
    with pytest.raises(DatasetError, match="an earlier write did not finish"):
        DatasetWriter(root, FPS, features())


def test_a_discarded_episode_leaves_nothing(tmp_path):
    with DatasetWriter(tmp_path / "d", FPS, features(), codec="h264") as writer:
        for number in range(5):
            writer.add_frame(frame(1, number))
        writer.discard_episode()
        for episode, (length, task) in enumerate(zip(LENGTHS, TASKS)):
            for number in range(length):
                writer.add_frame(frame(episode, number))
            writer.save_episode(task)
        writer.add_frame(frame(0, 0))  # never saved: left out, with a warning
    assert_reads_back(tmp_path / "d")


def test_nothing_saved_is_no_dataset(tmp_path):
    writer = DatasetWriter(tmp_path / "d", FPS, features())
    with pytest.raises(DatasetError, match="has no frames"):
        writer.save_episode("task")
    with pytest.raises(DatasetError, match="no episode was saved"):
        writer.close()
    assert not (tmp_path / "d/meta/info.json").exists()


def test_an_exception_leaves_no_dataset(tmp_path):
    def crash():
        with DatasetWriter(tmp_path / "d", FPS, features(), codec="h264") as writer:
            writer.add_frame(frame(0, 0))
            writer.save_episode("task")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        crash()
    with pytest.raises(DatasetError, match=r"no meta/info\.json"):
        open_dataset(root=tmp_path / "d")


def test_a_killed_process_leaves_no_dataset(tmp_path):
    script = f"""
import os, numpy as np
from flexor.data.format.writer import DatasetWriter
writer = DatasetWriter({str(tmp_path / "d")!r}, 10, {{"a": {{"dtype": "float32", "shape": [1]}}}})
writer.add_frame({{"a": 1.0}}); writer.save_episode("task")
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    assert not (tmp_path / "d/meta/info.json").exists()


def test_png_is_lossless():
    image = np.random.default_rng(0).integers(0, 255, (5, 7, 3), dtype=np.uint8)
    data = png(image)
    assert data.startswith(b"\x89PNG")
    decoded = av.CodecContext.create("png", "r").decode(av.Packet(data))[0]
    np.testing.assert_array_equal(decoded.to_ndarray(format="rgb24"), image)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux how threads are scheduled")
@pytest.mark.parametrize("codec", ["av1", "h264"])
def test_encoding_leaves_no_thread_with_real_time_priority(codec):
    """SVT-AV1, opened by root, gives itself and its caller one; a rank that polls then holds up the machine."""

    def policies() -> set[int]:
        return {os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")}  # noqa: PTH208

    encoder = EpisodeEncoder(VideoSettings(codec, 64, 64, 10))
    encoder.add(np.zeros((64, 64, 3), np.uint8))
    assert policies() == {os.SCHED_OTHER}
    assert len(encoder.finish()) == 1
    assert policies() == {os.SCHED_OTHER}
