"""Files of lines on a disk that is full for a while: no line is cut off, none is lost, nothing is raised."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flexor.core import lines
from flexor.core.lines import LineFile


@contextmanager
def files_of_at_most(count: int) -> Iterator[None]:
    """As a full disk: a write that goes beyond writes a part, and the next one fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", [0, 1, 9, 10, 11, 25])
def test_lines_wait_for_room(room, tmp_path, log_lines):
    path = tmp_path / "lines"
    file = LineFile(path)
    file.write("line number 1")
    with files_of_at_most(14 + room):
        for number in range(2, 6):
            file.write(f"line number {number}")
            assert path.read_text().endswith("\n")
    written = len(path.read_text().splitlines())
    assert written == 1 + room // 14 and len(file.waiting) == 5 - written
    assert len(log_lines) == 1 and "File too large" in log_lines[0]
    file.write("line number 6")
    file.close()
    assert path.read_text().splitlines() == [f"line number {number}" for number in range(1, 7)]
    assert len(log_lines) == 1


def test_told_again_when_it_happens_again(tmp_path, log_lines):
    file = LineFile(tmp_path / "lines")
    for _ in range(2):
        with files_of_at_most(0):
            file.write("x")
            file.write("y")
        file.write("z")
    assert len(log_lines) == 2


def test_what_is_lost_is_said(tmp_path, log_lines, monkeypatch):
    monkeypatch.setattr(lines, "MOST_WAITING", 3)
    file = LineFile(tmp_path / "lines")
    with files_of_at_most(0):
        for number in range(5):
            file.write(str(number))
        file.close()
    assert (tmp_path / "lines").read_text() == "" and "last 3 lines" in log_lines[-1]


def test_a_folder_that_comes_later(tmp_path, log_lines):
    """As of a network file system that is away for a while."""
    path = tmp_path / "away" / "lines"
    file = LineFile(path)
    file.write("one")
    path.parent.mkdir()
    file.write("two")
    assert path.read_text() == "one\ntwo\n" and len(log_lines) == 1


def test_it_appends(tmp_path: Path):
    path = tmp_path / "lines"
    path.write_text("one\n")
    file = LineFile(path)
    file.write("two")
    file.close()
    file.write("three")
    assert path.read_text() == "one\ntwo\nthree\n"
