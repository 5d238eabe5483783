"""VQ-BeT against numbers that LeRobot 0.6.1 computed (tests/parity/vqbet_lerobot.py) from the same weights."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))
from records import difference
from vqbet_cases import CASES
from vqbet_flexor import measure

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/vqbet/vqbet.json").read_text())


def test_every_case_is_covered():
    assert CASES.keys() == GOLDEN.keys()


@pytest.mark.parametrize("name", CASES)
def test_computes_what_lerobot_computes(name):
    ours, theirs = measure(name), GOLDEN[name]
    assert ours.keys() == theirs.keys()
    # same names, shapes and order, also in the optimizer; both phases: losses and their parts, the norm of
    # every gradient, codebooks after each step and the flags that end a phase; and a dozen actions
    far = {field: difference(ours[field], theirs[field]) for field in ours}
    assert all(value <= 1e-5 for value in far.values()), far
