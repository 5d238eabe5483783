"""Settings whose default depends on the GPU: precision and memory format. They are settled before a run starts."""

from __future__ import annotations

from dataclasses import replace

from flexor.config.schema import SHARDED, TrainConfig, validate_weights
from flexor.core.errors import ConfigError

# compute capability of the first NVIDIA GPUs that multiply in this type
BF16_SINCE = (8, 0)
FP8_SINCE = (8, 9)
COMPUTE_IN_BF16 = ("bf16", "fp8")  # settings of `precision` whose autocast is to bfloat16


def settle_for_gpu(config: TrainConfig, capability: tuple[int, int] | None) -> TrainConfig:
    """The settings with a value for each that was left to the GPU.

    `capability`: CUDA compute capability of the slowest GPU of the run; None if it uses no NVIDIA GPU.
    """
    if config.precision == "auto":
        bf16 = capability is not None and capability >= BF16_SINCE and config.policy.trains_in_bf16
        config = replace(config, precision="bf16" if bf16 else "no")
        validate_weights(config)
    if not multiplies_in(config.precision, capability):
        major, minor = FP8_SINCE
        raise ConfigError(
            f"precision=fp8 needs an NVIDIA GPU of compute capability {major}.{minor} or higher (Ada, Hopper, "
            f"Blackwell); {_this_one(capability)}. Use --precision=bf16."
        )
    if config.precision == "fp8":
        _check_fp8(config)
    if config.channels_last is None:
        config = replace(config, channels_last=capability is not None)
    return config


def multiplies_in(precision: str, capability: tuple[int, int] | None) -> bool:
    """Whether the GPU supports this precision as it is set; float32, bf16 and fp16 work on all devices."""
    return precision != "fp8" or (capability is not None and capability >= FP8_SINCE)


def _check_fp8(config: TrainConfig) -> None:
    unsupported = {
        f"parallel.strategy={config.parallel.strategy}": config.parallel.strategy in SHARDED,
        f"lora.base={config.lora.base}": config.lora.base is not None,
        "compile=true": config.compile,
    }
    for other, is_set in unsupported.items():
        if is_set:
            raise ConfigError(f"precision=fp8 does not work with {other}: leave out one.")


def _this_one(capability: tuple[int, int] | None) -> str:
    return "this device is none" if capability is None else f"this one has {capability[0]}.{capability[1]}"
