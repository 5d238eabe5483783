"""One client of `flexor bench serve`, a program of its own: it does not import torch.

Its argument is a JSON object. It connects, prints `ready`, waits for a line, sends requests, and prints its
measurements.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
from websockets.sync.client import connect

from flexor_client.jpeg import encode_jpeg
from flexor_client.wire import pack, unpack

SEEDS = 8  # different images, so that no cache has them


def synthetic_image(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Uint8 [H, W, 3] with large shapes, edges and some noise: a JPEG of it is about as large as that of a scene."""
    y, x = np.mgrid[0:height, 0:width]
    image = np.zeros((height, width, 3))
    for _ in range(12):
        cx, cy, radius = rng.uniform(0, width), rng.uniform(0, height), rng.uniform(0.05, 0.4) * width
        inside = (x - cx) ** 2 + (y - cy) ** 2 < radius**2
        image[inside] = rng.uniform(0, 255, 3) + 40 * np.sin(0.05 * (x + y))[inside][:, None]
    image += rng.normal(0, 4, image.shape)
    return image.clip(0, 255).astype(np.uint8)


def observations(settings: dict[str, Any]) -> list[dict[str, Any]]:
    rng = np.random.default_rng(settings["seed"])
    observed = []
    for _ in range(SEEDS):
        observation: dict[str, Any] = {"prompt": "pick up the block"}
        for name, about in settings["inputs"].items():
            if about["image"]:
                channels, height, width = about["shape"]
                observation[name] = synthetic_image(rng, height, width)[:, :, :channels]
            else:
                observation[name] = rng.uniform(-1, 1, about["shape"]).astype(np.float32)
        observed.append(observation)
    return observed


def frame(observation: dict[str, Any], jpeg: bool) -> bytes:
    compressed = {
        name: encode_jpeg(value) if jpeg and getattr(value, "ndim", 0) == 3 else value
        for name, value in observation.items()
    }
    return pack(compressed)


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    robot_observations, jpeg = observations(settings), settings["encoding"] == "jpeg"
    rows: list[dict[str, float]] = []
    with connect(settings["url"], compression=None, max_size=None) as socket:
        socket.recv()
        for number in range(settings["warm_up"]):
            socket.send(frame(robot_observations[number % SEEDS], jpeg))
            socket.recv()
        print("ready", flush=True)
        sys.stdin.readline()
        begun = time.time()
        for number in range(settings["requests"]):
            packing = time.perf_counter()
            sent = frame(robot_observations[number % SEEDS], jpeg)
            sending = time.perf_counter()
            socket.send(sent)
            reply = socket.recv()
            received = time.perf_counter()
            if isinstance(reply, str):
                raise SystemExit(reply)
            timing = unpack(reply)["server_timing"]
            if rows:
                rows[-1]["encode"] = timing["encode_ms"]
            rows.append(
                {
                    "pack": 1e3 * (sending - packing),
                    "round_trip": 1e3 * (received - sending),
                    **{part: timing[f"{part}_ms"] for part in ("decode", "queue", "model")},
                }
            )
        ended = time.time()
    return {"rows": rows[:-1], "begun": begun, "ended": ended, "frame_bytes": len(sent)}


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
