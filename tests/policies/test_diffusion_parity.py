"""Diffusion against numbers LeRobot 0.6.1 computed (tests/parity/diffusion_lerobot.py) from the same weights."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))
from diffusion_cases import CASES
from diffusion_flexor import measure
from records import difference

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/diffusion/diffusion.json").read_text())


def test_every_case_is_covered():
    assert CASES.keys() == GOLDEN.keys()


@pytest.mark.parametrize("name", CASES)
def test_computes_what_lerobot_computes(name):
    ours, theirs = measure(name), GOLDEN[name]
    assert ours.keys() == theirs.keys()
    # same names, shapes and order; normalised batch; loss; the norm of every gradient; a chunk of actions;
    # and a dozen actions in the robot's units
    far = {field: difference(ours[field], theirs[field]) for field in ours}
    assert all(value <= 1e-5 for value in far.values()), far
