"""How far actions of pi0 and pi0.5 with dtype=bfloat16 are from LeRobot's, which rounds RoPE's frequencies to bfloat16.

    PYTHONPATH=src .venv-lerobot/bin/python tests/parity/rope_in_bf16.py

Both programs compute with the same torch and random weights, on two images of 224 x 224 pixels. LeRobot computes also
with exact frequencies, and in float32.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from parity import flexor_side, lerobot_side
from parity.inputs import STATE, camera, observation_sequence
from parity.kinds import cases_of, part, prepared

INPUTS = STATE | camera("wrist", 224, 224) | camera("above", 224, 224)
SETTINGS = {"dtype": "bfloat16", "image_resolution": (224, 224), "num_inference_steps": 10}


def make_exact(policy: Any) -> None:
    """The frequencies as they are before they are cast."""
    for module in policy.modules():
        if hasattr(module, "inv_freq"):
            count, base = len(module.inv_freq), 10_000.0
            module.inv_freq = base ** -(torch.arange(count, dtype=torch.float32) / count)


def actions(side: Any, kind: str, case: dict, folder: Path, exact: bool = False) -> list:
    """What one of the programs does with random weights in two chunks."""
    with prepared(kind, side.__name__.removeprefix("parity.").removesuffix("_side"), folder):
        made = side.make_policy(kind, case)
        part(kind, "cases").fill_policy(made.policy)
        if exact:
            make_exact(made.policy)
        observations = observation_sequence(case["robot"], 5)
        if side is flexor_side:
            return flexor_side.act(made, observations)
        made.policy.eval()
        return lerobot_side.act(kind, made, observations)


def far(actions: list, reference: list) -> float:
    """The root mean square of the differences, relative to that of the actions."""
    a, b = torch.tensor(actions), torch.tensor(reference)
    return float((a - b).square().mean().sqrt() / b.square().mean().sqrt())


def main() -> None:
    torch.set_num_threads(1)
    print("          between both   Flexor's from float32   LeRobot's   with exact frequencies")
    for kind in ("pi0", "pi05"):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "files"
            case = cases_of(kind, folder)["default"]
            case |= {"inputs": INPUTS, "robot": INPUTS, "settings": {**case["settings"], **SETTINGS}}
            ours = actions(flexor_side, kind, case, folder)
            rounded, exact = (actions(lerobot_side, kind, case, folder, exact) for exact in (False, True))
            case["settings"]["dtype"] = "float32"
            wide = actions(lerobot_side, kind, case, folder)
        figures = far(ours, rounded), far(ours, wide), far(rounded, wide), far(exact, wide)
        print("{:10}{:12.1%}{:24.1%}{:12.1%}{:25.1%}".format(kind, *figures), flush=True)


if __name__ == "__main__":
    main()
