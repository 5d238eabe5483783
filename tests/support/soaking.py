"""Clients that come, go, misbehave, attack and die, while robots check that they get what they should, in time."""

from __future__ import annotations

import io
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from urllib.parse import urlsplit

import numpy as np
from PIL import Image
from websockets.exceptions import ConnectionClosed

from flexor_client.jpeg import encode_jpeg
from flexor_client.wire import pack
from support.frames_to_fuzz import hostile_frame
from support.hostile_requests import hostile_requests
from support.limits import LIMIT_S
from support.serving import CAMERA, STATE, RawClient, expected, observation

IMAGE = (240, 320)  # height and width: large enough that an image of many scans would take seconds
DEADLINE_S = 2.0  # of every robot; what it takes by itself is milliseconds
GRACE_S = 1.0  # for the way to the server and back, through this process: the machine may be busy
PAUSE_S = 0.1  # of everybody else between two deeds, on average: robots shall get their turn here, too


class Soak:
    """Asks until `requests` have been answered. `counts` says what happened; `wrong` must stay empty.

    A robot that waits longer than its deadline, with some grace, is wrong, too. `longest_s` is the longest that one
    waited, and "late" counts those that waited longer than their deadline.
    """

    def __init__(
        self, url: str, requests: int, steady: int = 3, seed: int = 0, deadline_s: float = DEADLINE_S
    ):
        self.url, self.requests, self.steady, self.seed = url, requests, steady, seed
        self.deadline_s = deadline_s
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.longest_s = 0.0
        self.lock = threading.Lock()
        noise = np.random.default_rng(seed).integers(0, 256, (*IMAGE, 3), np.uint8)
        scene = noise[::16, ::16].repeat(16, 0).repeat(16, 1)
        self.images = [encode_jpeg(scene[::-1]), encode_jpeg(scene), scene]
        self.attacks = [*hostile_requests(CAMERA, STATE, *IMAGE, 3).values()]
        self.costly = _costly(noise)

    def run(self, report: Callable[[int, int], None] | None = None) -> None:
        kinds = [
            *[self._steady] * self.steady,
            self._coming_and_going,
            self._dying,
            self._noise,
            *[self._attack] * 2,
            self._keep_decoders_busy,
            self._never_finish,
            self._flood,
        ]
        with ThreadPoolExecutor(len(kinds)) as threads:
            running = [
                threads.submit(kind, np.random.default_rng([self.seed, n])) for n, kind in enumerate(kinds)
            ]
            while not all(task.done() for task in running):
                time.sleep(0.05)
                if report:
                    report(min(self.counts["answered"], self.requests), self.requests)
            for task in running:
                task.result()

    def _over(self) -> bool:
        return self.counts["answered"] >= self.requests or bool(self.wrong)

    def _count(self, event: str) -> None:
        with self.lock:
            self.counts[event] += 1

    def _ask(self, robot: RawClient, rng: np.random.Generator) -> None:
        """One request, and whether its answer is right, and in time."""
        value, image = float(rng.integers(0, 600)), self.images[rng.integers(len(self.images))]
        frame = pack(observation(value, flexor={"deadline_ms": 1e3 * self.deadline_s}) | {CAMERA: image})
        started = time.perf_counter()
        reply = robot.ask_raw(frame)
        waited = time.perf_counter() - started
        self.longest_s = max(self.longest_s, waited)
        if isinstance(reply, dict) and "expired" in reply:
            self._count("expired")
        elif isinstance(reply, str) or not np.array_equal(reply["actions"], expected(value)):
            self.wrong.append(f"asked {value}, got {reply}")
        if waited > self.deadline_s:
            self._count("late")
        if waited > self.deadline_s + GRACE_S:
            self.wrong.append(f"waited {waited:.1f} s for {'actions' if 'actions' in reply else reply}")
        self._count("answered")

    def _steady(self, rng: np.random.Generator) -> None:
        """A well-behaved robot: one connection, from the beginning to the end."""
        try:
            with RawClient(self.url) as robot:
                while not self._over():
                    self._ask(robot, rng)
        except Exception as error:
            self.wrong.append(f"a well-behaved client lost its connection: {error!r}")

    def _coming_and_going(self, rng: np.random.Generator) -> None:
        while not self._over():
            with RawClient(self.url) as robot:
                for _ in range(rng.integers(0, 20)):
                    self._ask(robot, rng)
            self._count("left")

    def _dying(self, rng: np.random.Generator) -> None:
        """Ends its connection within a frame, or while it is waited for."""
        frame = pack(observation(1))
        raw = b"\x82\xfe" + len(frame).to_bytes(2, "big") + bytes(4) + frame
        while not self._over():
            robot = RawClient(self.url)
            robot.socket.socket.sendall(raw[: rng.integers(1, len(raw) + 1)])
            if rng.random() < 0.5:  # without a word, as a robot that loses its power
                robot.socket.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            robot.socket.socket.shutdown(socket.SHUT_RDWR)
            robot.socket.close()
            self._count("died")
            _pause(rng)

    def _noise(self, rng: np.random.Generator) -> None:
        at = urlsplit(self.url)
        while not self._over():
            if rng.random() < 0.3:  # not even a WebSocket
                with socket.create_connection((at.hostname, at.port), LIMIT_S) as raw:
                    raw.sendall(rng.bytes(rng.integers(1, 300)) + b"\r\n\r\n")
            else:
                self._send(hostile_frame(rng))
            self._count("noise")
            _pause(rng)

    def _attack(self, rng: np.random.Generator) -> None:
        """Requests that would become large, or take long."""
        while not self._over():
            self._send(self.attacks[rng.integers(len(self.attacks))])
            self._count("attacks")
            _pause(rng)

    def _keep_decoders_busy(self, rng: np.random.Generator) -> None:
        """Images that are as expensive as is allowed, one after the other, on several connections."""
        frames = [pack(observation(1) | {CAMERA: image}) for image in self.costly]
        robots = [RawClient(self.url) for _ in range(4)]
        while not self._over():
            for robot in robots:
                robot.socket.send(frames[rng.integers(len(frames))])
            for robot in robots:
                robot.socket.recv(timeout=LIMIT_S)
                self._count("costly")
            _pause(rng)
        for robot in robots:
            robot.socket.close()

    def _never_finish(self, rng: np.random.Generator) -> None:
        """Large messages that are begun on many connections, and never end."""
        begun = b"\x82\xff" + (5 * 2**20).to_bytes(8, "big") + bytes(4) + bytes(4 * 2**20)
        while not self._over():
            robots = []
            for _ in range(20):
                with suppress(OSError, ConnectionClosed, TimeoutError):
                    robots.append(RawClient(self.url, close_timeout=0.1))
                    robots[-1].socket.socket.sendall(begun)
                    self._count("unfinished")
                    _pause(rng)
            for robot in robots:
                robot.socket.socket.close()
                robot.socket.close()

    def _flood(self, rng: np.random.Generator) -> None:
        """Thousands of frames that are small: pings, and parts of a message that never ends."""
        floods = [
            (b"\x89\x80" + bytes(4)) * 40_000,
            b"\x02\x80" + bytes(4) + (b"\x00\x80" + bytes(4)) * 40_000,
        ]
        while not self._over():
            with suppress(ConnectionClosed, OSError), RawClient(self.url, close_timeout=0.1) as stranger:
                stranger.socket.socket.sendall(floods[rng.integers(len(floods))])
            self._count("floods")
            _pause(rng)

    def _send(self, frame: bytes) -> None:
        """What it is answered does not matter, even if the server hangs up at once."""
        with suppress(ConnectionClosed, OSError), RawClient(self.url) as stranger:
            stranger.ask_raw(frame)


def _pause(rng: np.random.Generator) -> None:
    time.sleep(rng.uniform(0, 2 * PAUSE_S))


def _costly(image: np.ndarray) -> list[bytes]:
    """Files of noise: one that is baseline, and a progressive one with as many scans as are allowed."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=40, progressive=True)
    data = file.getvalue().removesuffix(b"\xff\xd9")
    scan = data[data.rindex(b"\xff\xda") :]
    return [encode_jpeg(image, 95), data + scan * (16 - data.count(b"\xff\xda")) + b"\xff\xd9"]
