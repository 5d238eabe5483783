"""What the planner says about changes that a diagnosis suggests: how much faster, and whether they fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from flexor.config.schema import TrainConfig
from flexor.core.errors import FlexorError
from flexor.core.findings import Finding, Fix
from flexor.plan.data.from_dataset import open_for_plan
from flexor.plan.data.host import Data, Loading, host_memory
from flexor.plan.plan import Plan, Site, make_plan, site_of
from flexor.plan.site.hardware import GPU, Hardware, load_hardware
from flexor.plan.trace.traces import Traces
from flexor.runs.diagnosis.figures import Figures, mapping
from flexor.runs.diagnosis.verdict import WORTH, Diagnosis
from flexor.runs.state import GPU_BOUND
from flexor.train.checkpoint.resume import resumed_config
from flexor.train.ranks.split import split_batch

LAUNCH, EXCHANGE, MEMORY = "host-launch-bound", "communication-bound", "memory-pressure"
IN_RAM = "--dataset.cache.tier=ram"
PLANNED = ("--batch_size", "--step", "--precision")  # what the planner computes
LARGER = (2, 4, 8)  # times the batch size


def add_plan(diagnosis: Diagnosis, figures: Figures, folder: Path) -> str | None:
    """Replace the gains of changes that the planner can compute. Returns why it can't, if so."""
    names = {finding.name for finding in diagnosis.findings}
    steps = figures.on_gpu and names & {LAUNCH, GPU_BOUND, EXCHANGE, MEMORY}
    cached = any(fix.flag == IN_RAM for finding in diagnosis.findings for fix in finding.fixes)
    if not (steps or cached):
        return None
    try:
        config, data = open_for_plan(resumed_config(folder, {}))
    except (FlexorError, OSError) as error:
        return f"the planner can't open the run's dataset, so gains are estimates: {error}"
    for finding in diagnosis.findings:
        finding.fixes = [f for f in finding.fixes if f.flag != IN_RAM or _in_memory(config, data, figures)]
    if not steps:
        return None
    hardware = load_hardware()
    name = str(mapping(figures.record.get("machine")).get("device"))
    gpu = hardware.recognise(name)
    if gpu is None:
        return f"the planner does not know {name}, so gains are estimates"
    try:
        planner = GainPlanner(config, data, gpu, figures.processes, hardware)
        for finding in diagnosis.findings:
            _replace(finding, planner)
    except (FlexorError, NotImplementedError) as error:
        return f"this run can't be planned, so gains are estimates: {error}"
    return None


def _in_memory(config: TrainConfig, data: Data, figures: Figures) -> bool:
    """Whether the host's memory suffices for all frames, besides everything else that the run needs."""
    total = figures.get("system.ram_limit_gb") or figures.get("system.ram_total_gb")
    others_gb = max(figures.of("system.ram_used_gb") - figures.of("system.ram_own_gb"), 0.0)
    ranks, split = figures.processes, split_batch(config, figures.processes)
    passes = (split.batch_size, split.accumulation)
    loading = Loading(*passes, ranks, workers=config.num_workers, tier="ram", gpu=figures.on_gpu)
    need = host_memory(data, loading, config.dataset.cache).total / 1e9
    return total is None or need < total - others_gb


@dataclass
class GainPlanner:
    """Plans of a run with other settings, on the GPUs it has."""

    config: TrainConfig
    data: Data
    gpu: GPU
    gpus: int
    hardware: Hardware

    def __post_init__(self) -> None:
        self.site: Site = site_of(self.hardware, self.gpu, self.gpus)
        self.traces = Traces(self.config)
        self.now = self.plan(self.config, self.traces)

    def plan(self, config: TrainConfig, traces: Traces | None = None) -> Plan:
        return make_plan(config, self.data, self.site, self.hardware, traces=traces, search=False)

    def gain(self, changed: TrainConfig, same_pass: bool = False) -> float | None:
        """Times as many samples per second; None if it does not fit."""
        plan = self.plan(changed, self.traces if same_pass else None)
        if not plan.fits:
            return None
        return _rate(plan) / _rate(self.now)

    def larger_batch(self) -> Fix | None:
        """The batch size that trains on the most samples per second."""
        best: Fix | None = None
        config, split = self.now.config, self.now.split
        for times in LARGER:
            size = times * split.batch_size
            changed = replace(config, batch_size=size, global_batch_size=times * split.global_batch)
            why = "trains on more samples per second; it changes the training"
            least = WORTH * (best.speedup if best and best.speedup else 1.0)
            fix = _fix(why, f"--batch_size={size}", self.gain(changed, same_pass=True), least)
            if fix is None:
                break
            best = fix
        return best

    def graph(self) -> Fix | None:
        if self.config.step != "eager" or not self.now.capturable:
            return None
        gain = self.gain(replace(self.config, step="auto"), same_pass=True)
        return _fix("launches a step as one CUDA graph", "--step=auto", gain)

    def precision(self) -> Fix | None:
        if self.now.config.precision != "no" or "bf16" not in self.gpu.tflops:
            return None
        why = "computes matrix products in bf16; it rounds differently"
        return _fix(why, "--precision=bf16", self.gain(replace(self.config, precision="bf16")))

    def smaller_passes(self) -> Fix | None:
        config, size = self.now.config, self.now.split.batch_size
        if size % 2:
            return None
        total = self.now.split.global_batch
        changed = replace(
            config, batch_size=size // 2, gradient_accumulation_steps=None, global_batch_size=total
        )
        gain = self.gain(changed, same_pass=True)
        return _fix("computes the same step in smaller passes", f"--batch_size={size // 2}", gain, least=0.0)


def _fix(why: str, flag: str, gain: float | None, least: float = WORTH) -> Fix | None:
    return None if gain is None or gain < least else Fix(why, flag, gain, planned=True)


def _rate(plan: Plan) -> float:
    return plan.split.global_batch / plan.run_time.step.seconds


def _replace(finding: Finding, planner: GainPlanner) -> None:
    """Changes with the planner's gains instead of estimates; others stay."""
    kinds = {
        LAUNCH: (planner.graph, planner.larger_batch),
        GPU_BOUND: (planner.precision, planner.larger_batch, planner.graph),
        EXCHANGE: (planner.larger_batch,),
        MEMORY: (planner.smaller_passes,),
    }.get(finding.name, ())
    estimated = [fix for fix in finding.fixes if (fix.flag or "").startswith(PLANNED)]
    if not kinds or (finding.name == MEMORY and not estimated):  # or it is about the host's memory
        return
    planned = [fix for make in kinds if (fix := make()) is not None]
    rest = [fix for fix in finding.fixes if fix not in estimated]
    finding.fixes = sorted(planned, key=lambda fix: -(fix.speedup or 0.0)) + rest
