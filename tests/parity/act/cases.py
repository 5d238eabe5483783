"""The ACT policies that are compared, and what they are shown. Imported by both programs."""

import numpy as np

from parity.fill import uniform
from parity.inputs import ACTION, BATCH, ENVIRONMENT, STATE, camera, observation

STEPS = 12  # of acting: several chunks, and more than an ensemble holds
PARTS = ("l1_loss", "kld_loss")
TINY = {
    "chunk_size": 6,
    "n_action_steps": 4,
    "pretrained_backbone_weights": None,
    "dim_model": 16,
    "n_heads": 2,
    "dim_feedforward": 24,
    "n_encoder_layers": 2,
    "n_vae_encoder_layers": 2,
    "latent_dim": 4,
    "dropout": 0.0,
}


def case(inputs: dict, normalization: str = "MEAN_STD", **settings: object) -> dict:
    modes = dict.fromkeys(("VISUAL", "STATE", "ACTION"), normalization)
    settings = {**TINY, "normalization_mapping": modes, **settings}
    return {"inputs": inputs, "settings": settings}


ALL_ENV = {"VISUAL": "MIN_MAX", "STATE": "MEAN_STD", "ACTION": "MIN_MAX", "ENV": "MEAN_STD"}
CASES = {
    "vae": case(STATE | camera("top")),
    "no_vae": case(STATE | camera("top"), use_vae=False),
    "pre_norm": case(STATE | camera("top"), pre_norm=True),
    "gelu": case(STATE | ENVIRONMENT, feedforward_activation="gelu"),
    "kl_weight": case(STATE | ENVIRONMENT, kl_weight=0.5, n_encoder_layers=1, n_heads=4),
    "two_cameras": case(STATE | camera("wrist") | camera("above")),
    "two_sizes": case(STATE | camera("wrist", 33, 70) | camera("above", 64, 48)),
    "environment": case(STATE | ENVIRONMENT | camera("top"), normalization_mapping=ALL_ENV),
    "environment_first": case(ENVIRONMENT | STATE),
    "no_state": case(camera("top")),
    "no_state_no_vae": case(ENVIRONMENT, use_vae=False, pre_norm=True),
    "resnet34": case(STATE | camera("top"), vision_backbone="resnet34"),
    "resnet50": case(STATE | camera("top"), vision_backbone="resnet50"),
    "dilated": case(
        STATE | camera("top"), vision_backbone="resnet50", replace_final_stride_with_dilation=True
    ),
    "decoder_2": case(STATE | ENVIRONMENT, n_decoder_layers=2),
    "decoder_2_pre_norm": case(STATE | ENVIRONMENT, n_decoder_layers=2, pre_norm=True),
    "whole_chunk": case(STATE | ENVIRONMENT, n_action_steps=6),
    "ensemble": case(STATE | camera("top"), n_action_steps=1, temporal_ensemble_coeff=0.01),
    "ensemble_newer": case(STATE | ENVIRONMENT, n_action_steps=1, temporal_ensemble_coeff=-0.3),
    "min_max": case(STATE | camera("top"), "MIN_MAX"),
    "quantiles": case(STATE | camera("top"), "QUANTILES"),
    "quantile10": case(STATE | camera("top"), "QUANTILE10"),
    "identity": case(STATE | camera("top"), "IDENTITY"),
}


def training_batch(case: dict) -> dict[str, np.ndarray]:
    """Observations and actions, whose ends are padding, of a different length per sample."""
    chunk = case["settings"]["chunk_size"]
    is_pad = np.zeros((BATCH, chunk), bool)
    is_pad[0, -1:] = is_pad[1, -4:] = True
    actions = uniform("action", (BATCH, chunk, *ACTION["action"][1]), -2.0, 1.0)
    return {**observation(case["inputs"], "training"), "action": actions, "action_is_pad": is_pad}


# the policies that one program trains and the other acts with; what is changed for the second
TRAINED = {
    "pretrained_backbone_weights": "null",
    "dim_model": 32,
    "n_heads": 2,
    "dim_feedforward": 32,
    "chunk_size": 8,
    "n_action_steps": 4,
    "n_encoder_layers": 1,
    "n_vae_encoder_layers": 1,
    "latent_dim": 4,
}
OTHER_OPTIMIZER = ("--optimizer.type=sgd", "--optimizer.lr=1e-3", "--optimizer.momentum=0.9")
TRAINED_OTHERWISE = {"n_action_steps": 1, "temporal_ensemble_coeff": 0.01}
