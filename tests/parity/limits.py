"""How far numbers may be apart, relative to the scale of the values."""

from typing import NamedTuple

from parity.kinds import part

LIVE = 1e-5  # between both programs on one machine
# With the same torch, actions in bfloat16 are the same as well, unless a kind says otherwise (LIVE in its `cases.py`).
# Another torch or processor rounds attention otherwise: 0.014 between torch 2.7 and 2.13.
IN_BF16 = 0.06

# Between a machine and the one on which LeRobot's numbers were stored (x86). Behind each is what was measured, ARM
# against x86 and torch 2.7 against 2.13. A kind may have others: STORED in its `cases.py`. A field that has no line
# must be the same.
STORED = {
    "groups": 1e-9,  # learning rates, of which nine digits are stored
    "batch": 1e-7,  # 4e-9: a difference and a quotient each
    "loss": 5e-6,  # 6e-7, and so for the other sums over a whole network
    "eval_loss": 5e-6,
    "vocabulary": 5e-6,  # 1e-7
    "target": 5e-6,  # 1e-7
    "out": 5e-6,  # 8e-7
    "gradients": 3e-4,  # 4e-6, but a ReLU that is open on one machine and closed on the other made it 2e-4
    "actions": 1e-5,  # 2e-6
    "actions_in_bf16": IN_BF16,
    "signal": 1e-6,  # 1e-9, and so for the noise that a schedule adds and takes away
    "noisy": 1e-6,
    "path": 1e-6,
}


class Row(NamedTuple):
    """A line of the table that run.py prints."""

    name: str
    far: float
    limit: float = LIVE


def live_limit(kind: str, field: str) -> float:
    return getattr(part(kind, "cases"), "LIVE", {}).get(field, LIVE)


def stored_limit(kind: str, field: str) -> float:
    return {**STORED, **getattr(part(kind, "cases"), "STORED", {})}.get(field, 0.0)
