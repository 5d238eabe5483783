"""Repairs of small datasets, checked against what they were before they were broken; and ways to break them."""

import hashlib
import json
from pathlib import Path

import numpy as np

from flexor.data.check.check import check_dataset
from flexor.data.dataset import open_dataset
from flexor.data.repair.repair import RepairReport, repair_dataset
from support.damage import DATA, edit_json, edit_table

ALL = [0, 1, 2, 3]


def repair(root: Path, **options) -> RepairReport:
    """Repair beside the original, which must not change, and the result must be sound."""
    out, before = root.with_name("repaired"), contents(root)
    report = repair_dataset(root, out, **options)
    assert contents(root) == before, "the original was touched"
    checked = check_dataset(out)
    assert checked.findings == [], str(checked)
    json.dumps(report.to_json())
    return report


def contents(root: Path) -> dict[str, str]:
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def assert_same(original: Path, report: RepairReport, skip: tuple[str, ...] = ()) -> None:
    """Every row and every frame of the kept episodes is what it was, bit for bit."""
    ours, theirs = open_dataset(root=report.out), open_dataset(root=original)
    assert len(ours) == sum(plan.length for plan in report.included)
    for plan in report.included:
        new, old = ours.select([plan.new]), theirs.select([plan.episode.index])
        rows = np.arange(len(new))
        assert len(new) == len(old) == plan.length
        left, right = new.read(rows), old.read(rows)
        for name in set(right) - {"index", "episode_index", *skip}:
            assert np.array_equal(left[name], right[name]), (plan.episode.index, name)
        assert np.array_equal(left["frame_index"], rows)
        assert np.allclose(left["timestamp"], rows / ours.fps, atol=1e-5)


def declare(name: str, **changes):
    def change(data: dict) -> None:
        data["features"].setdefault(name, {"dtype": "float32", "shape": [4], "names": None}).update(changes)

    return lambda root: edit_json(root / "meta/info.json", change)


def rows(file: str = DATA, **columns):
    return lambda root: edit_table(root / file, **columns)
