"""A camera that is blank or frozen is named by the check, with or without decoding; a healthy one is not."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from flexor.data.check.check import check_dataset
from flexor.data.repair.repair import repair_dataset
from support.faulty_arm import TOP, WRIST, change_statistics, write_arm


def without_episode_statistics(root: Path) -> Path:
    """As recorded by programs that do not compute them."""
    for file in (root / "meta/episodes").rglob("*.parquet"):
        table = pq.read_table(file)
        pq.write_table(table.select([n for n in table.column_names if not n.startswith("stats/")]), file)
    return root


def findings_of(root: Path, deep: bool) -> set[tuple]:
    findings = check_dataset(root, deep=deep).findings
    return {(f.name, f.episode, f.feature, f.frame) for f in findings}


@pytest.mark.parametrize("deep", [True, False])
@pytest.mark.parametrize("stored_as", ["video", "image"])
def test_cameras_that_show_nothing(tmp_path, stored_as, deep):
    arm = {"cameras": True, "stored_as": stored_as}
    assert findings_of(write_arm(tmp_path / "healthy", **arm), deep) == set()
    root = without_episode_statistics(write_arm(tmp_path / "faulty", blank=[2, 5], frozen=[1, 6], **arm))
    findings = findings_of(root, deep)
    blank, frozen = ({f for f in findings if f[0] == f"{name}-camera"} for name in ("blank", "frozen"))
    assert findings == blank | frozen
    assert blank == {("blank-camera", episode, WRIST, 0) for episode in (2, 5)}
    assert {f[1:3] for f in frozen} == {(1, WRIST), (6, WRIST)}
    assert not deep or {f[3] for f in frozen} == {3}
    if not deep:
        notes = repair_dataset(root, tmp_path / "repaired", dry_run=True).notes
        assert any(f"{WRIST} in episodes 2, 5: it is blank (one colour)" in note for note in notes)
        assert any(f"{WRIST} in episodes 1, 6: it shows the same image" in note for note in notes)
        text = str(repair_dataset(root, tmp_path / "repaired", decode=False))
        assert "[blank-camera] episodes 2, 5" in text and "[frozen-camera] episodes 1, 6" in text


def test_the_statistics_of_episodes_say_it_where_images_are_not_looked_at(tmp_path):
    root = write_arm(tmp_path / "arm", blank=[3], cameras=True)
    for file in (root / "videos" / WRIST).rglob("*.mp4"):
        file.write_bytes(b"")
    findings = {f for f in findings_of(root, deep=False) if f[0] == "blank-camera"}
    assert findings == {("blank-camera", 3, WRIST, 0)}


@pytest.mark.parametrize(
    ("change", "is_wrong"),
    [
        (lambda name, value: value * 255, True),
        (lambda name, value: value * 3 if name in ("std", "max") else value, True),
        (lambda name, value: value + 0.2 * (name == "mean"), True),
        (lambda name, value: value * 1.02, False),
    ],
)
def test_statistics_of_images_are_compared_with_images(tmp_path, change, is_wrong):
    root = change_statistics(write_arm(tmp_path / "arm", cameras=True), TOP, change)
    expected = {("stats-wrong", None, TOP, None)} if is_wrong else set()
    assert findings_of(root, deep=True) == expected
