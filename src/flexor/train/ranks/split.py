"""Settings that depend on the number of processes and of samples.

They are computed once, at the start of a run, and written into its config.yaml. So a step of the run stays the same
wherever the run resumes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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

    def __str__(self) -> str:
        return f"batch {self.batch_size} x {self.world_size} process(es) x accumulation {self.accumulation}"


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
    """Split the global batch, fixed from here on, into the fewest micro-batches of at most `batch_size` samples."""
    given = config.gradient_accumulation_steps
    if config.global_batch_size is None:
        config.global_batch_size = config.batch_size * (given or 1) * world_size
    share, left = divmod(config.global_batch_size, world_size)
    if left:
        fitting = [n for n in range(1, config.global_batch_size + 1) if config.global_batch_size % n == 0]
        raise ConfigError(
            f"global_batch_size={config.global_batch_size} can't be split evenly across {world_size} processes: "
            f"use {', '.join(map(str, fitting))} processes, or another global_batch_size."
        )
    fewest = next(n for n in range(1, share + 1) if share % n == 0 and share // n <= config.batch_size)
    accumulation = given or fewest
    if share % accumulation or share // accumulation > config.batch_size:
        raise ConfigError(
            f"global_batch_size={config.global_batch_size} is not batch_size={config.batch_size} x "
            f"{world_size} process(es) x gradient_accumulation_steps={given}: leave one of them out."
        )
    config.gradient_accumulation_steps = None  # follows from the other two, for any number of processes
    return Split(share // accumulation, accumulation, world_size)


def scale_learning_rate(config: TrainConfig) -> None:
    """Scale the learning rate as scale_lr says; without it, not at all."""
    assert config.global_batch_size is not None
    if config.lr_factor is not None:
        return
    times = config.global_batch_size / config.batch_size
    config.lr_factor = {None: 1.0, "linear": times, "sqrt": math.sqrt(times)}[config.scale_lr]
    if config.scale_lr:
        log.info(
            "scale_lr=%s: learning rates are multiplied by %g, as the global batch is %g times batch_size=%d",
            config.scale_lr,
            config.lr_factor,
            times,
            config.batch_size,
        )


def steps_of(config: TrainConfig, samples: int) -> int:
    """The optimizer steps of a run, whether its settings give steps or epochs."""
    assert config.global_batch_size is not None
    if config.epochs is None:
        return config.steps
    return math.ceil(config.epochs * samples / config.global_batch_size)


def count_steps(config: TrainConfig, samples: int) -> None:
    """Set steps from epochs, if those are given."""
    assert config.global_batch_size is not None
    if config.epochs is None:
        return
    config.steps = steps_of(config, samples)
    log.info(
        "epochs=%g: %d samples in batches of %d make %d steps",
        config.epochs,
        samples,
        config.global_batch_size,
        config.steps,
    )
