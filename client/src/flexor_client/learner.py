"""An actor's connection to its learner: hands over records in their order, each once, and gets actions or new weights.

A thread of its own talks to the learner, so an actor never waits for the network. While the learner is gone, records
stay in the spool; when it is back, they are handed over, oldest first. `wire.py` describes the messages.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Callable

import msgpack
import numpy as np
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import ClientConnection

from flexor_client.address import Address, abort
from flexor_client.errors import ClientError, RefusedError, ServerLostError, WireError
from flexor_client.replies import REPLY_BYTES, read_message
from flexor_client.spool import Spool
from flexor_client.wire import LEARNER_PROTOCOL, pack

log = logging.getLogger("flexor_client")

MOST_RECORDS, MOST_BYTES = 32, 4 * 2**20  # of a message
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0  # between two tries to connect
POLL_S = 0.1  # between two messages, if there is nothing to hand over
CLOSING_S = 1.0
WEIGHTS_BYTES = 2**30  # of a reply with weights

OnWeights = Callable[[int, "dict[str, np.ndarray]"], None]


class LearnerLink:
    """`actor`: its name, for people. `environment`: what it observes and does, see `wire.py`. `has_policy`: it acts by
    itself: set `on_weights`, which gets the number of updates and the weights, in the link's thread, whenever there are
    new ones. Otherwise the learner sends actions. `timeout_s`: for one answer.
    """

    def __init__(
        self,
        address: Address,
        actor: str,
        environment: Mapping[str, Any],
        spool: Spool,
        *,
        has_policy: bool = False,
        timeout_s: float = 30.0,
    ):
        self.address, self.spool, self.timeout_s = address, spool, timeout_s
        self.on_weights: OnWeights | None = None
        self._reply_bytes = WEIGHTS_BYTES if has_policy else REPLY_BYTES
        self._hello = {
            "protocol": LEARNER_PROTOCOL,
            "actor": actor,
            "id": spool.id,
            "weights": has_policy,
            "environment": dict(environment),
        }
        self._changed = threading.Condition()
        self._connection: ClientConnection | None = None
        self._asked_at: float | None = None  # since when an answer is awaited
        self._closing = False
        self.connected, self.finished = False, False
        self.error: ClientError | None = None  # the learner refused this actor, or what it sent
        self.lost: ServerLostError | None = None
        self.welcome: dict[str, Any] = {}
        self.behind = self.update = 0  # steps that the learner has not learned from; its updates
        self.weights_update = -1  # of the weights that this actor has
        self._action: tuple[int, np.ndarray] | None = None  # and the number of the record that it answers
        self._thread = threading.Thread(target=self._run, name="flexor_client", daemon=True)
        self._thread.start()

    # --- for the actor's thread

    def add(self, record: Mapping[str, Any]) -> int:
        """Hand a record over, as soon as that is possible; its number. It is on the disk when this returns."""
        self.check()
        number = self.spool.append(pack(record))
        with self._changed:
            self._changed.notify_all()
        return number

    def action(self, number: int, timeout_s: float) -> np.ndarray | None:
        """The learner's action after the record with this number; None if it does not come in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_answered(number) or not self.connected, timeout_s)
            self.check()
            return self._action[1] if self._action is not None and self._action[0] == number else None

    def _is_answered(self, number: int) -> bool:
        return self.spool.acknowledged >= number or self.finished or self.error is not None

    def wait(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until the link's state fulfils a condition; whether it does."""
        with self._changed:
            fulfilled = self._changed.wait_for(lambda: condition() or self.error is not None, timeout_s)
        self.check()
        return fulfilled

    def check(self) -> None:
        """Raise what the learner refused. End a connection on which an answer is overdue."""
        if self.error is not None:
            raise self.error
        connection, asked_at = self._connection, self._asked_at
        if connection is not None and asked_at is not None and time.monotonic() - asked_at > self.timeout_s:
            abort(connection)

    @property
    def pending(self) -> int:
        """Records that the learner does not have yet."""
        return self.spool.last - self.spool.acknowledged

    def close(self, timeout_s: float = 0.0) -> None:
        """Hand over what is pending, for so long at most, and end. What is left stays in the spool."""
        if timeout_s and self.error is None:
            with self._changed:
                self._changed.wait_for(
                    lambda: not self.pending or self.finished or self.error is not None, timeout_s
                )
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._connection is not None:
            abort(self._connection)
        self._thread.join(self.timeout_s)
        self.spool.close()

    # --- the link's own thread

    def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while not self._closing and not self.finished:
            try:
                self._talk()
            except ServerLostError as error:
                pause = FIRST_PAUSE_S if self.connected else min(2 * pause, LONGEST_PAUSE_S)
                self._note(lost=error)
            except ClientError as error:
                self._note(error=error)
                return
            except Exception as error:  # nobody would notice that this thread has ended
                self._note(error=ClientError(f"{type(error).__name__}: {error}"))
                raise
            with self._changed:
                self._changed.wait_for(lambda: self._closing, 0 if self.finished else pause)

    def _note(self, *, lost: ServerLostError | None = None, error: ClientError | None = None) -> None:
        with self._changed:
            if lost is not None and self.lost is None and not self._closing:
                log.warning("%s Records are kept until the learner is back.", lost)
            self.connected, self.lost, self.error = False, lost, error
            self._changed.notify_all()

    def _talk(self) -> None:
        """A connection, from its first message to its last."""
        with ExitStack() as stack:
            self._connection = connection = self.address.connect(
                stack, self.timeout_s, CLOSING_S, self._reply_bytes
            )
            stack.callback(abort, connection)
            metadata = self._receive()
            if metadata.get("learner") != LEARNER_PROTOCOL:
                raise RefusedError(
                    f"{self.address.url} is no learner of this version: give the address of a run with "
                    "--rl.serve.port, and install the flexor-client of its release."
                )
            self._enter()
            while not self._closing and not self.finished:
                self._exchange()

    def _enter(self) -> None:
        """Say who this is, until the learner has begun."""
        while True:
            reply = self._ask(pack({"hello": self._hello}))
            if "starting" not in reply:
                break
            with self._changed:
                if self._changed.wait_for(lambda: self._closing, POLL_S):
                    raise ServerLostError("closed")
        self.spool.acknowledge(_count(reply, "received"))
        with self._changed:
            if self.lost is not None:
                log.warning("The learner is back; %d records are handed over.", self.pending)
            self.welcome, self.lost, self.connected = reply, None, True
            self._changed.notify_all()

    def _exchange(self) -> None:
        """One message, and its answer."""
        if self.on_weights is not None and self.update != self.weights_update:
            self._take_weights(self._ask(pack({"weights": self.weights_update})))
            return
        first = self.spool.acknowledged + 1
        records = self.spool.after(first - 1, MOST_RECORDS, MOST_BYTES)
        if not records:
            with self._changed:
                self._changed.wait_for(lambda: self.pending or self._closing, POLL_S)
            if self.pending or self._closing:
                return
        reply = self._ask(_records_frame(first, records) if records else pack({"status": True}))
        received = _count(reply, "received")
        with self._changed:
            self.spool.acknowledge(received)
            self.behind, self.update = _count(reply, "behind"), _count(reply, "update")
            self.finished = reply.get("finished") is True
            if "action" in reply and records:
                self._action = (received, _checked_action(reply["action"]))
            self._changed.notify_all()

    def _take_weights(self, reply: dict[str, Any]) -> None:
        weights, update = reply.get("weights"), _count(reply, "update")
        if not isinstance(weights, dict) or not all(isinstance(w, np.ndarray) for w in weights.values()):
            raise RefusedError(f"{self.address.url} sent weights that are none.")
        assert self.on_weights is not None
        if weights:
            self.on_weights(update, weights)
        with self._changed:
            self.weights_update = self.update = update
            self._changed.notify_all()

    def _ask(self, frame: bytes) -> dict[str, Any]:
        assert self._connection is not None
        self._asked_at = time.monotonic()
        try:
            self._connection.send(frame)
            return self._receive()
        except (OSError, WebSocketException) as error:
            raise ServerLostError(f"{self.address.url} is lost: {error}.") from error
        finally:
            self._asked_at = None

    def _receive(self) -> dict[str, Any]:
        assert self._connection is not None
        try:
            frame = self._connection.recv(timeout=self.timeout_s)
        except TimeoutError as error:
            raise ServerLostError(
                f"{self.address.url} did not answer within {self.timeout_s:g} s."
            ) from error
        except ConnectionClosed as error:
            raise ServerLostError(f"{self.address.url} closed the connection: {error}.") from error
        if isinstance(frame, str):
            raise RefusedError(f"{self.address.url} refused what this actor sent: {frame}")
        try:
            return read_message(frame, self._reply_bytes)
        except WireError as error:
            raise RefusedError(
                f"{self.address.url} does not speak the protocol of learners: {error}"
            ) from error


def _records_frame(first: int, records: list[bytes]) -> bytes:
    """{"first": number, "records": [...]}, of records that are packed already."""
    packer = msgpack.Packer()
    head = packer.pack_map_header(2) + packer.pack("first") + packer.pack(first) + packer.pack("records")
    return b"".join([head, packer.pack_array_header(len(records)), *records])


def _count(reply: Mapping[str, Any], name: str) -> int:
    value = reply.get(name)
    if type(value) is not int or not 0 <= value < 2**53:
        raise RefusedError(f"The learner's answer has no number {name}.")
    return value


def _checked_action(action: Any) -> np.ndarray:
    if not isinstance(action, np.ndarray) or action.ndim != 1 or action.dtype.kind != "f" or not action.size:
        raise RefusedError("The learner sent an action that is none.")
    return action
