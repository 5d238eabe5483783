"""Plan a run before it starts, choose settings if `auto` is set, and compare the run with the plan at the end."""

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
from flexor.monitor.meters import Arithmetic
from flexor.plan.data.from_dataset import facts_of
from flexor.plan.plan import Host, Plan, make_plan, site_of
from flexor.plan.site.hardware import gpu_here, load_hardware
from flexor.plan.speed.ceilings import ceiling_of_run
from flexor.plan.trace.traces import Traces
from flexor.policies.fit import sample_of
from flexor.train.ranks.processes import Processes

ROOM = 0.95  # share of a GPU's memory that `auto` may fill


class RunPlanner:
    """Plans for this machine. The policy's features must be filled in."""

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
        self.data = facts_of(training, *sample_of(config.policy, config.rename_map))
        self._traces: dict[bool, Traces] = {}

    def plan(self, config: TrainConfig) -> Plan:
        """The plan of a run with these settings. All batch sizes share their traces."""
        traces = self._traces.setdefault(config.activation_checkpointing, Traces(config))
        return make_plan(config, self.data, self.site, self.hardware, traces=traces, search=False)


class Preflight:
    """Passed to `flexor.train.loop.train`: plans a run before it starts, and compares afterwards."""

    plan: Plan | None = None

    def before(
        self, config: TrainConfig, training: Dataset, processes: Processes, device: torch.device
    ) -> TrainConfig:
        """The settings of the run: those given, or with `auto` those that the plan chose."""
        self.plan = plan_run(config, training, processes, device)
        return config if self.plan is None else with_chosen(config, self.plan)

    def arithmetic(self, device: torch.device) -> Arithmetic | None:
        if self.plan is None:
            return None
        return Arithmetic(self.plan.run_time.step.flops, ceiling_of_run(device, self.plan.config.precision))

    def planned(self) -> dict[str, float]:
        return {} if self.plan is None else planned_figures(self.plan)

    def after(self, metrics: dict[str, Any], device: torch.device) -> dict[str, Any]:
        return {} if self.plan is None else compare(self.plan, metrics, device)


def plan_run(
    config: TrainConfig, training: Dataset, processes: Processes, device: torch.device
) -> Plan | None:
    """Plan the run that is about to start, with the settings that `auto` chooses, and log the plan.

    None if there is no GPU, if planning is off, or if planning failed: that must not stop a run.
    """
    if device.type != "cuda" or not (config.plan or config.auto):
        if config.auto:
            log.info("auto: no settings are chosen, because the run uses no GPU")
        return None
    plan: Plan | None = processes.share(lambda: _planned(config, training, processes))
    return plan


def with_chosen(config: TrainConfig, plan: Plan) -> TrainConfig:
    """The settings that the plan chose, if `auto` asks for it. A resumed run keeps them."""
    if not config.auto:
        return config
    return replace(config, auto=False, **{name: getattr(plan.config, name) for name in AUTOMATIC})


def _planned(config: TrainConfig, training: Dataset, processes: Processes) -> Plan | None:
    try:
        planner = RunPlanner(config, training, processes)
        plan = planner.plan(choose(config, planner) if config.auto else config)
    except Exception as error:
        log.warning(
            "This run could not be planned (%s: %s). It continues without a plan.",
            type(error).__name__,
            error,
        )
        return None
    announce(plan)
    return plan


def announce(plan: Plan) -> None:
    step = plan.run_time.step
    log.info(
        "planned: peak memory %s of the %s's %s, %.0f ms per step (+-%.0f %%), bottleneck: %s, %.1f h in total",
        gigabytes(plan.peak),
        plan.site.gpu.name,
        gigabytes(plan.site.gpu.memory),
        1e3 * step.seconds,
        100 * step.spread,
        "data" if plan.data_bound else step.bound,
        plan.run_time.hours,
    )
    if not plan.fits:
        log.warning(
            "According to the plan, this run does not fit in GPU memory. `flexor plan` with the same flags suggests "
            "changes."
        )
    if plan.data_bound:
        log.warning(
            "According to the plan, data loading is the bottleneck: it delivers %.0f samples/s, and the training could "
            "use %.0f. That requires %d loading threads in total (--num_workers is per GPU); this host has %d cores.",
            plan.run_time.later.loaded,
            plan.run_time.later.demand,
            plan.run_time.later.threads,
            plan.site.host.cores,
        )


def planned_figures(plan: Plan) -> dict[str, float]:
    """What a run's record says before anything is measured."""
    return {
        "planned_allocated_bytes": plan.memory.allocated + plan.frames_on_gpu,
        "planned_step_s": plan.run_time.step.seconds,
        "planned_run_s": 3600 * plan.run_time.hours,
    }


def compare(plan: Plan, metrics: dict[str, Any], device: torch.device) -> dict[str, float]:
    """Compare the plan with the measured values: log them, and return them for the summary of the run."""
    memory = torch.cuda.max_memory_allocated(device)
    rate = metrics.get("samples_per_s")
    figures = planned_figures(plan) | {"allocated_bytes": memory}
    planned = plan.memory.allocated + plan.frames_on_gpu
    bound = " at most" if plan.config.compile else ""
    text = f"peak memory: {gigabytes(planned)} planned{bound}, {gigabytes(memory)} measured"
    if rate:
        actual = plan.split.global_batch / rate * (1 - metrics.get("data_wait", 0.0))
        figures["step_s"] = actual
        text += f"; step time: {1e3 * plan.run_time.step.seconds:.0f} ms planned{bound}, {1e3 * actual:.0f} ms measured"
    log.info("%s", text)
    return figures


# `auto`: the plan chooses settings; num_workers only if it has its default value.

AUTOMATIC = (
    "activation_checkpointing",
    "batch_size",
    "gradient_accumulation_steps",
    "global_batch_size",
    "num_workers",
)
DEFAULT = TrainConfig()


def choose(config: TrainConfig, planner: RunPlanner) -> TrainConfig:
    """The fastest settings that fit, with the same global batch size. Logs the reason of each choice."""
    config = _fitting(config, planner)
    if config.num_workers == DEFAULT.num_workers:
        plan = planner.plan(config)
        gpus = planner.site.gpus
        cores = max(1, planner.site.host.cores // gpus - 1)
        each = -(-plan.run_time.first.threads // gpus)  # the plan counts the threads of all ranks
        config = replace(config, num_workers=max(1, min(each, cores)))
        log.info(
            "auto: num_workers=%d per rank, to load %.0f samples/s in all",
            *(config.num_workers, plan.run_time.first.demand),
        )
    return config


def _fitting(config: TrainConfig, planner: RunPlanner) -> TrainConfig:
    """The largest passes that fit. Activation checkpointing is used only if not even one sample fits without it."""
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
                why = f"peak memory {gigabytes(plan.peak)} of {gigabytes(planner.site.gpu.memory)}"
                log.info(
                    "auto: batch_size=%d with %d passes per step, %s", size, plan.split.accumulation, why
                )
                if recompute and not config.activation_checkpointing:
                    log.info(
                        "auto: activation_checkpointing=true, because not even one sample fits without it"
                    )
                return tried
    log.warning("auto: not even one sample fits. `flexor plan` with the same flags suggests changes.")
    return config
