"""Names from outside stay inside: no name makes a path that leads out of its folder."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexor.core.paths import LINK_TARGETS, UnsafePath, files_to_push, inside, safe_name

ODD = [
    *("/etc/passwd", "../x", "a/../../x", "a/..", "..", ".", "", "a//b", "a/", "//a", "a\\..\\b", "C:\\x"),
    *(
        "a\0b",
        "a\nb",
        "\x1b[2J",
        "\u2025/x",
        "\uff0e\uff0e/x",
        "a\uff0fb",
        "a\uff3cb",
        "a/\ud800",
        "x" * 256,
        "a/" * 3000 + "b",
    ),
]


@pytest.mark.parametrize("name", [*ODD, 3, None, b"a", ["a"]])
def test_a_name_that_is_no_relative_path_is_refused(tmp_path, name):
    for refused in (safe_name, lambda name: inside(tmp_path, name)):
        with pytest.raises(UnsafePath) as error:
            refused(name)
        assert len(str(error.value)) < 400 and "\x1b" not in str(error.value)


@pytest.mark.parametrize(
    "name", ["meta/info.json", "a..b/c", "...", "überall/ö.mp4", "a b", "~", "observation.images.top"]
)
def test_a_relative_path_stays_as_it_is(tmp_path, name):
    assert safe_name(name) == name and inside(tmp_path, name) == tmp_path / name


def test_points_between_separators_are_left_out():
    assert safe_name("./data/./x.parquet") == "data/x.parquet"


LETTERS = st.sampled_from(
    [*"ab./\\~: \0\n", "..", "/..", "../", "\uff0e", "\uff0f", "\u2025", "\ud800", "\x7f", "é"]
)


@given(st.lists(LETTERS, max_size=12).map("".join) | st.text(max_size=40))
def test_every_name_is_inside_or_refused(name):
    root = Path("/nowhere/dataset")
    try:
        path = inside(root, name)
    except UnsafePath:
        return
    for spelled in (str(path), str(path).replace("\\", "/")):
        assert os.path.normpath(spelled).startswith("/nowhere/dataset/")
    assert os.fsencode(path) and "\0" not in str(path)
    assert safe_name(path.relative_to(root).as_posix()) == path.relative_to(root).as_posix()


def test_a_link_that_leads_out_is_refused_unless_its_target_is_named(tmp_path, monkeypatch):
    root, elsewhere = tmp_path / "dataset", tmp_path / "big disk" / "videos"
    (root / "meta").mkdir(parents=True)
    elsewhere.mkdir(parents=True)
    (root / "videos").symlink_to(elsewhere)
    (root / "meta" / "alias").symlink_to("info.json")
    assert inside(root, "meta/alias") == root / "meta" / "alias"
    for name in ("videos", "videos/a/b.mp4"):
        with pytest.raises(UnsafePath, match=r"is a link that leads out .*FLEXOR_LINK_TARGETS="):
            inside(root, name)
    monkeypatch.setenv(LINK_TARGETS, f"/nowhere:{elsewhere.parent}")
    assert inside(root, "videos/a/b.mp4") == root / "videos/a/b.mp4"


def test_a_folder_that_is_reached_through_a_link_is_no_link_that_leads_out(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "alias").symlink_to("real")
    assert inside(tmp_path / "alias", "x") == tmp_path / "alias" / "x"


def test_links_of_the_hub_cache_lead_to_its_repository_only(tmp_path):
    repository = tmp_path / "datasets--a--b"
    commit = repository / "snapshots" / "0123"
    (commit / "meta").mkdir(parents=True)
    (repository / "blobs").mkdir()
    (tmp_path / "datasets--c--d" / "blobs").mkdir(parents=True)
    (commit / "meta" / "info.json").symlink_to("../../../blobs/abc")
    (commit / "meta" / "other.json").symlink_to("../../../../datasets--c--d/blobs/abc")
    assert inside(commit, "meta/info.json")
    with pytest.raises(UnsafePath, match="leads out"):
        inside(commit, "meta/other.json")


# What is pushed


def test_all_files_below_a_folder(tmp_path):
    for name in ("a/b/c.txt", "d", ".hidden", "a/.e/f"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [*files_to_push(tmp_path)] == ["a/b/c.txt", "d"]
    assert [*files_to_push(tmp_path, hidden=True)] == [".hidden", "a/.e/f", "a/b/c.txt", "d"]
    assert [*files_to_push(tmp_path, top=("a",))] == ["a/b/c.txt"]


@pytest.mark.parametrize("target", ["/etc/passwd", "/etc", "inside", "nothing"])
def test_links_are_not_pushed_wherever_they_lead(tmp_path, target):
    root = tmp_path / "dataset"
    (root / "data").mkdir(parents=True)
    (root / "inside").touch()
    (root / "data/link").symlink_to(target if target.startswith("/") else root / target)
    with pytest.raises(UnsafePath, match=r"dataset/data/link is a symbolic link to .*FLEXOR_LINK_TARGETS="):
        files_to_push(root)
    assert [*files_to_push(root, top=("inside",))] == ["inside"]


def test_links_that_the_user_allows_are_pushed_with_what_is_below(tmp_path, monkeypatch):
    disk, root = tmp_path / "disk", tmp_path / "dataset"
    (disk / "videos").mkdir(parents=True)
    (disk / "videos/a.mp4").touch()
    root.mkdir()
    (root / "videos").symlink_to(disk / "videos")
    monkeypatch.setenv("FLEXOR_LINK_TARGETS", str(disk))
    assert files_to_push(root) == {"videos/a.mp4": root / "videos/a.mp4"}


def test_a_snapshot_of_the_hubs_cache_is_pushed(tmp_path):
    blob, root = tmp_path / "blobs/1234", tmp_path / "snapshots/abc"
    for folder in (blob.parent, root / "meta"):
        folder.mkdir(parents=True)
    blob.touch()
    (root / "meta/info.json").symlink_to("../../../blobs/1234")
    assert [*files_to_push(root)] == ["meta/info.json"]


def test_what_is_no_file_is_not_pushed(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnsafePath, match="pipe is neither a file nor a folder"):
        files_to_push(tmp_path)
