"""Settings of GR00T that only one of LeRobot and Flexor has, and defaults of an older version."""

from __future__ import annotations

from flexor.policies.groot.size import N1_5
from flexor.policies.lerobot_settings import LerobotSetting

OLD_DEFAULTS = {
    "max_state_dim": (64, 132),
    "max_action_dim": (32, 132),
    "chunk_size": (50, 40),
    "n_action_steps": (50, 40),
}
"""Defaults of GR00T N1.5, and those of N1.7: LeRobot replaces the ones by the others."""
UNUSED = (
    *("image_size", "lora_rank", "lora_alpha", "lora_dropout", "lora_full_model", "video_backend"),
    *("balance_dataset_weights", "balance_trajectory_weights", "dataset_paths", "output_dir", "save_steps"),
    *("batch_size", "dataloader_num_workers", "report_to", "resume"),
)
"""Settings that have no effect in LeRobot either."""
ONLY_IN_LEROBOT = {
    **dict.fromkeys(UNUSED, LerobotSetting()),
    "tokenizer_assets_repo": LerobotSetting(f"it is of GR00T N1.5. {N1_5}"[:-1], (None,)),
}
UNKNOWN_TO_LEROBOT = frozenset(
    {
        *("base_config", "load_base_model", "processor_name", "rtc_config", "embodiment_ids"),
        "action_feature_names",
        *("video_modality_keys", "use_percentiles", "clip_outliers", "state_dropout_prob"),
        *("image_target_size", "image_crop_size", "random_crop", "shortest_image_edge", "crop_fraction"),
        *(
            "letter_box_transform",
            "use_albumentations",
            "modalities",
            "image_min_pixels",
            "image_max_pixels",
            "formalize_language",
        ),
    }
)
