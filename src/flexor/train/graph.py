"""A step as a CUDA graph: the host launches all kernels of a step at once instead of one by one.

The first steps of a kind run eagerly, because libraries initialise themselves in them. Then a step is captured, and
replayed from there on: as one graph, or as one for each part of which a run takes the time. Before each replay the
batch, the learning rates, the keys of the noise and the seed of dropout are copied to where the graph reads them.
`begin_step` of the policy and the schedule stay outside. Several ranks exchange their gradients over NCCL within the
graph, while the backward pass goes on, and over gloo between two graphs. FSDP gathers weights and reduces gradients
within the graph too.
A graph runs the kernels of the eager step, so it computes the same. A step of another kind (a smaller batch, another
phase of training, other frozen parameters) gets a graph of its own; if there are too many kinds, it runs eagerly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexor.config.schema import TrainConfig
from flexor.core.batch import SAMPLE_ID, VALID_STEPS, Batch
from flexor.core.cuda_graphs import Pool, capture, why_not_captured
from flexor.core.errors import ConfigError
from flexor.core.log import log
from flexor.core.rng import GraphNoise, NoiseKeys
from flexor.monitor.meters import Meters
from flexor.monitor.step_times import StepTimes
from flexor.policies.nn.recompute import DROPOUT, Places
from flexor.train.checkpoint.state import TrainState
from flexor.train.engine.exchange import GradientExchange
from flexor.train.step import (
    StepFigures,
    compute_step,
    forward_backward,
    optimizer_step,
    seed_dropout,
    set_rates,
    update_weights,
)

WARM_UP = 3  # eager steps of a kind before it is captured
MOST_KINDS = 4  # graphs that are kept; each keeps its memory


class NoGraph(ConfigError):
    """step=graph was asked for, and the step can't be captured. `reason` says why, without more."""

    def __init__(self, reason: str, advice: str = ""):
        super().__init__(f"step=graph: {reason}{advice}")
        self.reason = reason


def why_not(
    config: TrainConfig,
    *,
    on_nvidia: bool,
    strategy: str = "one process",
    captures: bool = True,
) -> str | None:
    """What keeps a run from having its steps captured; None if nothing is known to. Plans ask too.

    `strategy`, `captures`: those of its engine.
    """
    if not on_nvidia:
        return "the run does not use an NVIDIA GPU"
    if config.parallel.cpu_offload:
        return "parallel.cpu_offload=true copies each block from host memory"
    if not captures:
        return f"{strategy} can't be captured"
    if strategy == "ddp" and config.parallel.find_unused_parameters:
        return "parallel.find_unused_parameters=true looks for them in every step"
    if config.activation_checkpointing and config.compile:
        return (
            "compiled blocks that are recomputed (activation_checkpointing=true) ask for the state of dropout"
        )
    return None


def wants_graph(config: TrainConfig, reason: str | None) -> bool:
    """Whether a run tries to capture its steps, given what `why_not` says. Refuses `step=graph` where it can't be."""
    if reason is not None and config.step == "graph":
        raise NoGraph(reason, ". Leave --step out to run without a graph.")
    return config.step != "eager" and reason is None


Piece = tuple[str, Callable[[], None]]  # a part of a step, as its times have it, and what runs it


class _Pieces:
    """Captures what runs inside: as one graph, or as one for each part of which `times` takes the time.

    What `exchange` can't have captured runs between two graphs.
    """

    def __init__(
        self,
        times: StepTimes,
        last: str,
        pool: Pool,
        stream: torch.cuda.Stream,
        exchange: GradientExchange | None = None,
        generators: Sequence[torch.Generator] = (),
    ):
        """`last`: the part that the last graph ends. `generators`: those that are drawn from besides the GPU's own."""
        self.times, self.last, self.pool, self.stream, self.exchange = times, last, pool, stream, exchange
        self.generators = generators
        self.pieces: list[Piece] = []

    def __enter__(self) -> list[Piece]:
        self._begin()
        self.times.cut = self._cut
        if self.exchange and not self.exchange.capturable:
            self.exchange.outside = self._run_outside
        return self.pieces

    def __exit__(self, *error: Any) -> None:
        self.times.cut = None
        if self.exchange:
            self.exchange.outside = None
        self._end(self.last, *error)

    def _run_outside(self, exchange: Callable[[], None]) -> None:
        self._end("backward", None, None, None)
        self.pieces.append(("communication", exchange))
        self._begin()

    def _cut(self, part: str) -> None:
        self._end(part, None, None, None)
        self._begin()

    def _begin(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        for generator in self.generators:
            self.graph.register_generator_state(generator)
        self.capture = capture(self.graph, self.pool, self.stream)
        self.capture.__enter__()

    def _end(self, part: str, *error: Any) -> None:
        self.capture.__exit__(*error)
        self.pieces.append((part, self.graph.replay))


@dataclass
class _Captured:
    """A step of one kind: its graphs, and the memory that they read and write."""

    batch: Batch
    keys: NoiseKeys
    names: list[str]  # of the parts of the loss
    passes: list[tuple[list[Piece], Tensor]]
    """Of the first micro-batch, of those between, and of the last with the update; each with its loss and parts."""
    norm: Tensor
    recomputing: list[tuple[torch.Generator, int]]
    """Generators of blocks that are recomputed with dropout, and where in its numbers each begins."""


class GraphStep:
    """`optimizer_step`, as a graph where that works."""

    def __init__(self, state: TrainState):
        self.state = state
        self.eager_steps: Counter[Hashable] = Counter()  # by kind
        self.warms_up = False  # the newest step was one before a graph is replayed, or captured it
        self.captured: dict[Hashable, _Captured] = {}
        self.block_places: dict[Hashable, Places] = {}  # by kind: of recomputed blocks, in random numbers
        self.generators: list[torch.Generator] = []  # of recomputed blocks
        engine = state.engine
        reason = why_not(
            state.config,
            on_nvidia=engine.device.type == "cuda",
            strategy=engine.strategy,
            captures=engine.captures,
        )
        self.gave_up = not wants_graph(state.config, reason)
        if reason is not None and engine.device.type == "cuda":
            log.info("steps run operation by operation: %s", reason)
        if not self.gave_up:
            self.stream, self.pool = torch.cuda.Stream(state.engine.device), torch.cuda.graph_pool_handle()

    def __call__(self, micro_batches: list[Batch], meters: Meters) -> tuple[Tensor, Tensor]:
        self.warms_up = False
        compute = compute_step if self.gave_up else self._compute
        figures = optimizer_step(self.state, micro_batches, meters, compute)
        if self.warms_up:
            meters.leave_out_step()
        return figures

    def _compute(self, state: TrainState, batches: list[Batch]) -> StepFigures:
        kind = self._kind(batches)
        self.warms_up = kind is not None and kind not in self.captured
        if self.warms_up and self.eager_steps[kind] >= WARM_UP:
            self._try_to_capture(kind, batches)
        if kind in self.captured:
            return self._replay(self.captured[kind], batches)
        self.eager_steps[kind] += 1
        # On the stream that will capture: there autograd and libraries set up what a capture then finds.
        current = torch.cuda.current_stream(state.engine.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            figures = compute_step(state, batches)
        self.block_places[kind] = DROPOUT.places
        current.wait_stream(self.stream)
        return figures

    def _kind(self, batches: list[Batch]) -> Hashable | None:
        """What steps have in common that can share a graph; None if this one can't have any."""
        key = self.state.policy.graph_key()
        shapes = {
            tuple((name, v.shape, v.dtype) for name, v in batch.items() if isinstance(v, Tensor))
            for batch in batches
        }
        if key is None or len(shapes) > 1:
            return None
        trained = tuple(parameter.requires_grad for parameter in self.state.policy.parameters())
        kind = (key, *shapes, len(batches), trained)
        return kind if kind in self.captured or len(self.captured) < MOST_KINDS else None

    def _try_to_capture(self, kind: Hashable, batches: list[Batch]) -> None:
        state = self.state
        exchange = state.engine.exchange
        try:
            self.captured[kind] = self._capture(batches[0], len(batches), self.block_places[kind])
        except RuntimeError as error:
            message = f"the step can't be captured in a CUDA graph: {why_not_captured(error, __file__)}"
            if exchange and exchange.capturable:
                exchange.capturable = False
                log.warning("%s. The next is captured without the exchange of gradients.", message)
                return
            self.gave_up = True
            if state.config.step == "graph":
                raise NoGraph(message) from error
            log.warning("%s. It runs operation by operation instead.", message)
        finally:
            state.engine.zero_grad(state.optimizer)
        if len(self.captured) == 1:
            log.info("from step %d on, a step is replayed as %s", state.step + 1, _describe(exchange))

    def _capture(self, like: Batch, micro_batches: int, places: Places) -> _Captured:
        """Nothing is computed here. `places`: of recomputed blocks, in random numbers."""
        state, device = self.state, self.state.engine.device
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()  # what eager steps took: graphs have memory of their own
        batch, keys = _memory_for(like, device), NoiseKeys(device)
        noise, names = GraphNoise(keys, batch[SAMPLE_ID]), []
        passes: list[tuple[list[Piece], Tensor]] = []
        generators, recomputing = self._generators(places)
        # The first pass makes the gradients, later ones add to them: a parameter that the loss does not reach has none.
        for last in (*[False] * min(micro_batches - 1, 2), True):
            part, drawn_from = "optimizer" if last else "backward", [g for g, _ in recomputing]
            with DROPOUT.captured(generators), self._pieces(part, drawn_from) as pieces:
                with state.engine.accumulate(last):
                    loss, parts = forward_backward(state, batch, noise)
                figures = torch.stack([value.float() for value in (loss, *parts.values())])
                if last:
                    state.engine.finish_backward(state.times)
                    norm = update_weights(state).float()
            names = [*parts]
            passes.append((pieces, figures))
        return _Captured(batch, keys, names, passes, norm, recomputing)

    def _pieces(self, last: str, generators: Sequence[torch.Generator]) -> _Pieces:
        times, exchange = self.state.times, self.state.engine.exchange
        return _Pieces(times, last, self.pool, self.stream, exchange, generators)

    def _generators(
        self, places: Places
    ) -> tuple[list[torch.Generator | None], list[tuple[torch.Generator, int]]]:
        """For each recomputed block a generator, or None if it draws nothing; and where in its numbers each begins."""
        draws = [before for before, after in places if after > before]
        while len(self.generators) < len(draws):
            self.generators.append(torch.Generator(self.state.engine.device))
        recomputing = list(zip(self.generators, draws))
        drawing = iter(self.generators)
        return [next(drawing) if after > before else None for before, after in places], recomputing

    def _replay(self, captured: _Captured, batches: list[Batch]) -> StepFigures:
        state = self.state
        captured.keys.write(state.config.seed, state.step)
        set_rates(state)
        total = torch.zeros_like(captured.passes[0][1])
        for micro, batch in enumerate(batches):
            _copy(batch, captured.batch)
            state.times.mark("copy")
            seed_dropout(state, micro)
            self._seed_blocks(captured.recomputing)
            last = micro + 1 == len(batches)
            pieces, figures = captured.passes[-1 if last else min(micro, 1)]
            self._run(pieces)
            total += figures
        loss, *parts = total.unbind()
        return StepFigures(loss, captured.norm.clone(), dict(zip(captured.names, parts)))

    def _seed_blocks(self, recomputing: list[tuple[torch.Generator, int]]) -> None:
        """Where each block began to draw from the generator of the GPU, its own begins."""
        if recomputing:
            seed = torch.cuda.default_generators[self.stream.device.index].initial_seed()
            for generator, place in recomputing:
                generator.manual_seed(seed).set_offset(place)

    def _run(self, pieces: list[Piece]) -> None:
        for part, run in pieces:
            run()
            self.state.times.mark(part)

    def close(self) -> None:
        """NCCL can't end before the graphs that use it."""
        self.captured.clear()


def _describe(exchange: GradientExchange | None) -> str:
    if exchange is None:
        return "a CUDA graph"
    if exchange.capturable:
        return "a CUDA graph, which contains the exchange of gradients"
    return "two CUDA graphs, between which the ranks exchange gradients"


def _memory_for(batch: Batch, device: torch.device) -> Batch:
    """A batch that a graph reads: tensors are copied into it, everything else is not for a GPU."""
    static = {n: torch.empty_like(v, device=device) for n, v in batch.items() if isinstance(v, Tensor)}
    if VALID_STEPS in batch:
        static[VALID_STEPS] = torch.zeros((), dtype=torch.float64, device=device)
    return static


def _copy(batch: Batch, static: Batch) -> None:
    for name, target in static.items():
        value = batch[name]
        if name == VALID_STEPS:
            target.fill_(value)
        else:
            source = value if value.is_cuda or value.is_pinned() else value.pin_memory()
            target.copy_(source, non_blocking=True)
