"""The multi-task DiT against numbers that LeRobot 0.6.1 computed (tests/parity/multi_task_dit_lerobot.py)."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))
from multi_task_dit_cases import CASES
from multi_task_dit_clip import make_clips
from multi_task_dit_flexor import measure
from records import difference

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/multi_task_dit/multi_task_dit.json").read_text())


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    make_clips(folder)
    return folder


def test_every_case_is_covered():
    assert CASES.keys() == GOLDEN.keys()


@pytest.mark.parametrize("name", CASES)
def test_computes_what_lerobot_computes(name, clips):
    ours, theirs = measure(name, clips), GOLDEN[name]
    assert ours.keys() == theirs.keys()
    # same names, shapes and order; tokens; normalised batch; loss, in training and not; the norm of every
    # gradient; a chunk; and a dozen actions in the robot's units
    far = {field: difference(ours[field], theirs[field]) for field in ours}
    assert all(value <= 1e-5 for value in far.values()), far
