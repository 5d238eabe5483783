"""Text from outside, such as a camera's name or a server's answer, made fit for a log and a terminal."""

from __future__ import annotations

import re
import unicodedata

INDENT = "  "


def printable(text: str) -> str:
    """The text with control characters as \\x1b and the like: they could move the cursor, or hide what follows.

    Lines after the first begin with two spaces, so that none can look like an entry of the log.
    """
    lines = [_visible(line) for line in text.split("\n")]
    return "\n".join([lines[0], *(line if line.startswith(INDENT) else INDENT + line for line in lines[1:])])


def visible(text: str) -> str:
    """The text with control characters as \\x1b and the like, line by line: for what a command prints."""
    return "\n".join(map(_visible, text.split("\n")))


def one_line(text: str) -> str:
    """The text in one line, with spaces instead of control characters."""
    return "".join(" " if _is_control(letter) else letter for letter in text)


def markdown(text: str) -> str:
    """The text in one line of Markdown, in which it is nothing but text: no link, no HTML, no list, no other cell."""
    escaped = re.sub(r"([\\`*_\[\]<>|~&$#])", r"\\\1", one_line(text).strip())
    begin = r"^(?:[-+](?=\s|$)|\d+(?=[.)](?:\s|$))|[-=](?=[-=\s]*$))"
    return re.sub(begin, lambda mark: f"&#{ord(mark[0][0])};{mark[0][1:]}", escaped)


def _visible(line: str) -> str:
    if line.isprintable():
        return line
    return "".join(_escaped(letter) if _is_control(letter) and letter != "\t" else letter for letter in line)


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")


def _is_control(letter: str) -> bool:
    """Whether it is a control character, one that changes the direction of text, or half of a pair."""
    return unicodedata.category(letter)[0] == "C" or letter in "\u2028\u2029"
