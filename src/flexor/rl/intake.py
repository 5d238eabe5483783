"""What happens to the records of actors on the network: into the file, acknowledged, and answered with an action.

All of it runs in the server's event loop, but for what a thread decodes or acts. The learner reads the file, in its
order, so a record is learned from the same way whether it has just come or a run resumes.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from flexor.core.batch import ACTION
from flexor.core.log import log
from flexor.core.typed import to_plain
from flexor.policies.sac.config import SACConfig
from flexor.rl.acting import ActingPolicy, PublishedWeights
from flexor.rl.actors import Actors
from flexor.rl.record_reader import CheckedRecord, RecordReader
from flexor.rl.records import RecordFile, observed_names
from flexor.rl.spec import EnvironmentSpec
from flexor.serve.limits import BadRequest


@dataclass(eq=False)
class ActorSession:
    """One actor's connection."""

    number: int
    name: str
    has_policy: bool
    """Whether it acts by itself, with weights that it gets."""
    update: int = 0
    """Of the weights that its last action came from, if it does not."""
    was_told: bool = False
    """That the run is over."""


class Intake:
    """The records of all actors of a run."""

    def __init__(
        self,
        policy: SACConfig,
        spec: EnvironmentSpec,
        file: RecordFile,
        acting: ActingPolicy,
        weights: PublishedWeights,
        *,
        steps: int,
        max_lag: int,
    ):
        self.policy, self.spec, self.file, self.acting, self.weights = policy, spec, file, acting, weights
        self.steps, self.max_lag = steps, max_lag
        self.actors = Actors(file)
        self.reader = RecordReader(policy, spec, file.layout)
        self.changed = threading.Condition()
        self.failure: OSError | None = None  # of the record file
        self.learned = 0  # steps
        self.closed = False
        threads = torch.get_num_threads()
        self.thread = ThreadPoolExecutor(1, "acting", torch.set_num_threads, (threads,))
        self.decoders = ThreadPoolExecutor(2, "decode")

    @property
    def finished(self) -> bool:
        return self.actors.steps >= self.steps

    def enter(self, spool: str, name: str, has_policy: bool, spec: EnvironmentSpec) -> ActorSession:
        """An actor says who it is; BadRequest if it can't be one of this policy's."""
        for observed in self.policy.observed:
            if spec.shapes.get(observed) != self.spec.shapes.get(observed):
                raise BadRequest(
                    f"The policy observes {observed} {self.spec.shapes[observed]}, but {name} has "
                    f"{', '.join(f'{n} {shape}' for n, shape in spec.shapes.items())}."
                )
        limits, expected = (np.array([each.low, each.high]) for each in (spec, self.spec))
        if limits.shape != expected.shape or not np.allclose(limits, expected, rtol=1e-5):
            raise BadRequest(
                f"The limits of {name}'s actions are {limits.tolist()}, but the policy acts within {expected.tolist()}."
            )
        return ActorSession(self.actors.enter(spool, name), name, has_policy)

    def welcome(self, session: ActorSession) -> dict[str, Any]:
        return {
            "received": self.actors.received.get(session.number, 0),
            "policy": {"type": self.policy.type, **to_plain(self.policy)},
            "seed": self.acting.seed,
            "actor": session.number,
            "max_lag": self.max_lag,
        }

    def status(self, session: ActorSession) -> dict[str, Any]:
        session.was_told |= self.finished
        return {
            "received": self.actors.received.get(session.number, 0),
            "behind": self.actors.steps - self.learned,
            "update": max(self.weights.newest.update, 0),
            "finished": self.finished,
        }

    def new_weights(self, have: Any) -> dict[str, Any]:
        if type(have) is not int:
            raise BadRequest("weights must be the number of updates of those that the actor has, or -1.")
        newest = self.weights.newest
        if newest.update == have:
            return {"update": have, "weights": {}}
        constant = self.weights.constant if have < 0 else {}
        return {"update": max(newest.update, 0), "weights": {**constant, **newest.tensors}}

    async def add(self, session: ActorSession, first: Any, messages: Any) -> dict[str, Any]:
        """Records from number `first` on; the answer to them."""
        if type(first) is not int or not 0 < first < 2**32 - 2**16:
            raise BadRequest("first must be the number of the first record, from 1.")
        checked = self.reader.check(messages)
        files = [file for each in checked for file in each.observed.files()]
        run = asyncio.get_running_loop().run_in_executor
        images = dict(zip(files, await asyncio.gather(*(run(self.decoders, file.decode) for file in files))))
        record = None
        for sequence, each in enumerate(checked, first):
            record = self.reader.record(each, images, session.number, sequence)
            self._store(session, each, sequence, record)
        assert record is not None
        reply = self.status(session)
        ended = bool(record["terminated"][0] or record["truncated"][0])
        if not (session.has_policy or ended or self.finished):
            action = await run(self.thread, self._act, record)
            session.update = self.acting.update
            if action is not None:
                reply[ACTION] = action
        return reply

    def _store(
        self, session: ActorSession, checked: CheckedRecord, sequence: int, record: np.ndarray
    ) -> None:
        """Into the file, unless it is there, or does not follow what is there, or the run has all its steps."""
        if self.finished:
            return
        if not self.actors.fits(session.number, sequence, checked.is_step):
            self.actors.leave_out(session.number, sequence)
            return
        if not session.has_policy:
            record["update"] = session.update if checked.is_step else 0
        with self.changed:
            if self.closed:
                raise OSError("the run has ended")
            try:
                self.file.append(record)
            except OSError as error:
                self.failure = error
                raise
            finally:
                self.changed.notify_all()
        self.actors.add(record)

    def _act(self, record: np.ndarray) -> np.ndarray | None:
        """The action after a record; None if the policy has none that is finite. In the thread that acts."""
        newest = self.weights.newest
        if newest.update != self.acting.update:
            self.acting.offer(newest.update, newest.tensors)
        observation = {name: record[name][0] for name in observed_names(self.file.layout)}
        action = self.acting.action(observation, int(record["sequence"][0]), int(record["actor"][0]))
        if not np.isfinite(action).all():
            log.warning("the policy chose an action that is not finite: nothing is sent to the robot")
            return None
        low, high = self.spec.action_limits
        return np.clip(action, low, high)

    def close(self) -> None:
        """Nothing is written to the file from now on."""
        with self.changed:
            self.closed = True
        self.thread.shutdown(wait=False, cancel_futures=True)
        self.decoders.shutdown(wait=False, cancel_futures=True)
