"""No text from outside reaches a log or a terminal as it is."""

from hypothesis import given
from hypothesis import strategies as st

from flexor.core.text import one_line, printable


def test_control_characters_are_shown_instead_of_obeyed():
    assert printable("a\x1b[2Jb\r\x9bc\u202ed\ud800\u2028") == "a\\x1b[2Jb\\r\\x9bc\\u202ed\\ud800\\u2028"
    assert printable("wörter\tund 漢字 🙂") == "wörter\tund 漢字 🙂"


def test_no_line_looks_like_an_entry_of_the_log():
    assert printable("camera x\n12:00:00 I saved\n  a list") == "camera x\n  12:00:00 I saved\n  a list"


@given(st.text())
def test_whatever_comes_is_printable_and_can_be_written(text):
    for line in printable(text).split("\n"):
        assert line.replace("\t", "").isprintable() or any(c.isspace() for c in line)
        assert not set(line) & {chr(code) for code in (*range(9), *range(10, 32), *range(127, 160))}
    assert printable(text).encode() is not None
    assert "\n" not in one_line(text) and "\x1b" not in one_line(text)
