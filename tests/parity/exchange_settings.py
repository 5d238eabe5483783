"""The small policies that are trained by one program and act in the other."""

from pathlib import Path

IMAGE_SIZE = 72  # of the built-in task's own 32 pixels, a ResNet leaves one
WITHOUT_WEIGHTS = {"pretrained_backbone_weights": "null"}
# or what is hardly trained goes to the limits
UNCLIPPED = {"beta_schedule": "linear", "clip_sample_range": 3.0}
# until codes that nothing is mapped to are among the others again, and two of the second phase
STEPS = {"vqbet": 62}

PLAIN = {
    "act": {
        **WITHOUT_WEIGHTS,
        "dim_model": 32,
        "n_heads": 2,
        "dim_feedforward": 32,
        "chunk_size": 8,
        "n_action_steps": 4,
        "n_encoder_layers": 1,
        "n_vae_encoder_layers": 1,
        "latent_dim": 4,
    },
    "diffusion": {
        **WITHOUT_WEIGHTS,
        "horizon": 8,
        "n_action_steps": 4,
        "down_dims": "[16,32]",
        "diffusion_step_embed_dim": 16,
        "spatial_softmax_num_keypoints": 8,
        "num_train_timesteps": 20,
        **UNCLIPPED,
    },
    "vqbet": {
        **WITHOUT_WEIGHTS,
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
    },
    "tdmpc": {
        "mlp_dim": 32,
        "image_encoder_hidden_dim": 8,
        "n_gaussian_samples": 32,
        "n_pi_samples": 8,
        "n_elites": 10,
    },
    "multi_task_dit": {
        "hidden_dim": 32,
        "num_heads": 2,
        "num_layers": 2,
        "horizon": 8,
        "n_action_steps": 4,
        "num_train_timesteps": 10,
        **UNCLIPPED,
        "num_integration_steps": 4,
        "image_crop_shape": "[32,32]",
        "tokenizer_max_length": 20,
    },
}
# what is changed for a second policy
OTHER = {
    "act": {"n_action_steps": 1, "temporal_ensemble_coeff": 0.01},
    "diffusion": {
        "resize_shape": "[70,96]",
        "crop_ratio": 0.9,
        "prediction_type": "sample",
        "noise_scheduler_type": "DDIM",
        "num_inference_steps": 5,
        "n_obs_steps": 3,
        "use_group_norm": "true",
        "use_film_scale_modulation": "false",
        "do_mask_loss_for_padding": "true",
    },
    "vqbet": {
        "use_group_norm": "true",
        "sequentially_select": "true",
        "bet_softmax_temperature": 1.0,
        "n_obs_steps": 2,
        "n_action_pred_token": 1,
        "action_chunk_size": 3,
        "vqvae_n_embed": 7,
    },
    "tdmpc": {"n_action_repeats": 1, "n_action_steps": 3, "q_ensemble_size": 2},
    "multi_task_dit": {
        "objective": "flow_matching",
        "use_rope": "false",
        "use_positional_encoding": "true",
        "use_separate_rgb_encoder_per_camera": "true",
    },
}


def arguments(kind: str, clips: Path, other: bool = False) -> list[str]:
    settings = {"type": kind, "device": "cpu", **PLAIN[kind], **(OTHER[kind] if other else {})}
    if kind == "multi_task_dit":
        settings |= dict.fromkeys(("vision_encoder_name", "text_encoder_name"), clips / "tiny-clip")
    return [f"--policy.{name}={value}" for name, value in settings.items()]
