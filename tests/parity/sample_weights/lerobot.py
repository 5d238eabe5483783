"""What LeRobot computes."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
import torch

from parity.sample_weights.cases import BATCHES, LENGTHS, progress


def measure(case: dict) -> dict:
    from lerobot.rewards.sarm.rabc import RABCWeights

    with TemporaryDirectory() as folder:
        file = Path(folder) / "sarm_progress.parquet"
        pd.DataFrame(progress(case)).to_parquet(file)
        weighter = RABCWeights(file, device=torch.device("cpu"), **case["settings"])
    deltas = [weighter._compute_delta(index) for index in range(sum(LENGTHS))]
    weights = weighter._compute_weights(np.array(deltas, np.float32))
    return {
        "weights": weights.tolist(),
        "in_batch": [in_loss(weighter.compute_batch_weights({"index": b})[0]) for b in BATCHES],
    }


def in_loss(weights: torch.Tensor) -> list[float]:
    """What each sample's loss is multiplied by in the mean over a batch, by the formula in `lerobot_train`."""
    return (weights * len(weights) / (weights.sum() + 1e-6)).tolist()
