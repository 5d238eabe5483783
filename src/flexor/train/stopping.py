"""Why a run ends before its last step: a signal, a loss that is NaN or infinite, or a process that failed."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexor.core.batch import SAMPLE_ID, Batch
from flexor.core.errors import FlexorError
from flexor.core.stop_signals import STOP_SIGNALS, handled
from flexor.train.checkpoint import folder as checkpoint
from flexor.train.checkpoint.run_folder import Run
from flexor.train.engine.base import Engine

STOPPED = 75  # exit code of a run that stopped on a signal, with a checkpoint: start it again (EX_TEMPFAIL)


class TrainingStopped(FlexorError):
    """A signal asked the run to stop; it has saved a checkpoint."""

    exit_code = STOPPED


class Crashed(FlexorError):
    """An unexpected error in one of several processes. Its stack is in the log; the other processes must end too."""

    exit_code = 70
    already_logged = True


class Diverged(FlexorError):
    """The loss or the gradient is NaN or infinite."""


class StopSignal:
    """Records SIGTERM, SIGUSR1, SIGHUP or Ctrl-C, so that the loop can save after the current step.

    Before the loop starts (`stepping` is false) there is nothing to save, and the run ends at once.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.stepping = False

    def __enter__(self) -> StopSignal:
        try:
            self.before = {number: signal.signal(number, self._handle) for number in handled()}
        except ValueError:  # not in the main thread: the caller handles signals
            self.before = {}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: object) -> None:
        if number == signal.SIGINT and (self.signal is not None or not self.stepping):
            raise KeyboardInterrupt  # a second Ctrl-C ends the run at once
        if not self.stepping:
            raise TrainingStopped(f"{signal.Signals(number).name}: stopped before the first step.")
        self.signal = signal.Signals(number)  # no logging here: the handler may interrupt a write to the log


def stop_error(number: signal.Signals, step: int, saved: Path | None, run: Run, log: bool) -> TrainingStopped:
    if saved:
        end = f"saved as {saved}. Resume with: flexor resume {run.folder}"
    elif checkpoint.newest(run.checkpoints):
        end = f"not saved (save_checkpoint=false). Resume from an earlier checkpoint with: flexor resume {run.folder}"
    else:
        end = "nothing saved (save_checkpoint=false), so it can't be resumed"
    message = f"{number.name}: stopped after step {step}, {end}"
    error = TrainingStopped(message)
    error.already_logged = not log
    if number is signal.SIGINT:
        error.exit_code = 130
    return error


class AsyncHostCopy:
    """Tensors being copied to the host. It waits for these copies only, not for GPU work queued after them."""

    def __init__(self, *tensors: Tensor):
        self._host = [tensor.detach().to("cpu", non_blocking=tensor.is_cuda) for tensor in tensors]
        on_gpu = [tensor.device for tensor in tensors if tensor.is_cuda]
        self._event = torch.cuda.current_stream(on_gpu[0]).record_event() if on_gpu else None

    def values(self) -> list[Any]:
        """As numbers and lists."""
        if self._event is not None:
            self._event.synchronize()
        return [tensor.tolist() for tensor in self._host]


class StopConditions:
    """Stops a run whose loss is NaN or infinite, and makes all ranks stop at the same step.

    A step's loss and gradient norm are checked after the next step has been queued, so that the GPU always has work,
    and before anything is saved. They are summed over all ranks, so all ranks see the same values.
    """

    def __init__(self, run: Run, engine: Engine, complete: Callable[[], None]):
        """`complete`: completes the checkpoint that is being written, if there is one."""
        self.run, self.engine, self.complete = run, engine, complete
        # fp16 overflows now and then by design: the scaler skips that step and lowers its scale
        self.overflows_left = self.overflows_allowed = 30 if engine.precision == "fp16" else 0
        self.unchecked: tuple[int, list[Batch], AsyncHostCopy] | None = None
        self.stopping: signal.Signals | None = None

    def add_step(
        self, step: int, batches: list[Batch], loss: Tensor, norm: Tensor, received: signal.Signals | None
    ) -> None:
        """`received`: the signal that this rank has received, if any."""
        self.check()
        sums = loss[None]
        if self.engine.world_size == 1:
            self.stopping = received
        else:
            signals = loss.new_zeros(len(STOP_SIGNALS))
            if received is not None:
                signals[STOP_SIGNALS.index(received)] = 1
            sums = self.engine.sum(torch.cat((sums, signals)))
        self.unchecked = (step, batches, AsyncHostCopy(sums, norm, loss))

    def check(self) -> None:
        if self.unchecked is None:
            return
        step, batches, figures = self.unchecked
        self.unchecked = None
        (loss, *signals), norm, local_loss = figures.values()
        for number, count in zip(STOP_SIGNALS, signals):
            if count:
                self.stopping = number
        finite = math.isfinite(norm)
        if finite:
            self.overflows_left = self.overflows_allowed
        elif math.isfinite(loss):
            self.overflows_left -= 1
        if math.isfinite(loss) and (finite or self.overflows_left >= 0):
            return
        quantity, value = ("gradient", norm) if math.isfinite(loss) else ("loss", loss)
        self._stop(f"{quantity} of step {step} is {value}", batches, local_loss)

    def _stop(self, problem: str, batches: list[Batch], local_loss: float) -> None:
        """All ranks get here at the same step, so they can exchange which rank's batch caused it."""
        processes = self.engine.processes
        sample_ids = torch.cat([batch[SAMPLE_ID] for batch in batches]).tolist()
        ranks = processes.gather((processes.host, local_loss, sample_ids))
        bad = [i for i, (_, loss, _) in enumerate(ranks) if not math.isfinite(loss)] or range(len(ranks))
        named = "; ".join(
            f"rank {rank} on {ranks[rank][0]}: {ranks[rank][2]}" if len(ranks) > 1 else f"{ranks[rank][2]}"
            for rank in bad
        )
        self.complete()  # it is the last good one
        error = Diverged(
            f"The {problem}, so the run stopped. Sample ids of that batch: {named}. "
            f"Last good checkpoint: {checkpoint.newest(self.run.checkpoints) or 'none yet'}. "
            "Check the data for NaN with `flexor data check`, or lower --optimizer.lr. Then start a new run from that "
            "checkpoint with --policy.path."
        )
        error.already_logged = not processes.is_main
        raise error
