"""LeRobot's settings that Flexor has under another name, does not need, or does not support.

A `lerobot-train` command should work unchanged. Flexor accepts a setting that has no effect, and names it in
the log, because silently ignoring a setting would mislead the user.
"""

from __future__ import annotations

from typing import Any

from flexor.config.lerobot_runtime import with_runtime
from flexor.core.errors import ConfigError
from flexor.core.log import log
from flexor.core.typed import Text, parse_yaml

# Settings that have no effect in Flexor, and why.
IGNORED = {
    "prefetch_factor": "threads prefetch the batches",
    "persistent_workers": "threads prefetch the batches",
    "dataloader_multiprocessing_context": "threads prefetch the batches, not processes",
    "tolerance_s": "--dataset.frame_by decides which video frame belongs to a row",
    "use_policy_training_preset": "the preset fills in every setting that is not given",
    "dataset.video_backend": "videos are decoded by PyAV",
    "dataset.return_uint8": "frames are always uint8",
    "eval.use_async_envs": "all environments run in one process",
    "wandb.disable_artifact": "no artifacts are uploaded",
    "wandb.add_tags": "the configuration itself is logged",
    "policy.use_peft": "--policy.path recognises adapters by their files, and merges them",
    "peft.method_type": "LoRA is the only type of adapter",
    "peft.init_type": "adapters always use PEFT's default initialisation",
    "peft": "give its settings one by one, such as --peft.r=16",
    "reward_model": "Flexor does not train reward models",
    "scheduler.name": "--scheduler.type chooses the scheduler",
    "job": "the run starts on this machine",
    "checkpoint_path": "use `flexor resume RUN` to resume a run",
    "resume": "use `flexor resume RUN` to resume a run",
    "dataset.repo_type": "Flexor reads only dataset repositories",
    "eval.recording": "evaluation episodes are not recorded as datasets; --eval.videos saves videos of them",
    "eval.recording_repo_id": "evaluation episodes are not recorded as datasets",
    "eval.recording_private": "evaluation episodes are not recorded as datasets",
    "parallelism.context_parallel": "Flexor does not split sequences over processes",
    "parallelism.cfg_parallel": "Flexor does not split guidance over processes",
    "accelerator.fsdp.wrap_modules": "the policy names the blocks that are sharded",
    "accelerator.fsdp.min_num_params": "the policy names the blocks that are sharded",
    "accelerator.fsdp.ignored_modules": "all parameters are sharded",
    "accelerator.ddp.gradient_as_bucket_view": "gradients are always views of their buckets",
    "accelerator.ddp.static_graph": "--step=graph replays CUDA graphs of steps",
    "accelerator.compile.backend": "--compile=true uses torch's default",
    "accelerator.compile.mode": "--compile=true uses torch's default",
    "accelerator.compile.regional": "--compile=true compiles block by block",
    "policy.pretrained_path": "--policy.path sets the checkpoint to start from",
    "policy.pretrained_revision": "--policy.path=REPO@REVISION sets the revision",
}
# Any other value of these requests something Flexor does not support: an error, not a warning.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "peft.method_type": ("LORA", "lora"),
    "peft.init_type": (None,),
    "peft": (None,),
    "reward_model": (None,),
    "scheduler.name": ("cosine",),
    "job.target": (None, "local"),
    "checkpoint_path": (None,),
    "resume": (False,),
    "dataset.repo_type": ("dataset",),
    "eval.recording": (False,),
    "use_policy_training_preset": (True,),
    "parallelism.context_parallel.ring_degree": (1,),
    "parallelism.context_parallel.ulysses_degree": (1,),
    "parallelism.cfg_parallel": (1,),
    "accelerator.fsdp.ignored_modules": (None,),
}
# LeRobot's values -> Flexor's
VALUES = {"scheduler.type": {"diffuser": "cosine", "cosine_annealing_with_warmup": "cosine"}}
# LeRobot's names of settings -> Flexor's
ALIASES = {
    "cudnn_deterministic": "deterministic",
    "peft.r": "lora.r",
    "peft.lora_alpha": "lora.alpha",
    "peft.target_modules": "lora.target_modules",
    "peft.full_training_modules": "lora.full_training_modules",
    "policy.path": "policy_path",
    "config_path": "config",
    "accelerator.compile.enabled": "compile",
    "accelerator.fsdp.cpu_offload": "parallel.cpu_offload",
    "accelerator.fsdp.reshard_after_forward": "parallel.reshard_after_forward",
    "checkpoint.async": "checkpoint.asynchronous",  # `async` is a Python keyword
}


def drop_ignored(flat: dict[str, Any]) -> dict[str, Any]:
    """Remove LeRobot's settings that have no effect in Flexor, and name them in the log."""
    supported = {}
    flat = with_runtime(_with_sample_weighting(flat))
    if "peft.method_type" in flat:
        flat = {"lora.r": 16, **flat}  # LeRobot's default
    for key, value in flat.items():
        reason = next((why for name, why in IGNORED.items() if f"{key}.".startswith(f"{name}.")), None)
        if reason is None:
            supported[key] = VALUES.get(key, {}).get(str(value), value)
            continue
        plain = parse_yaml(value) if isinstance(value, Text) else value
        values = {key: plain} | (
            {f"{key}.{k}": v for k, v in plain.items()} if isinstance(plain, dict) else {}
        )
        for name, requested in values.items():
            harmless = HARMLESS.get(name, HARMLESS.get(name.rpartition(".")[0], (requested,)))
            if requested not in harmless:
                raise ConfigError(f"{name}={requested} is not supported: {reason}.")
        if isinstance(value, Text) and key not in HARMLESS:
            log.warning("--%s has no effect in Flexor: %s", key, reason)
    return supported


def _with_sample_weighting(flat: dict[str, Any]) -> dict[str, Any]:
    """RA-BC as LeRobot's files had it before 0.6 (use_rabc), as the settings that it has now."""
    flags = {key: value for key, value in flat.items() if key != "use_rabc" and not key.startswith("rabc_")}
    if str(flags.get("sample_weighting", "")).lower() in ("null", "none"):
        del flags["sample_weighting"]  # its default
    is_new = any(key.startswith("sample_weighting.") for key in flags)
    if str(flat.get("use_rabc", False)).lower() != "true" or is_new:
        return flags
    old = {key.removeprefix("rabc_"): value for key, value in flat.items() if key.startswith("rabc_")}
    new = {f"sample_weighting.{key}": value for key, value in old.items() if value is not None}
    return {**flags, "sample_weighting.type": "rabc", **new}
