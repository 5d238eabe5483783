"""A run plans itself before it starts, lets the plan choose if asked to, and is held against it when it is done."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flexor.config.schema import TrainConfig
from flexor.core.log import log
from flexor.core.machine import free_memory, gigabytes, usable_cores
from flexor.data.dataset import Dataset
from flexor.plan.data.from_dataset import facts_of
from flexor.plan.plan import Host, Plan, make_plan, site_of
from flexor.plan.site.hardware import gpu_here, load_hardware
from flexor.plan.trace.traces import Traces
from flexor.policies.fit import deltas_of
from flexor.train.ranks.processes import Processes

ROOM = 0.95  # of a GPU's memory that the plan may fill when it chooses


class RunPlanner:
    """Plans for the machine that it runs on. The policy's features must be filled in."""

    def __init__(self, config: TrainConfig, training: Dataset, processes: Processes):
        self.hardware = load_hardware()
        gpu = gpu_here(self.hardware)
        assert gpu is not None
        folder = Path(config.output_dir or ".").absolute()
        while not folder.exists():
            folder = folder.parent
        disk = shutil.disk_usage(folder).free
        host = Host(usable_cores(), free_memory(), disk, "this machine")
        nodes = processes.world_size // processes.local_world_size
        self.site = site_of(self.hardware, gpu, processes.local_world_size, nodes, host=host)
        self.data = facts_of(training, list(config.policy.images), deltas_of(config.policy))
        self._traces: dict[tuple[str, bool], Traces] = {}

    def plan(self, config: TrainConfig) -> Plan:
        """Of a run with these settings; batch sizes of the same precision share their traces."""
        traces = self._traces.setdefault((config.precision, config.activation_checkpointing), Traces(config))
        return make_plan(config, self.data, self.site, self.hardware, traces=traces, search=False)


class Preflight:
    """What `flexor.train.loop.train` is given: the plan of a run, before it starts and after it is done."""

    plan: Plan | None = None

    def before(
        self, config: TrainConfig, training: Dataset, processes: Processes, device: torch.device
    ) -> None:
        self.plan = plan_run(config, training, processes, device)

    def after(self, metrics: dict[str, Any], device: torch.device) -> dict[str, Any]:
        return {} if self.plan is None else compare(self.plan, metrics, device)


def plan_run(
    config: TrainConfig, training: Dataset, processes: Processes, device: torch.device
) -> Plan | None:
    """The plan of the run that is about to start, in the log; with `auto` it changes the settings first.

    None where there is nothing to plan for, or where planning failed: that must not stop a run.
    """
    if device.type != "cuda" or not (config.plan or config.auto):
        if config.auto:
            log.info("auto: nothing to choose without a GPU")
        return None
    plan: Plan | None = processes.share(lambda: _planned(config, training, processes))
    if plan is not None and config.auto:
        for name in CHOSEN:
            setattr(config, name, getattr(plan.config, name))
        config.auto = False  # a resume keeps to what was chosen
    return plan


def _planned(config: TrainConfig, training: Dataset, processes: Processes) -> Plan | None:
    try:
        planner = RunPlanner(config, training, processes)
        plan = planner.plan(choose(config, planner) if config.auto else config)
    except Exception as error:
        log.warning(
            "This run could not be planned (%s: %s). It goes on without.", type(error).__name__, error
        )
        return None
    announce(plan)
    return plan


def announce(plan: Plan) -> None:
    step = plan.pace.step
    log.info(
        "planned: %s of the %s's %s, %.0f ms a step (give or take %.0f %%), bound by the %s, %.1f h in all",
        gigabytes(plan.peak),
        plan.site.gpu.name,
        gigabytes(plan.site.gpu.memory),
        1e3 * step.seconds,
        100 * step.spread,
        "data" if plan.data_bound else step.bound,
        plan.pace.hours,
    )
    if not plan.fits:
        log.warning("By the plan this does not fit. `flexor plan` with the same flags says what to change.")
    if plan.data_bound:
        log.warning(
            "By the plan the GPU waits for data: %.0f samples/s come of %.0f wanted. --num_workers=%d would do, of %d "
            "cores here.",
            plan.pace.later.loaded,
            plan.pace.later.wanted,
            plan.pace.later.threads,
            plan.site.host.cores,
        )


def compare(plan: Plan, metrics: dict[str, Any], device: torch.device) -> dict[str, float]:
    """The plan against what happened, in the log and as figures for the summary of the run."""
    memory = torch.cuda.max_memory_allocated(device)
    rate = metrics.get("samples_per_s")
    planned = plan.memory.allocated + plan.frames_on_gpu
    figures: dict[str, float] = {"planned_allocated_bytes": planned, "allocated_bytes": memory}
    bound = " at most" if plan.config.compile else ""
    text = f"memory {gigabytes(planned)} planned{bound}, {gigabytes(memory)} taken"
    if rate:
        actual = plan.split.global_batch / rate * (1 - metrics.get("data_wait", 0.0))
        figures |= {"planned_step_s": plan.pace.step.seconds, "step_s": actual}
        text += f"; a step {1e3 * plan.pace.step.seconds:.0f} ms planned{bound}, {1e3 * actual:.0f} taken"
    log.info("%s", text)
    return figures


# Letting the plan choose. Only what is at its default is chosen.

CHOSEN = (
    "precision",
    "activation_checkpointing",
    "batch_size",
    "gradient_accumulation_steps",
    "global_batch_size",
    "num_workers",
)
DEFAULT = TrainConfig()


def choose(config: TrainConfig, planner: RunPlanner) -> TrainConfig:
    """The fastest way to take the same global batch that fits, with a word on why."""
    config = replace(config)
    if config.precision == DEFAULT.precision and "bf16" in planner.site.gpu.tflops:
        config.precision = "bf16"
        log.info("auto: precision=bf16, which the %s computes fastest in", planner.site.gpu.name)
    config = _fitting(config, planner)
    if config.num_workers == DEFAULT.num_workers:
        plan = planner.plan(config)
        cores = max(1, planner.site.host.cores // planner.site.gpus - 1)
        config.num_workers = max(1, min(plan.pace.first.threads, cores))
        log.info("auto: num_workers=%d, for %.0f samples/s", config.num_workers, plan.pace.first.wanted)
    return config


def _fitting(config: TrainConfig, planner: RunPlanner) -> TrainConfig:
    """The largest passes that fit; blocks are computed again only if not even one sample fits without."""
    share = planner.plan(config).split.share
    sizes = [size for size in range(share, 0, -1) if share % size == 0]
    for recompute in sorted({config.activation_checkpointing, True}):
        for size in sizes:
            tried = replace(
                config,
                batch_size=size,
                gradient_accumulation_steps=None,
                global_batch_size=share * planner.site.world_size,
                activation_checkpointing=recompute,
            )
            plan = planner.plan(tried)
            if plan.peak <= ROOM * planner.site.gpu.memory:
                why = f"{gigabytes(plan.peak)} of {gigabytes(planner.site.gpu.memory)}"
                log.info("auto: batch_size=%d in %d passes, %s", size, plan.split.accumulation, why)
                if recompute and not config.activation_checkpointing:
                    log.info("auto: activation_checkpointing=true, or not one sample would fit")
                return tried
    log.warning("auto: not even one sample fits. `flexor plan` with the same flags says what to change.")
    return config
