"""Where a learner's steps come from: an environment in this process, or actors on the network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from flexor.core.log import log
from flexor.rl.acting import PublishedWeights
from flexor.rl.collector import Collector, EpisodeSummary
from flexor.rl.intake import Intake
from flexor.rl.learner import Figures, Learner
from flexor.rl.learner_server import LearnerServer
from flexor.rl.measures import Measures
from flexor.rl.records import RecordFile

READ_AT_ONCE = 1024  # records
WAIT_S = 0.2  # between two looks at signals


class StepSource(Protocol):
    """Adds records to a learner's buffer. All of them are in the run's file by then."""

    weights_age: float
    """Updates between the weights that chose the last action and the newest ones."""

    def resume(self) -> None:
        """Go on after the records that the buffer has. Those that the learner has not learned from are learned from
        now, or later by `step`."""

    def step(self, stopped: Callable[[], bool]) -> bool:
        """Add one step, and what belongs to it; False if there was none before the run was stopped."""

    def ended_episodes(self) -> list[EpisodeSummary]:
        """Those that have ended since the last call."""

    def learn(self) -> Figures | None:
        """The updates that are due now. What the last one measured; None if there was none."""

    def figures(self) -> dict[str, float]:
        """More figures for the log."""

    def close(self) -> None:
        """The run is over."""


class LocalSource:
    """An environment in this process, which waits for the learner."""

    def __init__(
        self, collector: Collector, file: RecordFile, learner: Learner, measures: Measures, steps: int
    ):
        """`steps`: of the whole run."""
        self.collector, self.file, self.learner, self.measures = collector, file, learner, measures
        self.steps = steps
        self.weights_age = 0.0 if learner.is_free else float(learner.settings.updates)

    def resume(self) -> None:
        """Learn again from what was recorded after the checkpoint, and go on where the robot was."""
        file, learner = self.file, self.learner
        updates = learner.updates
        if not file.count:
            return
        for place in range(learner.buffer.count, file.count):
            record = file.read(place, 1)
            learner.buffer.extend(record)
            if record["is_step"][0]:
                self._learn_again()
        log.info("read %d records", file.count)
        if learner.updates > updates:
            log.info(
                "updates %d to %d were repeated from those after the newest checkpoint",
                updates,
                learner.updates,
            )
        self._resume_episode()

    def _learn_again(self) -> None:
        self.learner.learn()

    def _resume_episode(self) -> None:
        """Go on in the episode that was cut off, if the environment can be brought back to where it was."""
        file, collector = self.file, self.collector
        starts = range(0, file.count, READ_AT_ONCE)
        kinds = np.concatenate(
            [file.read(start, min(READ_AT_ONCE, file.count - start))["is_step"] for start in starts]
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

    def step(self, stopped: Callable[[], bool]) -> bool:
        collector = self.collector
        if collector.episode.ended:
            self._record(collector.begin(collector.episode.number + 1))
        collector.policy.update = self.learner.updates
        self._record(collector.step(self.learner.buffer.transitions))
        return True

    def _record(self, record: np.ndarray) -> None:
        """To the file first: what was learned from is there."""
        self.file.append(record)
        self.learner.buffer.extend(record)
        self.measures.add(record)

    def ended_episodes(self) -> list[EpisodeSummary]:
        if not self.collector.episode.ended:
            return []
        self.file.flush()
        return [self.collector.episode]

    def learn(self) -> Figures | None:
        return self.learner.learn()

    def figures(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


class ActorSource:
    """Actors on the network, which do not wait. Their records are read from the file, in its order."""

    def __init__(
        self,
        server: LearnerServer,
        intake: Intake,
        learner: Learner,
        weights: PublishedWeights,
        measures: Measures,
    ):
        self.server, self.intake, self.learner, self.weights = server, intake, learner, weights
        self.measures = measures
        self.weights_age = 0.0
        self.episodes: dict[int, EpisodeSummary] = {}  # under way, by actor
        self.ended: list[EpisodeSummary] = []
        self.begun = 0  # episodes

    def resume(self) -> None:
        """What was recorded after the checkpoint is read again by `step`, before anything new."""
        file, buffer = self.intake.file, self.learner.buffer
        for start in range(0, buffer.count, READ_AT_ONCE):
            records = file.read(start, min(READ_AT_ONCE, buffer.count - start))
            self.begun += int((records["is_step"] == 0).sum())
        if file.count > buffer.count:
            log.info("learning again from %d records after the checkpoint", file.count - buffer.count)
        self.intake.learned = buffer.transitions
        self.weights.publish(self.learner.updates)
        self.server.open(self.intake)

    def step(self, stopped: Callable[[], bool]) -> bool:
        """Actors may have sent more than this step meanwhile: each step has its updates, whenever it came."""
        while (record := self._next(stopped)) is not None:
            self.learner.buffer.extend(record)
            self.measures.add(record)
            self._count(record)
            if record["is_step"][0]:
                self.intake.learned = self.learner.buffer.transitions
                # a learner that was resumed may be behind the weights that act
                self.weights_age = max(0.0, float(self.learner.updates) - float(record["update"][0]))
                return True
        return False

    def _next(self, stopped: Callable[[], bool]) -> np.ndarray | None:
        intake, place = self.intake, self.learner.buffer.count
        while not stopped() and not (self.learner.is_free and self.learner.can_learn()):
            with intake.changed:
                if intake.changed.wait_for(lambda: intake.file.count > place or intake.failure, WAIT_S):
                    break
        if intake.file.count > place:
            return intake.file.read(place, 1)
        if intake.failure is not None:
            raise intake.failure
        return None

    def _count(self, record: np.ndarray) -> None:
        actor = int(record["actor"][0])
        if not record["is_step"][0]:
            self.episodes[actor] = EpisodeSummary(self.begun)
            self.begun += 1
            return
        # after a resume, its first steps may lie before the checkpoint
        episode = self.episodes.setdefault(actor, EpisodeSummary(max(self.begun - 1, 0)))
        episode.add(record)
        if episode.ended:
            self.ended.append(self.episodes.pop(actor))
            self.intake.file.flush()

    def ended_episodes(self) -> list[EpisodeSummary]:
        ended, self.ended = self.ended, []
        return ended

    def learn(self) -> Figures | None:
        if self.learner.is_free:
            figures = self.learner.learn_freely(more=self.intake.file.count > self.learner.buffer.count)
        else:
            figures = self.learner.learn()
        self.weights.publish(self.learner.updates)
        return figures

    def figures(self) -> dict[str, float]:
        return {
            "actors": float(len(self.server.sessions)),
            "waiting_steps": float(self.intake.actors.steps - self.intake.learned),
        }

    def close(self) -> None:
        """Tell the actors that the run is over, if it is."""
        try:
            if self.intake.finished:
                self.server.tell_end()
        finally:
            self.intake.close()
