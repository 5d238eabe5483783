"""The TD-MPC policies that are compared, and what they are shown. Imported by both programs."""

import numpy as np

from parity.fill import uniform
from parity.inputs import ACTION, BATCH, ENVIRONMENT, STATE, camera, observation

STEPS = 6  # of acting: several plans, each started from the one before
PARTS = ("consistency_loss", "reward_loss", "Q_value_loss", "V_value_loss", "pi_loss", "Q", "V")
IMAGE = {"observation.image": ("VISUAL", (3, 48, 48))}
TINY = {
    "horizon": 4,
    "image_encoder_hidden_dim": 6,
    "state_encoder_hidden_dim": 12,
    "latent_dim": 10,
    "mlp_dim": 16,
    "cem_iterations": 3,
    "n_gaussian_samples": 20,
    "n_pi_samples": 6,
    "n_elites": 7,
}
MODES = {"VISUAL": "IDENTITY", "STATE": "IDENTITY", "ENV": "IDENTITY", "ACTION": "MIN_MAX"}


def case(inputs: dict, modes: dict | None = None, acts: bool = True, **settings: object) -> dict:
    settings = {**TINY, "normalization_mapping": {**MODES, **(modes or {})}, **settings}
    return {"inputs": inputs, "settings": settings, "acts": acts}


CASES = {
    "camera": case(STATE | IMAGE),
    "camera_first": case(IMAGE | STATE, max_random_shift_ratio=0.1, n_action_repeats=3),
    "not_shifted": case(STATE | IMAGE, max_random_shift_ratio=0.0),
    # LeRobot does not shift the pictures of such a camera, and can't act with it
    "another_camera": case(STATE | camera("top", 40, 40), acts=False, max_random_shift_ratio=0.0),
    "environment": case(STATE | ENVIRONMENT),
    "everything": case(
        ENVIRONMENT | IMAGE | STATE, {"STATE": "MEAN_STD", "ENV": "MIN_MAX", "VISUAL": "MEAN_STD"}
    ),
    "two_critics": case(STATE | ENVIRONMENT, q_ensemble_size=2),
    "one_critic": case(STATE | ENVIRONMENT, q_ensemble_size=1, uncertainty_regularizer_coeff=0.0),
    "sure": case(STATE | ENVIRONMENT, uncertainty_regularizer_coeff=0.0, q_ensemble_size=7),
    "no_proposals": case(STATE | ENVIRONMENT, n_pi_samples=0, n_action_repeats=1),
    "exact_proposals": case(STATE | ENVIRONMENT, min_std=0.0, n_action_repeats=1, n_action_steps=1),
    "whole_plan": case(STATE | ENVIRONMENT, n_action_repeats=1, n_action_steps=4),
    "two_of_the_plan": case(STATE | IMAGE, n_action_repeats=1, n_action_steps=2, discount=0.5),
    "policy_alone": case(STATE | ENVIRONMENT, use_mpc=False),
    "policy_alone_once": case(STATE | IMAGE, use_mpc=False, n_action_repeats=1),
    "horizon_1": case(STATE | ENVIRONMENT, horizon=1),
    "search": case(
        STATE | ENVIRONMENT,
        max_std=0.7,
        elite_weighting_temperature=2.0,
        gaussian_mean_momentum=0.4,
        n_elites=3,
        cem_iterations=5,
    ),
    "weights": case(
        STATE | ENVIRONMENT,
        reward_coeff=1.5,
        expectile_weight=0.6,
        value_coeff=0.7,
        consistency_coeff=3.0,
        advantage_scaling=8.0,
        pi_coeff=2.0,
        temporal_decay_coeff=0.8,
        target_model_momentum=0.9,
    ),
}


def training_batch(case: dict) -> dict[str, np.ndarray]:
    """Windows of observations, actions and rewards; the second sample's run over the end of its episode."""
    horizon = case["settings"]["horizon"]
    steps = [observation(case["inputs"], f"training {t}") for t in range(horizon + 1)]
    batch = {key: np.stack([each[key] for each in steps], 1) for key in case["inputs"]}
    batch["action"] = uniform("action", (BATCH, horizon, *ACTION["action"][1]), -0.5, 1.5)
    batch["next.reward"] = uniform("reward", (BATCH, horizon), -1.0, 2.0)
    batch["index"] = np.arange(BATCH)
    is_pad = np.zeros((BATCH, horizon + 1), bool)
    is_pad[1, max(1, horizon - 1) :] = True
    batch |= {f"{key}_is_pad": is_pad for key in case["inputs"]}
    return {**batch, "action_is_pad": is_pad[:, :-1], "next.reward_is_pad": is_pad[:, :-1]}


# the policies that one program trains and the other acts with; what is changed for the second
TRAINED = {
    "mlp_dim": 32,
    "image_encoder_hidden_dim": 8,
    "n_gaussian_samples": 32,
    "n_pi_samples": 8,
    "n_elites": 10,
}
TRAINED_OTHERWISE = {"n_action_repeats": 1, "n_action_steps": 3, "q_ensemble_size": 2}
