"""LeRobot's settings that Flexor has under another name, does not need, or can't do.

A `lerobot-train` command is meant to work unchanged. What nothing here depends on is taken and named in
the log, because a setting that is silently ignored is a lie.
"""

from __future__ import annotations

from typing import Any

from flexor.core.errors import ConfigError
from flexor.core.log import log
from flexor.core.typed import Text, parse_yaml

# What nothing here depends on, and why.
IGNORED = {
    "prefetch_factor": "batches are read ahead by threads",
    "persistent_workers": "batches are read ahead by threads",
    "dataloader_multiprocessing_context": "batches are read ahead by threads, not processes",
    "tolerance_s": "--dataset.frame_by decides which frame is a row's",
    "use_policy_training_preset": "presets fill what is not given; what is given counts",
    "dataset.video_backend": "videos are decoded by PyAV",
    "dataset.return_uint8": "frames travel as uint8 always",
    "eval.use_async_envs": "environments run side by side in one process",
    "wandb.disable_artifact": "no artifacts are uploaded",
    "wandb.add_tags": "the configuration is logged as such",
    "policy.push_to_hub": "nothing is uploaded: use `hf upload REPO RUN/checkpoints/last/pretrained_model`",
    "policy.repo_id": "nothing is uploaded",
    "policy.private": "nothing is uploaded",
    "policy.tags": "nothing is uploaded",
    "policy.license": "nothing is uploaded",
    "policy.use_peft": "adapters are merged into what is saved, so there are none to load",
    "peft.method_type": "adapters are LoRA's",
    "peft.init_type": "adapters start as those of PEFT do unless told otherwise",
    "peft": "name its settings one by one, such as --peft.r=16",
    "reward_model": "reward models are not trained here",
    "sample_weighting": "samples all weigh the same",
    "scheduler.name": "scheduler.type names it",
    "rename_map": "the policy and the dataset must use the same names",
    "job": "the run starts on this machine",
    "save_checkpoint_to_hub": "nothing is uploaded",
    "checkpoint_path": "a run goes on with `flexor resume RUN`",
    "resume": "a run goes on with `flexor resume RUN`",
    "dataset.repo_type": "only dataset repositories are read",
    "dataset.image_transforms": "pictures are not augmented yet",
    "dataset.depth_output_unit": "depth maps are not read yet",
    "eval.recording": "evaluation episodes are not recorded as datasets; --eval.videos films them",
    "eval.recording_repo_id": "evaluation episodes are not recorded as datasets",
    "eval.recording_private": "evaluation episodes are not recorded as datasets",
    "policy.pretrained_path": "--policy.path names the checkpoint to start from",
    "policy.pretrained_revision": "--policy.path=REPO@REVISION names it",
}
# Any other value of these asks for something Flexor does not do: better refused than ignored.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "policy.push_to_hub": (False,),
    "policy.use_peft": (False,),
    "peft.method_type": ("LORA", "lora"),
    "peft.init_type": (None,),
    "peft": (None,),
    "reward_model": (None,),
    "sample_weighting": (None,),
    "rename_map": ({}, None),
    "scheduler.name": ("cosine",),
    "job.target": (None, "local"),
    "save_checkpoint_to_hub": (False,),
    "checkpoint_path": (None,),
    "resume": (False,),
    "dataset.repo_type": ("dataset",),
    "dataset.image_transforms.enable": (False,),
    "eval.recording": (False,),
    "use_policy_training_preset": (True,),
}
# LeRobot's names of values -> ours
VALUES = {"scheduler.type": {"diffuser": "cosine", "cosine_annealing_with_warmup": "cosine"}}
# LeRobot's name -> ours
ALIASES = {
    "cudnn_deterministic": "deterministic",
    "peft.r": "lora.r",
    "peft.lora_alpha": "lora.alpha",
    "peft.target_modules": "lora.target_modules",
    "peft.full_training_modules": "lora.full_training_modules",
    "policy.path": "policy_path",
    "config_path": "config",
    "checkpoint.async": "checkpoint.asynchronous",  # a keyword of Python's
}


def drop_ignored(flat: dict[str, Any]) -> dict[str, Any]:
    """The settings without those of LeRobot's that have no effect here, which are named in the log."""
    kept = {}
    if "peft.method_type" in flat:
        flat = {"lora.r": 16, **flat}  # LeRobot's default
    for key, value in flat.items():
        reason = next((why for name, why in IGNORED.items() if f"{key}.".startswith(f"{name}.")), None)
        if reason is None:
            kept[key] = VALUES.get(key, {}).get(str(value), value)
            continue
        plain = parse_yaml(value) if isinstance(value, Text) else value
        asked = {key: plain} | (
            {f"{key}.{k}": v for k, v in plain.items()} if isinstance(plain, dict) else {}
        )
        for name, wanted in asked.items():
            harmless = HARMLESS.get(name, HARMLESS.get(name.rpartition(".")[0], (wanted,)))
            if wanted not in harmless:
                raise ConfigError(f"{name}={wanted} is not supported: {reason}.")
        if isinstance(value, Text) and key not in HARMLESS:
            log.warning("--%s has no effect here: %s", key, reason)
    return kept
