"""The state of one robot that a policy controls, kept between two actions.

`Pretrained.chunk` has no state, so one policy can control many robots. A session keeps, for one robot: the last
observations, the rest of the last chunk, the average of overlapping chunks, and what the policy wrote to
`batch["memory"]`. Evaluation uses one session per environment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from flexor.core.batch import Batch
from flexor.core.errors import FlexorError
from flexor.core.rng import Noise
from flexor.policies.pretrained import Pretrained
from flexor.policies.processing.rename_and_move import renaming_of

Observation = Mapping[str, np.ndarray]


class TemporalEnsembler:
    """The average of all chunks that have an action for the current step (Algorithm 2 of the ACT paper).

    The weight of a chunk is exp(-coefficient * i), where i = 0 is the oldest. With running sums, a step costs one
    addition.
    """

    def __init__(self, coefficient: float, chunk_size: int):
        self.weights = np.exp(-coefficient * np.arange(chunk_size)).astype(np.float32)
        self.totals = self.weights.cumsum()
        self.sums: np.ndarray | None = None  # [H, A]
        self.counts = np.zeros(chunk_size, int)  # earlier chunks that have an action for step h

    def __call__(self, chunk: np.ndarray) -> np.ndarray:
        """A new chunk [H, A] -> the action [A] for now."""
        sums = np.zeros_like(chunk) if self.sums is None else self.sums
        sums = sums + self.weights[self.counts][:, None] * chunk
        action: np.ndarray = sums[0] / self.totals[self.counts[0]]
        # one step later: entry h + 1 becomes entry h, and no chunk reaches the last step yet
        self.sums = np.concatenate((sums[1:], np.zeros_like(sums[:1])))
        self.counts = np.append(self.counts[1:] + 1, 0)
        return action


class History:
    """The last observations, stacked along time as in training: [...] -> [T, ...].

    At the start of an episode the first observation is repeated, as in a training sample that begins before its
    episode. Future observations, which some policies use in training, are left out.
    """

    def __init__(self, deltas: list[int] | None):
        self.deltas = None if deltas is None else [step for step in deltas if step <= 0]
        self.seen: deque[Observation] = deque(maxlen=1 - min(self.deltas or [0]))

    def add(self, observation: Observation) -> None:
        self.seen.append(observation)

    def stacked(self) -> Observation:
        if self.deltas is None:
            return self.seen[-1]
        shown = [self.seen[max(0, len(self.seen) - 1 + step)] for step in self.deltas]
        return {name: np.stack([moment[name] for moment in shown]) for name in shown[-1]}


class Session:
    """One robot that a policy controls. Several sessions can share the policy."""

    def __init__(self, pretrained: Pretrained, seed: int = 0, episode: int = 0):
        self.pretrained, self.seed = pretrained, seed
        self.config = pretrained.policy.config
        self.renaming = renaming_of(pretrained.preprocessor)
        self.reset(episode)

    def reset(self, episode: int = 0) -> None:
        """Start a new episode. The policy's noise depends on its number: the same number gets the same noise."""
        self.episode, self.step = episode, 0
        self.history = History(self.config.observation_deltas)
        self.queue: deque[np.ndarray] = deque()  # actions [A] that are still to be executed
        self.memory: Batch = {}
        coefficient = self.config.ensemble_coefficient
        self.ensembler = (
            None if coefficient is None else TemporalEnsembler(coefficient, len(self.config.action_deltas))
        )

    def act(self, observation: Observation, task: str = "") -> np.ndarray:
        """The action [A] for an observation, in the robot's units. Call it once for every step of the robot."""
        action: np.ndarray = act_together([self], [observation], [task])[0]
        return action

    def observe(self, observation: Observation, task: str) -> None:
        self._check(observation)
        self.history.add(observation)
        self.task = task

    def needs_chunk(self) -> bool:
        return self.ensembler is not None or not self.queue

    def take(self, chunk: np.ndarray, memory: Batch) -> None:
        """Store a new chunk [H, A], and the memory that the policy gets back at the next prediction."""
        self.memory = memory
        if self.ensembler:
            self.queue.append(self.ensembler(chunk))
        else:
            self.queue.extend(chunk[: self.config.action_steps])

    def next_action(self) -> np.ndarray:
        self.step += 1
        return self.queue.popleft()

    def _check(self, observation: Observation) -> None:
        """The environment must provide the inputs that the policy was trained on, under its names or renamed ones."""
        renamed = {self.renaming.get(name, name): value for name, value in observation.items()}
        if len(renamed) < len(observation):
            twice = [
                f"{a} and {b}" for a, b in self.renaming.items() if {a, b} <= observation.keys() and a != b
            ]
            raise FlexorError(
                f"The environment provides both {', '.join(twice)}, which rename_map gives the same name: set "
                "--rename_map to the names of this environment, or to {}."
            )
        for name, feature in self.config.observed.items():
            if name not in renamed:
                raise FlexorError(
                    f"The policy needs {name}, but the environment provides only {sorted(observation)}. If it is there "
                    f"under another name, give --rename_map='{{NAME: {name}}}'."
                )
            shape = tuple(renamed[name].shape)
            if shape != feature.shape:
                raise FlexorError(
                    f"{name} is {list(shape)} in the environment, but the policy was trained on "
                    f"{list(feature.shape)}: set the environment's size with --env.kwargs."
                )


def act_together(
    sessions: Sequence[Session], observations: Sequence[Observation], tasks: Sequence[str]
) -> np.ndarray:
    """One action for each robot, [N, A]. The policy computes all chunks that are due in one batch."""
    for session, observation, task in zip(sessions, observations, tasks, strict=True):
        session.observe(observation, task)
    for group in _alike([session for session in sessions if session.needs_chunk()]):
        _ask(group)
    return np.stack([session.next_action() for session in sessions])


def _alike(sessions: Sequence[Session]) -> Iterator[list[Session]]:
    """Groups of sessions that can share a batch: their memories have the same names and shapes."""
    groups: dict[object, list[Session]] = {}
    for session in sessions:
        shapes = tuple((name, tuple(value.shape)) for name, value in sorted(session.memory.items()))
        groups.setdefault((id(session.pretrained), session.seed, shapes), []).append(session)
    yield from groups.values()


def _ask(sessions: list[Session]) -> None:
    """Predict the chunks of all sessions in one batch."""
    first, shown = sessions[0], [session.history.stacked() for session in sessions]
    steps = [session.step for session in sessions]
    episodes = torch.tensor([session.episode for session in sessions])
    memory: Batch = {
        name: torch.stack([session.memory[name] for session in sessions]) for name in first.memory
    }
    chunks = first.pretrained.chunk(
        {name: np.stack([one[name] for one in shown]) for name in shown[0]},
        [session.task for session in sessions],
        Noise(first.seed, steps[0] if len({*steps}) == 1 else steps, episodes),
        memory,
    )
    for name, value in memory.items():
        if not isinstance(value, Tensor) or len(value) != len(sessions):
            raise FlexorError(
                f"The policy wrote {value!r} to batch['memory'][{name!r}]: it must be a tensor whose first "
                f"dimension is the batch ({len(sessions)})."
            )
    for row, (session, chunk) in enumerate(zip(sessions, chunks)):
        session.take(chunk, {name: value[row] for name, value in memory.items()})
