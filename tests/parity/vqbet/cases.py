"""The VQ-BeT policies that are compared, and what they are shown. Imported by both programs."""

import numpy as np
import torch

from parity.fill import fill, uniform
from parity.inputs import STATE, actions, camera, history

STEPS = 12  # of acting: several chunks
TINY = {
    "n_obs_steps": 3,
    "n_action_pred_token": 2,
    "action_chunk_size": 4,
    "crop_shape": (33, 48),
    "pretrained_backbone_weights": None,
    "use_group_norm": True,
    "spatial_softmax_num_keypoints": 4,
    "n_vqvae_training_steps": 2,
    "vqvae_n_embed": 6,
    "vqvae_embedding_dim": 8,
    "vqvae_enc_hidden_dim": 12,
    "gpt_block_size": 20,
    "gpt_input_dim": 16,
    "gpt_output_dim": 16,
    "gpt_n_layer": 2,
    "gpt_n_head": 2,
    "gpt_hidden_dim": 16,
    "dropout": 0.0,
}
MODES = {"VISUAL": "IDENTITY", "STATE": "MIN_MAX", "ACTION": "MIN_MAX"}
INPUTS = camera("top") | STATE


def case(inputs: dict = INPUTS, **settings: object) -> dict:
    return {"inputs": inputs, "settings": {**TINY, "normalization_mapping": MODES, **settings}}


CASES = {
    "group_norm": case(),
    "batch_norm": case(use_group_norm=False),
    "state_first": case(
        STATE | camera("wrist", 70, 50), normalization_mapping={**MODES, "VISUAL": "MEAN_STD"}
    ),
    "whole_picture": case(camera("top", 33, 70) | STATE, crop_shape=None),
    "crop_middle": case(crop_shape=(35, 49), crop_is_random=False),
    "sequential": case(sequentially_select=True),
    "sequential_hot": case(sequentially_select=True, bet_softmax_temperature=2.0, vqvae_n_embed=9),
    "hot": case(bet_softmax_temperature=3.0),
    "cold": case(bet_softmax_temperature=1e-3),
    "one_action": case(action_chunk_size=1),
    "one_chunk": case(n_action_pred_token=1),
    "one_observation": case(n_obs_steps=1, n_action_pred_token=4),
    "one_of_each": case(n_obs_steps=1, n_action_pred_token=1, action_chunk_size=1),
    "many_observations": case(n_obs_steps=6, gpt_block_size=19),
    "weights": case(offset_loss_weight=3.0, primary_code_loss_weight=0.2, secondary_code_loss_weight=2.0),
    "sizes": case(gpt_input_dim=12, gpt_output_dim=20, gpt_n_layer=3, gpt_n_head=4, gpt_hidden_dim=24),
    "codes": case(vqvae_n_embed=17, vqvae_embedding_dim=5, vqvae_enc_hidden_dim=7),
    "one_code": case(vqvae_n_embed=1),
    "resnet34": case(vision_backbone="resnet34", crop_shape=(39, 40), spatial_softmax_num_keypoints=7),
    "mean_std": case(normalization_mapping=dict.fromkeys(MODES, "MEAN_STD")),
}
# state that is computed or says how far training is: compared as it is
COMPUTED = ("attn.bias", "select_target_actions_indices", "initted", "discretized", "freeze_codebook")
# figures that are means over samples; LeRobot has others, of a whole batch
PARTS = (
    "classification_loss",
    "offset_loss",
    "equal_primary_code_rate",
    "equal_secondary_code_rate",
    "vq_action_error",
    "action_mse_error",
)


def fill_policy(policy: torch.nn.Module) -> str:
    """Weights for every case, and codebooks as they are in the middle of training."""
    state = policy.state_dict()
    computed = {name: value.clone() for name, value in state.items() if name.endswith(COMPUTED)}
    digest = fill(policy)
    for name, value in state.items():
        if name in computed:
            value.copy_(computed[name])
        elif name.endswith("cluster_size"):
            value.copy_(torch.from_numpy(uniform(name, tuple(value.shape), 0.5, 3.0)))
    return digest


def codebooks(policy: torch.nn.Module) -> list[list[float]]:
    """What a step makes of the codes, and of the flags that say which phase is next."""
    suffixes = ("embed", "embed_avg", "cluster_size", "discretized", "freeze_codebook")
    state = sorted(policy.state_dict().items())
    return [value.float().flatten().tolist() for name, value in state if name.endswith(suffixes)]


def training_batch(case: dict) -> dict[str, np.ndarray]:
    """Observations [B, T, ...] and actions; padding is learnt like anything else."""
    settings = case["settings"]
    steps = settings["n_obs_steps"] + settings["n_action_pred_token"] + settings["action_chunk_size"] - 2
    return {**history(case, "training"), **actions(steps, (1, 1))}


# the policies that one program trains and the other acts with; what is changed for the second
TRAINED = {
    "pretrained_backbone_weights": "null",
    "crop_shape": "[64,64]",
    "spatial_softmax_num_keypoints": 8,
    "n_vqvae_training_steps": 60,
    "vqvae_embedding_dim": 16,
    "vqvae_enc_hidden_dim": 32,
    "gpt_block_size": 20,
    "gpt_input_dim": 32,
    "gpt_output_dim": 32,
    "gpt_n_layer": 2,
    "gpt_n_head": 2,
    "gpt_hidden_dim": 32,
    "scheduler_warmup_steps": 1,
}
TRAINED_OTHERWISE = {
    "use_group_norm": "true",
    "sequentially_select": "true",
    "bet_softmax_temperature": 1.0,
    "n_obs_steps": 2,
    "n_action_pred_token": 1,
    "action_chunk_size": 3,
    "vqvae_n_embed": 7,
}
# until codes that nothing is mapped to are among the others again, and two of the second phase
TRAINED_STEPS = 62
