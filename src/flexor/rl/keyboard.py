"""The keyboard as a teleoperator: keys in the terminal that the run was started in.

A terminal says that a key was pressed, not that it is held: so a key takes over until it is pressed again, and each
press of a direction moves one step. A key that is held is pressed again and again.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from typing import Any

from flexor.core.errors import ConfigError
from flexor.core.log import log

DIRECTIONS = {  # in the robot's frame: x forward, y to its left, z up
    "\x1b[A": ("delta_x", 1.0),
    "\x1b[B": ("delta_x", -1.0),
    "\x1b[D": ("delta_y", 1.0),
    "\x1b[C": ("delta_y", -1.0),
    "u": ("delta_z", 1.0),
    "d": ("delta_z", -1.0),
}
GRIPPER = {"c": 0.0, "o": 2.0}
STAY = 1.0
TAKE_OVER, SUCCESS, FAILURE, RERECORD = " ", "s", "f", "r"
HELP = (
    "space: take over, hand back; arrows: forward, back, left, right; u, d: up, down; c, o: close, open the gripper; "
    "s: success; f: failure; r: leave the episode out and record it again"
)
ESCAPE = "\x1b["
READ_AT_ONCE = 1024


class Keyboard:
    """LeRobot's interface. `terminal`: its file descriptor; default: the standard input."""

    def __init__(self, terminal: int | None = None):
        self.terminal = sys.stdin.fileno() if terminal is None else terminal
        self.unread = ""  # the beginning of a key's sequence
        self.acting = False
        self.pressed: list[str] = []
        self.before: list[Any] | None = None  # the terminal's settings

    def connect(self) -> None:
        if not os.isatty(self.terminal):
            raise ConfigError(
                "rl.intervener=keyboard reads keys from the terminal, but the standard input is none: start the run in "
                "a terminal, not in the background."
            )
        self.before = termios.tcgetattr(self.terminal)
        tty.setcbreak(self.terminal)
        log.info("keys: %s", HELP)

    def disconnect(self) -> None:
        if self.before is not None:
            termios.tcsetattr(self.terminal, termios.TCSADRAIN, self.before)
            self.before = None

    def get_action(self) -> dict[str, float]:
        """One step in each direction that was pressed since the last call."""
        self.pressed = self._read()
        action = {"delta_x": 0.0, "delta_y": 0.0, "delta_z": 0.0, "gripper": STAY}
        for key in self.pressed:
            if key in DIRECTIONS:
                name, value = DIRECTIONS[key]
                action[name] = value
            elif key in GRIPPER:
                action["gripper"] = GRIPPER[key]
        return action

    def get_teleop_events(self) -> dict[str, bool]:
        for _ in range(self.pressed.count(TAKE_OVER)):
            self.acting = not self.acting
        success, failure, rerecord = (key in self.pressed for key in (SUCCESS, FAILURE, RERECORD))
        if success or failure or rerecord:
            self.acting = False
        return {
            "is_intervention": self.acting,
            "terminate_episode": failure or rerecord,
            "success": success,
            "rerecord_episode": rerecord,
        }

    def _read(self) -> list[str]:
        """The keys that were pressed since the last call, in their order."""
        text = self.unread
        while select.select([self.terminal], [], [], 0)[0]:
            data = os.read(self.terminal, READ_AT_ONCE)
            if not data:
                break  # the terminal is gone
            text += data.decode(errors="replace")
        keys = []
        while text and not (ESCAPE.startswith(text) or text == ESCAPE):
            length = len(ESCAPE) + 1 if text.startswith(ESCAPE) else 1
            keys.append(text[:length])
            text = text[length:]
        self.unread = text
        return keys
