"""The training loop, read top to bottom.

`train` opens the run, builds its parts and hands them to `fit`. Whatever happens, the run folder
holds the settings, the metrics so far and whole checkpoints.
"""

from __future__ import annotations

import signal
import time
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from flexor.batch import SAMPLE_ID
from flexor.config import TrainConfig
from flexor.data.dataset import Dataset
from flexor.data.loader import Loader
from flexor.errors import ConfigError, FlexorError
from flexor.log import log
from flexor.monitor.meters import Meters, as_json
from flexor.monitor.trackers import Trackers
from flexor.rng import Noise
from flexor.sim.rollout import summarize
from flexor.train import checkpoint
from flexor.train.build import build_datasets, build_loader, build_state
from flexor.train.engine import Engine, pick_device
from flexor.train.evaluate import actor_of, exported_weights, held_out_loss, play
from flexor.train.resume import check_same_run, newest_checkpoint
from flexor.train.run import Run, default_folder, open_run
from flexor.train.state import TrainState

STOPPED = 75  # exit code of a run that saved itself when told to stop: "start me again" (EX_TEMPFAIL)


class TrainingStopped(FlexorError):
    """A signal asked the run to stop; it has saved a checkpoint."""

    exit_code = STOPPED


class Diverged(FlexorError):
    """The loss or the gradient is no longer a number."""


@dataclass
class Result:
    """What a finished run has to tell."""

    folder: Path
    step: int
    checkpoint: Path | None
    metrics: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


def train(config: TrainConfig, resume: bool = False) -> Result:
    """Do a run, or go on with one."""
    started = time.perf_counter()
    config.job_name = config.job_name or config.policy.type
    folder = Path(config.output_dir) if config.output_dir else default_folder(config.job_name)
    config.output_dir = str(folder)
    if config.dataset.root and "://" not in config.dataset.root:
        config.dataset.root = str(Path(config.dataset.root).absolute())  # a resume may start elsewhere
    with open_run(folder, resume) as run:
        found = newest_checkpoint(folder) if resume else None
        engine = Engine(pick_device(config.policy.device), config.precision, config.deterministic)
        training, held_out = build_datasets(config.dataset)
        state = build_state(config, training, engine, resuming=resume)
        if found is not None:
            check_same_run(found, config, state.fingerprint, state.preprocessor)
            state.load(found)
            if state.step > config.steps:
                raise ConfigError(f"steps={config.steps}: the run is at step {state.step} already.")
            run.forget_metrics_after(state.step)
        loader = build_loader(config, training, held_out, engine)
        run.write_config(config)
        _introduce(state, training, held_out, found)
        with closing(loader), engine.own_stream() if loader.decoded_on_gpu else nullcontext():
            result = fit(state, run, loader, held_out)
        result.seconds = time.perf_counter() - started
    return result


def fit(state: TrainState, run: Run, loader: Loader, held_out: Dataset | None) -> Result:
    """Optimizer steps until the last one."""
    config, engine, policy = state.config, state.engine, state.policy
    meters, watch = Meters(), Watch(run, engine.precision)
    result = Result(run.folder, state.step, checkpoint.newest(run.checkpoints))
    policy.train()

    with Trackers(config, run.folder) as trackers, StopSignal() as stop, _progress_bar(state) as bar:
        batches = loader.steps(state.step, config.steps)
        while state.step < config.steps:
            waiting = time.perf_counter()
            micro_batches = next(batches)
            meters.waited += time.perf_counter() - waiting

            loss, norm = optimizer_step(state, micro_batches, meters)
            state.step += 1
            watch.see(state.step, micro_batches, loss, norm)
            meters.samples += loader.global_batch
            bar.update()

            last = state.step == config.steps
            if state.step % config.log_freq == 0 or last:
                watch.check()
                epoch = loader.order.epoch(state.step * loader.global_batch)
                result.metrics |= _log(state, meters, trackers, bar, epoch, loader.troubles())
            if held_out is not None and _due(state.step, config.eval_steps, last):
                values = {"held_out_loss": held_out_loss(state, held_out, config.max_eval_samples)}
                result.metrics |= _report(state.step, values, trackers)
            if config.env.type and _due(state.step, config.env_eval_freq, False):
                result.metrics |= _report(state.step, _evaluate(state, run), trackers)
            if config.save_checkpoint and (_due(state.step, config.save_freq, last) or stop.signal):
                watch.check()
                result.checkpoint = save_checkpoint(state, run)
                loader.sync()
            if stop.signal and not last:
                raise _stopped(stop.signal, state.step, result.checkpoint, run)
        watch.check()
    result.step = state.step
    return result


def optimizer_step(
    state: TrainState, micro_batches: list[dict[str, Any]], meters: Meters
) -> tuple[Tensor, Tensor]:
    """One step: forward and backward for each micro-batch, clip, update. Returns loss and gradient norm."""
    config, engine, policy = state.config, state.engine, state.policy
    samples = sum(len(batch[SAMPLE_ID]) for batch in micro_batches)
    total = torch.zeros((), device=engine.device)
    for micro, batch in enumerate(micro_batches):
        batch = state.preprocessor(batch)
        noise = Noise(config.seed, state.step, batch[SAMPLE_ID])
        with engine.forward(config.seed, state.step, micro):
            losses = policy(batch, noise)
            loss = losses.per_sample.float().sum() / samples
        engine.backward(loss)
        total += loss.detach()
        for name, part in losses.parts.items():
            meters.add(name, part.detach().float().sum() / samples * len(micro_batches))

    assert config.optimizer.grad_clip_norm is not None
    norm = engine.clip_grad_norm(policy, state.optimizer, config.optimizer.grad_clip_norm)
    engine.step(state.optimizer)
    state.scheduler.step()
    if state.ema:
        state.ema.update(policy)
    meters.add("loss", total)
    meters.add("grad_norm", norm)
    return total, norm


class Watch:
    """Stops a run whose loss is no longer a number, without making every step wait for the GPU.

    A step's figures are looked at when the next step has been queued, and before anything is saved.
    """

    def __init__(self, run: Run, precision: str):
        self.run = run
        # fp16 overflows now and then by design: the scaler skips that step and lowers its scale
        self.overflows_left = self.overflows_allowed = 30 if precision == "fp16" else 0
        self.seen: tuple[int, list[dict[str, Any]], Tensor, Tensor] | None = None

    def see(self, step: int, batches: list[dict[str, Any]], loss: Tensor, norm: Tensor) -> None:
        self.check()
        self.seen = (step, batches, loss, norm)

    def check(self) -> None:
        if self.seen is None:
            return
        step, batches, loss, norm = self.seen
        self.seen = None
        what = "gradient" if torch.isfinite(loss) else "loss"
        if torch.isfinite(norm):
            self.overflows_left = self.overflows_allowed
        elif what == "gradient":
            self.overflows_left -= 1
        if what == "gradient" and (torch.isfinite(norm) or self.overflows_left >= 0):
            return
        ids = torch.cat([batch[SAMPLE_ID] for batch in batches]).tolist()
        good = checkpoint.newest(self.run.checkpoints)
        raise Diverged(
            f"The {what} of step {step} is {loss.item() if what == 'loss' else norm.item()}, so the run "
            f"stopped. Sample ids of that batch: {ids}. Last good checkpoint: {good or 'none yet'}. "
            "Look for NaN in the data (`flexor data check`), or lower --optimizer.lr; then start from that "
            "checkpoint with --policy.path."
        )


class StopSignal:
    """Remembers that SIGTERM, SIGUSR1 or Ctrl-C came, so that the loop can save at the next step."""

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __enter__(self) -> StopSignal:
        try:
            self.before = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        except ValueError:  # not in the main thread: whoever runs us handles signals
            self.before = {}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: object) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt  # the second Ctrl-C does not wait
        self.signal = signal.Signals(number)  # and nothing more: a handler may interrupt a write to the log


def _stopped(number: signal.Signals, step: int, saved: Path | None, run: Run) -> TrainingStopped:
    where = f"saved as {saved}" if saved else "nothing saved (save_checkpoint=false)"
    error = TrainingStopped(
        f"{number.name}: stopped after step {step}, {where}. Go on: flexor resume {run.folder}"
    )
    if number is signal.SIGINT:
        error.exit_code = 130
    return error


def save_checkpoint(state: TrainState, run: Run) -> Path:
    config = state.config
    saved = checkpoint.save(run.checkpoints, state.step, config.steps, state.save)
    log.info("saved %s", saved)
    removed = checkpoint.prune(run.checkpoints, config.checkpoint.keep_last, config.checkpoint.keep_every)
    if removed:
        log.info("removed the checkpoints of steps %s", ", ".join(map(str, removed)))
    return saved


def _due(step: int, every: int, last: bool) -> bool:
    return last or (every > 0 and step % every == 0)


def _log(
    state: TrainState, meters: Meters, trackers: Trackers, bar: Any, epoch: float, troubles: dict[str, int]
) -> dict[str, Any]:
    values = {**meters.report(), "lr": state.scheduler.get_last_lr()[0], "epoch": epoch, **troubles}
    meters.reset()
    trackers.log(state.step, values)
    bar.set_postfix(loss=f"{values['loss']:.3f}", samples_s=f"{values['samples_per_s']:.0f}")
    log.info(
        "step %d  loss %.4f  grad %.2f  lr %.2e  %.1f samples/s  epoch %.2f  data wait %.0f %%%s",
        state.step,
        values["loss"],
        values["grad_norm"],
        values["lr"],
        values["samples_per_s"],
        epoch,
        100 * values["data_wait"],
        "".join(f"  {name.replace('_', ' ')} {count}" for name, count in troubles.items()),
    )
    return as_json(values)


def _report(step: int, values: dict[str, Any], trackers: Trackers) -> dict[str, Any]:
    trackers.log(step, values)
    log.info("step %d  %s", step, "  ".join(f"{k} {v:.4g}" for k, v in values.items()))
    return values


def _evaluate(state: TrainState, run: Run) -> dict[str, Any]:
    config = state.config
    with exported_weights(state):
        videos = run.videos / f"{state.step:06d}"
        episodes = play(actor_of(state), config.env, config.eval, videos)
    return {f"eval_{name}": value for name, value in asdict(summarize(episodes)).items()}


def _progress_bar(state: TrainState) -> Any:
    return tqdm(
        total=state.config.steps,
        initial=state.step,
        unit="step",
        dynamic_ncols=True,
        smoothing=0.05,
        disable=None,
    )


def _introduce(state: TrainState, training: Dataset, held_out: Dataset | None, found: Path | None) -> None:
    """What is about to happen, in a few lines."""
    config = state.config
    parameters = list(state.policy.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    total = sum(p.numel() for p in parameters)
    log.info(
        "%s: %.1f M parameters, %.1f M trained, on %s, precision %s",
        config.policy.type,
        total / 1e6,
        trained / 1e6,
        state.engine.device,
        config.precision,
    )
    held = f" and {len(held_out.episodes)} held out" if held_out is not None else ""
    log.info("%s: %d episodes, %d frames%s", training.repo_id, len(training.episodes), len(training), held)
    batch = config.batch_size * config.gradient_accumulation_steps
    rates = ", ".join(f"{group['initial_lr']:g}" for group in state.optimizer.param_groups)
    log.info(
        "steps %d to %d, %d samples each (batch %d x accumulation %d), %s lr %s",
        state.step,
        config.steps,
        batch,
        config.batch_size,
        config.gradient_accumulation_steps,
        config.optimizer.type,
        rates,
    )
    log.info("run folder %s%s", config.output_dir, f", going on from {found.name}" if found else "")
