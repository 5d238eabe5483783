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

import numpy as np
import torch

from flexor.rl.acting import ActingPolicy, PublishedWeights
from flexor.rl.collector import Collector, EpisodeSummary
from flexor.rl.learner import Figures, Learner
from flexor.rl.measures import Measures
from flexor.rl.records import RecordFile
from flexor.rl.sources import WAIT_S, LocalSource

WEIGHTS_S = 0.1  # between two copies of the weights, at least; on a GPU the host also waits for it so often


class FreeSource(LocalSource):
    """Steps of an environment in a thread of its own."""

    def __init__(
        self, collector: Collector, file: RecordFile, learner: Learner, measures: Measures, steps: int
    ):
        """`steps`: after which it stops to collect."""
        super().__init__(collector, file, learner, measures, steps)
        self.acting = ActingPolicy(deepcopy(collector.policy.pretrained), collector.policy.seed)
        collector.policy = self.acting
        self.weights = PublishedWeights(learner.policy, WEIGHTS_S)
        self.records: deque[tuple[np.ndarray, EpisodeSummary | None]] = deque()
        self.arrived = threading.Condition()
        self.ended: list[EpisodeSummary] = []
        self.failure: BaseException | None = None
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._run, name="collector", daemon=True)

    def resume(self) -> None:
        """What was recorded is in the buffer again. Its updates are not repeated."""
        super().resume()
        self.acting.policy.load_state_dict(self.learner.policy.state_dict())
        self.acting.update = self.learner.updates
        self.thread.start()

    def _learn_again(self) -> None:
        pass

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
            self.measures.add(record)
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
        ended, self.ended = self.ended, []
        return ended

    def learn(self) -> Figures | None:
        """An update, unless more steps have come: those are added to the buffer first."""
        figures = self.learner.learn_freely(more=bool(self.records))
        if figures is not None:
            self.weights.publish(self.learner.updates)
            newest = self.weights.newest
            if newest.update > self.acting.offered:
                self.acting.offer(newest.update, newest.tensors)
        return figures

    def close(self) -> None:
        """Let the thread end its step."""
        self.stopping.set()
        if self.thread.is_alive():
            self.thread.join()

    # In the thread that collects.

    def _run(self) -> None:
        torch.set_num_threads(1)
        device = self.learner.device
        # so that it does not queue behind updates
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        try:
            with torch.cuda.stream(stream) if stream else nullcontext():
                self._collect()
        except BaseException as error:  # raised by `step`, in the main thread
            self.failure = error
            with self.arrived:
                self.arrived.notify_all()

    def _collect(self) -> None:
        collector = self.collector
        taken = self.learner.buffer.transitions
        while taken < self.steps and not self.stopping.is_set():
            if collector.episode.ended:
                self._hand_over(collector.begin(collector.episode.number + 1), None)
            record = collector.step(taken)
            taken += 1
            self._hand_over(record, collector.episode if collector.episode.ended else None)

    def _hand_over(self, record: np.ndarray, ended: EpisodeSummary | None) -> None:
        """To the file first: what was learned from is there."""
        self.file.append(record)
        self.records.append((record, ended))
        with self.arrived:
            self.arrived.notify_all()
