"""Colour is for terminals that show it, and for nobody else."""

import io
import logging

import pytest

from flexor.core.console import GREEN, RED, coloured, print_error, print_text
from flexor.core.log import in_colour_of


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


COLOURS = {r"\bfits\b": GREEN, "DOES NOT FIT": RED}


def test_a_terminal_gets_colour_and_a_pipe_does_not():
    assert coloured("act fits", COLOURS, Terminal()) == "act \x1b[1;32mfits\x1b[0m"
    assert coloured("act DOES NOT FIT", COLOURS, Terminal()) == "act \x1b[1;31mDOES NOT FIT\x1b[0m"
    assert coloured("act fits", COLOURS, io.StringIO()) == "act fits"


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_who_wants_none_gets_none(name: str, value: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, value)
    assert coloured("act fits", COLOURS, Terminal()) == "act fits"


def test_colours_of_strangers_are_not_shown():
    terminal = Terminal()
    print_text("fits \x1b[31mred", terminal, COLOURS)
    assert terminal.getvalue().count("\x1b[") == 2  # only its own


def test_errors_begin_in_red(monkeypatch: pytest.MonkeyPatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    print_error("flexor plan: no such GPU")
    assert terminal.getvalue() == "\x1b[1;31mflexor plan:\x1b[0m no such GPU\n"


def test_warnings_of_a_run_are_in_colour(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stderr", Terminal())
    assert in_colour_of(logging.INFO, "step 1") == "step 1"
    assert in_colour_of(logging.WARNING, "it is slow") == "\x1b[33mit is slow\x1b[0m"
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert in_colour_of(logging.ERROR, "it failed") == "it failed"
