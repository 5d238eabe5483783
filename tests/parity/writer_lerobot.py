"""Does LeRobot read what our writer wrote, and does it read the same thing?

    python tests/parity/writer_lerobot.py write ROOT     # where flexor is installed
    python tests/parity/writer_lerobot.py read ROOT      # where lerobot is installed (0.6.1)

`write` makes several datasets under ROOT and keeps beside each what was written, as .npz. `read` opens
each with LeRobotDataset and compares lengths, numbers, images, tasks, timestamps and statistics, which
LeRobot computes again from the same frames. It prints a line per dataset and exits 1 on a difference.
"""

import sys
from pathlib import Path

import numpy as np

CASES = {
    "av1": {"codec": "av1"},
    "h264": {"codec": "h264"},
    "h264_gop30": {"codec": "h264", "gop": 30},
    "av1_gop30": {"codec": "av1", "gop": 30, "fps": 30},
    "av1_odd_size": {"codec": "av1", "size": (65, 97)},
    "many_files": {"codec": "av1", "data_files_mb": 0.02, "video_files_mb": 0.01, "chunk_size": 2},
    "fps_29.97": {"codec": "av1", "fps": 29.97},
}
LENGTHS = (130, 7, 1, 40)
TASKS = ("push the block", "ouvrir le tiroir à café", "push the block", "wait")


def picture(seed: int, step: int, size: tuple[int, int]) -> np.ndarray:
    """A smooth moving picture: noise would not survive any video codec."""
    y, x = np.mgrid[0 : size[0], 0 : size[1]].astype(np.float32)
    planes = [np.sin(x / 9 + step / 7 + c + seed) + np.cos(y / 11 - step / 5 + c) for c in range(3)]
    return (127 + 60 * np.stack(planes, -1)).clip(0, 255).astype(np.uint8)


def frames(episode: int, length: int, size: tuple[int, int]) -> list[dict]:
    rng = np.random.default_rng(episode)
    state = rng.normal(5, 0.1, (length, 6)).astype(np.float32)
    action = rng.normal(-1, 2, (length, 4)).astype(np.float32)
    return [
        {
            "observation.state": state[t],
            "action": action[t],
            "grid": rng.normal(size=(2, 3)).astype(np.float32),
            "next.done": np.array([t == length - 1]),
            "count": np.array([t * 3], np.int64),
            "note": f"step {t}",
            "observation.images.top": picture(episode, t, size),
            "observation.images.side": picture(episode + 50, t, size),
            "observation.images.still": picture(episode + 99, t, (32, 48)),
        }
        for t in range(length)
    ]


def features(size: tuple[int, int]) -> dict:
    axes = ["height", "width", "channels"]
    return {
        "observation.state": {"dtype": "float32", "shape": (6,), "names": [f"j{i}" for i in range(6)]},
        "action": {"dtype": "float32", "shape": (4,), "names": [f"a{i}" for i in range(4)]},
        "grid": {"dtype": "float32", "shape": (2, 3), "names": None},
        "next.done": {"dtype": "bool", "shape": (1,), "names": None},
        "count": {"dtype": "int64", "shape": (1,), "names": None},
        "note": {"dtype": "string", "shape": (1,), "names": None},
        "observation.images.top": {"dtype": "video", "shape": (*size, 3), "names": axes},
        "observation.images.side": {"dtype": "video", "shape": (*size, 3), "names": axes},
        "observation.images.still": {"dtype": "image", "shape": (32, 48, 3), "names": axes},
    }


def write(root: Path) -> None:
    from flexor.data.format.writer import DatasetWriter

    for name, case in CASES.items():
        options = {"fps": 10, **case}
        size = options.pop("size", (64, 96))
        with DatasetWriter(root / name, features=features(size), robot_type="toy", **options) as writer:
            for episode, (length, task) in enumerate(zip(LENGTHS, TASKS)):
                for frame in frames(episode, length, size):
                    writer.add_frame(frame)
                writer.save_episode(task)
        print("wrote", name)


def read(root: Path) -> int:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    failures = 0
    for name, case in CASES.items():
        dataset = LeRobotDataset(f"toy/{name}", root=root / name)
        problems = compare(dataset, case.get("size", (64, 96)), case.get("fps", 10))
        problems += compare_stats(dataset, case.get("size", (64, 96)), case.get("fps", 10))
        videos = len(list((root / name).glob("videos/*/*/*.mp4")))
        tables = len(list((root / name).glob("data/*/*.parquet")))
        print(
            f"{'FAIL' if problems else 'ok':4} {name}: {videos} videos, {tables} tables",
            *problems,
            sep="\n   ",
        )
        failures += bool(problems)
    return failures


def compare(dataset, size: tuple[int, int], fps: float) -> list[str]:
    problems = []
    if (dataset.num_episodes, dataset.num_frames) != (len(LENGTHS), sum(LENGTHS)):
        problems.append(f"{dataset.num_episodes} episodes, {dataset.num_frames} frames")
    if set(dataset.meta.tasks.index) != set(TASKS):
        problems.append(f"tasks {list(dataset.meta.tasks.index)}")
    row, worst = 0, 0.0
    for episode, length in enumerate(LENGTHS):
        for t, frame in enumerate(frames(episode, length, size)):
            item = dataset[row]
            for key, written in frame.items():
                got = item[key]
                if "images" in key:
                    error = np.abs(got.numpy() * 255 - written.transpose(2, 0, 1)).mean()
                    worst = max(worst, 0.0 if "still" in key else error)
                    # Neighbouring frames lie about 8 apart, so a frame off by one shows.
                    limit = 1e-3 if "still" in key else 5
                    if got.shape != written.transpose(2, 0, 1).shape or error > limit:
                        problems.append(f"{key} row {row}: off by {error:.2f} of 255 on average")
                elif isinstance(written, str):
                    problems += [] if got == written else [f"{key} row {row}: {got!r}"]
                elif not np.array_equal(got.numpy().reshape(written.shape), written):
                    problems.append(f"{key} row {row}: {got} instead of {written}")
            if item["task"] != TASKS[episode] or abs(item["timestamp"].item() - t / fps) > 1e-4:
                problems.append(f"row {row}: task {item['task']!r}, timestamp {item['timestamp'].item()}")
            place = [item[key].item() for key in ("episode_index", "frame_index", "index")]
            problems += [] if place == [episode, t, row] else [f"row {row}: {place}"]
            row += 1
    print(f"     worst mean video error {worst:.2f} of 255")
    return problems[:8]


def compare_stats(dataset, size: tuple[int, int], fps: float) -> list[str]:
    """LeRobot's own functions over the frames that were written, against our stats.json."""
    from lerobot.datasets import compute_stats as theirs

    per_episode, start = [], 0
    for episode, length in enumerate(LENGTHS):
        written = frames(episode, length, size)
        sampled = theirs.sample_indices(length)
        part = {}
        for key in written[0]:
            if "images" in key:
                images = np.stack([written[i][key].transpose(2, 0, 1) for i in sampled])
                raw = theirs.get_feature_stats(images, axis=(0, 2, 3), keepdims=True)
                part[key] = {k: v if k == "count" else np.squeeze(v / 255.0, axis=0) for k, v in raw.items()}
            elif key != "note":
                values = np.stack([frame[key] for frame in written])
                values = values.reshape(-1) if values.shape[1:] == (1,) else values
                if values.ndim == 3:  # their own path fails on a matrix in an episode of one frame
                    values = values.reshape(-1, values.shape[-1])
                part[key] = theirs.get_feature_stats(values, axis=0, keepdims=values.ndim == 1)
                part[key]["count"] = np.array([length])
        for key, values in (("timestamp", np.arange(length) / fps), ("index", start + np.arange(length))):
            part[key] = theirs.get_feature_stats(values, axis=0, keepdims=True)
        per_episode.append(part)
        start += length
    problems = []
    for key, stats in theirs.aggregate_stats(per_episode).items():
        for stat, value in stats.items():
            ours = dataset.meta.stats[key][stat]
            # They sum in float32: a mean over many pixels is good to 4 digits, E[x^2] - E[x]^2 to 3.
            limit = {"std": 2e-3, "mean": 1e-4}.get(stat, 1e-5)
            if ours.shape != value.shape or not np.allclose(ours, value, rtol=limit, atol=1e-5):
                problems.append(f"stats {key}/{stat}: {ours.ravel()[:3]} against {value.ravel()[:3]}")
    return problems


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("write", "read"):
        sys.exit(__doc__)
    sys.exit(write(Path(sys.argv[2])) if sys.argv[1] == "write" else bool(read(Path(sys.argv[2]))))
