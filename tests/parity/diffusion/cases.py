"""The diffusion policies that are compared, and what they are shown. Imported by both programs."""

import numpy as np

from parity.inputs import ENVIRONMENT, STATE, actions, camera, history

STEPS = 12  # of acting: several chunks
PARTS = ()
GRADIENTS_IN_DOUBLE = True
TINY = {
    "horizon": 8,
    "n_action_steps": 4,
    "pretrained_backbone_weights": None,
    "spatial_softmax_num_keypoints": 4,
    "down_dims": (16, 24),
    "diffusion_step_embed_dim": 8,
    "num_train_timesteps": 10,
}
MODES = {"VISUAL": "MEAN_STD", "STATE": "MIN_MAX", "ACTION": "MIN_MAX"}


def case(inputs: dict, **settings: object) -> dict:
    return {"inputs": inputs, "settings": {**TINY, "normalization_mapping": MODES, **settings}}


ONE_CAMERA = STATE | camera("top")
TWO_CAMERAS = STATE | camera("wrist") | camera("above")
LOW = STATE | ENVIRONMENT
# With the default schedule, the first steps of acting multiply what rounding did: where there are many steps, or many
# layers before them, another is used.
DDIM = {"noise_scheduler_type": "DDIM"}
CASES = {
    "batch_norm": case(ONE_CAMERA),
    "group_norm": case(ONE_CAMERA, use_group_norm=True),
    "two_encoders": case(TWO_CAMERAS),
    "one_encoder": case(TWO_CAMERAS, use_separate_rgb_encoder_per_camera=False, use_group_norm=True),
    "one_encoder_batch_norm": case(TWO_CAMERAS, use_separate_rgb_encoder_per_camera=False),
    "crop": case(ONE_CAMERA, crop_shape=(33, 48)),
    "crop_two": case(TWO_CAMERAS, crop_shape=(40, 49), use_group_norm=True, beta_schedule="linear"),
    "crop_shared": case(TWO_CAMERAS, crop_shape=(35, 56), use_separate_rgb_encoder_per_camera=False),
    "crop_middle": case(ONE_CAMERA, crop_shape=(35, 49), crop_is_random=False, use_group_norm=True),
    "resize": case(ONE_CAMERA, resize_shape=(36, 70), use_group_norm=True),
    "resize_crop": case(ONE_CAMERA, resize_shape=(64, 48), crop_ratio=0.9, use_group_norm=True),
    "resnet34": case(ONE_CAMERA, vision_backbone="resnet34", use_group_norm=True),
    "resnet50": case(
        ONE_CAMERA,
        vision_backbone="resnet50",
        use_group_norm=True,
        spatial_softmax_num_keypoints=7,
        beta_schedule="linear",
    ),
    "environment": case(
        STATE | camera("top") | ENVIRONMENT,
        use_group_norm=True,
        normalization_mapping={**MODES, "ENV": "MEAN_STD"},
    ),
    "no_camera": case(LOW, num_train_timesteps=100),
    "mask": case(LOW, do_mask_loss_for_padding=True),
    "sample": case(LOW, prediction_type="sample"),
    "ddim": case(LOW, **DDIM, num_inference_steps=4),
    "ddim_all": case(LOW, **DDIM, beta_schedule="linear", num_train_timesteps=100, num_inference_steps=100),
    "ddim_sample": case(LOW, **DDIM, prediction_type="sample", num_inference_steps=10),
    "fewer_steps": case(LOW, num_train_timesteps=50, num_inference_steps=7),
    "linear": case(LOW, beta_schedule="linear", beta_start=0.001, beta_end=0.05),
    "scaled_linear": case(LOW, **DDIM, beta_schedule="scaled_linear", num_train_timesteps=30),
    "no_clip": case(LOW, clip_sample=False),
    "clip_range": case(LOW, **DDIM, clip_sample_range=1.5),
    "shift_only": case(LOW, use_film_scale_modulation=False, kernel_size=3, n_groups=4),
    "one_width": case(LOW, down_dims=(8,), horizon=6),
    "four_widths": case(LOW, down_dims=(8, 16, 24, 16), horizon=32, n_action_steps=9),
    "one_observation": case(ONE_CAMERA, n_obs_steps=1, use_group_norm=True),
    "three_observations": case(LOW, n_obs_steps=3, n_action_steps=6),
    "recomputed": case(ONE_CAMERA, gradient_checkpointing=True),
}


def training_batch(case: dict) -> dict[str, np.ndarray]:
    """Observations [B, T, ...] and actions."""
    return {**history(case, "training"), **actions(case["settings"]["horizon"], (1, 4))}


# of the golden numbers (limits.py): gradients are in float64; each step of denoising multiplies what rounding did
STORED = {"gradients": 1e-6, "actions": 5e-5}

# the policies that one program trains and the other acts with; what is changed for the second
TRAINED = {
    "pretrained_backbone_weights": "null",
    "horizon": 8,
    "n_action_steps": 4,
    "down_dims": "[16,32]",
    "diffusion_step_embed_dim": 16,
    "spatial_softmax_num_keypoints": 8,
    "num_train_timesteps": 20,
    # or what is hardly trained goes to the limits
    "beta_schedule": "linear",
    "clip_sample_range": 3.0,
}
TRAINED_OTHERWISE = {
    "resize_shape": "[70,96]",
    "crop_ratio": 0.9,
    "prediction_type": "sample",
    "noise_scheduler_type": "DDIM",
    "num_inference_steps": 5,
    "n_obs_steps": 3,
    "use_group_norm": "true",
    "use_film_scale_modulation": "false",
    "do_mask_loss_for_padding": "true",
}
