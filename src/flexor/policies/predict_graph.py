"""A prediction as one CUDA graph: the host launches all its kernels at once instead of one by one.

A diffusion policy runs its network up to 100 times for one chunk of actions, and a small network's kernels take the GPU
less time than the host needs to launch them. The first prediction of a kind runs eagerly, the second is captured, later
ones are replayed. A graph runs the kernels of the eager prediction, so it computes the same. An autoregressive
policy (`autoregressive.py`) has a second graph, of a segment of tokens.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexor.core.batch import MEMORY, Batch
from flexor.core.cuda_graphs import capture, why_not_captured
from flexor.core.log import log
from flexor.core.rng import GraphNoise, Noise, NoiseKeys
from flexor.policies.autoregressive import AutoregressivePolicy
from flexor.policies.base import Policy

MAX_GRAPHS = 8  # each holds its own memory


@dataclass
class _CapturedPrediction:
    """The graph, and the memory that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: dict[str, Tensor]
    keys: NoiseKeys
    sample_ids: Tensor
    output: Tensor | _CapturedSegment  # the actions, or the graph that decodes them
    memory: dict[str, Tensor]  # what the policy writes to its memory


@dataclass
class _CapturedSegment:
    """The graph of one segment of an autoregressive prediction, and the state that it changes."""

    policy: AutoregressivePolicy
    state: Any
    graph: torch.cuda.CUDAGraph

    def actions(self) -> Tensor:
        for _ in range(self.policy.max_segments):
            self.graph.replay()
            if self.policy.is_finished(self.state):
                break
        return self.policy.decode_actions(self.state)


class PredictGraphs:
    """`policy.predict` on an NVIDIA GPU, as a graph where that works. Call it in inference mode."""

    def __init__(self, policy: Policy):
        self.policy = policy
        self.weights = [*policy.parameters(), *policy.buffers()]  # listing them takes milliseconds
        self.captured: dict[Hashable, _CapturedPrediction] = {}
        self.run_once: set[Hashable] = set()  # eagerly, before they are captured
        self.gave_up = False
        self.device = next(policy.parameters()).device  # it need not be torch's current one
        self.stream = torch.cuda.Stream(self.device)

    def __call__(self, batch: Batch, noise: Noise) -> Tensor:
        if self.gave_up:
            return self.policy.predict(batch, noise)
        inputs = _tensors(batch)
        kind = self._kind(inputs, noise)
        if kind not in self.captured and kind in self.run_once and len(self.captured) < MAX_GRAPHS:
            self._try_to_capture(kind, inputs, noise)
        if kind in self.captured:
            return _replay(self.captured[kind], inputs, noise, batch.get(MEMORY))
        self.run_once.add(kind)
        # on the stream of the capture: libraries set up their workspaces there
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            actions = self.policy.predict(batch, noise)
        current.wait_stream(self.stream)
        return actions

    def _kind(self, inputs: dict[str, Tensor], noise: Noise) -> Hashable:
        """Predictions with equal keys can share a graph."""
        shapes = tuple((name, value.shape, value.dtype) for name, value in inputs.items())
        weights = tuple(tensor.data_ptr() for tensor in self.weights)
        rounding = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        return shapes, isinstance(noise.step, int), weights, rounding, autocast

    def _try_to_capture(self, kind: Hashable, inputs: dict[str, Tensor], noise: Noise) -> None:
        try:
            self.captured[kind] = self._capture(inputs, noise)
        except Exception as error:  # what can't be captured can still run eagerly
            self.gave_up = True
            log.info(
                "Predictions can't be captured in a CUDA graph: %s. They run operation by operation, which is slower.",
                why_not_captured(error, __file__),
            )

    def _capture(self, like: dict[str, Tensor], noise: Noise) -> _CapturedPrediction:
        """Captures without computing anything."""
        torch.cuda.synchronize(self.device)
        torch._C._cuda_clearCublasWorkspaces()  # the graph gets its own
        inputs = {name: torch.empty_like(value) for name, value in like.items()}
        ids = torch.empty_like(noise.sample_ids)
        keys = NoiseKeys(self.device, None if isinstance(noise.step, int) else len(ids))
        batch, graph = _as_batch(inputs), torch.cuda.CUDAGraph()
        graph_noise = GraphNoise(keys, ids)
        pool = torch.cuda.graph_pool_handle()
        output: Tensor | _CapturedSegment
        if isinstance(self.policy, AutoregressivePolicy) and self.policy.writes_tokens:
            with capture(graph, pool, self.stream):
                state = self.policy.prefill(batch, graph_noise)
            segment = torch.cuda.CUDAGraph()
            with capture(segment, pool, self.stream):  # in the same memory: never replayed at the same time
                self.policy.decode_segment(state)
            output = _CapturedSegment(self.policy, state, segment)
        else:
            with capture(graph, pool, self.stream):
                output = self.policy.predict(batch, graph_noise)
        return _CapturedPrediction(graph, inputs, keys, ids, output, dict(batch[MEMORY]))


def _tensors(batch: Batch) -> dict[str, Tensor]:
    """The inputs of a graph: the tensors, flat. Strings, such as the task, stay on the host."""
    memory: dict[str, Any] = {f"{MEMORY}/{name}": value for name, value in batch.get(MEMORY, {}).items()}
    return {name: value for name, value in {**batch, **memory}.items() if isinstance(value, Tensor)}


def _as_batch(tensors: dict[str, Tensor]) -> Batch:
    """The reverse of `_tensors`."""
    inner = f"{MEMORY}/"
    batch: Batch = {name: value for name, value in tensors.items() if not name.startswith(inner)}
    batch[MEMORY] = {
        name.removeprefix(inner): value for name, value in tensors.items() if name.startswith(inner)
    }
    return batch


def _replay(
    captured: _CapturedPrediction, inputs: dict[str, Tensor], noise: Noise, memory: Batch | None
) -> Tensor:
    for name, target in captured.inputs.items():
        target.copy_(inputs[name], non_blocking=True)
    captured.sample_ids.copy_(noise.sample_ids, non_blocking=True)
    captured.keys.write(noise.seed, noise.step)
    captured.graph.replay()
    if memory is not None:
        memory.update({name: value.clone() for name, value in captured.memory.items()})
    output = captured.output
    return output.clone() if isinstance(output, Tensor) else output.actions()
