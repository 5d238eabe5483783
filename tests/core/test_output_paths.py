"""Where a command will write is checked before its work: missing folders are fine, everything else is named."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flexor.core.errors import ConfigError
from flexor.core.output_paths import check_output_file, check_output_folder, make_parents

CHECKS = [check_output_file, check_output_folder]
NOBODY = 65534


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Somebody who may not write everywhere, also where the tests run as root."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if before == 0:
            os.seteuid(before)


@pytest.mark.parametrize("check", CHECKS)
def test_missing_folders_are_fine_and_made_when_it_is_written(check, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("a/b/c")
    assert check(path, "--output") == path
    assert not Path("a").exists()  # nothing is written by a check
    make_parents(path).write_text("x")


def test_what_exists_and_can_be_written(tmp_path):
    (tmp_path / "file").touch()
    check_output_file(tmp_path / "file", "--output")
    check_output_folder(tmp_path, "--output")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    check_output_file(tmp_path / "link", "--output")


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("below", ["x", "x/y/z"])
def test_a_file_on_the_way_is_named(check, below, tmp_path):
    (tmp_path / "notes").touch()
    with pytest.raises(ConfigError, match=rf"--output=.*{below}: .*/notes is a file, not a folder: choose"):
        check(tmp_path / "notes" / below, "--output")


def test_the_wrong_kind(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--html=.* is a folder: name a file, such as .*/NAME"):
        check_output_file(tmp_path, "--html")
    with pytest.raises(ConfigError, match=r"--videos=.*file is a file, but must be a folder"):
        check_output_folder(tmp_path / "file", "--videos")


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", ["x" * 300, "a\0b"])
def test_names_that_no_file_can_have(check, name, tmp_path):
    with pytest.raises(ConfigError, match=r"--output=.* can't be used"):
        check(tmp_path / name / "more", "--output")


@pytest.mark.parametrize("check", CHECKS)
def test_links_to_nothing_and_in_a_circle(check, tmp_path):
    (tmp_path / "nothing").symlink_to(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"nothing is a link to .*/none, which does not exist"):
        check(tmp_path / "nothing", "--output")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with pytest.raises(ConfigError, match="can't be used"):
        check(tmp_path / "circle", "--output")


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", ["new", "new/below", "theirs"])
def test_no_permission(check, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # others can't come here from above
    tmp_path.chmod(0o755)
    place = Path("locked")
    place.mkdir()
    if check is check_output_folder:
        (place / "theirs").mkdir(mode=0o555)
    else:
        (place / "theirs").touch(mode=0o444)
    place.chmod(0o555)
    with ordinary_user(), pytest.raises(ConfigError, match=r"--output=.*no permission to write to .*locked"):
        check(place / name, "--output")


@pytest.mark.parametrize("check", CHECKS)
def test_a_read_only_file_system(check):
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    read_only = [m[1] for m in mounts if "ro" in m[3].split(",") and Path(m[1]).is_dir()]
    if not read_only:
        pytest.skip("this machine has no read-only file system")
    with pytest.raises(ConfigError, match="is on a read-only file system"):
        check(Path(read_only[0]) / "new" / "file", "--output")
