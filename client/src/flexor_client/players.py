"""A robot that executes a remote policy's chunks: one action per step of the robot.

`ChunkPlayer` waits for every chunk, and the robot with it. `RealTimePlayer` never waits: it asks for the next chunk
while the robot executes the last one.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Callable, Protocol

import numpy as np

from flexor_client.chunks import Timeline
from flexor_client.errors import ClientError, ExpiredError, ServerLostError
from flexor_client.limits import ActionLimits, TrainingRange, check_actions

log = logging.getLogger("flexor_client")

Observation = Mapping[str, Any]
WHEN_LOST = ("finish", "hold", "stop")


class ChunkSource(Protocol):
    """What a player asks: RemotePolicy, or something like it."""

    @property
    def metadata(self) -> dict[str, Any]: ...

    def reset(self, episode: int | None = None) -> None: ...

    def chunk(self, observation: Observation, task: str = "", **options: Any) -> np.ndarray: ...


class PendingRequest(Protocol):
    """A request under way, such as a Future."""

    def done(self) -> bool: ...

    def result(self) -> Any: ...


def in_background(work: Callable[[], Any]) -> PendingRequest:
    """Start `work` in a thread that does not keep the program from ending."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="flexor_client", daemon=True).start()
    return future


class SentHistory:
    """The last observations, for a policy that sees several: it is not sent every step, so they are sent with the last.

    `steps` are relative to now, such as [-1, 0]; None: the policy sees only the last observation.
    """

    def __init__(self, steps: list[int] | None):
        self.steps = steps
        self._observations: deque[Observation] = deque(maxlen=1 - min(steps or [0]))

    def clear(self) -> None:
        self._observations.clear()

    def add(self, observation: Observation) -> None:
        self._observations.append(observation)

    def message(self) -> Observation:
        if self.steps is None:
            return self._observations[-1]
        # At the start of an episode the first observation is repeated, as in training.
        now = len(self._observations) - 1
        window = [self._observations[max(0, now + step)] for step in self.steps if step <= 0]
        return {name: [observation[name] for observation in window] for name in window[-1]}


class _Player:
    """What both players have: the episode, the history and the limits."""

    def __init__(self, policy: ChunkSource, limits: ActionLimits | None, beyond_training: float | None):
        self.policy, self.limits = policy, limits
        metadata = policy.metadata
        self.training = TrainingRange.of(metadata, beyond_training)
        # whether the server wants every step, and keeps the history itself
        self.every_step = metadata.get("reply") == "action"
        self.action_steps: int | None = metadata.get("action_steps")
        self.history = SentHistory(None if self.every_step else metadata.get("observation_steps"))
        self.reset()

    def reset(self, episode: int = 0, position: np.ndarray | None = None) -> None:
        """A new episode. `position`: the action that would keep the robot where it is; its first step is limited then.

        The policy's noise depends on the episode's number.
        """
        self.episode, self.step = episode, 0
        self.last = None if position is None else np.asarray(position, np.float64)
        self.history.clear()
        self.policy.reset(episode)

    def _allowed(self, action: np.ndarray) -> np.ndarray:
        check_actions(action, 1)
        if self.training is not None:
            self.training.check(action)
        if self.limits is not None:
            action = self.limits(action, self.last)
        self.last = action
        return action


class ChunkPlayer(_Player):
    """Executes chunk after chunk, and waits for each: right for a simulator, which waits, too.

    `execute`: how many actions of a chunk to execute; None: as many as the policy was meant to. `limits` and
    `beyond_training`: see RealTimePlayer.
    """

    def __init__(
        self,
        policy: ChunkSource,
        execute: int | None = None,
        limits: ActionLimits | None = None,
        beyond_training: float | None = 1.0,
    ):
        if execute is not None and execute < 1:
            raise ClientError(f"execute={execute}: must be at least 1.")
        self.execute = execute
        super().__init__(policy, limits, beyond_training)

    def reset(self, episode: int = 0, position: np.ndarray | None = None) -> None:
        super().reset(episode, position)
        self.queue: deque[np.ndarray] = deque()

    def act(self, observation: Observation, task: str = "") -> np.ndarray:
        """The action [A] for an observation. Call it once for every step of the robot."""
        self.history.add(observation)
        if not self.queue:
            chunk = self.policy.chunk(self.history.message(), task, step=self.step)
            check_actions(chunk, 2)
            self.queue.extend(chunk[: self.execute or self.action_steps])
        self.step += 1
        return self._allowed(self.queue.popleft())


class RealTimePlayer(_Player):
    """Executes chunks without a pause between them (real-time chunking).

    `fps`: steps of the robot per second; `act` must be called at this rate. `execute`: actions of a chunk to use before
    the next one takes over; None: as many as the policy was meant to. Fewer react faster. `margin`: steps by which a
    chunk is asked for earlier than the measured latency requires. `when_lost`: what to do if the server is lost or has
    not answered for `lost_after_s` seconds: "finish" the actions that are left, then hold; "hold" at once; "stop":
    raise ServerLostError. In the first two cases the player continues as soon as the server is back. `limits` are
    checked for every action. An action that is not finite always raises LimitError. So does one that is far outside of
    the policy's training data, if the server tells their range: by more than the width of that range, or
    `beyond_training` times as much; None: this is not checked.

    To hold means that `act` returns None: there is no action, and a robot that gets none keeps its position. If yours
    does not, send it what makes it stop.
    """

    def __init__(
        self,
        policy: ChunkSource,
        fps: float,
        *,
        execute: int | None = None,
        margin: int = 1,
        blend: int = 3,
        when_lost: str = "finish",
        lost_after_s: float = 2.0,
        limits: ActionLimits | None = None,
        beyond_training: float | None = 1.0,
        clock: Callable[[], float] = time.monotonic,
        start: Callable[[Callable[[], Any]], PendingRequest] = in_background,
    ):
        """`blend` is for policies that can't continue a chunk themselves: steps over which a new chunk takes over from
        the last one. `clock` and `start` (starts a request) are replaced in simulations."""
        if when_lost not in WHEN_LOST:
            raise ClientError(f"when_lost={when_lost!r}: use {', '.join(WHEN_LOST)}.")
        if not fps > 0:
            raise ClientError(f"fps={fps}: give the steps of the robot per second.")
        self.fps, self.when_lost, self.lost_after_s = fps, when_lost, lost_after_s
        self._clock, self._start = clock, start
        self.timeline = Timeline(execute, margin, blend)
        self.idle_steps, self.answers = 0, 0  # steps without an action after the first; chunks that arrived
        self.latencies_s: deque[float] = deque(maxlen=1000)
        super().__init__(policy, limits, beyond_training)
        if self.every_step:
            raise ClientError(
                "This policy averages the chunks of all steps (temporal ensembling), so it must be asked at every "
                "step, which leaves no time for the network. Serve it with --policy.temporal_ensemble_coeff=null."
            )
        if execute is None:
            self.timeline.execute = self.action_steps
        continues = policy.metadata.get("continues_chunks")
        self._server_continues = continues is not None  # else it does not know what `previous` is
        self._blend_steps = None if continues else blend
        if self._server_continues:
            self.timeline.blend = 0

    def reset(self, episode: int = 0, position: np.ndarray | None = None) -> None:
        super().reset(episode, position)
        self.timeline.clear()
        self._request: PendingRequest | None = None  # one that is still under way is for the last episode
        self._request_step, self._request_count, self._request_time = 0, 0, 0.0
        self._error: ServerLostError | None = None
        self._try_at, self._pause = -math.inf, 0.1
        self._began = False

    @property
    def lost(self) -> bool:
        """Whether the server is lost."""
        return self._error is not None

    def act(self, observation: Observation, task: str = "") -> np.ndarray | None:
        """The action [A] to execute now; None: hold. Call it once for every step of the robot. It does not wait."""
        self.history.add(observation)
        self._receive()
        if self._request is None and self.timeline.is_due() and self._clock() >= self._try_at:
            self._ask(task)
            self._receive()
        self._check_lost()
        if self.lost and self.when_lost == "hold":
            self.timeline.drop()
        self.step += 1
        action = self.timeline.next()
        if action is None:
            self.idle_steps += self._began
            return None
        self._began = True
        return self._allowed(action)

    def wait(self, observation: Observation, task: str = "", timeout_s: float = 60.0) -> None:
        """Ask for the first chunk and wait until it is there, before the robot starts."""
        self.history.add(observation)
        give_up = self._clock() + timeout_s
        self._ask(task)
        while self._request is not None and not self._request.done():
            if self._clock() > give_up:
                raise ServerLostError(f"The server sent no first chunk within {timeout_s:g} s.")
            time.sleep(0.001)
        self._receive()
        if self._error is not None:
            raise self._error

    def _ask(self, task: str) -> None:
        options: dict[str, Any] = {"step": self.step}
        if self._server_continues:
            options.update(self._continuation())
        message = self.history.message()
        self._request_step, self._request_count = self.step, self.timeline.executed
        self._request_time = self._clock()
        self._request = self._start(lambda: self.policy.chunk(message, task, **options))

    def _continuation(self) -> dict[str, Any]:
        """What the server needs to know to continue the chunk that is being executed."""
        remaining = self.timeline.remaining()
        if remaining is None:
            return {}
        delay = min(self.timeline.delay, len(remaining))
        if self._blend_steps is not None:  # beyond, nothing of the new chunk is mixed with the last
            remaining = remaining[: delay + self._blend_steps]
        if not len(remaining):
            return {}
        return {"previous": np.ascontiguousarray(remaining, np.float32), "delay": delay}

    def _receive(self) -> None:
        """Take over a chunk that has arrived."""
        if self._request is None or not self._request.done():
            return
        request, self._request = self._request, None
        try:
            chunk = request.result()
        except ExpiredError:
            return
        except ServerLostError as error:
            self._lose(error)
            self._try_at = self._clock() + self._pause
            self._pause = min(2 * self._pause, 2.0)
            return
        if self._error is not None:
            log.warning("The server is back.")
            stale = self._clock() - self._request_time > self.lost_after_s
            self._error, self._pause = None, 0.1
            if stale:  # the world may have changed: ask again
                return
        check_actions(chunk, 2)
        self._measure(len(chunk))
        self.timeline.take(chunk, self._request_count)

    def _measure(self, actions: int) -> None:
        """Note how long the answer took, which had this many actions."""
        self.answers += 1
        latency = self._clock() - self._request_time
        self.latencies_s.append(latency)
        # In steps of the robot, which may be late themselves. A first chunk is waited for without steps.
        steps = max(self.step - self._request_step, math.ceil(latency * self.fps - 1e-3))
        self.timeline.add_delay(steps)
        if self.answers > 1 and steps >= actions:
            log.warning(
                "An answer took %d steps, but a chunk has %d actions: the robot waits.", steps, actions
            )

    def _check_lost(self) -> None:
        if self._request is not None and self._clock() - self._request_time > self.lost_after_s:
            self._lose(ServerLostError(f"The server has not answered for {self.lost_after_s:g} s."))

    def _lose(self, error: ServerLostError) -> None:
        if self._error is None:
            log.warning("%s The robot %s.", error, "stops" if self.when_lost == "stop" else "will hold")
        self._error = error
        if self.when_lost == "stop":
            raise error


setattr(RealTimePlayer, "held", property(lambda player: player.idle_steps))  # noqa: B010  (its name until 0.1)
