"""Edits of small datasets, compared with their originals."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from flexor.data.check.check import check_dataset
from flexor.data.dataset import open_dataset
from flexor.data.edit.edit import EditReport
from support.damage import edit_table
from support.small_datasets import LENGTHS


def contents(*roots: Path) -> dict[str, str]:
    files = sorted(path for root in roots for path in root.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def assert_copied(report: EditReport, roots: list[Path], skip: tuple[str, ...] = ()) -> None:
    """Every row and frame is that of the original, the new dataset has no problem, nothing else was written."""
    json.dumps(report.to_json())
    for dataset in report.datasets:
        checked = check_dataset(dataset.folder)
        assert checked.findings == [] and report.ok, str(checked)
        ours = open_dataset(root=dataset.folder)
        assert len(ours) == sum(part.length for part in dataset.parts)
        originals = {root: open_dataset(root=root, on_bad_episode="skip") for root in roots}
        for new, part in enumerate(dataset.parts):
            left = ours.select([new])
            right = originals[part.source.root].select([part.plan.episode.index])
            rows = np.arange(part.length)
            new_rows, old_rows = left.read(rows), right.read(rows + part.first)
            for name in set(old_rows) - {"index", "episode_index", "frame_index", "timestamp", *skip}:
                assert np.array_equal(new_rows[name], old_rows[name]), (new, name)
            assert np.array_equal(new_rows["frame_index"], rows)
            assert np.array_equal(new_rows["timestamp"], (rows / ours.fps).astype(np.float32))
            assert (new_rows["episode_index"] == new).all()
        assert [path.name for path in dataset.folder.parent.iterdir() if "incomplete" in path.name] == []


def idle(root: Path, spans: dict[int, tuple[int, int]]) -> Path:
    """Let each of these episodes move only between two frames, and all others from their first frame to the last."""
    ends = np.cumsum(LENGTHS)

    def change(values):
        new = []
        for episode, length in enumerate(LENGTHS):
            first, last = spans.get(episode, (0, length - 1))
            place = np.clip(np.arange(length), first, last)
            new += [[float(at - first)] * len(values[0]) for at in place]
        return new

    for path in sorted(root.glob("data/*/*.parquet")):
        table = pq.read_table(path)
        assert table.num_rows == ends[-1]
        edit_table(path, action=change, **{"observation.state": change})
    return root
