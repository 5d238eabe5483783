"""What a run's data is: the same for copies and selections that share files, another for other contents."""

import shutil
from dataclasses import asdict

import pytest

from flexor.data.dataset import open_dataset
from flexor.data.identity import differences, identify
from flexor.data.mixture.mixed import Member, join_datasets


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXOR_CACHE", str(tmp_path / "cache"))


def test_a_copy_is_the_same_data(dataset, tmp_path):
    copy = shutil.copytree(dataset, tmp_path / "copy", copy_function=shutil.copyfile)
    first, second = identify(open_dataset(root=dataset)), identify(open_dataset(root=copy))
    assert first == second and first.summary() == second.summary() and None not in first.summary().values()
    assert any(name.endswith(".mp4") for name in first.videos)
    assert any(name.endswith(".parquet") for name in first.tables)


def test_statistics_and_other_episodes_are_no_part_of_it(dataset, tmp_path):
    copy = shutil.copytree(dataset, tmp_path / "copy")
    (copy / "meta" / "stats.json").unlink()
    assert identify(open_dataset(root=copy)) == identify(open_dataset(root=dataset))
    few, all_of_them = open_dataset(root=dataset, episodes=[0, 1]), open_dataset(root=dataset)
    assert identify(few) == identify(all_of_them.select([0, 1])) != identify(all_of_them)


def test_videos_over_a_network_are_not_read(dataset):
    remote = open_dataset(root=f"file://{dataset}")
    assert identify(remote).videos is not None
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(str(dataset), "/identity/place", recursive=True)
    try:
        streamed = identify(open_dataset(root="memory://identity/place"))
    finally:
        memory.rm("/identity", recursive=True)
    local = identify(open_dataset(root=dataset))
    assert streamed.videos is None and streamed.tables == local.tables
    assert streamed.summary() == {**local.summary(), "videos": None}


def test_each_dataset_of_several_counts(dataset, tmp_path):
    copy = shutil.copytree(dataset, tmp_path / "copy")
    first, second = open_dataset(root=dataset), open_dataset(root=copy)
    both = join_datasets([Member("a", first), Member("b", second)])
    identity = identify(both)
    assert {name.partition(": ")[0] for name in identity.tables} == {"dataset 1", "dataset 2"}
    again = join_datasets([Member("other", first), Member("names", second)])
    assert identify(again) == identity
    first_only = identify(both.select(first.episodes.index.tolist()))
    assert {name.partition(": ")[0] for name in first_only.videos} == {"dataset 1"}


def test_differences_are_named(dataset):
    tables = identify(open_dataset(root=dataset)).tables
    name = next(iter(tables))
    assert differences(tables, tables) == []
    assert differences(tables, {**tables, name: "x"}) == [name]
    assert differences({**tables, "more": "x"}, tables) == ["more (not there any more)"]
    assert differences(tables, {**tables, "more": "x"}) == ["more (new)"]


def test_it_is_saved_as_plain_data(dataset):
    identity = identify(open_dataset(root=dataset))
    assert identity.to_json() == asdict(identity)


def test_frames_that_the_metadata_moves_are_not_taken_from_a_cache(dataset, tmp_path):
    """The videos are the same, but a frame's row is now at another time in them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    copy = shutil.copytree(dataset, tmp_path / "copy")  # times included
    before = open_dataset(root=dataset).content()
    assert open_dataset(root=copy).content() == before
    file = next((copy / "meta" / "episodes").rglob("*.parquet"))
    table = pq.read_table(file)
    name = next(n for n in table.column_names if n.endswith("from_timestamp"))
    moved = pa.array([time + 0.1 for time in table[name].to_pylist()], table.schema.field(name).type)
    pq.write_table(table.set_column(table.schema.get_field_index(name), name, moved), file)
    assert open_dataset(root=copy).content() != before
