"""Compare the same training on different GPUs and numbers of GPUs: which is cheapest, which is fastest.

The same training means the same samples in every optimizer step: the global batch is split over the GPUs, in as few
passes as fit into their memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from flexor.config.for_gpu import BF16_SINCE, multiplies_in, settle_for_gpu
from flexor.config.schema import TrainConfig
from flexor.plan.data.host import Data, Speed
from flexor.plan.image_features import PlannedFeatures, with_features
from flexor.plan.memory.bound import stored
from flexor.plan.memory.memory import MemoryPlan, MemoryPlanner, Parallelism, context_of, usable
from flexor.plan.plan import Host, Site, costs, features_on, loading_on, predict_run_time, settled, site_of
from flexor.plan.site.hardware import GPU, Hardware
from flexor.plan.speed.speeds import Speeds, load
from flexor.plan.speed.time import step_time
from flexor.plan.trace.events import Trace
from flexor.plan.trace.features import reads_features
from flexor.plan.trace.traces import LOW, Traces
from flexor.train.ranks.split import Split

COUNTS = (1, 2, 4, 8)
PROMISING = 8  # GPUs for which several of them are planned too
EQUAL = 1.02  # ratio of run times that count as equal


@dataclass(frozen=True)
class Choice:
    """A run on one type and number of GPUs."""

    gpu: GPU
    gpus: int
    split: Split | None
    """How the global batch is split; None if not even one sample per pass fits."""
    peak_of: Callable[[], int] = field(repr=False)
    step_s: float = 0.0
    hours: float = 0.0
    usd: float | None = None
    """Rent of the whole run."""
    usd_per_hour: float | None = None
    energy_usd: float = 0.0
    spread: float = 0.0
    bound: str = ""
    """gpu, host, network or data."""

    @property
    def fits(self) -> bool:
        return self.split is not None

    @cached_property
    def peak(self) -> int:
        """Bytes of peak memory per GPU; with one sample per pass if nothing fits."""
        return self.peak_of()


class Ranking:
    """Choices for one job. GPUs that behave the same share a memory plan.

    `calibrated`: use calibrations measured on this machine.
    """

    def __init__(
        self,
        config: TrainConfig,
        data: Data,
        hardware: Hardware,
        speeds: Speeds,
        *,
        traces: Traces | None = None,
        speed: Speed | None = None,
        calibrated: bool = True,
    ):
        self.config, self.data, self.hardware = config, data, hardware
        self.speeds, self.speed, self.calibrated = speeds, speed, calibrated
        self.traces = traces or Traces(config)
        self._stored = 0
        """Bytes that a process alone stores on any GPU, once that is known: those without bf16 store no less."""
        self._encoded: dict[tuple[str, int, Host], PlannedFeatures] = {}
        self._plans: dict[
            tuple[int | None, tuple[str, bool | None, bool], int, int, Parallelism], MemoryPlan
        ] = {}

    def choices(self, gpus: Iterable[GPU], counts: Sequence[int] = COUNTS) -> list[Choice]:
        """All choices: the cheapest first, then those without a price, the fastest first; those that do not fit last.

        Several GPUs of a type are planned only if one of it is among the cheapest or the fastest.
        """
        return sorted(self.each(gpus, counts), key=_by_cost)

    def each(self, gpus: Iterable[GPU], counts: Sequence[int] = COUNTS) -> Iterator[Choice]:
        """The same choices one by one, as they are planned."""
        single = []
        for gpu in gpus:
            if not multiplies_in(self.config.precision, gpu.compute_capability):
                continue
            single.append(self.choice(gpu, counts[0]))
            yield single[-1]
        single.sort(key=_by_cost)
        fast = sorted(single, key=lambda choice: (not choice.fits, choice.hours))
        best = {choice.gpu.name: choice.gpu for choice in (*single[:PROMISING], *fast[:PROMISING])}
        for gpu in best.values():
            yield from (self.choice(gpu, count) for count in counts[1:] if not gpu.unified)

    def choice(self, gpu: GPU, count: int) -> Choice:
        """This number of GPUs, on the cheapest machine that has them."""
        return self.on(site_of(self.hardware, gpu, count))

    def on(self, site: Site) -> Choice:
        """The choice with the fewest passes that fit."""
        splits, planner = list(self._splits(site.world_size)), self._planner(site)

        def peak() -> int:
            return self._memory(self._trace(splits[-1], site), site).total if splits else 0

        too_large = Choice(site.gpu, site.gpus, None, peak)
        if site.world_size == 1 and self._stored > planner.capacity:
            return too_large
        for split in splits:
            if split.accumulation > splits[0].accumulation == 1:
                # several passes need no less than one of their size, whose trace is made from those of the first split
                once = self._trace(replace(split, accumulation=1), site)
                if planner.least(once).peak > planner.capacity:
                    continue
            trace = self._trace(split, site)
            if planner.never_fits(trace):
                break
            if planner.least(trace).peak > planner.capacity:
                continue
            memory = self._memory(trace, site)
            if self._fits(memory, split, site):
                return self._described(trace, memory.within(usable(site.gpu)), split, site)
        return too_large

    def _trace(self, split: Split, site: Site) -> Trace:
        passes = (split.batch_size, split.accumulation)
        encoded = self._features(site).tier != "off"
        trace = self.traces.at(*passes, site.gpu, exact=False, features=encoded)
        if not self._stored and (site.gpu.compute_capability or (0, 0)) >= BF16_SINCE:
            self._stored = stored(trace)
        return trace

    def _features(self, site: Site) -> PlannedFeatures:
        """Features of the run's images there."""
        assert self.config.global_batch_size
        key = (site.gpu.name, site.gpus, site.host)
        if key not in self._encoded:
            config = settle_for_gpu(self.config, site.gpu.compute_capability)
            batch = self.config.global_batch_size
            self._encoded[key] = features_on(site, config, self.data, batch, self.speeds, self.speed)
        return self._encoded[key]

    def _splits(self, count: int) -> Iterator[Split]:
        """Ways to split the global batch, the largest passes first."""
        assert self.config.global_batch_size
        per_gpu, remainder = divmod(self.config.global_batch_size, count)
        if remainder:
            return
        for passes in range(1, per_gpu + 1):
            if per_gpu % passes == 0 and per_gpu // passes <= self.config.batch_size:
                yield Split(per_gpu // passes, passes, count)

    def _planner(self, site: Site) -> MemoryPlanner:
        config = with_features(self.config, self._features(site))
        return MemoryPlanner(config, site.gpu, world_size=site.world_size, traces=self.traces)

    def _memory(self, trace: Trace, site: Site) -> MemoryPlan:
        planner = self._planner(site)
        no_cuda = site.gpu.compute_capability is None
        context = None if no_cuda else context_of(site.gpu, site.world_size)
        settled = (planner.config.precision, planner.config.channels_last, reads_features(planner.config))
        key = (context, settled, trace.batch_size, trace.accumulation, planner.parallelism(trace))
        if key not in self._plans:
            self._plans[key] = planner.plan(trace)
        return self._plans[key]

    def _fits(self, memory: MemoryPlan, split: Split, site: Site) -> bool:
        if memory.total <= usable(site.gpu):
            return True
        if memory.allocated + memory.context > usable(site.gpu):
            return False
        return self._planner(site).fits(max(LOW, split.batch_size), split.accumulation)

    def _described(self, trace: Trace, memory: MemoryPlan, split: Split, site: Site) -> Choice:
        speeds = (load(site.gpu) if self.calibrated else None) or self.speeds
        size, passes = split.batch_size, split.accumulation
        config = replace(self.config, batch_size=size, gradient_accumulation_steps=passes)
        config, _ = settled(config, site, self.data)
        step = step_time(
            trace,
            site.gpu,
            config=config,
            parallelism=memory.parallelism,
            speeds=speeds,
            links=site.links,
        )
        features = self._features(site)
        loading = loading_on(site, config, self.data, split, features)
        run_time = predict_run_time(step, config, self.data, site, split, loading, self.speed, features)
        money = costs(site, run_time.hours, run_time.busy, self.hardware)
        return Choice(
            gpu=site.gpu,
            gpus=site.gpus,
            split=split,
            peak_of=lambda: memory.total,
            step_s=step.seconds * run_time.later.stretch,
            hours=run_time.hours,
            usd=money.rent,
            usd_per_hour=site.usd_per_hour,
            energy_usd=money.energy.usd,
            spread=step.spread,
            bound="data" if run_time.later.bound else step.bound,
        )


def _by_cost(choice: Choice) -> tuple[bool, bool, float, float]:
    cost = choice.hours if choice.usd is None else choice.usd
    return not choice.fits, choice.usd is None, cost, choice.hours


def cheapest(choices: Iterable[Choice]) -> Choice | None:
    """The cheapest choice to rent that fits."""
    return min((c for c in choices if c.fits and c.usd is not None), key=_by_cost, default=None)


def fastest(choices: Iterable[Choice]) -> Choice | None:
    """The cheapest of the fastest choices: where the host is the bottleneck, many are equally fast."""
    fitting = [choice for choice in choices if choice.fits]
    least = min((choice.hours for choice in fitting), default=0.0)
    return min((c for c in fitting if c.hours <= EQUAL * least), key=_by_cost, default=None)
