"""LeRobot's annotations are copied with their episodes, and cut with them."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flexor.data.check.check import check_dataset
from flexor.data.edit.edit import (
    delete_episodes,
    merge_datasets,
    trim_dataset,
)
from flexor.data.edit.trim import TrimSettings
from support.damage import edit_json
from support.edits import assert_copied, idle

# --- annotations of LeRobot's


def with_language(root: Path) -> Path:
    """Persistent annotations on every row of an episode, and an event on one frame."""
    times = pa.field("timestamp", pa.float32(), nullable=False)
    common = [pa.field("role", pa.string(), nullable=False), pa.field("content", pa.string())]
    tools = pa.field("tool_calls", pa.list_(pa.string()))
    persistent = pa.list_(pa.struct([*common, pa.field("style", pa.string()), times, tools]))
    events = pa.list_(pa.struct([*common, pa.field("style", pa.string()), tools]))
    for path in sorted(root.glob("data/*/*.parquet")):
        table = pq.read_table(path)
        both = [[], []]
        for episode, frame in zip(table["episode_index"].to_pylist(), table["frame_index"].to_pylist()):
            row = {"role": "assistant", "style": "subtask", "tool_calls": None}
            both[0].append([row | {"content": f"{episode} {t}", "timestamp": t} for t in (0.0, 0.4)])
            spoken = {"role": "user", "content": "stop", "style": "interjection", "tool_calls": ['{"a": 1}']}
            both[1].append([spoken] if frame == 6 else [])
        table = table.append_column("language_persistent", pa.array(both[0], persistent))
        pq.write_table(table.append_column("language_events", pa.array(both[1], events)), path)
    names = ("language_persistent", "language_events")
    declared = {name: {"dtype": "language", "shape": [1], "names": None} for name in names}
    edit_json(root / "meta/info.json", lambda info: info["features"].update(declared))
    edit_json(root / "meta/info.json", lambda info: info.update(tools=[{"type": "function"}]))
    return root


def columns_of(root: Path, names: tuple[str, ...]) -> list[dict]:
    tables = [pq.read_table(path, columns=list(names)) for path in sorted(root.glob("data/*/*.parquet"))]
    return pa.concat_tables(tables).to_pylist()


LANGUAGE = ("language_persistent", "language_events")


def test_annotations_are_copied(originals, tmp_path):
    root = with_language(shutil.copytree(originals / "many", tmp_path / "many"))
    report = delete_episodes(root, tmp_path / "new", "1")
    assert_copied(report, [root])
    old, new = columns_of(root, LANGUAGE), columns_of(tmp_path / "new", LANGUAGE)
    assert new == old[:12] + old[21:]
    info = json.loads((tmp_path / "new/meta/info.json").read_text())
    assert info["features"]["language_events"] == {"dtype": "language", "shape": [1], "names": None}
    assert info["tools"] == [{"type": "function"}]
    merge_datasets([tmp_path / "new", root], tmp_path / "merged")
    assert columns_of(tmp_path / "merged", LANGUAGE) == new + old


def test_annotations_that_are_not_declared_are_copied(originals, tmp_path):
    root = with_language(shutil.copytree(originals / "many", tmp_path / "many"))
    edit_json(root / "meta/info.json", lambda info: [info["features"].pop(name) for name in LANGUAGE])
    (finding,) = check_dataset(root, deep=False).findings
    assert finding.name == "column-undeclared" and ", ".join(LANGUAGE) in finding.evidence
    delete_episodes(root, tmp_path / "new", "1")
    assert check_dataset(tmp_path / "new", deep=False).findings == []
    old = columns_of(root, LANGUAGE)
    assert columns_of(tmp_path / "new", LANGUAGE) == old[:12] + old[21:]
    info = json.loads((tmp_path / "new/meta/info.json").read_text())
    assert {info["features"][name]["dtype"] for name in LANGUAGE} == {"language"}


def test_annotations_of_a_cut_episode_count_from_its_start(originals, tmp_path):
    root = idle(shutil.copytree(originals / "one", tmp_path / "one"), {0: (3, 4)})
    trim_dataset(with_language(root), tmp_path / "new", TrimSettings(keep=0))
    rows = columns_of(tmp_path / "new", LANGUAGE)[:4]
    assert [len(row["language_events"]) for row in rows] == [0, 0, 0, 1], "an event is not cut"
    times = [record["timestamp"] for record in rows[0]["language_persistent"]]
    assert times == pytest.approx([-0.3, 0.1])
