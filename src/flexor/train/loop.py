"""The training loop, read top to bottom.

`train` loads the data, resolves the settings, builds the parts of the run and hands them to `fit`. Whatever happens,
the run folder holds the settings, the metrics so far and complete checkpoints.
"""

from __future__ import annotations

import time
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flexor.config.parse import flatten
from flexor.config.schema import SHARDED, TrainConfig
from flexor.core.errors import UNWRITABLE, ConfigError, FlexorError
from flexor.core.log import log, log_file, set_rank
from flexor.core.machine import let_gpu_memory_grow
from flexor.core.run_files import LOG
from flexor.core.typed import with_settings
from flexor.data.check.summary import summarise_data
from flexor.data.dataset import Dataset
from flexor.data.identity import identify
from flexor.data.loader.loader import Loader
from flexor.evaluate.envs import check_env
from flexor.monitor.meters import Arithmetic, Meters
from flexor.monitor.profiler import Profiling
from flexor.monitor.trackers import check_trackers
from flexor.policies.rename import in_dataset
from flexor.train.announce import log_setup
from flexor.train.build import (
    build_engine,
    build_loader,
    build_state,
    mention_other_steps,
    mention_rename_map,
)
from flexor.train.checkpoint import folder as checkpoint
from flexor.train.checkpoint.resume import check_same_run, keep_statistics, newest_checkpoint
from flexor.train.checkpoint.run_folder import Run, join_run
from flexor.train.checkpoint.run_record import describe_dataset, describe_machine, note, note_data_files
from flexor.train.checkpoint.saver import Saver
from flexor.train.checkpoint.state import TrainState, seed_rng
from flexor.train.compile import CompileTime
from flexor.train.datasets import build_datasets, weigh_samples
from flexor.train.disk_space import check_disk_space
from flexor.train.engine.base import Engine, check_devices, pick_device
from flexor.train.graph import GraphStep
from flexor.train.hub.background import Pusher
from flexor.train.ranks.agreement import (
    check_same_dataset,
    check_same_files,
    check_same_program,
    check_same_settings,
)
from flexor.train.ranks.processes import Processes, find_processes
from flexor.train.ranks.split import Split
from flexor.train.ranks.watchdog import Watchdog
from flexor.train.resolve import PreflightCheck, Resume, resolve_for_dataset, resolve_for_machine
from flexor.train.run_log import RunLog
from flexor.train.stopping import Crashed, StopConditions, StopSignal, stop_error
from flexor.train.validate import evaluate, held_out_loss


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
    with StopSignal() as stop, Pusher(stop) as pusher:  # the last push comes when the other ranks have left
        try:
            return _take_part(config, resume, processes, stop, preflight, pusher)
        except FlexorError as error:
            processes.report_once(error)
            raise
        except Exception as error:
            if processes.world_size == 1 or getattr(error, "errno", None) in UNWRITABLE:
                raise
            log.exception("rank %d on %s failed", processes.rank, processes.host)
            raise Crashed(repr(error)) from error
        finally:
            if processes.world_size == 1:
                processes.leave()  # after an error too: the next run in this process joins anew


def _take_part(
    config: TrainConfig,
    resume: Resume,
    processes: Processes,
    stop: StopSignal,
    preflight: PreflightCheck | None,
    pusher: Pusher,
) -> TrainResult:
    started_at = time.perf_counter()
    let_gpu_memory_grow()
    device = pick_device(config.policy.device, processes)
    if processes.world_size > 1 or config.parallel.strategy in SHARDED:
        processes.join(device, config.parallel.timeout_s, config.parallel.backend)
        check_same_program(processes)
    hosts = processes.hosts or [processes.host]
    with Watchdog(processes.rank, hosts, processes.store, config.parallel.timeout_s) as watchdog:
        check_same_settings(processes, flatten(config.to_saved()))
        check_devices(processes, device, config.parallel.backend)
        config, started = resolve_for_machine(config, resume, processes, device)
        assert config.output_dir is not None
        processes.share(lambda: check_trackers(config))
        processes.share(lambda: pusher.prepare(config))
        with join_run(processes, Path(config.output_dir), started) as run:
            newest = processes.share(lambda: _find_checkpoint(run, resume == "yes")) if started else None
            training, held_out = _open_data(config, processes, resuming=newest is not None)
            config, split = resolve_for_dataset(config, training, processes, device, preflight)
            engine = build_engine(config, processes, device)
            state, loader = _build(config, split, engine, training, held_out, newest)
            if processes.is_main:
                _write_record(run, state, loader, {} if preflight is None else {"plan": preflight.planned()})
            processes.share(lambda: check_disk_space(state, run))  # and other hosts write samples too
            log_setup(state, loader.dataset, held_out, newest)
            arithmetic = preflight.arithmetic(device) if preflight is not None else None
            if processes.is_main:
                pusher.start()
            with (
                log_file(run.folder / LOG) if processes.is_main else nullcontext(),
                closing(loader),
                engine.side_stream() if loader.decoded_on_gpu else nullcontext(),
            ):
                result = fit(state, run, loader, held_out, stop, watchdog, pusher, arithmetic)
            if preflight is not None and processes.is_main:
                figures = preflight.after(result.metrics, device)
                result.metrics |= figures
                note(run.folder, plan=figures)
        processes.barrier()
    result.seconds, result.main = time.perf_counter() - started_at, processes.is_main
    processes.leave()
    result.hub = pusher.outcome
    return result


def _open_data(config: TrainConfig, processes: Processes, resuming: bool) -> tuple[Dataset, Dataset | None]:
    """The episodes to train on, and those held out."""
    if config.env.type and config.env_eval_freq:
        check_env(config.env.type, config.env.task, config.env.package)  # not hours later
    if not resuming and config.policy_path is None:
        config.policy.check_untrained()
    elif not resuming:
        mention_rename_map(config)
        mention_other_steps(config)
    with processes.main_first():  # one process per host downloads or records
        training, held_out = build_datasets(config.dataset)
    check_same_dataset(processes, training)
    return training, held_out


def _build(
    config: TrainConfig,
    split: Split,
    engine: Engine,
    training: Dataset,
    held_out: Dataset | None,
    newest: Path | None,
) -> tuple[TrainState, Loader]:
    """The parts of the run, from a checkpoint if there is one."""
    training = weigh_samples(config, training)
    state = build_state(config, training, engine, split, resuming=newest is not None)
    with engine.processes.main_first():  # one process per host reads the files, the others what it remembers
        state.identity = identify(training)
    check_same_files(engine.processes, state.identity)
    if engine.processes.is_main:
        config = state.config
        names = in_dataset(config.policy.observed, config.rename_map)
        state.data_summary = summarise_data(training, dict(zip(names, config.policy.observed)))
    seed_rng(config.seed, engine.rank)
    if newest is not None:
        check_same_run(newest, state)
        keep_statistics(newest, state)
        state.load(newest)
        if state.step > config.steps:
            raise ConfigError(
                f"steps={config.steps}, but the run is already at step {state.step}: use a larger value."
            )
    loader = build_loader(state, training, held_out)
    # the pool, and with it the order, depends on the memory that is left
    state.config = with_settings(config, {"dataset.order": loader.order_config})
    return state, loader


def _write_record(run: Run, state: TrainState, loader: Loader, plan: dict[str, Any]) -> None:
    """Write to the run's folder, before the first step: its settings, data and machine, and its plan if it has one."""
    assert state.identity is not None
    run.forget_metrics_after(state.step)
    run.write_config(state.config)
    described = {**describe_dataset(loader.dataset), "decoded_gb": round(loader.decoded_bytes / 1e9, 4)}
    note_data_files(run.folder, state.identity)
    note(run.folder, dataset=described, machine=describe_machine(state.engine), **plan)
    run.note_launch(state.engine.processes.launch)


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
    watchdog: Watchdog,
    pusher: Pusher,
    arithmetic: Arithmetic | None = None,
) -> TrainResult:
    """Optimizer steps until the last one, or until a signal asks to stop."""
    config, engine = state.config, state.engine
    meters, saver = _meters(state, loader, arithmetic), Saver(state, run, pusher.saved)
    step, times = GraphStep(state), meters.times
    conditions = StopConditions(run, engine, saver.complete)
    compiling = CompileTime(state.policy) if config.compile else None
    profiling = Profiling(config.profile, run.folder, engine.device, engine.rank, config.profile_all_ranks)
    state.policy.train()

    with RunLog(state, run, loader, meters) as run_log, closing(profiling), closing(step), saver:
        batches = loader.steps(state.step, config.steps)
        stop.stepping = True
        while state.step < config.steps:
            watchdog.beat(state.step, "reading data")
            profiling.begin(state.step + 1)
            times.waiting()
            micro_batches = next(batches)
            times.begins()

            watchdog.beat(state.step, "computing")
            loss, norm = step(micro_batches, meters)
            times.queued()
            if compiling and compiling.log():
                meters.leave_out_step()
            state.step += 1
            conditions.add_step(state.step, micro_batches, loss, norm, stop.signal)
            times.mark("rest")
            run_log.count_step()
            if profiling.is_on:
                with watchdog.without_limit("profiling"):
                    profiling.end(state.step)
            saver.check()

            last, stopping = state.step == config.steps, conditions.stopping
            if _due(state.step, config.log_freq, last):
                conditions.check()
                run_log.log_steps(micro_batches)
            _evaluate(state, run, held_out, run_log, watchdog)
            if config.save_checkpoint and (_due(state.step, config.save_freq, last) or stopping):
                conditions.check()
                _save(saver, loader, watchdog)
            if stopping:
                break
        conditions.check()
        watchdog.lift_limit("finishing")
        saver.wait()
        if state.step < config.steps and conditions.stopping:
            raise stop_error(conditions.stopping, state.step, saver.newest, run, log=engine.rank == 0)
    return TrainResult(run.folder, state.step, saver.newest, run_log.newest)


def _save(saver: Saver, loader: Loader, watchdog: Watchdog) -> None:
    with watchdog.without_limit("saving a checkpoint"), saver.state.times.part("checkpoint"):
        saver.save()
    loader.sync()


def _evaluate(
    state: TrainState, run: Run, held_out: Dataset | None, run_log: RunLog, watchdog: Watchdog
) -> None:
    """The held-out loss and the success in the environment, if they are due at this step."""
    config = state.config
    if held_out is not None and _due(state.step, config.eval_steps, state.step == config.steps):
        with watchdog.without_limit("computing the held-out loss"), state.times.part("evaluation"):
            losses = held_out_loss(state, held_out, config.max_eval_samples)
        run_log.log(losses)
    if config.env.type and _due(state.step, config.env_eval_freq, False):
        with watchdog.without_limit("evaluating"), state.times.part("evaluation"):
            run_log.log(evaluate(state, run))


def _due(step: int, every: int, last: bool) -> bool:
    return last or (every > 0 and step % every == 0)


def _meters(state: TrainState, loader: Loader, arithmetic: Arithmetic | None) -> Meters:
    engine = state.engine
    exchanges, host = engine.exchanges_in_backward, engine.processes.host
    meters = Meters(engine.device, exchanges=exchanges, host=host, arithmetic=arithmetic)
    state.times, loader.before_copy = meters.times, meters.times.has_batch
    return meters
