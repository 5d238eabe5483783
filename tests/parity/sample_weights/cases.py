"""RA-BC: the weight of each sample from the progress of the task. Imported by both programs."""

import math

import numpy as np

from parity.fill import Draws

LENGTHS = (30, 12, 21)
BATCHES = ([0, 3, 29, 30, 41, 42, 50, 62], [10, 11, 12, 40], [5, 70])  # frame 70 has no progress
STORED = {"weights": 1e-6, "in_batch": 5e-6}  # LeRobot adds 1e-6 to a sum of weights twice
CASES = {
    "default": {"settings": {}},
    "short chunk, gaps": {"settings": {"chunk_size": 4}, "gaps": True},
    "strict": {"settings": {"chunk_size": 8, "kappa": 0.2, "head_mode": "dense"}},
    "other constants": {
        "settings": {"chunk_size": 3, "kappa": 0.02, "epsilon": 1e-2, "fallback_weight": 0.25},
        "gaps": True,
    },
    "all backwards": {"settings": {"chunk_size": 5}, "sign": -1},
}


def progress(case: dict) -> dict[str, np.ndarray]:
    """The file: rises with each episode, but not always. Some frames have none, and some are not in the file."""
    total = sum(LENGTHS)
    noise = Draws("progress").normal("noise", (2, total)).numpy() * 0.03
    rise = np.concatenate([np.linspace(0, 1, length) for length in LENGTHS]) * case.get("sign", 1)
    columns = {
        "index": np.arange(total),
        "episode_index": np.repeat(np.arange(len(LENGTHS)), LENGTHS),
        "progress_sparse": (rise + noise[0]).astype(np.float32),
        "progress_dense": (rise**2 + noise[1]).astype(np.float32),
    }
    if case.get("gaps"):
        columns["progress_sparse"][[4, 20, 29, 55]] = math.nan
        columns = {name: np.delete(values, [7, 8]) for name, values in columns.items()}
    return columns
