"""What a run reports while it trains: its log, metrics, trackers and progress bar, its health and diagnosis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

from tqdm import tqdm

from flexor.core.batch import Batch
from flexor.core.log import log
from flexor.data.loader.loader import PROBLEMS, Loader
from flexor.monitor.meters import Meters, as_json
from flexor.monitor.system import sampler_for, this_process
from flexor.monitor.system_file import over_hosts
from flexor.monitor.trackers import Trackers
from flexor.runs.text import duration_text
from flexor.train.checkpoint.run_folder import Run
from flexor.train.checkpoint.run_record import read_record
from flexor.train.checkpoint.state import TrainState
from flexor.train.diagnose import RunDiagnosis
from flexor.train.health import Health


class RunLog:
    """Of one process; rank 0 writes. Use it as a context manager around the steps."""

    def __init__(self, state: TrainState, run: Run, loader: Loader, meters: Meters):
        config, engine = state.config, state.engine
        self.state, self.loader, self.meters = state, loader, meters
        self.newest: dict[str, Any] = {}
        """The newest value of each metric."""
        self.health = Health(state, run, loader) if engine.rank == 0 else None
        self.diagnosis = RunDiagnosis(config, run.folder, loader, engine.processes)
        name = read_record(run.folder).get("id", "run")
        self.trackers = Trackers(config, run.folder, name, engine.rank > 0)
        processes = engine.processes
        me = this_process(processes.host, processes.rank, engine.device)
        self.sampler = sampler_for(me, processes.gather(me), run.folder, config.system_every_s, state.step)
        options: dict[str, Any] = {"dynamic_ncols": True, "smoothing": 0.05, "unit": "step"}
        hidden = None if engine.rank == 0 else True  # None: without a terminal
        self.bar = tqdm(total=config.steps, initial=state.step, disable=hidden, **options)
        self._open = ExitStack()

    def __enter__(self) -> RunLog:
        with ExitStack() as opening:
            for part in (self.trackers, self.sampler, closing(self.diagnosis), self.bar):
                opening.enter_context(part)
            self._open = opening.pop_all()
        return self

    def __exit__(self, *problem: Any) -> None:
        self._open.__exit__(*problem)

    def count_step(self) -> None:
        self.meters.count_step(self.loader.global_batch)
        self.sampler.step = self.state.step
        self.bar.update()

    def log_steps(self, micro_batches: Sequence[Batch]) -> None:
        """A line about the steps since the last one, of which these batches are the newest."""
        step = self.state.step
        if self.health:
            self.health.check_images(step, micro_batches)
        values, problems = self._values()
        if self.health:
            self.health.check_metrics(step, values)
        self.diagnosis.add_to(step, values)
        self.meters.reset()
        self.trackers.log(step, values)
        self.bar.set_postfix(loss=f"{values['loss']:.3f}", samples_s=f"{values['samples_per_s']:.0f}")
        log.info("step %d  %s", step, _line(values, problems))
        self.newest |= as_json(values)

    def log(self, values: dict[str, Any]) -> None:
        """A line about something else, such as an evaluation."""
        log.info("step %d  %s", self.state.step, "  ".join(f"{k} {v:.4g}" for k, v in values.items()))
        if self.health:
            self.health.check_metrics(self.state.step, values)
        self.trackers.log(self.state.step, values)
        self.newest |= values

    def _values(self) -> tuple[dict[str, Any], dict[str, int]]:
        """The metrics of all ranks, and the counts of problems with the data."""
        state, loader = self.state, self.loader
        loader.dataset.store.repeats.tell()
        ranks = state.engine.processes.gather((loader.problem_counts(), self.sampler.take()))
        problems = {name: sum(counts.get(name, 0) for counts, _ in ranks) for name in PROBLEMS}
        problems["skipped_episodes"] = len(loader.dataset.skipped)
        problems = {name: count for name, count in problems.items() if count}
        values: dict[str, Any] = {
            **self.meters.report(state.engine, steps_left=state.config.steps - state.step),
            "lr": state.scheduler.get_last_lr()[0],
            "epoch": loader.order.epoch(state.step * loader.global_batch),
            **problems,
        }
        if loader.frames_per_sample:
            values["frames_per_s"] = loader.frames_per_sample * values["samples_per_s"]
        if system := over_hosts([samples for _, samples in ranks]):
            values["system"] = system
        if progress := loader.progress(state.step):
            values["datasets"] = {name: counts._asdict() for name, counts in progress.items()}
        return values, problems


def _line(values: Mapping[str, Any], problems: Mapping[str, int]) -> str:
    progress: Mapping[str, Mapping[str, float]] = values.get("datasets", {})
    parts = [
        f"loss {values['loss']:.4f}",
        f"grad {values['grad_norm']:.2f}",
        f"lr {values['lr']:.2e}",
        f"{values['samples_per_s']:.1f} samples/s",
        f"epoch {values['epoch']:.2f}",
        f"data wait {100 * values['data_wait']:.0f} %",
        f"GPU busy {100 * values['gpu_busy']:.0f} %" if "gpu_busy" in values else "",
        f"left {duration_text(values['left_s'])}" if values["left_s"] else "",
        *(f"{name.replace('_', ' ')} {count}" for name, count in problems.items()),
        *(f"{name} {100 * p['share']:.0f} % ({p['epochs']:.2f} epochs)" for name, p in progress.items()),
    ]
    return "  ".join(filter(None, parts))
