"""The SAC policies that are compared, and what they learn from. Imported by both programs."""

import hashlib

import numpy as np
import torch

from parity.fill import uniform, weight
from parity.inputs import BATCH, ENVIRONMENT, STATE, camera, observation

STEPS = 3
UPDATES = 3  # one after the other, by which weights are compared
LEROBOT_TYPE = "gaussian_actor"
PARTS = ()
MODES = {"VISUAL": "MEAN_STD", "STATE": "MIN_MAX", "ENV": "MIN_MAX", "ACTION": "MIN_MAX"}
TINY = {"latent_dim": 12, "image_encoder_hidden_dim": 4, "image_embedding_pooling_dim": 3}
HEAD = {"std_min": 1e-5, "std_max": 2.0}
LAYERS = {"hidden_dims": [16, 12]}
ALGORITHM = {
    "critic_network_kwargs": LAYERS,
    "discount": 0.97,
    "use_backup_entropy": False,
    "temperature_init": 0.01,
    "utd_ratio": 2,
}
TOP, SIDE = camera("top", 64, 72), camera("side", 64, 72)


def case(
    inputs: dict,
    modes: dict | None = None,
    algorithm: dict | None = None,
    updates: bool = True,
    acts: bool = True,
    **settings: object,
) -> dict:
    """`updates`: whether LeRobot's update is right, so that ours is the same."""
    networks = {
        "actor_network_kwargs": LAYERS,
        "policy_kwargs": HEAD,
        "discrete_critic_network_kwargs": LAYERS,
    }
    return {
        "inputs": inputs,
        "settings": {
            **TINY,
            **networks,
            # LeRobot would freeze random convolutions: see docs/rl.md
            "freeze_vision_encoder": False,
            "normalization_mapping": {**MODES, **(modes or {})},
            **settings,
        },
        "algorithm": {**ALGORITHM, **(algorithm or {})},
        "updates": updates,
        "acts": acts,
    }


GRIPPER = {"num_discrete_actions": 3, "acts": False, "updates": False}
CASES = {
    "state": case(STATE),
    "environment": case(STATE | ENVIRONMENT),
    "camera": case(TOP),
    "cameras": case(STATE | TOP | SIDE, {"VISUAL": "IDENTITY"}),
    "everything": case(STATE | ENVIRONMENT | SIDE),
    "own_encoders": case(STATE | ENVIRONMENT, shared_encoder=False),
    "own_encoders_camera": case(STATE | TOP, shared_encoder=False),
    "lerobot_values": case(
        STATE,
        algorithm={"discount": 0.99, "use_backup_entropy": True, "temperature_init": 1.0, "utd_ratio": 1},
        policy_kwargs={"std_min": 1e-5, "std_max": 10.0},
    ),
    "subset": case(STATE | ENVIRONMENT, algorithm={"num_critics": 5, "num_subsample_critics": 2}),
    "narrow": case(STATE, policy_kwargs={"std_min": 0.2, "std_max": 0.5}),
    "late_actor": case(STATE, algorithm={"policy_update_freq": 2, "target_entropy": -1.0}),
    "plain_layers": case(
        STATE,
        algorithm={"critic_network_kwargs": {"hidden_dims": [10], "activate_final": False}},
        actor_network_kwargs={"hidden_dims": [16, 16, 8], "activate_final": False},
    ),
    "tanh_layers": case(
        STATE, algorithm={"critic_network_kwargs": {"hidden_dims": [10, 8], "final_activation": "Tanh"}}
    ),
    "gripper": case(STATE | ENVIRONMENT, **GRIPPER),
    "gripper_camera": case(STATE | TOP, **GRIPPER),
    "gripper_own_encoders": case(STATE, shared_encoder=False, **GRIPPER),
    "penalty": case(STATE, algorithm={"penalty": True}, **GRIPPER),
}


def transitions(case: dict, number: int) -> dict:
    """What was observed, done and received: raw observations, and actions in [-1, 1]."""
    name = f"transitions {number}"
    action = uniform(f"{name}/action", (BATCH, 3), -1.0, 1.0)
    if case["settings"].get("num_discrete_actions"):
        choice = uniform(f"{name}/choice", (BATCH, 1), 0, 3).astype(np.int64).astype(np.float32)
        action = np.concatenate([action, choice], 1)
    return {
        "state": observation(case["inputs"], f"{name}/state"),
        "next_state": observation(case["inputs"], f"{name}/next"),
        "action": action,
        "reward": uniform(f"{name}/reward", (BATCH,), -1.0, 1.0),
        "done": np.array([0.0, float(number % 2)], np.float32),
        "penalty": uniform(f"{name}/penalty", (BATCH,), -0.5, 0.0),
    }


def fill_policy(module: torch.nn.Module) -> str:
    return fill_state(module.state_dict())


def fill_state(state: dict) -> str:
    """Set every weight. A digest of names and shapes; weights that several modules share have several names."""
    lines = []
    for name, value in sorted(state.items()):
        lines.append(f"{name} {tuple(value.shape)}")
        if name != "log_alpha":
            value.copy_(torch.as_tensor(weight(name, tuple(value.shape))))
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


def norms(named: dict) -> dict:
    """The norm of each tensor by its name."""
    return {name: tensor.detach().double().norm().item() for name, tensor in sorted(named.items())}
