"""What we compute."""

import numpy as np

from flexor.data.loader.loader import weight_scale
from flexor.data.mixture.sample_weights import rabc_weights
from parity.sample_weights.cases import BATCHES, LENGTHS, progress


def measure(case: dict) -> dict:
    settings, file = dict(case["settings"]), progress(case)
    column = f"progress_{settings.pop('head_mode', 'sparse')}"
    fallback = settings.pop("fallback_weight", 1.0)
    weights = rabc_weights(
        file["index"],
        file["episode_index"],
        file[column],
        settings.pop("chunk_size", 50),
        **settings,
        fallback=fallback,
    )
    frames = np.append(weights, np.full(10, fallback, np.float32))
    return {
        "weights": frames[: sum(LENGTHS)].tolist(),
        "in_batch": [(frames[batch] * weight_scale(frames[batch])).tolist() for batch in BATCHES],
    }
