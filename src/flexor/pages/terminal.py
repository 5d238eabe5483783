"""Images in a terminal: with the graphics of kitty, iTerm2 or sixel, or as coloured half blocks, which work everywhere.

print(rendered(pixels, columns=80, way=find_way()))
"""

from __future__ import annotations

import base64
import os
import re
import select
import sys
import time
from collections.abc import Mapping
from itertools import groupby

import numpy as np

from flexor.pages.images import png, scaled

WAYS = ("kitty", "iterm2", "sixel", "blocks")
CELL = (16, 8)  # pixels of a character, height and width, if the terminal does not say
CHUNK = 4096  # kitty takes base64 in parts of this size
CUBE = 6  # levels per channel of a sixel image: 216 colours, and terminals have at least 256
QUERY_S = 0.5  # how long the terminal has to answer


def find_way(environment: Mapping[str, str] = os.environ) -> str:
    """How this terminal shows images best."""
    if environment.get("TMUX") or environment.get("STY"):  # they pass no images on
        return "blocks"
    term, program = environment.get("TERM", ""), environment.get("TERM_PROGRAM", "")
    if "kitty" in term or "ghostty" in term or environment.get("KITTY_WINDOW_ID") or program == "ghostty":
        return "kitty"
    if program in ("iTerm.app", "WezTerm", "mintty") or environment.get("LC_TERMINAL") == "iTerm2":
        return "iterm2"
    if environment.get("KONSOLE_VERSION"):
        return "kitty"
    return "sixel" if _answers_sixel() else "blocks"


def rendered(pixels: np.ndarray, columns: int, way: str, true_colour: bool = True) -> str:
    """An image, RGB uint8 [H, W, 3], as text to print; at most `columns` characters wide."""
    height, width = pixels.shape[:2]
    if way == "blocks":
        wide = max(min(columns, width), 1)
        rows = max(round(height * wide / width / 2), 1)
        return half_blocks(scaled(pixels, 2 * rows, wide), true_colour)
    wide = min(columns * CELL[1], width)
    pixels = scaled(pixels, max(round(height * wide / width), 1), wide)
    return {"kitty": kitty, "iterm2": iterm2, "sixel": sixel}[way](pixels)


def half_blocks(pixels: np.ndarray, true_colour: bool = True) -> str:
    """Two pixels per character: the upper one colours the block, the lower one its background."""
    assert len(pixels) % 2 == 0
    lines = []
    for upper, lower in zip(pixels[::2].tolist(), pixels[1::2].tolist()):
        line, last = "", None
        for pair in zip(upper, lower):
            if pair != last:
                line += f"\x1b[38;{_colour(pair[0], true_colour)};48;{_colour(pair[1], true_colour)}m"
            line += "▀"
            last = pair
        lines.append(f"{line}\x1b[0m")
    return "\n".join(lines)


def _colour(rgb: list[int], true_colour: bool) -> str:
    if true_colour:
        return "2;{};{};{}".format(*rgb)
    red, green, blue = (round(level / 51) for level in rgb)
    return f"5;{16 + 36 * red + 6 * green + blue}"


def kitty(pixels: np.ndarray) -> str:
    height, width = pixels.shape[:2]
    data = base64.b64encode(np.ascontiguousarray(pixels).tobytes()).decode()
    parts = [data[i : i + CHUNK] for i in range(0, len(data), CHUNK)]
    text = ""
    for number, part in enumerate(parts):
        first = f"a=T,f=24,s={width},v={height},q=2," if number == 0 else ""
        text += f"\x1b_G{first}m={int(number < len(parts) - 1)};{part}\x1b\\"
    return text


def iterm2(pixels: np.ndarray) -> str:
    data = png(pixels)
    height, width = pixels.shape[:2]
    size = f"size={len(data)};width={width}px;height={height}px"
    return f"\x1b]1337;File=inline=1;{size}:{base64.b64encode(data).decode()}\x07"


def sixel(pixels: np.ndarray) -> str:
    """Bands of six rows; in each, a line per colour with a character per column."""
    height, width = pixels.shape[:2]
    levels = np.rint(pixels / 255 * (CUBE - 1)).astype(int) @ [CUBE * CUBE, CUBE, 1]  # [H, W]
    percent = [round(100 * i / (CUBE - 1)) for i in range(CUBE)]
    text = f'\x1bPq"1;1;{width};{height}'
    for colour in np.unique(levels).tolist():
        red, green, blue = colour // CUBE**2, colour // CUBE % CUBE, colour % CUBE
        text += f"#{colour};2;{percent[red]};{percent[green]};{percent[blue]}"
    for top in range(0, height, 6):
        band = levels[top : top + 6]
        for colour in np.unique(band).tolist():
            bits = (band == colour).T @ (1 << np.arange(len(band)))  # [W]
            text += f"#{colour}" + _run_lengths([chr(63 + b) for b in bits.tolist()]) + "$"
        text += "-"
    return text + "\x1b\\"


def _run_lengths(letters: list[str]) -> str:
    runs = [(letter, len(list(group))) for letter, group in groupby(letters)]
    return "".join(f"!{count}{letter}" if count > 3 else letter * count for letter, count in runs)


def has_true_colour(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether half blocks may use any colour. Only a terminal that says it has 256 colours gets those."""
    has_256 = "256color" in environment.get("TERM", "")
    return environment.get("COLORTERM", "") in ("truecolor", "24bit") or not has_256


def _answers_sixel() -> bool:
    """Ask the terminal for its abilities: attribute 4 is sixel."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    try:
        import termios
        import tty
    except ImportError:  # Windows
        return False
    source = sys.stdin.fileno()
    before = termios.tcgetattr(source)
    try:
        tty.setcbreak(source)
        sys.stdout.write("\x1b[c")
        sys.stdout.flush()
        answer, end = b"", time.monotonic() + QUERY_S
        while (
            not answer.endswith(b"c") and select.select([source], [], [], max(end - time.monotonic(), 0))[0]
        ):
            answer += os.read(source, 64)
    finally:
        termios.tcsetattr(source, termios.TCSADRAIN, before)
    match = re.search(rb"\x1b\[\?([\d;]+)c", answer)
    return match is not None and b"4" in match[1].split(b";")
