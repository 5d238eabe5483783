"""A run that learns while it acts: take a step, here or from an actor on the network, and learn. Read top to bottom."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flexor.config.schema import TrainConfig
from flexor.core.errors import ConfigError, FlexorError
from flexor.core.log import log, log_file, set_rank
from flexor.core.machine import free_memory, gigabytes
from flexor.core.rng import seed_everything
from flexor.core.run_files import LOG
from flexor.data.dataset import Dataset
from flexor.evaluate.play import play
from flexor.evaluate.rollout import PolicyActor, summarize
from flexor.monitor.trackers import Trackers, check_trackers
from flexor.policies import make_policy
from flexor.policies.pretrained import Pretrained, find_folder, load_weights
from flexor.policies.sac.config import SACConfig
from flexor.rl.acting import ActingPolicy
from flexor.rl.buffer import ReplayBuffer
from flexor.rl.checkpoint import load_checkpoint, save_checkpoint
from flexor.rl.collector import Collector
from flexor.rl.demonstrations import demonstration_records
from flexor.rl.environment import fitted, open_env, spec_of, statistics
from flexor.rl.free_running import FreeSource
from flexor.rl.graph import GraphUpdate
from flexor.rl.intervention import make_intervener
from flexor.rl.learner import Figures, Learner
from flexor.rl.measures import Measures, TimedEnv
from flexor.rl.progress import RunProgress
from flexor.rl.records import RecordFile, record_type
from flexor.rl.reward import with_classifier
from flexor.rl.serving import actor_source, save_spec, serving, spec_of_actors
from flexor.rl.sources import READ_AT_ONCE, LocalSource, StepSource
from flexor.train.checkpoint import folder as checkpoint
from flexor.train.checkpoint.run_folder import Run, open_run
from flexor.train.checkpoint.run_record import note, read_record
from flexor.train.datasets import build_datasets
from flexor.train.engine.base import Engine, pick_device
from flexor.train.health import MetricsHealth
from flexor.train.loop import TrainResult
from flexor.train.ranks.processes import Processes, find_processes
from flexor.train.resolve import Resume, resolve_for_machine
from flexor.train.stopping import Diverged, StopSignal, stop_error

RECORDS_FOLDER = "records"


@dataclass
class OnlineRun:
    """The parts of a run."""

    config: TrainConfig
    run: Run
    learner: Learner
    source: StepSource
    pretrained: Pretrained
    file: RecordFile
    measures: Measures


def train_online(config: TrainConfig, resume: Resume = "no") -> TrainResult:
    """Start or resume a run."""
    started_at = time.perf_counter()
    processes = find_processes()
    set_rank(processes.rank, processes.world_size)
    if processes.world_size > 1:
        raise ConfigError(
            f"policy.type={config.policy.type} learns in one process: leave --gpus and --processes out."
        )
    device = pick_device(config.policy.device, processes)
    with StopSignal() as stop:
        config, started = resolve_for_machine(config, resume, processes, device)
        assert config.output_dir is not None
        check_trackers(config)
        with (
            open_run(Path(config.output_dir), started) as run,
            _build(config, run, processes, device) as parts,
            log_file(run.folder / LOG),
        ):
            _log_setup(parts)
            result = _learn(parts, stop)
    result.seconds = time.perf_counter() - started_at
    return result


@contextmanager
def _build(config: TrainConfig, run: Run, processes: Processes, device: torch.device) -> Iterator[OnlineRun]:
    """The parts of the run, with what it recorded before, if it did."""
    Engine(
        device, config.precision, config.deterministic, processes, config.parallel
    )  # how the device computes
    with ExitStack() as stack:
        server = stack.enter_context(serving(config.rl.serve))
        dataset = _demonstrations(config)
        env = None if config.env.type is None else stack.enter_context(closing(_env(config, device)))
        records = run.folder / RECORDS_FOLDER
        spec = spec_of(env) if env is not None else spec_of_actors(records, server)
        policy = config.policy
        assert isinstance(policy, SACConfig)
        policy = fitted(policy, spec)
        policy = replace(policy, dataset_stats=statistics(policy, spec, dataset))
        config = replace(config, policy=policy)
        layout = record_type(policy.observed, len(spec.low))
        demonstrations = np.zeros(0, layout)
        if dataset is not None:
            demonstrations = demonstration_records(dataset, policy.observed, layout, config.rl.reward)
        buffer = _buffer(config, run, layout, demonstrations, device)
        pretrained = _new_policy(config, policy, device)
        learner = Learner(pretrained, buffer, config.rl, config.seed)
        if device.type == "cpu" and not policy.images:
            torch.set_num_threads(1)  # its networks are so small that threads wait for each other
        if buffer.device.type == "cuda" and config.step != "eager":
            learner.compute = GraphUpdate(device)
        run.write_config(config)  # from here on it can be resumed
        file = stack.enter_context(closing(RecordFile(records, layout)))
        save_spec(records, spec)
        note(run.folder, task=spec.task or config.job_name, fps=spec.fps)
        if server is not None:
            measures = Measures(learner)
            source: StepSource = actor_source(server, config, spec, file, learner, pretrained, measures)
        else:
            assert env is not None
            measures = Measures(learner, env)
            intervener = stack.enter_context(closing(make_intervener(config.rl, env)))
            acting = ActingPolicy(pretrained, config.seed)
            collector = Collector(env, acting, intervener, layout, config.seed)
            make_source = LocalSource if config.rl.updates != "max" else FreeSource
            source = make_source(collector, file, learner, measures, config.steps)
        stack.enter_context(closing(source))
        yield OnlineRun(config, run, learner, source, pretrained, file, measures)


def _env(config: TrainConfig, device: torch.device) -> TimedEnv:
    return TimedEnv(with_classifier(open_env(config.env), config.rl, device))


def _demonstrations(config: TrainConfig) -> Dataset | None:
    dataset = config.dataset
    if dataset.repo_id is None and dataset.root is None and dataset.mix is None:
        return None
    return build_datasets(dataset)[0]


def _buffer(
    config: TrainConfig, run: Run, layout: np.dtype[Any], demonstrations: np.ndarray, device: torch.device
) -> ReplayBuffer:
    settings = config.rl
    need = (settings.observations + len(demonstrations)) * layout.itemsize
    storage, file = settings.storage, None
    if storage == "auto":
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
        storage = "cuda" if need <= free / 2 else "cpu"
    if storage == "cuda" and device.type != "cuda":
        raise ConfigError(f"rl.storage=cuda, but the run is on {device}: leave it out.")
    if storage == "cpu" and need > free_memory():
        raise ConfigError(
            f"The buffer takes {gigabytes(need)} of memory, and {gigabytes(free_memory())} are free: choose a smaller "
            "--rl.capacity, or keep it in a file with --rl.storage=file."
        )
    if storage == "file":
        file = run.folder / RECORDS_FOLDER / "buffer"
    where = device if storage == "cuda" else torch.device("cpu")
    return ReplayBuffer(layout, settings.observations, demonstrations, where, file)


def _new_policy(config: TrainConfig, policy: SACConfig, device: torch.device) -> Pretrained:
    assert policy.dataset_stats is not None
    before, after = policy.pipelines(policy.dataset_stats, str(device))
    seed_everything("weights", config.seed)
    module = make_policy(policy)
    if config.policy_path is not None:
        load_weights(module, find_folder(config.policy_path))
    else:
        module.load_backbone()
    return Pretrained(module.to(device), before, after)


def _log_setup(parts: OnlineRun) -> None:
    config, learner = parts.config, parts.learner
    buffer, rl = learner.buffer, config.rl
    steps = len(buffer.demonstrations)
    where = config.env.type or "the environments of its actors"
    log.info("%s in %s on %s, preset %s", config.policy.type, where, learner.device, rl.preset)
    log.info("demonstrations: %d steps of %d episodes", steps, buffer.first_row - steps)
    where = "in a file" if rl.storage == "file" else f"on {buffer.device}"
    log.info("buffer: %d observations, %s, %s", rl.observations, gigabytes(buffer.nbytes()), where)
    log.info("%d steps, %s updates each from step %d on", config.steps, rl.updates, rl.learning_starts)


def _learn(parts: OnlineRun, stop: StopSignal) -> TrainResult:
    config, learner, source, file = parts.config, parts.learner, parts.source, parts.file
    _resume(parts)
    buffer = learner.buffer
    name = read_record(parts.run.folder).get("id", "run")
    parts.run.forget_metrics_after(buffer.transitions)
    figures: Figures | None = None
    last: Path | None = checkpoint.newest(parts.run.checkpoints)
    saved = -1 if last is None else int(last.name)
    with Trackers(config, parts.run.folder, name) as trackers:
        health = MetricsHealth(config, parts.run, buffer.transitions)
        progress = RunProgress(trackers, health, config.steps, buffer.transitions, _samples(learner))
        stop.stepping = True
        while buffer.transitions < config.steps:
            stepped = source.step(lambda: stop.signal is not None)
            step = buffer.transitions
            for episode in source.ended_episodes():
                progress.add_episode(episode)
            figures = source.learn() or figures
            if stepped and (step % config.log_freq == 0 or step == config.steps):
                _check(figures, step)
                measured = parts.measures.report() | source.figures()
                progress.report(step, learner.updates, figures, source.weights_age, measured)
            if stepped and config.env_eval_freq and config.env.type and step % config.env_eval_freq == 0:
                progress.log(step, evaluate(parts))
            due = stepped and config.save_freq > 0 and step % config.save_freq == 0
            stopping = stop.signal is not None and step > 0
            if config.save_checkpoint and step != saved and (due or step == config.steps or stopping):
                file.flush()
                last = save_checkpoint(parts.run, config, learner, parts.pretrained, buffer.count)
                saved = step
            if stop.signal is not None and step < config.steps:
                raise stop_error(stop.signal, step, last, parts.run, log=True)
        metrics = progress.newest
    return TrainResult(parts.run.folder, buffer.transitions, last, metrics)


def _samples(learner: Learner) -> int:
    return learner.settings.batch_size * learner.batches


def _check(figures: Figures | None, step: int) -> None:
    for name, value in (figures or {}).items():
        if not np.isfinite(float(value)):
            raise Diverged(
                f"{name} is {float(value)} at step {step}, so the run stopped. Check the rewards and the observations "
                "for NaN, or lower --rl.critic_lr and --rl.actor_lr."
            )


def _resume(parts: OnlineRun) -> None:
    """Load the newest checkpoint, and go on after the records that it was made from."""
    file, learner = parts.file, parts.learner
    newest = checkpoint.newest(parts.run.checkpoints)
    learned = load_checkpoint(newest, learner) if newest is not None else 0
    if learned > file.count:
        raise FlexorError(
            f"{file.path} has {file.count} records, but {newest} was made from {learned}: restore the file, or remove "
            "that checkpoint."
        )
    for start in range(0, learned, READ_AT_ONCE):
        learner.buffer.extend(file.read(start, min(READ_AT_ONCE, learned - start)))
    parts.source.resume()


def evaluate(parts: OnlineRun) -> dict[str, Any]:
    """Episodes with the policy as it is now, without noise."""
    config, policy = parts.config, parts.learner.policy
    policy.eval()
    summary = summarize(play(PolicyActor(parts.pretrained, config.seed), config.env, config.eval))
    return {f"eval_{name}": value for name, value in asdict(summary).items()}
