"""A server in this process, in a thread of its own, and policies that are quick to serve."""

from __future__ import annotations

import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from websockets.sync.client import ClientConnection, connect

from flexor.policies.act.config import ACTConfig
from flexor.policies.base import Policy
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.pretrained import Pretrained
from flexor.serve import background, batching, processes
from flexor.serve.background import in_background
from flexor.serve.predictor import Predictor
from flexor.serve.server import PolicyServer
from flexor.serve.settings import ServeSettings
from flexor_client.wire import pack, unpack
from support.limits import FOREVER_S, LIMIT_S

CAMERA, STATE = "observation.images.top", "observation.state"
SIZE, CHUNK = 8, 4
needs_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="processes for connections need Linux"
)


class Numbers(Policy):
    """Entry h of its chunk is the state's first two values plus h; a state of 666 makes it fail."""

    def __init__(self, config: ACTConfig, before: Callable[[int], None] | None = None):
        super().__init__(config)
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.before = before
        self.batches: list[int] = []

    def predict(self, batch: Any, noise: Any) -> torch.Tensor:
        state = batch[STATE]
        self.batches.append(len(state))
        if self.before is not None:
            self.before(len(state))
        if (state == 666).any():
            raise ZeroDivisionError("the number of the beast")
        chunk = state[:, None, :2] + torch.arange(CHUNK)[:, None]
        return torch.where(chunk > 1e6, torch.nan, chunk)


def numbers(
    before: Callable[[int], None] | None = None, image: tuple[int, int] = (SIZE, SIZE), **settings: Any
) -> Pretrained:
    """`image`: height and width of its camera's images."""
    config = ACTConfig(
        **{"chunk_size": CHUNK, "n_action_steps": CHUNK, **settings},
        input_features={
            CAMERA: PolicyFeature(Kind.VISUAL, (3, *image)),
            STATE: PolicyFeature(Kind.STATE, (3,)),
        },
        output_features={"action": PolicyFeature(Kind.ACTION, (2,))},
    )
    return Pretrained(Numbers(config, before), *config.pipelines({}, "cpu"))


def observation(value: float = 0.0, **more: Any) -> dict[str, Any]:
    state = np.array([value, -value, 1], np.float32)
    return {CAMERA: np.zeros((SIZE, SIZE, 3), np.uint8), STATE: state, **more}


def expected(value: float) -> np.ndarray:
    return np.array([value, -value], np.float32) + np.arange(CHUNK, dtype=np.float32)[:, None]


@contextmanager
def serving(
    pretrained: Pretrained | Predictor, names: Mapping[str, str] | None = None, **settings: Any
) -> Iterator[tuple[str, PolicyServer]]:
    """A server on a free port: its address and itself. A busy machine reaches none of its time limits."""
    patience = {"port": 0, "processes": 0, "opening_s": LIMIT_S, "ping_s": LIMIT_S}
    serve_settings = ServeSettings(**{**patience, **settings})
    if isinstance(pretrained, Pretrained):
        pretrained = Predictor(pretrained, reply=serve_settings.reply, max_batch=serve_settings.max_batch)
    server = PolicyServer(serve_settings, pretrained, names)
    limits = dict.fromkeys(("START_S", "END_S", "FIGURES_S", "ANSWER_S"), LIMIT_S)
    with (
        mock.patch.multiple(processes, FROZEN_S=FOREVER_S, **limits),
        mock.patch.object(background, "STOP_S", LIMIT_S),
        in_background(server) as url,
    ):
        yield url, server


def get(url: str, path: str, **headers: str) -> tuple[int, str]:
    """What a browser gets: status and text."""
    request = urllib.request.Request(url.replace("ws", "http", 1) + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class RawClient:
    """A client that sends exactly what a test gives it."""

    def __init__(self, url: str, **settings: Any):
        patience = {"open_timeout": LIMIT_S, "ping_interval": None}
        self.connecting = connect(url, compression=None, max_size=None, **{**patience, **settings})
        self.socket: ClientConnection = self.connecting.__enter__()
        self.metadata = unpack(self.socket.recv(timeout=LIMIT_S))

    def ask(self, message: Any) -> Any:
        return self.ask_raw(pack(message))

    def ask_raw(self, frame: bytes | str) -> Any:
        """The result; of an error, its text."""
        self.socket.send(frame)
        reply = self.socket.recv(timeout=LIMIT_S)
        return reply if isinstance(reply, str) else unpack(reply)

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def ask_at_once(url: str, server: PolicyServer, values: Sequence[float]) -> list[Any]:
    """The replies to robots that ask together. The server waits for all of them, however long each takes."""
    batcher = server.model.batcher

    def expect_all() -> None:
        batcher.window_s = LIMIT_S

    clients = [RawClient(url) for _ in values]
    barrier = threading.Barrier(len(values), expect_all)

    def ask(client: RawClient, value: float) -> Any:
        client.ask(observation(1))  # from now on the batcher knows this robot
        barrier.wait(LIMIT_S)
        return client.ask(observation(value, flexor={}))

    window = batcher.window_s
    with mock.patch.object(batching, "ACTIVE_S", LIMIT_S), ThreadPoolExecutor(len(values)) as threads:
        replies = list(threads.map(ask, clients, values))
    batcher.window_s = window
    for client in clients:
        client.socket.close()
    return replies
