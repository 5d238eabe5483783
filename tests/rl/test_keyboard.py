"""Keys in a real terminal: what they do, how they are split, and that the terminal is as before."""

import os
import pty
import select
import termios

import pytest

from flexor.core.errors import ConfigError
from flexor.rl.keyboard import Keyboard


@pytest.fixture
def terminal():
    """The side of a person who presses keys, and the side of the program."""
    person, program = pty.openpty()
    yield person, program
    os.close(person)
    os.close(program)


def press(terminal, keys: str) -> None:
    person, program = terminal
    os.write(person, keys.encode())
    assert select.select([program], [], [], 60)[0]


@pytest.fixture
def keyboard(terminal):
    made = Keyboard(terminal[1])
    made.connect()
    yield made
    made.disconnect()


def step(keyboard: Keyboard) -> tuple[dict, set]:
    action = keyboard.get_action()
    return action, {name for name, on in keyboard.get_teleop_events().items() if on}


def test_space_takes_over_and_hands_back(terminal, keyboard):
    assert step(keyboard)[1] == set()
    press(terminal, " ")
    assert step(keyboard)[1] == {"is_intervention"}
    assert step(keyboard)[1] == {"is_intervention"}
    press(terminal, " ")
    assert step(keyboard)[1] == set()


def test_each_press_of_a_direction_is_one_step(terminal, keyboard):
    press(terminal, " \x1b[A\x1b[Cuo")
    assert step(keyboard)[0] == {"delta_x": 1.0, "delta_y": -1.0, "delta_z": 1.0, "gripper": 2.0}
    assert step(keyboard)[0] == {"delta_x": 0.0, "delta_y": 0.0, "delta_z": 0.0, "gripper": 1.0}
    press(terminal, "\x1b[B\x1b[Ddc")
    assert step(keyboard)[0] == {"delta_x": -1.0, "delta_y": 1.0, "delta_z": -1.0, "gripper": 0.0}


@pytest.mark.parametrize("cut", [1, 2])
def test_a_key_that_arrives_in_two_parts(cut, terminal, keyboard):
    press(terminal, "\x1b[A"[:cut])
    assert step(keyboard)[0]["delta_x"] == 0
    press(terminal, "\x1b[A"[cut:])
    assert step(keyboard)[0]["delta_x"] == 1


@pytest.mark.parametrize(
    ("key", "events"),
    [
        ("s", {"success"}),
        ("f", {"terminate_episode"}),
        ("r", {"terminate_episode", "rerecord_episode"}),
        ("x", {"is_intervention"}),
    ],
)
def test_the_end_of_an_episode_hands_back(key, events, terminal, keyboard):
    press(terminal, " ")
    step(keyboard)
    press(terminal, key)
    assert step(keyboard)[1] == events
    assert step(keyboard)[1] == ({"is_intervention"} if key == "x" else set())


def test_the_terminal_is_as_before(terminal):
    before = termios.tcgetattr(terminal[1])
    keyboard = Keyboard(terminal[1])
    keyboard.connect()
    assert termios.tcgetattr(terminal[1])[3] & (termios.ECHO | termios.ICANON) == 0
    keyboard.disconnect()
    keyboard.disconnect()
    assert termios.tcgetattr(terminal[1]) == before


def test_without_a_terminal(tmp_path):
    with (tmp_path / "file").open("w+") as file, pytest.raises(ConfigError, match="terminal"):
        Keyboard(file.fileno()).connect()
