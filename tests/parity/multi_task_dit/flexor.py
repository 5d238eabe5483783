"""What LeRobot draws from the beta distribution is given; ours is tested on its own."""

from unittest.mock import patch

from parity import flexor_side
from parity.inputs import BATCH


def measure(case: dict) -> dict:
    with patch("flexor.policies.nn.flow.beta", lambda noise, name, *_: noise.uniform(name, (BATCH,))):
        return flexor_side.measure_policy("multi_task_dit", case)
