"""What we compute against what LeRobot 0.6.1 computed from the same weights: every folder of tests/parity."""

import pytest
import torch.nn.functional as F

from parity.flexor_side import measure
from parity.kinds import KINDS, cases_of, golden, part
from parity.limits import stored_limit
from parity.records import difference

pytestmark = pytest.mark.slow  # all of them together


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
    far = differences(kind, name, files)
    assert not too_far(kind, far), far


@pytest.mark.parametrize(
    ("kind", "name", "norm"),
    [
        ("act", "vae", "layer_norm"),
        ("diffusion", "mask", "group_norm"),
        ("multi_task_dit", "ddpm", "layer_norm"),
        ("pi0", "default", "rms_norm"),
        ("smolvla", "frozen", "rms_norm"),
        ("tdmpc", "camera", "layer_norm"),
        ("vqbet", "group_norm", "group_norm"),
        ("xvla", "auto", "layer_norm"),
    ],
)
def test_a_changed_constant_would_be_noticed(kind, name, norm, files, monkeypatch):
    """Guards the limits of the test above: 1e-4 instead of 1e-5 in a normalisation is about the least there can be."""
    usual = getattr(F, norm)
    monkeypatch.setattr(F, norm, lambda *arguments: usual(*arguments[:-1], 10 * arguments[-1]))
    assert "actions" in too_far(kind, differences(kind, name, files))


def differences(kind, name, files) -> dict[str, float]:
    ours, theirs = measure(kind, cases_of(kind, files / kind)[name]), golden(kind)[name]
    assert ours.keys() == theirs.keys()
    return {field: difference(ours[field], theirs[field]) for field in ours}


def too_far(kind, far) -> list[str]:
    return [field for field, value in far.items() if not value <= stored_limit(kind, field)]
