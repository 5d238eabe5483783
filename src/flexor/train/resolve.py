"""Resolves, before a run starts, what its settings leave open. Afterwards its config alone defines it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from flexor.config.for_gpu import settle_for_gpu
from flexor.config.schema import TrainConfig
from flexor.core.log import log
from flexor.core.output_paths import check_output_folder
from flexor.core.run_files import RUN_CONFIG
from flexor.data.dataset import Dataset
from flexor.data.loader.loader import sample_rows
from flexor.data.mixture.entries import absolute_roots
from flexor.monitor.meters import Arithmetic
from flexor.policies.fit import fit_to_dataset
from flexor.train.checkpoint.resume import continued_config
from flexor.train.checkpoint.run_folder import default_folder, restarted_folder
from flexor.train.engine.base import lowest_capability
from flexor.train.ranks.processes import Processes
from flexor.train.ranks.split import Split, resolve_batch, resolve_lr_factor, split_batch

Resume = Literal["no", "yes", "auto"]  # auto: resume if the run has started


class PreflightCheck(Protocol):
    """Plans the run before it starts, and compares it with the plan afterwards: see `flexor.plan.preflight`."""

    def before(
        self, config: TrainConfig, training: Dataset, processes: Processes, device: torch.device
    ) -> TrainConfig: ...

    def arithmetic(self, device: torch.device) -> Arithmetic | None: ...

    def planned(self) -> dict[str, float]: ...

    def after(self, metrics: dict[str, Any], device: torch.device) -> dict[str, Any]: ...


def resolve_for_machine(
    config: TrainConfig, resume: Resume, processes: Processes, device: torch.device
) -> tuple[TrainConfig, bool]:
    """Everything but what depends on the data: the folder, and what the GPU decides. Also whether the run has started.

    Rank 0 chooses the folder. The settings of a run that has started come from there.
    """
    job_name = config.job_name or config.policy.type
    restarted = processes.restarts > 0

    def choose_folder() -> tuple[Path, bool]:
        earlier = restarted_folder(processes.launch) if restarted and not config.output_dir else None
        folder = Path(config.output_dir) if config.output_dir else earlier or default_folder(job_name)
        check_output_folder(folder, "--output_dir")
        again = resume == "auto" or (resume == "no" and restarted)
        return folder, resume == "yes" or (again and (folder / RUN_CONFIG).is_file())

    folder, started = processes.share(choose_folder)
    # a resume may start in another working directory
    resolved = replace(config, job_name=job_name, dataset=absolute_roots(config.dataset))
    if started and resume != "yes":
        resolved = continued_config(folder, resolved)
    resolved = replace(resolved, output_dir=str(folder))
    return settle_for_gpu(resolved, lowest_capability(processes, device)), started


def resolve_for_dataset(
    config: TrainConfig,
    training: Dataset,
    processes: Processes,
    device: torch.device,
    preflight: PreflightCheck | None,
) -> tuple[TrainConfig, Split]:
    """The rest: the policy's features, what `auto` chooses, the global batch, learning rates and steps."""
    config = replace(config, policy=fit_to_dataset(config.policy, training, config.rename_map))
    if preflight is not None:
        config = preflight.before(config, training, processes, device)
    split = split_batch(config, processes.world_size)
    samples = len(sample_rows(training, config.policy.drop_last_frames))
    config = resolve_lr_factor(resolve_batch(config, split, samples))
    if config.epochs is not None:
        log.info(
            "epochs=%g: %d samples in batches of %d make %d steps",
            *(config.epochs, samples, split.global_batch, config.steps),
        )
    return config, split
