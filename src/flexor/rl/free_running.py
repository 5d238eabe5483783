"""`rl.updates=max`: the environment and the learner run side by side, and neither waits for the other.

A thread collects with copies of the weights; the learner updates them in the main thread as often as the machine
manages. So how many updates there are per step depends on the machine, and the run is no function of its seed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flexor.policies.weight_names import unique_state
from flexor.rl.collector import Collector, EpisodeSummary
from flexor.rl.learner import Learner
from flexor.rl.records import RecordFile

WAIT_S = 0.05  # between two looks at signals, while there is nothing to do


class Weights(NamedTuple):
    """Copies of the learner's weights, for the thread that acts."""

    update: int
    tensors: dict[str, Tensor]
    ready: Any  # a CUDA event; None on a CPU


class FreeSource:
    """Steps of an environment in a thread of its own."""

    def __init__(self, collector: Collector, file: RecordFile, learner: Learner, steps: int):
        """`steps`: after which it stops to collect."""
        self.collector, self.file, self.learner, self.steps = collector, file, learner, steps
        self.weights_age = 0.0
        self.record_added: Callable[[np.ndarray], None] = lambda record: None
        self.device = learner.device
        self.acting = deepcopy(learner.policy)
        collector.pretrained = replace(collector.pretrained, policy=self.acting)
        collector.policy = self.acting
        self.weights: Weights | None = None  # that have not been taken yet
        self.launched: Any = None  # of the newest update
        self.records: deque[tuple[np.ndarray, EpisodeSummary | None]] = deque()
        self.arrived = threading.Condition()
        self.ended: list[EpisodeSummary] = []
        self.failure: BaseException | None = None
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._run, name="collector", daemon=True)

    def start(self) -> None:
        """After the learner has what was recorded before."""
        self.acting.load_state_dict(self.learner.policy.state_dict())
        self.thread.start()

    def step(self, stopped: Callable[[], bool]) -> bool:
        """Add one step to the buffer, and what belongs to it; False if none has come while the learner can learn."""
        while not (stopped() or self.records or self.learner.can_learn()):
            self._raise_failure()
            with self.arrived:
                self.arrived.wait_for(lambda: self.records or self.failure, WAIT_S)
        self._raise_failure()
        while self.records:
            record, episode = self.records.popleft()
            self.learner.buffer.extend(record)
            self.record_added(record)
            if episode is not None:
                self.ended.append(episode)
                self.file.flush()
            if record["is_step"][0]:
                self.weights_age = float(self.learner.updates) - float(record["update"][0])
                return True
        return False

    def _raise_failure(self) -> None:
        if self.failure is not None and not self.records:
            raise self.failure

    def ended_episodes(self) -> list[EpisodeSummary]:
        """Those that have ended since the last call."""
        ended, self.ended = self.ended, []
        return ended

    def learn(self) -> dict[str, Tensor] | None:
        """An update, unless more steps have come: those are added to the buffer first."""
        if self.records or not self.learner.can_learn():
            return None
        figures = self.learner.update_once()
        if self.device.type == "cuda":
            if self.launched is not None:
                self.launched.synchronize()  # of the update before: the host must not run far ahead of the GPU
            self.launched = torch.cuda.Event()
            self.launched.record()
        if self.weights is None:
            tensors = {name: value.detach().clone() for name, value in self._trained().items()}
            ready = torch.cuda.Event() if self.device.type == "cuda" else None
            if ready is not None:
                ready.record()
            self.weights = Weights(self.learner.updates, tensors, ready)
        return figures

    def _trained(self) -> dict[str, Tensor]:
        state = unique_state(self.learner.policy)
        return {name: value for name, value in state.items() if value.is_floating_point()}

    def close(self) -> None:
        """Let the thread end its step."""
        self.stopping.set()
        if self.thread.is_alive():
            self.thread.join()

    # In the thread that collects.

    def _run(self) -> None:
        torch.set_num_threads(1)
        on_gpu = self.device.type == "cuda"
        stream = (
            torch.cuda.Stream(self.device) if on_gpu else None
        )  # so that it does not queue behind updates
        try:
            with torch.cuda.stream(stream) if stream else nullcontext():
                self._collect()
        except BaseException as error:  # raised by `step`, in the main thread
            self.failure = error
            with self.arrived:
                self.arrived.notify_all()

    def _collect(self) -> None:
        collector = self.collector
        taken, update = self.learner.buffer.transitions, self.learner.updates
        while taken < self.steps and not self.stopping.is_set():
            if collector.episode.ended:
                self._record(collector.begin(collector.episode.number + 1), None)
            update = self._take_weights(update)
            record = collector.step(taken, update)
            taken += 1
            self._record(record, collector.episode if collector.episode.ended else None)

    def _take_weights(self, update: int) -> int:
        """The newest weights that the learner has copied. The number of the update that they are from."""
        weights = self.weights
        if weights is None:
            return update
        if weights.ready is not None:
            torch.cuda.current_stream().wait_event(weights.ready)
        current = unique_state(self.acting)
        with torch.no_grad():
            for name, tensor in weights.tensors.items():
                current[name].copy_(tensor)
        if weights.ready is not None:
            torch.cuda.current_stream().synchronize()  # before the copies are freed
        self.weights = None
        return weights.update

    def _record(self, record: np.ndarray, ended: EpisodeSummary | None) -> None:
        """To the file first: what was learned from is there."""
        self.file.append(record)
        self.records.append((record, ended))
        with self.arrived:
            self.arrived.notify_all()
