"""What a run says of itself while it trains: its log, metrics, trackers and progress bar, its health and diagnosis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

from tqdm import tqdm

from flexor.core.batch import Batch
from flexor.core.log import log
from flexor.data.loader.loader import PROBLEMS, Loader
from flexor.monitor.meters import Meters, as_json
from flexor.monitor.system import Sampler, sampler_for, this_process
from flexor.monitor.system_file import over_hosts
from flexor.monitor.trackers import Trackers
from flexor.runs.text import duration_text
from flexor.train.checkpoint.run_folder import Run
from flexor.train.checkpoint.run_record import read_record
from flexor.train.checkpoint.state import TrainState
from flexor.train.diagnose import Diagnosing
from flexor.train.health import Health


class RunLog:
    """Of one process; rank 0 writes. Use it as a context manager around the steps."""

    def __init__(self, state: TrainState, run: Run, loader: Loader, meters: Meters):
        config, engine = state.config, state.engine
        self.state, self.loader, self.meters = state, loader, meters
        self.newest: dict[str, Any] = {}
        """The newest value of everything that was told."""
        self.health = Health(state, run, loader) if engine.rank == 0 else None
        self.diagnosing = Diagnosing(config, run.folder, loader, engine.processes)
        name = read_record(run.folder).get("id", "run")
        self.trackers = Trackers(config, run.folder, name, engine.rank > 0)
        self.sampler = _sampler(state, run)
        self.bar = _progress_bar(state)
        self._open = ExitStack()

    def __enter__(self) -> RunLog:
        with ExitStack() as opening:
            for part in (self.trackers, self.sampler, closing(self.diagnosing), self.bar):
                opening.enter_context(part)
            self._open = opening.pop_all()
        return self

    def __exit__(self, *problem: Any) -> None:
        self._open.__exit__(*problem)

    def count_step(self) -> None:
        self.sampler.step = self.state.step
        self.bar.update()

    def tell_steps(self, micro_batches: Sequence[Batch]) -> None:
        """A line about the steps since the last one, of which these batches are the newest."""
        step = self.state.step
        if self.health:
            self.health.look(step, micro_batches)
        values, troubles = self._values()
        if self.health:
            self.health.see(step, values)
        self.diagnosing.add_to(step, values)
        self.meters.reset()
        self.trackers.log(step, values)
        self.bar.set_postfix(loss=f"{values['loss']:.3f}", samples_s=f"{values['samples_per_s']:.0f}")
        log.info("step %d  %s", step, _line(values, troubles))
        self.newest |= as_json(values)

    def tell(self, values: dict[str, Any]) -> None:
        """A line about something else, such as an evaluation."""
        log.info("step %d  %s", self.state.step, "  ".join(f"{k} {v:.4g}" for k, v in values.items()))
        if self.health:
            self.health.see(self.state.step, values)
        self.trackers.log(self.state.step, values)
        self.newest |= values

    def _values(self) -> tuple[dict[str, Any], dict[str, int]]:
        """Of all ranks, and what went wrong with the data."""
        state, loader = self.state, self.loader
        loader.dataset.store.repeats.tell()
        found = state.engine.processes.gather((loader.problem_counts(), self.sampler.take()))
        counts = {name: sum(told.get(name, 0) for told, _ in found) for name in PROBLEMS}
        counts["skipped_episodes"] = len(loader.dataset.skipped)
        troubles = {name: count for name, count in counts.items() if count}
        values: dict[str, Any] = {
            **self.meters.report(state.engine, steps_left=state.config.steps - state.step),
            "lr": state.scheduler.get_last_lr()[0],
            "epoch": loader.order.epoch(state.step * loader.global_batch),
            **troubles,
        }
        if loader.frames_per_sample:
            values["frames_per_s"] = loader.frames_per_sample * values["samples_per_s"]
        system = over_hosts([sampled for _, sampled in found])
        if system:
            values["system"] = system
        seen = loader.progress(state.step)
        if seen:
            values["datasets"] = {name: counts._asdict() for name, counts in seen.items()}
        return values, troubles


def _line(values: Mapping[str, Any], troubles: Mapping[str, int]) -> str:
    seen: Mapping[str, Mapping[str, float]] = values.get("datasets", {})
    parts = [
        f"loss {values['loss']:.4f}",
        f"grad {values['grad_norm']:.2f}",
        f"lr {values['lr']:.2e}",
        f"{values['samples_per_s']:.1f} samples/s",
        f"epoch {values['epoch']:.2f}",
        f"data wait {100 * values['data_wait']:.0f} %",
        f"GPU busy {100 * values['gpu_busy']:.0f} %" if "gpu_busy" in values else "",
        f"left {duration_text(values['left_s'])}" if values["left_s"] else "",
        *(f"{name.replace('_', ' ')} {count}" for name, count in troubles.items()),
        *(f"{name} {100 * s['share']:.0f} % ({s['epochs']:.2f} epochs)" for name, s in seen.items()),
    ]
    return "  ".join(filter(None, parts))


def _sampler(state: TrainState, run: Run) -> Sampler:
    """Samples this host, if this is its first process."""
    processes = state.engine.processes
    me = this_process(processes.host, processes.rank, state.engine.device)
    return sampler_for(me, processes.gather(me), run.folder, state.config.system_every_s, state.step)


def _progress_bar(state: TrainState) -> Any:
    return tqdm(
        total=state.config.steps,
        initial=state.step,
        unit="step",
        dynamic_ncols=True,
        smoothing=0.05,
        disable=None if state.engine.rank == 0 else True,
    )
