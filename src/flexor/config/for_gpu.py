"""Settings whose default depends on the GPU: precision and memory format. They are settled before a run starts."""

from __future__ import annotations

from dataclasses import replace

from flexor.config.schema import TrainConfig, validate_weights

BF16_SINCE = (8, 0)  # compute capability of the first NVIDIA GPUs that compute in bfloat16


def settle_for_gpu(config: TrainConfig, capability: tuple[int, int] | None) -> TrainConfig:
    """The settings with a value for each that was left to the GPU.

    `capability`: CUDA compute capability of the slowest GPU of the run; None if it uses no NVIDIA GPU.
    """
    if config.precision == "auto":
        bf16 = capability is not None and capability >= BF16_SINCE and config.policy.trains_in_bf16
        config = replace(config, precision="bf16" if bf16 else "no")
        validate_weights(config)
    if config.channels_last is None:
        config = replace(config, channels_last=capability is not None)
    return config
