"""Whatever stands in a dataset's files, a person gets an error that names it, or a dataset: never a traceback.

Every value of the metadata and every column of the tables is taken away or replaced by nonsense, one after the other.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flexor.core.errors import FlexorError
from flexor.data.check.check import check_dataset
from flexor.data.check.info import describe, render
from flexor.data.dataset import open_dataset
from support.legacy import to_v2
from support.samples import FEATURES, write_sample

NONSENSE: list[Any] = [None, -1, 10**9, 0.5, float("nan"), "", "{x}", [], [[1]], {}, {"a": {}}, True]
FEW = {name: FEATURES[name] for name in ("observation.images.top", "observation.state", "action", "comment")}


@pytest.fixture(scope="module")
def samples(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("samples")
    root = write_sample(folder / "v3.0", features=FEW, lengths=(7, 4), data_files_mb=0.001)
    return {"v3.0": root} | {v: to_v2(root, folder / v, v) for v in ("v2.1", "v2.0")}


def use(root: Path) -> None:
    """All that reads a dataset."""
    try:
        dataset = open_dataset(root=root, on_bad_episode="skip")
        windows = {"action": [0, 1]} if "action" in dataset.columns else {}
        dataset.read(np.array([0, len(dataset) - 1]), windows)
        dataset.fingerprint()
    except FlexorError as error:
        assert "Error" not in str(error), error  # no exception's name stands for a reason
    report = check_dataset(root, deep=False)
    assert not any("KeyError" in problem.evidence for problem in report.findings)
    with suppress(FlexorError):
        render(describe(root))


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Every place in a tree of JSON."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def changed(value: Any, path: tuple, new: Any, remove: bool = False) -> Any:
    copy = json.loads(json.dumps(value))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    if remove:
        del inner[path[-1]]
    else:
        inner[path[-1]] = new
    return copy


@pytest.mark.parametrize("version", ["v3.0", "v2.1", "v2.0"])
def test_info(samples, version, tmp_path):
    root = shutil.copytree(samples[version], tmp_path / "data")
    path = root / "meta/info.json"
    info = json.loads(path.read_text())
    keep = [
        place for place in places(info) if len(place) < 3 or place[1] in ("action", "observation.images.top")
    ]
    # the older ones are read alike: a quarter of the places each
    some = {"v3.0": slice(None), "v2.1": slice(0, None, 4), "v2.0": slice(2, None, 4)}[version]
    for number, place in [*enumerate(keep)][some]:
        path.write_text(json.dumps(changed(info, place, None, remove=True)))
        use(root)
        path.write_text(json.dumps(changed(info, place, NONSENSE[number % len(NONSENSE)])))
        use(root)
    for new in NONSENSE:
        path.write_text(json.dumps(new))
        use(root)


@pytest.mark.parametrize(
    "version, name",
    [
        ("v2.1", "episodes.jsonl"),
        ("v2.1", "tasks.jsonl"),
        ("v2.1", "episodes_stats.jsonl"),
        ("v2.0", "stats.json"),
        ("v3.0", "stats.json"),
    ],
)
def test_other_metadata(samples, version, name, tmp_path):
    root = shutil.copytree(samples[version], tmp_path / "data")
    path = root / "meta" / name
    first, *rest = path.read_text().splitlines() if name.endswith("l") else [path.read_text()]
    tree = json.loads(first)
    for number, place in enumerate(list(places(tree))[:12]):
        new = NONSENSE[number % len(NONSENSE)]
        for trees in (changed(tree, place, new), changed(tree, place, None, remove=True)):
            path.write_text("\n".join([json.dumps(trees), *rest]))
            use(root)
    for new in NONSENSE:
        path.write_text("\n".join([json.dumps(new), *rest]))
        use(root)


TYPES = [
    pa.string(),
    pa.float64(),
    pa.bool_(),
    pa.list_(pa.int64()),
    pa.struct([("x", pa.int64())]),
    pa.null(),
]
VALUES = {"string": "x", "double": float("nan"), "bool": True, "list<item: int64>": [1, 2], "null": None}


@pytest.mark.parametrize("version, folder", [("v3.0", "meta"), ("v3.0", "data"), ("v2.1", "data")])
def test_columns(samples, version, folder, tmp_path):
    root = shutil.copytree(samples[version], tmp_path / "data")
    for path in sorted((root / folder).rglob("*.parquet")):
        table = pq.read_table(path)
        names = [name for name in table.column_names if not name.startswith("stats/")]
        for number, name in enumerate(names):
            at = table.column_names.index(name)
            pq.write_table(table.remove_column(at), path)
            use(root)
            kind = TYPES[number % len(TYPES)]
            values = pa.array([VALUES.get(str(kind))] * len(table), kind)
            pq.write_table(table.set_column(at, name, values), path)
            use(root)
        pq.write_table(table.slice(0, 0), path)
        use(root)
        pq.write_table(table, path)
        if folder == "data":
            break  # one file stands for all
