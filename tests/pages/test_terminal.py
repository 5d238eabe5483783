"""Images in a terminal: what each kind of terminal would show, decoded again."""

import base64
import os
import re
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

from flexor.data.show.terminal import spark_line
from flexor.pages import terminal
from flexor.pages.images import jpeg, png, scaled
from support.limits import LIMIT_S

IMAGE = np.random.default_rng(0).integers(0, 256, (14, 9, 3), dtype=np.uint8)


def decoded(data: bytes, codec: str) -> np.ndarray:
    import av

    context = av.CodecContext.create(codec, "r")
    frames = [*context.decode(av.Packet(data)), *context.decode(None)]
    return frames[0].to_ndarray(format="rgb24")


def test_half_blocks():
    lines = terminal.half_blocks(IMAGE).split("\n")
    assert len(lines) == 7 and all(line.count("▀") == 9 for line in lines)
    colours = [
        int(n) for n in re.findall(r"2;(\d+);(\d+);(\d+)", lines[0])[1]
    ]  # lower pixel of the first column
    assert colours == IMAGE[1, 0].tolist()


def test_half_blocks_with_256_colours():
    white = np.full((2, 3, 3), 255, np.uint8)
    assert terminal.half_blocks(white, true_colour=False) == "\x1b[38;5;231;48;5;231m▀▀▀\x1b[0m"


def test_kitty():
    image = np.random.default_rng(1).integers(0, 256, (40, 50, 3), dtype=np.uint8)  # several parts
    parts = re.findall(r"\x1b_G([^;]*);([^\x1b]*)\x1b\\", terminal.kitty(image))
    assert len(parts) > 1 and all(len(data) <= 4096 for _, data in parts)
    assert "s=50,v=40" in parts[0][0] and [head[-1] for head, _ in parts] == ["1"] * (len(parts) - 1) + ["0"]
    data = base64.b64decode("".join(data for _, data in parts))
    assert np.array_equal(np.frombuffer(data, np.uint8).reshape(image.shape), image)


def test_iterm2():
    head, _, data = terminal.iterm2(IMAGE).removesuffix("\x07").partition(":")
    assert "width=9px;height=14px" in head
    assert np.array_equal(decoded(base64.b64decode(data), "png"), IMAGE)


def test_sixel():
    text = terminal.sixel(IMAGE)
    assert text.startswith('\x1bPq"1;1;9;14') and text.endswith("\x1b\\")
    palette = {int(n): [int(x) for x in rgb] for n, *rgb in re.findall(r"#(\d+);2;(\d+);(\d+);(\d+)", text)}
    painted = np.full((18, 9, 3), -1)
    body = re.sub(r"#\d+;2;\d+;\d+;\d+", "", text[len('\x1bPq"1;1;9;14') : -2])
    for band, lines in enumerate(body.split("-")[:-1]):
        for line in filter(None, lines.split("$")):
            number, codes = re.match(r"#(\d+)(.*)", line).groups()
            letters = re.sub(r"!(\d+)(.)", lambda m: m[2] * int(m[1]), codes)
            assert len(letters) == 9
            for x, letter in enumerate(letters):
                for bit in range(6):
                    if (ord(letter) - 63) >> bit & 1:
                        painted[band * 6 + bit, x] = palette[int(number)]
    assert (painted[:14] >= 0).all() and (painted[14:] == -1).all()
    assert abs(painted[:14] * 2.55 - IMAGE).max() <= 26  # 216 colours


@pytest.mark.parametrize(
    ("environment", "way"),
    [
        ({"TERM": "xterm-kitty"}, "kitty"),
        ({"TERM_PROGRAM": "ghostty"}, "kitty"),
        ({"TERM_PROGRAM": "iTerm.app"}, "iterm2"),
        ({"TERM_PROGRAM": "WezTerm"}, "iterm2"),
        ({"TERM": "xterm-kitty", "TMUX": "yes"}, "blocks"),
        ({"TERM": "dumb"}, "blocks"),
    ],
)
def test_terminals_are_recognised(environment: dict[str, str], way: str):
    assert terminal.find_way(environment) == way


@pytest.mark.parametrize("way", terminal.WAYS)
def test_images_fit_into_the_terminal(way: str):
    wide = np.zeros((30, 3000, 3), np.uint8)
    text = terminal.rendered(wide, 40, way)
    assert way != "blocks" or max(line.count("▀") for line in text.split("\n")) == 40
    assert way != "kitty" or "s=320," in text


def test_curves_as_blocks():
    values = np.array([0.0, 1.0, np.nan, 0.5])
    assert spark_line(values, 0, 1, 10) == "▁█!▅"
    assert spark_line(np.zeros(100), 0, 0, 10) == "▁" * 10


def test_a_coarser_jpeg_is_smaller():
    image = scaled(IMAGE, 140, 90)
    sizes = [len(jpeg(image, quantizer)) for quantizer in (2, 5, 12, 31)]
    assert all(larger > smaller for larger, smaller in pairwise(sizes))
    assert abs(decoded(jpeg(image, 2), "mjpeg").astype(int) - image).mean() < 6
    assert np.array_equal(decoded(png(image), "png"), image)


@pytest.mark.parametrize(("answer", "way"), [(b"\x1b[?62;4;22c", "sixel"), (b"\x1b[?62;22c", "blocks")])
def test_a_terminal_is_asked_for_sixel(answer: bytes, way: str):
    """A real terminal (a pseudo-terminal) on which the program asks and this test answers."""
    ours, theirs = os.openpty()
    script = (
        "from flexor.pages import terminal\n"
        f"terminal.QUERY_S = {LIMIT_S}\n"
        "print(terminal.find_way({'TERM': 'xterm'}))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdin=theirs, stdout=theirs, stderr=subprocess.PIPE
    )
    os.close(theirs)
    output = b""
    while b"\x1b[c" not in output:
        output += os.read(ours, 64)
    os.write(ours, answer)
    try:
        while way.encode() not in output:
            output += os.read(ours, 64)
    finally:
        child.communicate(timeout=LIMIT_S)
        os.close(ours)
    assert child.returncode == 0
