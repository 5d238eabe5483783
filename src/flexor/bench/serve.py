"""`flexor bench serve`: how long a robot waits for its actions, and where that time goes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexor.bench import serve_load
from flexor.bench.step import name_of
from flexor.core.batch import ACTION, STATE, Batch
from flexor.core.console import Progress, table
from flexor.core.errors import ConfigError, FlexorError
from flexor.core.rng import Noise, NoiseSource
from flexor.policies.act.config import ACTConfig
from flexor.policies.base import Policy
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.pretrained import Pretrained
from flexor.serve.background import in_background
from flexor.serve.predictor import Predictor
from flexor.serve.server import PolicyServer
from flexor.serve.settings import ServeSettings

PARTS = ("network", "decode", "queue", "model", "encode")

PERCENTILES = (50, 95, 99)
WARM_UP = 5
RATE_HZ = 30  # for which the bandwidth is reported


@dataclass(frozen=True)
class ServeCase:
    """One measurement."""

    clients: int
    encoding: str
    requests: int
    """Of each client."""


class EmptyPolicy(Policy):
    """A policy that computes nothing."""

    def __init__(self, config: ACTConfig):
        super().__init__(config)
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def predict(self, batch: Batch, noise: NoiseSource) -> Tensor:
        raise NotImplementedError


class NoModel(Pretrained):
    """Returns zeros at once, without processing: measures the server alone."""

    def chunk(
        self,
        observation: Mapping[str, np.ndarray],
        task: Sequence[str],
        noise: Noise | None = None,
        memory: Batch | None = None,
        previous: np.ndarray | None = None,
        delay: int | Sequence[int] = 0,
        left: Sequence[int] | None = None,
    ) -> np.ndarray:
        config = self.policy.config
        return np.zeros((len(task), len(config.action_deltas), config.action.shape[0]), np.float32)


def no_model(cameras: tuple[int, int, int], state: int = 14, action: int = 14) -> Predictor:
    """A predictor without a policy. `cameras`: number, height, width."""
    count, height, width = cameras
    image = PolicyFeature(Kind.VISUAL, (3, height, width))
    images = {f"observation.images.{n}": image for n in range(count)}
    config = ACTConfig(
        input_features={STATE: PolicyFeature(Kind.STATE, (state,)), **images},
        output_features={ACTION: PolicyFeature(Kind.ACTION, (action,))},
    )
    return Predictor(NoModel(EmptyPolicy(config), *config.pipelines({}, "cpu")))


def bench_serve(
    predictors: Iterator[Predictor],
    clients: Sequence[int],
    encodings: Sequence[str],
    requests: int,
    processes: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure each predictor with each number of clients and each encoding of images.

    `processes`: for connections, as in `ServeSettings`.
    """
    if min(clients) < 1 or requests < 2:
        raise ConfigError("--clients must be at least 1, and --requests at least 2.")
    rows: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    for predictor in predictors:
        cases = [ServeCase(n, e, max(2, requests // n)) for n in clients for e in encodings]
        most = max(clients) + 1
        settings = ServeSettings(port=0, requests_per_s=1e9, max_clients=most, processes=processes)
        server = PolicyServer(settings, predictor)
        cameras = [list(feature.shape) for feature in predictor.config.images.values()]
        modelless = isinstance(predictor.pretrained, NoModel)
        about = {
            "policy": None if modelless else predictor.config.type,
            "device": name_of(next(predictor.pretrained.policy.parameters()).device),
            "torch": torch.__version__,
            "processes": settings.connection_processes(),
        }
        with in_background(server) as url:
            for number, case in enumerate(cases, 1):
                rows.append({"cameras": cameras, **_measure(case, url, server.metadata()["inputs"])})
                if progress:
                    progress(number, len(cases))
    return {**about, "rows": rows}


def _measure(case: ServeCase, url: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """Start the clients, let them send requests at the same time, and merge their measurements."""
    settings = {"url": url, "inputs": inputs, "warm_up": WARM_UP}
    settings |= {"encoding": case.encoding, "requests": case.requests}
    with ExitStack() as stack:
        robots = [_start(stack, {**settings, "seed": seed}) for seed in range(case.clients)]
        for robot in robots:
            if robot.stdout.readline() != "ready\n":  # type: ignore[union-attr]
                raise FlexorError(f"A client failed:\n{robot.communicate()[1]}")
        for robot in robots:
            robot.stdin.write("go\n")  # type: ignore[union-attr]
            robot.stdin.flush()  # type: ignore[union-attr]
        results = []
        for robot in robots:
            out, errors = robot.communicate()
            if robot.returncode:
                raise FlexorError(f"A client failed:\n{errors}")
            results.append(json.loads(out))
    return {**vars(case), **_figures(results)}


def _start(stack: ExitStack, settings: dict[str, Any]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", serve_load.__name__, json.dumps(settings)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    robot: subprocess.Popen[str] = subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload]
    stack.callback(robot.wait)
    stack.callback(robot.kill)
    return robot


def _figures(clients: list[dict[str, Any]]) -> dict[str, Any]:
    """Percentiles over the requests of all clients, in milliseconds."""
    rows = [row for client in clients for row in client["rows"]]
    times = {part: np.array([row[part] for row in rows]) for part in rows[0]}
    inside = sum(times[part] for part in PARTS[1:])
    times["network"] = times["round_trip"] - inside
    times["without_model"] = times["round_trip"] - times["model"]
    seconds = max(client["ended"] for client in clients) - min(client["begun"] for client in clients)
    count = sum(len(client["rows"]) + 1 for client in clients)
    frame = clients[0]["frame_bytes"]
    return {
        "ms": {part: _percentiles(values) for part, values in times.items()},
        "requests_per_s": count / seconds,
        "frame_bytes": frame,
        "megabits_per_s": frame * 8 * RATE_HZ / 1e6,
    }


def _percentiles(values: np.ndarray) -> dict[str, float]:
    return {f"p{p}": float(v) for p, v in zip(PERCENTILES, np.percentile(values, PERCENTILES))}


def render_serve(report: dict[str, Any]) -> str:
    policy = report["policy"] or "no model: measures the server alone"
    lines = [
        f"{policy}; {report['device']}, torch {report['torch']}, processes for connections: {report['processes']}; "
        "milliseconds that a robot waits for its actions",
        "",
    ]
    cells = [
        [
            *("cameras", "images", "clients", "requests/s", "p50", "p95", "p99", "p50 without model", "p99"),
            *PARTS,
            f"Mbit/s at {RATE_HZ} Hz",
        ]
    ]
    for row in report["rows"]:
        ms, (_, height, width) = row["ms"], row["cameras"][0] if row["cameras"] else (0, 0, 0)
        cells.append(
            [
                f"{len(row['cameras'])}x{height}x{width}",
                row["encoding"],
                str(row["clients"]),
                f"{row['requests_per_s']:,.0f}",
                *(f"{ms['round_trip'][p]:.2f}" for p in ("p50", "p95", "p99")),
                *(f"{ms['without_model'][p]:.2f}" for p in ("p50", "p99")),
                *(f"{ms[part]['p50']:.2f}" for part in PARTS),
                f"{row['megabits_per_s']:,.1f}",
            ]
        )
    return "\n".join([*lines, table(cells), "", f"{', '.join(PARTS)}: medians of the parts"])
