"""A run that learns while it acts, in one process: collect a step, record it, learn, read top to bottom."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
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
from flexor.evaluate.rollout import PolicyActor, summarize, task_of
from flexor.monitor.trackers import Trackers, check_trackers
from flexor.policies import make_policy
from flexor.policies.pretrained import Pretrained, find_folder, load_weights
from flexor.policies.sac.config import SACConfig
from flexor.rl.buffer import ReplayBuffer
from flexor.rl.checkpoint import load_checkpoint, save_checkpoint
from flexor.rl.collector import Collector, EpisodeSummary
from flexor.rl.demonstrations import demonstration_records
from flexor.rl.environment import fitted, open_env, statistics
from flexor.rl.free_running import FreeSource
from flexor.rl.graph import GraphUpdate
from flexor.rl.intervention import make_intervener
from flexor.rl.learner import Figures, Learner
from flexor.rl.measures import Measures, TimedEnv
from flexor.rl.progress import RunProgress
from flexor.rl.records import RecordFile, record_type
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
READ_AT_ONCE = 1024  # records
DEFAULT_FPS = 10.0  # of an environment that does not say


@dataclass
class OnlineRun:
    """The parts of a run."""

    config: TrainConfig
    run: Run
    learner: Learner
    collector: Collector
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
    dataset = _demonstrations(config)
    with closing(TimedEnv(open_env(config.env))) as env:
        policy = config.policy
        assert isinstance(policy, SACConfig)
        policy = fitted(policy, env)
        policy = replace(policy, dataset_stats=statistics(policy, env, dataset))
        config = replace(config, policy=policy)
        layout = record_type(policy.observed, env.action_space.shape[0])  # type: ignore[index]
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
        intervener = make_intervener(config.rl.intervener, env)
        collector = Collector(env, pretrained, intervener, layout, config.seed)
        with closing(RecordFile(run.folder / RECORDS_FOLDER, layout)) as file:
            run.write_config(config)
            fps = float(env.metadata.get("render_fps") or DEFAULT_FPS)
            note(run.folder, task=task_of(env) or config.job_name, fps=fps)
            measures = Measures(learner, env)
            yield OnlineRun(config, run, learner, collector, pretrained, file, measures)


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
    log.info("%s in %s on %s, preset %s", config.policy.type, config.env.type, learner.device, rl.preset)
    log.info("demonstrations: %d steps of %d episodes", steps, buffer.first_row - steps)
    where = "in a file" if rl.storage == "file" else f"on {buffer.device}"
    log.info("buffer: %d observations, %s, %s", rl.observations, gigabytes(buffer.nbytes()), where)
    log.info("%d steps, %s updates each from step %d on", config.steps, rl.updates, rl.learning_starts)


def _learn(parts: OnlineRun, stop: StopSignal) -> TrainResult:
    config, learner, file = parts.config, parts.learner, parts.file
    _resume(parts)
    buffer = learner.buffer
    name = read_record(parts.run.folder).get("id", "run")
    parts.run.forget_metrics_after(buffer.transitions)
    figures: Figures | None = None
    last: Path | None = checkpoint.newest(parts.run.checkpoints)
    with Trackers(config, parts.run.folder, name) as trackers, _free(parts) as free:
        health = MetricsHealth(config, parts.run, buffer.transitions)
        progress = RunProgress(trackers, health, config.steps, buffer.transitions, _samples(learner))
        stop.stepping = True
        while buffer.transitions < config.steps:
            if free is None:
                stepped, ended, age = True, _step(parts), float(config.rl.updates)
                figures = learner.learn() or figures
            else:
                stepped = free.step(lambda: stop.signal is not None)
                ended, age = free.ended_episodes(), free.weights_age
                figures = free.learn() or figures
            for episode in ended:
                progress.add_episode(episode)
            if not (stepped or stop.signal is not None):
                continue
            step = buffer.transitions
            if step % config.log_freq == 0 or step == config.steps:
                _check(figures, step)
                progress.report(step, learner.updates, figures, age, parts.measures.report())
            if config.env_eval_freq and step % config.env_eval_freq == 0:
                progress.log(step, evaluate(parts))
            due = config.save_freq > 0 and step % config.save_freq == 0
            if config.save_checkpoint and (due or step == config.steps or stop.signal is not None):
                file.flush()
                last = save_checkpoint(parts.run, config, learner, parts.pretrained, buffer.count)
            if stop.signal is not None and step < config.steps:
                raise stop_error(stop.signal, step, last, parts.run, log=True)
        metrics = progress.newest
    return TrainResult(parts.run.folder, buffer.transitions, last, metrics)


def _samples(learner: Learner) -> int:
    return learner.settings.batch_size * learner.batches


@contextmanager
def _free(parts: OnlineRun) -> Iterator[FreeSource | None]:
    """The thread that collects, if it does not wait for the learner."""
    if parts.config.rl.updates != "max":
        yield None
        return
    with closing(FreeSource(parts.collector, parts.file, parts.learner, parts.config.steps)) as free:
        free.record_added = parts.measures.add
        free.start()
        yield free


def _step(parts: OnlineRun) -> list[EpisodeSummary]:
    """One step here. The episode, if it ended."""
    collector, learner = parts.collector, parts.learner
    if collector.episode.ended:
        _record(parts, collector.begin(collector.episode.number + 1))
    _record(parts, collector.step(learner.buffer.transitions, learner.updates))
    if not collector.episode.ended:
        return []
    parts.file.flush()
    return [collector.episode]


def _record(parts: OnlineRun, record: np.ndarray) -> None:
    """To the file first: what was learned from is there."""
    parts.file.append(record)
    parts.learner.buffer.extend(record)
    parts.measures.add(record)


def _check(figures: Figures | None, step: int) -> None:
    for name, value in (figures or {}).items():
        if not np.isfinite(float(value)):
            raise Diverged(
                f"{name} is {float(value)} at step {step}, so the run stopped. Check the rewards and the observations "
                "for NaN, or lower --rl.critic_lr and --rl.actor_lr."
            )


def _resume(parts: OnlineRun) -> None:
    """Load the newest checkpoint, learn again from what was recorded after it, and go on where the robot was."""
    file, learner = parts.file, parts.learner
    newest = checkpoint.newest(parts.run.checkpoints)
    if not file.count:
        return
    learned = load_checkpoint(newest, learner) if newest is not None else 0
    if learned > file.count:
        raise FlexorError(
            f"{file.path} has {file.count} records, but {newest} was made from {learned}: restore the file, or remove "
            "that checkpoint."
        )
    updates = learner.updates
    for start in range(0, learned, READ_AT_ONCE):
        learner.buffer.extend(file.read(start, min(READ_AT_ONCE, learned - start)))
    for place in range(learned, file.count):
        record = file.read(place, 1)
        learner.buffer.extend(record)
        if record["is_step"][0] and parts.config.rl.updates != "max":
            learner.learn()
    log.info(
        "read %d records; updates %d to %d were repeated from those after the newest checkpoint",
        *(file.count, updates, learner.updates),
    )
    _resume_episode(parts)


def _resume_episode(parts: OnlineRun) -> None:
    """Go on in the episode that was cut off, if the environment can be brought back to where it was."""
    file, collector = parts.file, parts.collector
    kinds = np.concatenate(
        [
            file.read(start, min(READ_AT_ONCE, file.count - start))["is_step"]
            for start in range(0, file.count, READ_AT_ONCE)
        ]
    )
    firsts = np.flatnonzero(kinds == 0)
    number, records = len(firsts) - 1, file.read(int(firsts[-1]), file.count - int(firsts[-1]))
    if records["terminated"][-1] or records["truncated"][-1]:
        collector.episode.number = number
        return
    if not collector.repeat(records, number):
        log.info(
            "episode %d was cut off, and the environment does not repeat it: the next one begins", number
        )
        collector.episode.number, collector.episode.ended = number, True


def evaluate(parts: OnlineRun) -> dict[str, Any]:
    """Episodes with the policy as it is now, without noise."""
    config, policy = parts.config, parts.learner.policy
    policy.eval()
    summary = summarize(play(PolicyActor(parts.pretrained, config.seed), config.env, config.eval))
    return {f"eval_{name}": value for name, value in asdict(summary).items()}
