"""A policy on another machine: observations go there, actions come back. It waits for each answer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as TookTooLong
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Callable

import numpy as np
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import ClientConnection

from flexor_client.address import Address, abort
from flexor_client.errors import ClientError, ExpiredError, RefusedError, ServerLostError, WireError
from flexor_client.jpeg import encode_jpeg
from flexor_client.replies import REPLY_BYTES, read_metadata, read_result, stable_fields
from flexor_client.wire import OPTIONS
from flexor_client.wire import pack as pack_frame

log = logging.getLogger("flexor_client")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0  # between two tries to connect
CLOSING_S = 1.0  # for the server to say goodbye


class RemotePolicy:
    """The policy of a server, `flexor serve` or openpi's. One connection, one robot.

    `url`: ws://host:port, or wss:// with TLS. `api_key`: the server's. `certificate`: a file with the certificates to
    trust instead of the system's, such as a server's own. `jpeg`: a quality from 1 to 100, with which images are sent
    compressed (90 is hardly visible); None: as they are, which every server understands. `timeout_s`: for one answer;
    the first may take longer, if the server compiles. `reconnect_s`: how long to try to reach a server that is lost,
    before ServerLostError; 0: not at all.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        certificate: str | Path | None = None,
        jpeg: int | None = None,
        timeout_s: float = 30.0,
        reconnect_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._address = Address(url, api_key, certificate)
        if jpeg is not None and not 1 <= jpeg <= 100:
            raise ClientError(
                f"jpeg={jpeg}: give a quality from 1 to 100, or None to send images as they are."
            )
        self.url, self.jpeg, self.timeout_s, self.reconnect_s = url, jpeg, timeout_s, reconnect_s
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._sender = ThreadPoolExecutor(1, "flexor_client")
        self._connection: ClientConnection | None = None
        self._stack = ExitStack()  # closes it
        self._metadata: dict[str, Any] = {}
        self._has_metadata = False  # whether there was any
        self._episode: int | None = None
        self._resets, self._resets_sent = 0, 0  # new episodes, and those that the server knows of

    @property
    def metadata(self) -> dict[str, Any]:
        """What the server says about its policy; `flexor_client.wire` describes it. Empty with some servers."""
        with self._lock:
            if self._connection is None:
                self._retry(self._connect)
        return self._metadata

    def reset(self, episode: int | None = None) -> None:
        """A new episode begins with the next observation. The policy's noise depends on its number, if given."""
        self._episode = episode
        self._resets += 1

    def infer(self, observation: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """The server's result for an observation, with `actions` [H, A]. `options` are those of `flexor_client.wire`.

        A lost server is tried again for `reconnect_s`; the observation is sent again then.
        """
        with self._lock:
            resets = self._resets  # another episode may begin while this answer is awaited
            if resets > self._resets_sent:
                options = {"reset": True, **options}
            if self._episode is not None:
                options = {"episode": self._episode, **options}
            frame = self._pack(observation, options)
            result: dict[str, Any] = self._retry(lambda: self._request(frame))
            self._resets_sent = resets
        if "expired" in result:
            age, allowed = (result["expired"].get(name, 0) for name in ("age_ms", "deadline_ms"))
            raise ExpiredError(f"The observation was {age:.0f} ms old; {allowed:.0f} are allowed.")
        return result

    def chunk(self, observation: Mapping[str, Any], task: str = "", **options: Any) -> np.ndarray:
        """The next actions [H, A], in the robot's units."""
        result = self.infer({**observation, "prompt": task} if task else observation, **options)
        if "actions" not in result:
            raise RefusedError(f"{self.url} answered without actions [H, A]. Is it a policy server?")
        actions: np.ndarray = result["actions"]
        return actions

    def close(self) -> None:
        with self._lock:
            self._disconnect()

    def __enter__(self) -> RemotePolicy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pack(self, observation: Mapping[str, Any], options: Mapping[str, Any]) -> bytes:
        try:
            message = {name: self._compress(value) for name, value in observation.items()}
            return pack_frame({**message, OPTIONS: options} if options else message)
        except WireError as error:
            raise ClientError(f"The observation can't be sent: {error}") from error

    def _compress(self, value: Any) -> Any:
        """The value with its images as JPEG files, if that is wanted."""
        if self.jpeg is None:
            return value
        if isinstance(value, Mapping):
            return {name: self._compress(item) for name, item in value.items()}
        is_image = isinstance(value, np.ndarray) and value.dtype == np.uint8
        if isinstance(value, list) or (is_image and value.ndim == 4):
            return [self._compress(image) for image in value]
        return encode_jpeg(value, self.jpeg) if is_image and value.ndim == 3 else value

    def _retry(self, ask: Callable[[], Any]) -> Any:
        """What `ask` returns, tried again while the server is lost, with growing pauses."""
        give_up, pause = self._clock() + self.reconnect_s, FIRST_PAUSE_S
        while True:
            try:
                return ask()
            except ServerLostError as error:
                self._disconnect()
                if self._clock() + pause > give_up:
                    raise
                log.warning("%s Trying again in %.1f s.", error, pause)
                self._sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
            except RefusedError:
                self._disconnect()
                raise

    def _connect(self) -> ClientConnection:
        """The connection; the server's metadata came with it."""
        if self._connection is not None:
            return self._connection
        self._connection = self._address.connect(self._stack, self.timeout_s, CLOSING_S, REPLY_BYTES)
        self._accept_metadata(self._receive(self._connection, read_metadata))
        return self._connection

    def _accept_metadata(self, metadata: dict[str, Any]) -> None:
        """Take note of what the server says of its policy, which must be the one that the robot began with."""
        before, now = (stable_fields(fields) for fields in (self._metadata, metadata))
        if self._has_metadata and before != now:
            raise RefusedError(
                f"{self.url} serves another policy than before: {now}, after {before}. Begin anew with a new "
                "RemotePolicy."
            )
        self._metadata, self._has_metadata = metadata, True

    def _request(self, frame: bytes) -> dict[str, Any]:
        connection = self._connect()
        max_bytes = self._metadata.get("limits", {}).get("frame_bytes")
        if max_bytes is not None and len(frame) > max_bytes:
            raise ClientError(
                f"The observation has {len(frame):,} bytes, but {self.url} takes {max_bytes:,.0f}: send only what the "
                "policy needs, or compressed images (jpeg=90), or start the server with a larger --max-frame-mb."
            )
        self._send(connection, frame)
        return self._receive(connection, lambda reply: read_result(reply, self._metadata))

    def _send(self, connection: ClientConnection, frame: bytes) -> None:
        """In another thread: if the server does not read, it waits for ever, and this one must not."""
        sending = self._sender.submit(connection.send, frame)
        try:
            sending.result(self.timeout_s)
        except TookTooLong as error:
            raise ServerLostError(
                f"{self.url} did not take the observation within {self.timeout_s:g} s."
            ) from error
        except (OSError, WebSocketException) as error:
            raise ServerLostError(f"{self.url} is lost: {error}.") from error
        finally:
            if not sending.done():  # also if the user ends it
                abort(connection)

    def _receive(
        self, connection: ClientConnection, read: Callable[[bytes], dict[str, Any]]
    ) -> dict[str, Any]:
        try:
            frame = connection.recv(timeout=self.timeout_s)
        except TimeoutError as error:
            # The connection is closed: this answer would be taken for that to the next observation.
            raise ServerLostError(f"{self.url} did not answer within {self.timeout_s:g} s.") from error
        except ConnectionClosed as error:
            raise ServerLostError(f"{self.url} closed the connection: {error}.") from error
        except (OSError, WebSocketException, ValueError) as error:
            raise ServerLostError(f"{self.url} is lost: {error}.") from error
        if isinstance(frame, str):
            raise RefusedError(f"{self.url} can't use the observation: {frame}")
        try:
            return read(frame)
        except WireError as error:
            raise RefusedError(
                f"{self.url} does not speak the protocol of policy servers: {error}"
            ) from error

    def _disconnect(self) -> None:
        """Say goodbye, but not for longer than allowed: a server that does not read could prevent it."""
        connection, self._connection = self._connection, None
        stack, self._stack = self._stack, ExitStack()
        if connection is None:
            return
        closing = threading.Thread(target=stack.close, name="flexor_client", daemon=True)
        closing.start()
        closing.join(2 * CLOSING_S)
        if closing.is_alive():
            abort(connection)
            closing.join(CLOSING_S)
