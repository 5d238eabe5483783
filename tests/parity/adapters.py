"""Adapters both ways: those saved here act in LeRobot with PEFT, and those that PEFT saved act here.

Called by run.py. The policy is an ACT without cameras, whose weights stay in `base`.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flexor.policies.adapter_files import save_adapter
from flexor.policies.adapters import LoraConfig, add_adapters, is_adapter, merged
from flexor.policies.pretrained import load_pretrained, save_pretrained
from parity import flexor_side
from parity.act import cases
from parity.fill import fill, uniform
from parity.inputs import observation_sequence
from parity.kinds import cases_of
from parity.limits import Row
from parity.records import difference

CASE = cases_of("act", Path())["decoder_2"]
SETTINGS: dict[str, Any] = {
    "r": 3,
    "target_modules": ["linear1", "linear2", "encoder_robot_state_input_proj"],
    "full_training_modules": ["action_head"],
}
ALPHA = 5


def rows(lerobot: Path, folder: Path) -> Iterator[Row]:
    made = flexor_side.make_policy("act", CASE)
    fill(made.policy)
    around = made.preprocessor, made.postprocessor
    save_pretrained(folder / "base", made.policy.config, made.policy.state_dict(), *around)
    lora = LoraConfig(**SETTINGS, alpha=ALPHA)
    add_adapters(made.policy, lora, seed=0)
    raw = {name: moved(name, tensor) for name, tensor in made.policy.state_dict().items()}
    save_pretrained(folder / "here", made.policy.config, merged(raw, lora), *around)
    save_adapter(folder / "here", raw, lora, str(folder / "base"))
    observations = observation_sequence(CASE["robot"], cases.STEPS)
    np.savez(folder / "seen.npz", **observations)
    subprocess.run([lerobot, "-m", "parity.adapters_lerobot", folder], check=True, capture_output=True)
    for name, saved in (("saved here, act there", "here/adapter"), ("saved there, act here", "there")):
        theirs = json.loads((folder / saved / "actions.json").read_text())
        ours = flexor_side.act(load_pretrained(str(folder / saved)), observations)
        yield Row(f"adapters {name}", difference(ours, theirs))
        base = flexor_side.act(load_pretrained(str(folder / "base")), observations)
        assert difference(base, theirs) > 0.01, "adapters without effect show nothing"
    here = flexor_side.act(load_pretrained(str(folder / "here")), observations)
    yield Row(
        "adapters alone and merged",
        difference(here, json.loads((folder / "here/adapter/actions.json").read_text())),
    )


def moved(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """What is trained gets other values."""
    if is_adapter(name) or "action_head" in name:
        return torch.from_numpy(uniform(f"moved {name}", tuple(tensor.shape), -0.5, 0.5))
    return tensor
