"""What policies are shown in every comparison, and by what their numbers are normalised. Imported by both programs."""

import numpy as np

from parity.fill import uniform

BATCH = 2
STATE = {"observation.state": ("STATE", (4,))}
ENVIRONMENT = {"observation.environment_state": ("ENV", (5,))}
ACTION = {"action": ("ACTION", (3,))}
TASKS = ["pick up the red cube", "open the drawer"]


def camera(name: str, height: int = 40, width: int = 56) -> dict:
    """Sizes that no stride divides, so that rounding shows."""
    return {f"observation.images.{name}": ("VISUAL", (3, height, width))}


def observation(inputs: dict, moment: str) -> dict[str, np.ndarray]:
    """Pictures as bytes, everything else as floats; a state's first number never changes."""
    out = {}
    for key, (kind, shape) in inputs.items():
        values = uniform(f"{key}/{moment}", (BATCH, *shape), -1.0, 2.0)
        if kind == "VISUAL":
            values = uniform(f"{key}/{moment}", (BATCH, *shape), 0, 256).astype(np.uint8)
        elif kind == "STATE":
            values[:, 0] = 0.25
        out[key] = values
    return out


def observation_sequence(inputs: dict, steps: int) -> dict[str, np.ndarray]:
    """What a policy is shown one step after the other: [steps, B, ...]."""
    observations = [observation(inputs, f"step {step}") for step in range(steps)]
    return {key: np.stack([each[key] for each in observations]) for key in observations[0]}


def history(case: dict, moment: str) -> dict[str, np.ndarray]:
    """What was observed last: [B, T, ...]."""
    steps = case["settings"].get("n_obs_steps", 2)
    observations = [observation(case["inputs"], f"{moment} {step}") for step in range(steps)]
    return {key: np.stack([each[key] for each in observations], 1) for key in observations[0]}


def action_of(case: dict) -> dict:
    """The action of a case, as a feature."""
    return case.get("action", ACTION)


def actions(steps: int, padded: tuple[int, int], action: dict = ACTION) -> dict[str, np.ndarray]:
    """[B, steps, A] to learn: of the first sample's, the beginning is padding, of the second's the end."""
    is_pad = np.zeros((BATCH, steps), bool)
    is_pad[0, : padded[0]] = is_pad[1, -padded[1] :] = True
    return {
        "action": uniform("action", (BATCH, steps, *action["action"][1]), -2.0, 1.0),
        "action_is_pad": is_pad,
    }


def statistics(inputs: dict, action: dict = ACTION) -> dict[str, dict[str, np.ndarray]]:
    """Ordered as statistics are; a state's first number, which never changes, has no spread."""
    stats = {}
    for key, (kind, shape) in {**inputs, **action}.items():
        size = (shape[0], 1, 1) if kind == "VISUAL" else shape
        middle = uniform(f"{key}/mean", size, 0.3, 0.6)
        spread = uniform(f"{key}/std", size, 0.2, 0.4)
        if kind == "STATE":
            middle[0], spread[0] = 0.25, 0.0
        offsets = {"min": -2.5, "q01": -2, "q10": -1.25, "mean": 0, "q90": 1.5, "q99": 2.25, "max": 3}
        stats[key] = {name: middle + np.float32(offset) * spread for name, offset in offsets.items()}
        stats[key]["std"] = spread
    return stats
