"""LeRobot loads the optimizer's state of a run of ours: run where `lerobot` is installed.

python -m parity.optimizers_lerobot KIND FOLDER
"""

import json
import sys
from pathlib import Path

from parity.kinds import prepared
from parity.records import direction


def main(kind: str, folder: Path) -> None:
    from lerobot.configs.train import TrainPipelineConfig
    from lerobot.optim.factory import make_optimizer_and_scheduler
    from lerobot.optim.optimizers import load_optimizer_state
    from lerobot.policies.factory import get_policy_class

    checkpoint = folder / "run/checkpoints/last"
    with prepared(kind, "lerobot", folder / "files"):
        policy = get_policy_class(kind).from_pretrained(checkpoint / "pretrained_model", strict=True)
    settings = TrainPipelineConfig.from_pretrained(checkpoint / "pretrained_model")
    optimizer, _ = make_optimizer_and_scheduler(settings, policy)
    load_optimizer_state(optimizer, checkpoint / "training_state")
    directions = {}
    for name, parameter in policy.named_parameters():
        state = optimizer.state.get(parameter, {})
        if state:
            assert state["exp_avg"].shape == parameter.shape and float(state["step"]) == 2, name
            directions[name] = direction(state["exp_avg"])
    (folder / "optimizer.json").write_text(json.dumps(directions))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
