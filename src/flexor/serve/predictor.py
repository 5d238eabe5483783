"""Answers requests with a policy. All of it runs in one thread, the model's own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from flexor.core.errors import FlexorError
from flexor.core.log import log
from flexor.policies.features import Kind
from flexor.policies.pretrained import Pretrained
from flexor.policies.processing.rename_and_move import renaming_of, with_renaming
from flexor.policies.processing.tokenize import Tokenize
from flexor.policies.session import Executing, Session, predict_together
from flexor.serve.action_range import action_range
from flexor.serve.job import ServeJob
from flexor.serve.settings import Reply

SIZES = (1, 2, 4, 8, 16, 32)  # of batches, where each needs a graph or compiled code of its own
WARM_UP = 3  # predictions of each kind: the first is eager, the second is captured, the third replayed


class Predictor:
    """A policy that answers jobs, several in one batch."""

    def __init__(
        self,
        pretrained: Pretrained,
        *,
        reply: Reply | None = None,
        seed: int = 0,
        autocast: torch.dtype | None = None,
        fixed_sizes: bool = False,
        max_batch: int = 8,
    ):
        """`fixed_sizes`: fill batches up to one of a few sizes."""
        renaming = renaming_of(pretrained.preprocessor)
        self.robots_names = {ours: robots for robots, ours in renaming.items()}
        """{name of an input of the policy: its name on the robot that it was trained for}, where they differ."""
        if renaming:  # observations get the policy's names when they are read
            before = with_renaming(pretrained.preprocessor, {})
            pretrained = replace(pretrained, preprocessor=before)
        self.pretrained, self.seed, self.autocast = pretrained, seed, autocast
        self.config, self.action_range = pretrained.policy.config, action_range(pretrained)
        self.reply: Reply = reply or ("chunk" if self.config.ensemble_coefficient is None else "action")
        self.sizes = [size for size in SIZES if size < max_batch] + [max_batch] if fixed_sizes else []
        self.max_batch = max_batch

    def session(self) -> Session:
        return Session(self.pretrained, self.seed)

    def describe(self) -> dict[str, Any]:
        """What clients are told about the policy."""
        config = self.config
        about: dict[str, Any] = {
            "policy": config.type,
            "language": any(isinstance(step, Tokenize) for step in self.pretrained.preprocessor.steps),
            "actions": [len(config.action_deltas), config.action.shape[0]],
            "action_steps": config.action_steps,
            "reply": self.reply,
            "continues_chunks": self.pretrained.policy.continues_chunks,
        }
        if self.action_range is not None:
            about["action_range"] = self.action_range
        if config.observation_deltas is not None:
            about["observation_steps"] = [step for step in config.observation_deltas if step <= 0]
        return about

    def warm(self) -> None:
        """Run every kind of prediction that robots will ask for: libraries load, compile and capture now."""
        started = time.perf_counter()
        for size in self.sizes or [1]:
            for continued in (False, True)[: 1 + self.pretrained.policy.continues_chunks]:
                for _ in range(WARM_UP if self.sizes else 1):
                    self._imagine(size, continued)
        log.info("ran the policy for the first time: %.1f s", time.perf_counter() - started)

    def _imagine(self, size: int, continued: bool) -> None:
        sessions = [self.session() for _ in range(size)]
        chunk = np.zeros((len(self.config.action_deltas), self.config.action.shape[0]), np.float32)
        dtypes = {True: np.uint8, False: np.float32}
        observed = self.config.observed.items()
        observation = {name: np.zeros(f.shape, dtypes[f.type is Kind.VISUAL]) for name, f in observed}
        for session in sessions:
            session.observe(observation, "do it")
        running = [Executing(chunk, 1) if continued else None for _ in sessions]
        with self._precision():
            predict_together(sessions, [s.history.stacked() for s in sessions], running, self.sizes)

    def answer(self, jobs: Sequence[ServeJob]) -> None:
        """Fill in `actions` or `error` of every job."""
        due: list[ServeJob] = []
        for job in jobs:
            job.started, job.batch = time.perf_counter(), len(jobs)
            try:
                self._observe(job)
                if self._wants_chunk(job) or job.session.needs_chunk():
                    due.append(job)
            except Exception as error:
                self._fail(job, error)
        self._predict(due)
        for job in jobs:
            if job.error is None and not job.expired:  # meanwhile: then its session stays at this step
                self._finish(job)
            job.finished = time.perf_counter()

    def _observe(self, job: ServeJob) -> None:
        options, session = job.options, job.session
        if options.reset or (options.episode is not None and options.episode != session.episode):
            session.reset(session.episode if options.episode is None else options.episode)
            job.starts_episode = True
        if options.step is not None:
            session.step = options.step
        job.step, job.episode = session.step, session.episode
        if job.request.stacked:
            session.task = job.request.task
        else:
            session.observe(job.request.observation, job.request.task)

    def _wants_chunk(self, job: ServeJob) -> bool:
        return (job.options.reply or self.reply) == "chunk"

    def _predict(self, jobs: list[ServeJob]) -> None:
        """The chunks of these jobs. If that fails, each alone: what one sends must not cost the others their answer."""
        if not jobs:
            return
        try:
            with self._precision():
                sessions, running = [job.session for job in jobs], [_executing(job) for job in jobs]
                chunks = predict_together(sessions, [*map(_stacked, jobs)], running, self.sizes)
        except Exception as error:
            if len(jobs) == 1:
                self._fail(jobs[0], error)
                return
            for job in jobs:
                self._predict([job])
            return
        for job, chunk in zip(jobs, chunks):
            if np.isfinite(chunk).all():
                job.actions = chunk
            else:
                job.error = "The policy predicted values that are not finite: nothing is sent to the robot."
                job.failure = "not_finite"

    def _finish(self, job: ServeJob) -> None:
        session = job.session
        if self._wants_chunk(job):
            session.step += self.config.action_steps
            return
        if job.actions is not None:
            session.add_chunk(job.actions)
        job.actions = session.next_action()[None]

    def _fail(self, job: ServeJob, error: Exception) -> None:
        if isinstance(error, FlexorError):
            job.error = str(error)
            return
        log.exception("A prediction failed")
        job.error = f"The policy failed: {type(error).__name__}. The server's log says more."

    @contextmanager
    def _precision(self) -> Iterator[None]:
        device = next(self.pretrained.policy.parameters()).device.type
        with nullcontext() if self.autocast is None else torch.autocast(device, self.autocast):
            yield


def _stacked(job: ServeJob) -> Any:
    """What the policy sees: a history that the request brings, or the session's."""
    return job.request.observation if job.request.stacked else job.session.history.stacked()


def _executing(job: ServeJob) -> Executing | None:
    options = job.options
    if options.previous is None or job.starts_episode:
        return None
    return Executing(np.ascontiguousarray(options.previous, np.float32), options.delay)
