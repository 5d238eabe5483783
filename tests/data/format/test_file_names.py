"""Templates of file names in meta/info.json, as recorders in the wild write them."""

import pytest

from flexor.data.format.file_names import V2, V3, FileNames


def test_what_lerobot_writes():
    new, old = FileNames(V3, v3=True), FileNames({**V2, "chunks_size": 100}, v3=False)
    assert new.data(7, 1, 2) == "data/chunk-001/file-002.parquet"
    assert new.video("observation.images.top", 7, 0, 3) == (
        "videos/observation.images.top/chunk-000/file-003.mp4"
    )
    assert old.data(123) == "data/chunk-001/episode_000123.parquet"
    assert old.video("top", 123) == "videos/chunk-001/top/episode_000123.mp4"


def test_no_template_means_lerobots():
    assert FileNames({}, v3=False).data(1001) == "data/chunk-001/episode_001001.parquet"
    assert FileNames({"data_path": None}, v3=True).data(5, 0, 4) == "data/chunk-000/file-004.parquet"


def test_the_other_versions_name_of_a_chunk():
    info = {
        "data_path": "data/chunk-{chunk_index:03d}/episode_{episode_index:06d}.parquet",
        "chunks_size": 10,
    }
    assert FileNames(info, v3=False).data(25) == "data/chunk-002/episode_000025.parquet"
    info = {"data_path": "data/{episode_chunk}/{episode_index}.parquet"}
    assert FileNames(info, v3=True).data(25, 3, 4) == "data/3/25.parquet"


@pytest.mark.parametrize(
    "template, v3, message",
    [
        ("data/file-{file_index:03d}.parquet", False, "{file_index} is unknown"),
        ("data/{robot}.parquet", True, "{robot} is unknown"),
        ("data/{video_key}.parquet", True, "{video_key} is unknown"),
        ("data/{}.parquet", True, "{} is unknown"),
        ("data/{chunk_index.real}", True, "{chunk_index.real} is unknown"),
        ("data/{chunk_index", True, "expected '}'"),
        ("data/{chunk_index:q}", True, "is not a valid format"),
        (7, True, "not a template"),
    ],
)
def test_what_can_not_be_filled_in_names_the_fields_there_are(template, v3, message):
    with pytest.raises(ValueError) as error:
        FileNames({"data_path": template}, v3)
    assert "data_path" in str(error.value) and message in str(error.value)
    assert template == 7 or "{chunk_index}" in str(error.value)


def test_metadata_that_does_not_say_where():
    with pytest.raises(ValueError, match="episode 3"):
        FileNames({}, v3=True).data(3, None, 1)
