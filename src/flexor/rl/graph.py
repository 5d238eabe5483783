"""One update as one CUDA graph: batches are drawn, processed and learned from without the host."""

from __future__ import annotations

import torch
from torch import Tensor

from flexor.core.cuda_graphs import capture, why_not_captured
from flexor.core.log import log
from flexor.core.rng import GraphNoise, NoiseKeys
from flexor.rl.learner import Figures, Learner, compute_eagerly

WARM_UP = 3  # updates before the first capture: libraries and optimizers set up what it then finds


class GraphUpdate:
    """`compute_eagerly`, as a graph where that works. Updates with and without the actor have a graph each."""

    def __init__(self, device: torch.device):
        self.stream, self.pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        self.graphs: dict[bool, tuple[torch.cuda.CUDAGraph, Figures]] = {}
        self.eager = 0
        self.gave_up = False
        self.keys = NoiseKeys(device)
        self.bounds: Tensor = torch.zeros(2, dtype=torch.int64, device=device)

    def __call__(self, learner: Learner) -> Figures:
        with_actor = learner.updates % int(learner.algorithm.settings["policy_update_freq"]) == 0
        if self.gave_up or (with_actor not in self.graphs and self.eager < WARM_UP):
            self.eager += 1
            return self._eagerly(learner)
        if with_actor not in self.graphs:
            self._capture(learner, with_actor)
        if self.gave_up:
            return self._eagerly(learner)
        graph, figures = self.graphs[with_actor]
        self.bounds.copy_(learner.buffer.bounds().pin_memory(), non_blocking=True)
        self.keys.write(learner.seed, learner.updates)
        graph.replay()
        return figures

    def _eagerly(self, learner: Learner) -> Figures:
        """On the stream that will capture."""
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            figures = compute_eagerly(learner)
        current.wait_stream(self.stream)
        return figures

    def _capture(self, learner: Learner, with_actor: bool) -> None:
        graph, noise = torch.cuda.CUDAGraph(), GraphNoise(self.keys, learner.sample_ids)
        try:
            with capture(graph, self.pool, self.stream):
                figures = learner.update(self.bounds, noise, learner.updates)
        except RuntimeError as error:
            self.gave_up = True
            reason = why_not_captured(error, __file__)
            log.warning(
                "an update can't be captured in a CUDA graph: %s. It runs operation by operation", reason
            )
            return
        self.graphs[with_actor] = graph, figures
        log.info("from update %d on, an update is replayed as a CUDA graph", learner.updates + 1)
