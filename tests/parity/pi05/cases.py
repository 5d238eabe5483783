"""The pi0.5s that are compared, what they are shown and told. Imported by both programs."""

from parity.pi0 import cases as pi0
from parity.pi0.cases import (
    MODES,
    ONE_CAMERA,
    PARTS,
    RELATIVE,
    STEPS,
    TIMES,
    TWO_CAMERAS,
    fill_policy,
    make_files,
    training_batch,
)

__all__ = ["CASES", "PARTS", "STEPS", "fill_policy", "make_files", "training_batch"]

QUANTILES = {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"}


def case(inputs: dict, **settings: object) -> dict:
    return pi0.case(inputs, **{"normalization_mapping": QUANTILES, "tokenizer_max_length": 90, **settings})


CASES = {
    "default": case(ONE_CAMERA),
    "two_cameras": case(TWO_CAMERAS),
    "empty_camera": case(TWO_CAMERAS, empty_cameras=1),
    "expert_only": case(ONE_CAMERA, train_expert_only=True),
    "frozen_vision": case(ONE_CAMERA, freeze_vision_encoder=True),
    "recomputed": case(ONE_CAMERA, gradient_checkpointing=True),
    "other_times": case(ONE_CAMERA, **TIMES, num_inference_steps=5),
    "other_sizes": case(
        ONE_CAMERA, max_state_dim=7, max_action_dim=5, image_resolution=(42, 42), chunk_size=9
    ),
    "mean_std": case(ONE_CAMERA, normalization_mapping=MODES),
    "relative": case(ONE_CAMERA, **RELATIVE),
    "truncated": case(ONE_CAMERA, tokenizer_max_length=40),
}
