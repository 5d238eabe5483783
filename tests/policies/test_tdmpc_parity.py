"""TD-MPC against numbers that LeRobot 0.6.1 computed (tests/parity/tdmpc_lerobot.py) from the same weights."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))
from records import difference
from tdmpc_cases import CASES
from tdmpc_flexor import measure

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/tdmpc/tdmpc.json").read_text())


def test_every_case_is_covered():
    assert CASES.keys() == GOLDEN.keys()


@pytest.mark.parametrize("name", CASES)
def test_computes_what_lerobot_computes(name):
    ours, theirs = measure(name), GOLDEN[name]
    assert ours.keys() == theirs.keys()
    # same names, shapes and order; normalised batch; loss and its parts; the norm of every gradient; the
    # target model after an update; and actions in the robot's units, each plan started from the last
    far = {field: difference(ours[field], theirs[field]) for field in ours}
    assert all(value <= 1e-5 for value in far.values()), far
