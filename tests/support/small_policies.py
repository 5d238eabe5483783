"""Policies small enough for seconds: their settings."""

from support import small_pi, small_resnet

SMALL = {
    "diffusion": [
        "horizon=8",
        "n_action_steps=4",
        "down_dims=[16,32]",
        "diffusion_step_embed_dim=8",
        "spatial_softmax_num_keypoints=4",
        "pretrained_backbone_weights=null",
    ],
    "vqbet": [
        "n_obs_steps=2",
        "action_chunk_size=2",
        "crop_shape=null",
        "use_group_norm=true",
        f"vision_backbone={small_resnet.NAME}",
        "pretrained_backbone_weights=null",
        "spatial_softmax_num_keypoints=4",
        "n_vqvae_training_steps=3",  # both phases, also after a resume
        "vqvae_n_embed=6",
        "vqvae_embedding_dim=8",
        "gpt_block_size=8",
        *(f"gpt_{size}_dim=16" for size in ("input", "output", "hidden")),
        "gpt_n_layer=2",
        "gpt_n_head=2",
        "dropout=0",
    ],
    "tdmpc": ["horizon=3", "latent_dim=8", "mlp_dim=16", "state_encoder_hidden_dim=8"],
    "multi_task_dit": [
        "horizon=8",
        "n_action_steps=4",
        "hidden_dim=16",
        "num_layers=2",
        "num_heads=2",
        "timestep_embed_dim=8",
        "tokenizer_max_length=20",
        "dropout=0",
    ],
    "pi0": small_pi.SETTINGS,
    "pi05": small_pi.SETTINGS,
    "pi0_fast": small_pi.FAST_SETTINGS,
}
