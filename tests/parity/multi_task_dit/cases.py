"""The multi-task DiTs that are compared, what they are shown and told. Imported by both programs."""

import numpy as np

from parity.inputs import ENVIRONMENT, STATE, actions, camera, history
from parity.kinds import FOLDER
from parity.multi_task_dit.clips import make_clips

STEPS = 12  # of acting: several chunks
PARTS = ()
TINY = {
    "horizon": 8,
    "n_action_steps": 4,
    "num_train_timesteps": 10,
    "num_integration_steps": 5,
    "hidden_dim": 16,
    "num_layers": 2,
    "num_heads": 2,
    "dropout": 0.0,
    "timestep_embed_dim": 8,
    "image_crop_shape": (32, 32),
    "tokenizer_max_length": 20,
}
MODES = {"VISUAL": "MEAN_STD", "STATE": "MIN_MAX", "ACTION": "MIN_MAX"}


def case(inputs: dict, clip: str = "tiny-clip", text: str = "", **settings: object) -> dict:
    """`clip` sees, and reads the task unless `text` does."""
    clips = {"vision_encoder_name": f"{FOLDER}/{clip}", "text_encoder_name": f"{FOLDER}/{text or clip}"}
    return {"inputs": inputs, "settings": {**TINY, **clips, "normalization_mapping": MODES, **settings}}


ONE_CAMERA = STATE | camera("top")
TWO_CAMERAS = STATE | camera("wrist") | camera("above")
FLOW = {"objective": "flow_matching"}
DDIM = {"noise_scheduler_type": "DDIM"}
# Each step of acting multiplies what rounding did before; ten are too many for some of these networks.
FEW = {"num_inference_steps": 4}
CASES = {
    "ddpm": case(ONE_CAMERA),
    "ddim": case(STATE, **DDIM, num_inference_steps=5, clip_sample_range=1.5),
    "sample": case(STATE, prediction_type="sample", beta_schedule="linear", **FEW),
    "flow": case(ONE_CAMERA, **FLOW),
    "flow_uniform": case(STATE, **FLOW, timestep_sampling_strategy="uniform", sigma_min=0.05),
    "flow_rk4": case(STATE, **FLOW, integration_method="rk4", timestep_sampling_s=0.7, sigma_min=0.1),
    "two_cameras": case(TWO_CAMERAS, **FEW),
    "two_encoders": case(TWO_CAMERAS, use_separate_rgb_encoder_per_camera=True, **FLOW),
    "one_camera_separate": case(ONE_CAMERA, use_separate_rgb_encoder_per_camera=True),
    "crop_middle": case(ONE_CAMERA, image_crop_is_random=False),
    "resize": case(ONE_CAMERA, image_resize_shape=(32, 32), image_crop_shape=None),
    "resize_crop": case(TWO_CAMERAS, image_resize_shape=(64, 37), **FLOW),
    "crop_too_large": case(STATE | camera("top", 32, 32), image_crop_shape=(224, 224)),
    "resized_below_crop": case(ONE_CAMERA, image_resize_shape=(32, 32), image_crop_shape=(33, 32)),
    "environment_unused": case(
        STATE | ENVIRONMENT | camera("top"), normalization_mapping={**MODES, "ENV": "MEAN_STD"}
    ),
    "learned_positions": case(STATE, use_rope=False, use_positional_encoding=True),
    "no_positions": case(STATE, use_rope=False, num_heads=4),
    "both_positions": case(STATE, use_positional_encoding=True, rope_base=50.0, num_layers=3, **FLOW),
    "mask": case(STATE, do_mask_loss_for_padding=True),
    "mask_flow": case(ONE_CAMERA, do_mask_loss_for_padding=True, **FLOW),
    "one_observation": case(ONE_CAMERA, n_obs_steps=1),
    "three_observations": case(TWO_CAMERAS, n_obs_steps=3, n_action_steps=6),
    "left_longest": case(STATE, tokenizer_padding="longest", tokenizer_padding_side="left"),
    "truncated": case(STATE, tokenizer_max_length=6),
    "old_clip": case(ONE_CAMERA, "old-clip", image_crop_shape=(28, 28), image_resize_shape=(30, 41)),
    "two_clips": case(ONE_CAMERA, "old-clip", "tiny-clip", image_crop_shape=(28, 28), **FLOW),
    "old_clip_left": case(ONE_CAMERA, "old-clip", image_crop_shape=(28, 28), tokenizer_padding_side="left"),
}


make_files = make_clips


def training_batch(case: dict) -> dict[str, np.ndarray]:
    """Observations [B, T, ...] and actions."""
    return {**history(case, "training"), **actions(case["settings"]["horizon"], (1, 4))}


# of the golden numbers (limits.py): each step of denoising multiplies what rounding did
STORED = {"actions": 5e-5}

# the policies that one program trains and the other acts with; what is changed for the second
TRAINED = {
    "vision_encoder_name": f"{FOLDER}/tiny-clip",
    "text_encoder_name": f"{FOLDER}/tiny-clip",
    "hidden_dim": 32,
    "num_heads": 2,
    "num_layers": 2,
    "horizon": 8,
    "n_action_steps": 4,
    "num_train_timesteps": 10,
    # or what is hardly trained goes to the limits
    "beta_schedule": "linear",
    "clip_sample_range": 3.0,
    "num_integration_steps": 4,
    "image_crop_shape": "[32,32]",
    "tokenizer_max_length": 20,
}
TRAINED_OTHERWISE = {
    "objective": "flow_matching",
    "use_rope": "false",
    "use_positional_encoding": "true",
    "use_separate_rgb_encoder_per_camera": "true",
}
