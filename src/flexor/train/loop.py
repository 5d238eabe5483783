"""The training loop, read top to bottom.

`train` opens the run, builds its parts and hands them to `fit`. Whatever happens, the run folder
holds the settings, the metrics so far and complete checkpoints.
"""

from __future__ import annotations

import time
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from tqdm import tqdm

from flexor.config.for_gpu import settle_for_gpu
from flexor.config.schema import TrainConfig
from flexor.core.errors import UNWRITABLE, ConfigError, FlexorError
from flexor.core.log import log, log_file, set_rank
from flexor.core.machine import let_gpu_memory_grow
from flexor.core.run_files import LOG, RUN_CONFIG
from flexor.data.dataset import Dataset
from flexor.data.loader.loader import TROUBLES, Loader, sample_rows
from flexor.data.mixture.entries import absolute_roots
from flexor.monitor.meters import Arithmetic, Meters, as_json
from flexor.monitor.profiler import Profiling
from flexor.monitor.system import Sampler, sampler_for, this_process
from flexor.monitor.system_file import over_hosts
from flexor.monitor.trackers import Trackers, check_trackers
from flexor.policies.fit import fit_to_dataset
from flexor.runs.text import duration_text
from flexor.train.announce import introduce
from flexor.train.build import build_engine, build_loader, build_state, tell_other_names
from flexor.train.checkpoint import folder as checkpoint
from flexor.train.checkpoint.resume import check_same_run, continued_config, newest_checkpoint
from flexor.train.checkpoint.run_folder import Run, default_folder, join_run, restarted_folder
from flexor.train.checkpoint.run_record import describe_dataset, describe_machine, note, read_record
from flexor.train.checkpoint.saver import Saver
from flexor.train.checkpoint.state import TrainState, seed_rng
from flexor.train.compile import CompileTime
from flexor.train.datasets import build_datasets, check_same_episodes, weigh_samples
from flexor.train.diagnose import Diagnosing
from flexor.train.engine.base import check_devices, lowest_capability, pick_device
from flexor.train.graph import GraphStep
from flexor.train.health import Health
from flexor.train.hub.background import Pushing
from flexor.train.ranks.processes import Processes, find_processes
from flexor.train.ranks.split import count_steps, scale_learning_rate, split_batch
from flexor.train.ranks.watchdog import Watchdog
from flexor.train.stopping import Crashed, StopSignal, Watch, stopped
from flexor.train.validate import evaluate, held_out_loss

Resume = Literal["no", "yes", "auto"]  # auto: resume if the run has started


class PreflightCheck(Protocol):
    """Plans the run before it starts, and compares it with the plan afterwards: see `flexor.plan.preflight`."""

    def before(
        self, config: TrainConfig, training: Dataset, processes: Processes, device: torch.device
    ) -> None: ...

    def arithmetic(self, device: torch.device) -> Arithmetic | None: ...

    def planned(self) -> dict[str, float]: ...

    def after(self, metrics: dict[str, Any], device: torch.device) -> dict[str, Any]: ...


@dataclass
class TrainResult:
    """The result of a finished run."""

    folder: Path
    step: int
    checkpoint: Path | None
    metrics: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    main: bool = True  # this process is rank 0
    hub: dict[str, Any] | None = None  # what was pushed where, if anything was to be pushed


def train(config: TrainConfig, resume: Resume = "no", preflight: PreflightCheck | None = None) -> TrainResult:
    """Start or resume a run, as one of its processes."""
    processes = find_processes()
    set_rank(processes.rank, processes.world_size)
    with StopSignal() as stop, Pushing(stop) as pushing:  # the last push comes when the other ranks have left
        try:
            return _take_part(config, resume, processes, stop, preflight, pushing)
        except FlexorError as error:
            processes.say_once(error)
            raise
        except Exception as error:
            if processes.world_size == 1 or getattr(error, "errno", None) in UNWRITABLE:
                raise
            log.exception("rank %d on %s failed", processes.rank, processes.host)
            raise Crashed(repr(error)) from error


def _take_part(
    config: TrainConfig,
    resume: Resume,
    processes: Processes,
    stop: StopSignal,
    preflight: PreflightCheck | None,
    pushing: Pushing,
) -> TrainResult:
    started = time.perf_counter()
    let_gpu_memory_grow()
    device = pick_device(config.policy.device, processes)
    if processes.world_size > 1 or config.parallel.strategy in ("fsdp", "hsdp"):
        processes.join(device, config.parallel.timeout_s, config.parallel.backend)
    with _watchdog(config, processes) as dog:
        check_devices(processes, device, config.parallel.backend)
        config, begun = _settle_folder(config, resume, processes)
        settled = settle_for_gpu(config, lowest_capability(processes, device))
        config.precision, config.channels_last = settled.precision, settled.channels_last
        assert config.output_dir is not None
        processes.share(lambda: check_trackers(config))
        processes.share(lambda: pushing.prepare(config))
        with join_run(processes, Path(config.output_dir), begun) as run:
            found = processes.share(lambda: _find_checkpoint(run, resume == "yes")) if begun else None
            state, loader, held_out = _build(config, found, run, processes, device, preflight)
            arithmetic = preflight.arithmetic(device) if preflight is not None else None
            if processes.is_main:
                pushing.start()
            with (
                log_file(run.folder / LOG) if processes.is_main else nullcontext(),
                closing(loader),
                state.engine.own_stream() if loader.decoded_on_gpu else nullcontext(),
            ):
                result = fit(state, run, loader, held_out, stop, dog, pushing, arithmetic)
            if preflight is not None and processes.is_main:
                figures = preflight.after(result.metrics, device)
                result.metrics |= figures
                note(run.folder, plan=figures)
        processes.barrier()
    result.seconds, result.main = time.perf_counter() - started, processes.is_main
    processes.leave()
    result.hub = pushing.outcome
    return result


def _settle_folder(config: TrainConfig, resume: Resume, processes: Processes) -> tuple[TrainConfig, bool]:
    """The run's folder, and whether a run has already started there. Rank 0 decides."""
    config.job_name = config.job_name or config.policy.type
    config.dataset = absolute_roots(config.dataset)  # a resume may start elsewhere
    restarted = processes.restarts > 0

    def decide() -> tuple[Path, bool]:
        found = restarted_folder(processes.launch) if restarted and not config.output_dir else None
        folder = (
            Path(config.output_dir) if config.output_dir else found or default_folder(str(config.job_name))
        )
        again = resume == "auto" or (resume == "no" and restarted)
        return folder, resume == "yes" or (again and (folder / RUN_CONFIG).is_file())

    folder, begun = processes.share(decide)
    if begun and resume != "yes":
        config = continued_config(folder, config)
    config.output_dir = str(folder)
    return config, begun


def _build(
    config: TrainConfig,
    found: Path | None,
    run: Run,
    processes: Processes,
    device: torch.device,
    preflight: PreflightCheck | None,
) -> tuple[TrainState, Loader, Dataset | None]:
    """The parts of the run, from a checkpoint if one was found."""
    if found is None and config.policy_path is None:
        config.policy.check_untrained()
    elif found is None:
        tell_other_names(config)
    with processes.main_first():  # one process per host downloads or records
        training, held_out = build_datasets(config.dataset)
    check_same_episodes(training, processes)
    # from here on the config alone defines the run
    config.policy = fit_to_dataset(config.policy, training, config.rename_map)
    training = weigh_samples(config, training)
    if preflight is not None:
        preflight.before(config, training, processes, device)
    split = split_batch(config, processes.world_size)
    scale_learning_rate(config)
    count_steps(config, len(sample_rows(training, config.policy.drop_last_frames)))
    engine = build_engine(config, processes, device)
    state = build_state(config, training, engine, split, resuming=found is not None)
    seed_rng(config.seed, processes.rank)
    if found is not None:
        check_same_run(found, config, state.fingerprint, state.preprocessor)
        state.load(found)
        if state.step > config.steps:
            raise ConfigError(
                f"steps={config.steps}, but the run is already at step {state.step}: use a larger value."
            )
    loader = build_loader(config, training, held_out, engine, split)
    if processes.is_main:
        run.forget_metrics_after(state.step)
        run.write_config(config)
        described = {**describe_dataset(training), "decoded_gb": round(loader.decoded_bytes / 1e9, 4)}
        note(run.folder, dataset=described, machine=describe_machine(engine))
        if preflight is not None:
            note(
                run.folder, plan=preflight.planned()
            )  # so that others see how a run that trains compares with it
        run.note_launch(processes.launch)
    processes.barrier()  # other hosts write samples too
    introduce(state, training, held_out, found)
    return state, loader, held_out


def _find_checkpoint(run: Run, must: bool) -> Path | None:
    """The checkpoint to resume from. A run that its launcher restarts before the first checkpoint starts at step 0."""
    if not must and checkpoint.newest(run.checkpoints) is None:
        return None
    return newest_checkpoint(run.folder)


def fit(
    state: TrainState,
    run: Run,
    loader: Loader,
    held_out: Dataset | None,
    stop: StopSignal,
    dog: Watchdog,
    pushing: Pushing,
    arithmetic: Arithmetic | None = None,
) -> TrainResult:
    """Optimizer steps until the last one, or until a signal asks to stop."""
    config, engine = state.config, state.engine
    meters, saver = _meters(state, arithmetic), Saver(state, run, pushing.saved)
    times = state.times = meters.times
    loader.before_copy = times.has_batch
    watch = Watch(run, engine, saver.complete)
    result = TrainResult(run.folder, state.step, saver.newest)
    step = GraphStep(state)
    compiling = CompileTime(state.policy) if config.compile else None
    profiling = Profiling(config.profile, run.folder, engine.device, engine.rank, config.profile_all_ranks)
    health = Health(state, run, loader) if engine.rank == 0 else None
    diagnosing = Diagnosing(config, run.folder, loader, engine.processes)
    state.policy.train()

    with (
        Trackers(config, run.folder, read_record(run.folder).get("id", "run"), engine.rank > 0) as trackers,
        _sampler(state, run) as sampler,
        closing(profiling),
        closing(diagnosing),
        _progress_bar(state) as bar,
        saver,
    ):
        batches = loader.steps(state.step, config.steps)
        stop.stepping = True
        while state.step < config.steps:
            dog.beat(state.step, "reading data")
            profiling.begin(state.step + 1)
            times.waiting()
            micro_batches = next(batches)
            times.begins()

            dog.beat(state.step, "computing")
            loss, norm = step(micro_batches, meters)
            times.queued()
            if compiling:
                compiling.tell()
            state.step += 1
            watch.see(state.step, micro_batches, loss, norm, stop.signal)
            times.mark("rest")
            meters.count_step(loader.global_batch)
            sampler.step = state.step
            if profiling.is_on:
                with dog.patiently("profiling"):
                    profiling.end(state.step)
            saver.check()
            bar.update()

            last, stopping = state.step == config.steps, watch.stopping
            if state.step % config.log_freq == 0 or last:
                watch.check()
                epoch = loader.order.epoch(state.step * loader.global_batch)
                if health:
                    health.look(state.step, micro_batches)
                result.metrics |= _log(
                    state, meters, trackers, bar, epoch, loader, sampler, health, diagnosing
                )
            result.metrics |= _evaluations(state, run, held_out, trackers, dog, health)
            if config.save_checkpoint and (_due(state.step, config.save_freq, last) or stopping):
                watch.check()
                with dog.patiently("saving a checkpoint"), times.part("checkpoint"):
                    saver.save()
                loader.sync()
            if stopping and not last:
                with dog.patiently("saving a checkpoint"):
                    saver.wait()
                raise stopped(stopping, state.step, saver.newest, run, said=engine.rank > 0)
        watch.check()
        dog.rest("finishing")
        saver.wait()
    result.step, result.checkpoint = state.step, saver.newest
    return result


def _evaluations(
    state: TrainState,
    run: Run,
    held_out: Dataset | None,
    trackers: Trackers,
    dog: Watchdog,
    health: Health | None,
) -> dict[str, Any]:
    """The held-out loss and the success in the environment, if they are due at this step."""
    config, found = state.config, dict[str, Any]()
    if held_out is not None and _due(state.step, config.eval_steps, state.step == config.steps):
        with dog.patiently("computing the held-out loss"), state.times.part("evaluation"):
            values = {"held_out_loss": held_out_loss(state, held_out, config.max_eval_samples)}
        found |= _report(state.step, values, trackers, health)
    if config.env.type and _due(state.step, config.env_eval_freq, False):
        with dog.patiently("evaluating"), state.times.part("evaluation"):
            found |= _report(state.step, evaluate(state, run), trackers, health)
    return found


def _due(step: int, every: int, last: bool) -> bool:
    return last or (every > 0 and step % every == 0)


def _log(
    state: TrainState,
    meters: Meters,
    trackers: Trackers,
    bar: Any,
    epoch: float,
    loader: Loader,
    sampler: Sampler,
    health: Health | None,
    diagnosing: Diagnosing,
) -> dict[str, Any]:
    loader.dataset.store.repeats.tell()
    found = state.engine.processes.gather((loader.troubles(), sampler.take()))
    counts = {name: sum(told.get(name, 0) for told, _ in found) for name in TROUBLES}
    counts["skipped_episodes"] = len(loader.dataset.skipped)
    troubles = {name: count for name, count in counts.items() if count}
    values: dict[str, Any] = {
        **meters.report(state.engine, left=state.config.steps - state.step),
        "lr": state.scheduler.get_last_lr()[0],
        "epoch": epoch,
        **troubles,
    }
    if loader.frames_per_sample:
        values["frames_per_s"] = loader.frames_per_sample * values["samples_per_s"]
    system = over_hosts([sampled for _, sampled in found])
    if system:
        values["system"] = system
    seen = loader.seen(state.step)
    if seen:
        values["datasets"] = {name: counts._asdict() for name, counts in seen.items()}
    if health:
        health.see(state.step, values)
    diagnosing.add_to(state.step, values)
    meters.reset()
    trackers.log(state.step, values)
    bar.set_postfix(loss=f"{values['loss']:.3f}", samples_s=f"{values['samples_per_s']:.0f}")
    log.info(
        "step %d  loss %.4f  grad %.2f  lr %.2e  %.1f samples/s  epoch %.2f  data wait %.0f %%%s%s%s%s",
        state.step,
        values["loss"],
        values["grad_norm"],
        values["lr"],
        values["samples_per_s"],
        epoch,
        100 * values["data_wait"],
        f"  GPU busy {100 * values['gpu_busy']:.0f} %" if "gpu_busy" in values else "",
        f"  left {duration_text(values['left_s'])}" if values["left_s"] else "",
        "".join(f"  {name.replace('_', ' ')} {count}" for name, count in troubles.items()),
        "".join(f"  {name} {100 * s.share:.0f} % ({s.epochs:.2f} epochs)" for name, s in seen.items()),
    )
    return as_json(values)


def _report(step: int, values: dict[str, Any], trackers: Trackers, health: Health | None) -> dict[str, Any]:
    log.info("step %d  %s", step, "  ".join(f"{k} {v:.4g}" for k, v in values.items()))
    if health:
        health.see(step, values)
    trackers.log(step, values)
    return values


def _meters(state: TrainState, arithmetic: Arithmetic | None) -> Meters:
    engine = state.engine
    exchanges, host = engine.exchanges_in_backward, engine.processes.host
    return Meters(engine.device, exchanges=exchanges, host=host, arithmetic=arithmetic)


def _sampler(state: TrainState, run: Run) -> Sampler:
    """Samples this host, if this is its first process."""
    processes = state.engine.processes
    me = this_process(processes.host, processes.rank, state.engine.device)
    return sampler_for(me, processes.gather(me), run.folder, state.config.system_every_s, state.step)


def _watchdog(config: TrainConfig, processes: Processes) -> Watchdog:
    where = (processes.rank, processes.world_size, processes.host)
    return Watchdog(*where, processes.store, config.parallel.timeout_s)


def _progress_bar(state: TrainState) -> Any:
    return tqdm(
        total=state.config.steps,
        initial=state.step,
        unit="step",
        dynamic_ncols=True,
        smoothing=0.05,
        disable=None if state.engine.rank == 0 else True,
    )
