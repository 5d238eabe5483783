"""What we compute against what LeRobot 0.6.1 computed from the same weights: every folder of tests/parity."""

import pytest

from parity.flexor_side import measure
from parity.kinds import KINDS, cases_of, golden, part
from parity.limits import stored_limit
from parity.records import difference


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return tmp_path_factory.mktemp("parity")


@pytest.mark.parametrize("kind", KINDS)
def test_every_case_is_covered(kind):
    assert golden(kind).keys() == part(kind, "cases").CASES.keys()


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in KINDS for name in part(kind, "cases").CASES]
)
def test_computes_what_lerobot_computed(kind, name, files):
    """Of a policy: names, shapes and order of parameters; groups of the optimizer; the normalised batch and tokens;
    the loss and its parts, in training and not; the norm of every gradient; and a dozen actions in the robot's units.
    """
    ours, theirs = measure(kind, cases_of(kind, files / kind)[name]), golden(kind)[name]
    assert ours.keys() == theirs.keys()
    far = {field: difference(ours[field], theirs[field]) for field in ours}
    assert all(value <= stored_limit(kind, field) for field, value in far.items()), far
