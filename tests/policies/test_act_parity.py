"""ACT against numbers that LeRobot 0.6.1 computed (tests/parity/act_lerobot.py) from the same weights."""

import json
import sys
from pathlib import Path

import pytest

from flexor.policies.pretrained import read_config

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))
from act_cases import CASES
from act_flexor import measure
from records import difference

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/act/act.json").read_text())


def test_every_case_is_covered():
    assert CASES.keys() == GOLDEN.keys()


@pytest.mark.parametrize("name", CASES)
def test_computes_what_lerobot_computes(name):
    ours, theirs = measure(name), GOLDEN[name]
    assert ours.keys() == theirs.keys()
    # same names, shapes and order; normalised batch; loss and its parts; the norm of every gradient;
    # a chunk; and a dozen actions in the robot's units
    far = {field: difference(ours[field], theirs[field]) for field in ours}
    assert all(value <= 1e-5 for value in far.values()), far


def test_reads_a_switch_that_lerobot_wrote_as_a_number(tmp_path):
    """It declares this one an int, and so writes 0 once a checkpoint has been loaded and saved again."""
    settings = {"type": "act", "replace_final_stride_with_dilation": 0, "use_peft": False}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert read_config(str(tmp_path)).replace_final_stride_with_dilation is False
