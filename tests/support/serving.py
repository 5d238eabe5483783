"""A server in this process, in a thread of its own, and policies that are quick to serve."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from websockets.sync.client import ClientConnection, connect

from flexor.policies.act.config import ACTConfig
from flexor.policies.base import Policy
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.pretrained import Pretrained
from flexor.serve.background import in_background
from flexor.serve.predictor import Predictor
from flexor.serve.server import PolicyServer
from flexor.serve.settings import ServeSettings
from flexor_client.wire import pack, unpack

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
    """A server on a free port: its address and itself."""
    given = ServeSettings(**{"port": 0, "processes": 0, **settings})
    if isinstance(pretrained, Pretrained):
        pretrained = Predictor(pretrained, reply=given.reply, max_batch=given.max_batch)
    server = PolicyServer(given, pretrained, names)
    with in_background(server) as url:
        yield url, server


def get(url: str, path: str, **headers: str) -> tuple[int, str]:
    """What a browser gets: status and text."""
    request = urllib.request.Request(url.replace("ws", "http", 1) + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class Talk:
    """A client that says exactly what it is told to."""

    def __init__(self, url: str, **settings: Any):
        self.connecting = connect(url, compression=None, max_size=None, **settings)
        self.socket: ClientConnection = self.connecting.__enter__()
        self.metadata = unpack(self.socket.recv(timeout=30))

    def ask(self, message: Any) -> Any:
        return self.ask_raw(pack(message))

    def ask_raw(self, frame: bytes | str) -> Any:
        """The result; of an error, its text."""
        self.socket.send(frame)
        reply = self.socket.recv(timeout=30)
        return reply if isinstance(reply, str) else unpack(reply)

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
