"""Clients that come, go, misbehave and die, while others check that they get what they should."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import numpy as np

from flexor_client.wire import pack
from support.frames_to_fuzz import hostile_frame
from support.serving import Talk, expected, observation


class Soak:
    """Asks until `requests` have been answered. `found` counts what happened; `wrong` must stay empty."""

    def __init__(self, url: str, requests: int, steady: int = 3, seed: int = 0):
        self.url, self.requests, self.steady, self.seed = url, requests, steady, seed
        self.found: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.lock = threading.Lock()

    def run(self, report: Callable[[int, int], None] | None = None) -> None:
        kinds = [*[self._steady] * self.steady, self._coming_and_going, self._dying, self._hostile]
        with ThreadPoolExecutor(len(kinds)) as threads:
            running = [
                threads.submit(kind, np.random.default_rng([self.seed, n])) for n, kind in enumerate(kinds)
            ]
            while not all(one.done() for one in running):
                time.sleep(0.05)
                if report:
                    report(min(self.found["answered"], self.requests), self.requests)
            for one in running:
                one.result()

    def _over(self) -> bool:
        return self.found["answered"] >= self.requests or bool(self.wrong)

    def _count(self, what: str) -> None:
        with self.lock:
            self.found[what] += 1

    def _ask(self, robot: Talk, rng: np.random.Generator) -> None:
        """One request, and whether its answer is right."""
        value = float(rng.integers(0, 600))
        reply = robot.ask(observation(value))
        if isinstance(reply, str) or not np.array_equal(reply["actions"], expected(value)):
            self.wrong.append(f"asked {value}, got {reply}")
        self._count("answered")

    def _steady(self, rng: np.random.Generator) -> None:
        """A well-behaved robot: one connection, from the beginning to the end."""
        try:
            with Talk(self.url) as robot:
                while not self._over():
                    self._ask(robot, rng)
        except Exception as error:
            self.wrong.append(f"a well-behaved client lost its connection: {error!r}")

    def _coming_and_going(self, rng: np.random.Generator) -> None:
        while not self._over():
            with Talk(self.url) as robot:
                for _ in range(rng.integers(0, 20)):
                    self._ask(robot, rng)
            self._count("left")

    def _dying(self, rng: np.random.Generator) -> None:
        """Ends its connection within a frame, or while it is waited for."""
        frame = pack(observation(1))
        raw = b"\x82\xfe" + len(frame).to_bytes(2, "big") + bytes(4) + frame
        while not self._over():
            robot = Talk(self.url)
            robot.socket.socket.sendall(raw[: rng.integers(1, len(raw) + 1)])
            if rng.random() < 0.5:  # without a word, as a robot that loses its power
                robot.socket.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            robot.socket.socket.shutdown(socket.SHUT_RDWR)
            robot.socket.close()
            self._count("died")

    def _hostile(self, rng: np.random.Generator) -> None:
        at = urlsplit(self.url)
        while not self._over():
            if rng.random() < 0.3:  # not even a WebSocket
                with socket.create_connection((at.hostname, at.port), 30) as raw:
                    raw.sendall(rng.bytes(rng.integers(1, 300)) + b"\r\n\r\n")
            else:
                with Talk(self.url) as robot:
                    robot.ask_raw(hostile_frame(rng))
            self._count("hostile")
