"""Settings that depend on the number of processes and of samples.

They are computed once, at the start of a run, and written into its config.yaml. So a step of the run stays the same
wherever the run resumes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from flexor.config.schema import TrainConfig
from flexor.core.errors import ConfigError
from flexor.core.log import log


@dataclass(frozen=True)
class Split:
    """How a global batch is split: rank r gets the r-th part, in `accumulation` micro-batches."""

    batch_size: int
    accumulation: int
    world_size: int

    @property
    def share(self) -> int:
        return self.batch_size * self.accumulation

    @property
    def global_batch(self) -> int:
        return self.share * self.world_size

    @property
    def parts(self) -> str:
        """How the global batch is split, in brackets; empty if it is not."""
        factors = {"processes": self.world_size, "accumulated batches": self.accumulation}
        words = [f"{count} {name}" for name, count in factors.items() if count > 1]
        return f" ({' x '.join([*words, f'batch {self.batch_size}'])})" if words else ""


def hsdp_sizes(world: int, local: int, replicate: int | None, shard: int | None) -> tuple[int, int]:
    """The number of groups, and of processes in each."""
    if shard is None:
        shard = world // replicate if replicate else local
    if replicate is None:
        replicate = max(1, world // shard)
    if replicate * shard != world:
        raise ConfigError(
            f"parallel.dp_replicate={replicate} x parallel.dp_shard={shard} must be the number of processes, {world}."
        )
    return replicate, shard


def split_batch(config: TrainConfig, world_size: int) -> Split:
    """Split the global batch into the fewest micro-batches of at most `batch_size` samples."""
    accumulation, batch = config.gradient_accumulation_steps, config.global_batch_size
    if batch is None:
        batch = config.batch_size * (accumulation or 1) * world_size
    share, left = divmod(batch, world_size)
    if left:
        fitting = [n for n in range(1, batch + 1) if batch % n == 0]
        raise ConfigError(
            f"global_batch_size={batch} can't be split evenly across {world_size} processes: "
            f"use {', '.join(map(str, fitting))} processes, or another global_batch_size."
        )
    if accumulation is None:
        accumulation = next(
            n for n in range(1, share + 1) if share % n == 0 and share // n <= config.batch_size
        )
    if share % accumulation or share // accumulation > config.batch_size:
        raise ConfigError(
            f"global_batch_size={batch} is not batch_size={config.batch_size} x {world_size} (processes) x "
            f"gradient_accumulation_steps={accumulation}: leave one of them out."
        )
    return Split(share // accumulation, accumulation, world_size)


def resolve_batch(config: TrainConfig, split: Split, samples: int) -> TrainConfig:
    """The settings with a global batch and a number of steps. Accumulation follows, for any number of processes."""
    steps = config.steps
    if config.epochs is not None:
        steps = math.ceil(config.epochs * samples / split.global_batch)
    return replace(
        config, global_batch_size=split.global_batch, gradient_accumulation_steps=None, steps=steps
    )


def resolve_lr_factor(config: TrainConfig) -> TrainConfig:
    """The settings with the factor that `scale_lr` means. The global batch is resolved."""
    assert config.global_batch_size is not None
    if config.lr_factor is not None:
        return config
    times = config.global_batch_size / config.batch_size
    factor = {None: 1.0, "linear": times, "sqrt": math.sqrt(times)}[config.scale_lr]
    if config.scale_lr:
        log.info(
            "scale_lr=%s: learning rates are multiplied by %g, as the global batch is %g times batch_size=%d",
            *(config.scale_lr, factor, times, config.batch_size),
        )
    return replace(config, lr_factor=factor)
