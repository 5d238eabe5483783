"""Whether the disk has room for a run's checkpoints: said before the first step, not at the first checkpoint."""

from __future__ import annotations

import shutil

from flexor.config.schema import TrainConfig
from flexor.core.errors import ConfigError
from flexor.core.log import log
from flexor.core.machine import gigabytes
from flexor.policies.weight_names import unique_state
from flexor.train.checkpoint.run_folder import Run
from flexor.train.checkpoint.state import TrainState

STATE_BYTES = {"adamw_8bit": 2, "sgd": 4}  # of the optimizer's state, per trained weight
ADAM_BYTES = 8


def check_disk_space(state: TrainState, run: Run) -> None:
    """Raise an error if not even one checkpoint fits, and warn if not all of them do.

    A run that resumes is only warned: it may remove checkpoints that it has, and be stopped before it saves.
    """
    config = state.config
    if not config.save_checkpoint or state.step >= config.steps:
        return
    each, free = checkpoint_bytes(state), shutil.disk_usage(run.folder).free
    count = checkpoints_at_once(config, state.step)
    if free < each and not state.step:
        raise ConfigError(
            f"A checkpoint takes about {gigabytes(each)}, and {run.folder} has {gigabytes(free)} free. Free some disk "
            "space, choose another --output_dir, or train without checkpoints: --save_checkpoint=false."
        )
    if free < each * count:
        log.warning(
            "%d checkpoints of about %s each will be kept, but the disk has only %s free: keep fewer with "
            "--checkpoint.keep_last=N, or save less often with --save_freq=N",
            *(count, gigabytes(each), gigabytes(free)),
        )


def checkpoint_bytes(state: TrainState) -> int:
    """Of one checkpoint, about: weights, their average, and the optimizer's state."""
    weights = sum(tensor.nbytes for tensor in unique_state(state.policy).values())
    trained = sum(weight.numel() for weight in state.policy.parameters() if weight.requires_grad)
    optimizer = STATE_BYTES.get(str(state.config.optimizer.type), ADAM_BYTES) * trained
    return weights * (2 if state.config.ema.enable else 1) + optimizer


def checkpoints_at_once(config: TrainConfig, step: int) -> int:
    """The largest number of new checkpoints that a run keeps."""
    left = config.steps - step
    saved = -(-left // config.save_freq) if config.save_freq > 0 else 1
    keep = config.checkpoint.keep_last
    if keep is None:
        return saved
    every = config.checkpoint.keep_every
    return min(saved, keep + 1 + (left // every if every else 0))  # one is written before another is removed
