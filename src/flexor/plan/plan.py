"""Estimate everything a run needs before it starts: memory, time, host, disk, network, energy and cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from flexor.config.for_gpu import settle_for_gpu
from flexor.config.schema import TrainConfig
from flexor.core.errors import ConfigError
from flexor.core.machine import pinned_bytes
from flexor.plan.data.disk import CheckpointCounts, Disk, checkpoint_bytes, checkpoints_kept, disk_needed
from flexor.plan.data.host import (
    ConcurrentRuns,
    Data,
    DataSupply,
    HostMemory,
    Loading,
    Resources,
    Speed,
    choose_tier,
    concurrent_runs,
    expected_speed,
    gpu_cache_bytes,
    host_memory,
    loading_seconds,
    supply,
)
from flexor.plan.image_features import NONE, Around, PlannedFeatures, plan_features, with_features
from flexor.plan.memory.memory import MemoryPlan, MemoryPlanner, is_captured, usable
from flexor.plan.site import money
from flexor.plan.site.hardware import GPU, Flavor, Hardware
from flexor.plan.site.links import Links, links_of
from flexor.plan.site.network import Exchange, exchange
from flexor.plan.speed.speeds import Speeds
from flexor.plan.speed.time import StepTime, step_time
from flexor.plan.trace.events import Category, Trace, unfreed
from flexor.plan.trace.traces import Traces
from flexor.policies.base import PolicyConfig
from flexor.policies.features import Kind
from flexor.train.ranks.split import Split, resolve_batch, split_batch

FPS = 30.0
HOURS_PER_MONTH = 160.0  # that your own machine is used: working hours


@dataclass(frozen=True)
class Host:
    """The machine around the GPUs."""

    cores: int
    memory: int
    disk: int
    source: str


WORKSTATION = Host(cores=16, memory=64_000_000_000, disk=1_000_000_000_000, source="assumed: a workstation")


@dataclass(frozen=True)
class Site:
    """The hardware that a run is planned for: GPUs, nodes, the host and the price."""

    gpu: GPU
    gpus: int = 1
    nodes: int = 1
    interconnect: str | None = None
    """Of the GPUs of a node, and `network` between nodes, as `links_of` reads them."""
    network: str | None = None
    host: Host = WORKSTATION
    usd_per_hour: float | None = None
    """Price of all nodes together; None if no rental price is known."""
    billed_by_s: int = 1
    price_source: str = ""

    @property
    def world_size(self) -> int:
        return self.gpus * self.nodes

    @property
    def links(self) -> Links:
        return links_of(self.gpu, self.gpus, self.nodes, self.interconnect, self.network)


def site_of(
    hardware: Hardware,
    gpu: GPU,
    gpus: int = 1,
    nodes: int = 1,
    interconnect: str | None = None,
    network: str | None = None,
    *,
    price: float | None = None,
    host: Host | None = None,
) -> Site:
    """The cheapest machine with this number of GPUs; if there is none, several machines with one GPU."""
    site = Site(gpu, gpus, nodes, interconnect, network)
    if offers := hardware.offers(gpu, gpus):
        site = rented(site, offers[0], nodes)
    elif offers := hardware.offers(gpu, 1):
        site = rented(site, offers[0], nodes * gpus)
    if host is not None:
        site = replace(site, host=host)
    if price is not None:
        site = replace(site, usd_per_hour=price, billed_by_s=1, price_source="given")
    return site


def rented(site: Site, offer: Flavor, machines: int = 1) -> Site:
    """The same GPUs on machines of a cloud: with their host and price."""
    each, name = machines // site.nodes, f"{offer.cloud}/{offer.name}"
    disk = round((offer.disk_gb or 1000) * 1e9)
    host = Host(offer.cores * each, round(offer.ram_gb * each * 1e9), disk, name)
    source = f"{f'{machines} x ' if machines > 1 else ''}{name}, {offer.as_of}"
    price = offer.usd_per_hour * machines
    return replace(site, host=host, usd_per_hour=price, billed_by_s=offer.billed_by_s, price_source=source)


@dataclass(frozen=True)
class RunTime:
    """The speed of a run, including data loading."""

    step: StepTime
    first: DataSupply
    """Data loading in the first epoch, on one node."""
    later: DataSupply
    seconds: float
    """Of the whole run, with the pass that encodes all images if there is one."""
    first_pass_s: float = 0.0
    """Of that pass."""

    @property
    def hours(self) -> float:
        return self.seconds / 3600

    @property
    def busy(self) -> float:
        """Share of the time in which a GPU computes."""
        return min(1.0, self.step.gpu_seconds / (self.step.seconds * self.later.stretch))


@dataclass(frozen=True)
class Money:
    """US dollars."""

    energy: money.Energy
    """On your own machine."""
    rent: float | None
    purchase: money.Purchased | None
    """The price of the machine, if it can be bought."""
    break_even: money.BreakEven | None


@dataclass(frozen=True)
class Plan:
    """What a run needs on one site."""

    config: TrainConfig
    """As it will run: batch size, accumulation and steps are resolved."""
    data: Data
    site: Site
    split: Split
    memory: MemoryPlan
    frames_on_gpu: int
    """Bytes of cached frames on each GPU, in addition to `memory`."""
    fits: bool
    largest_batch: int | None
    """Samples per pass; None if it was not searched."""
    run_time: RunTime
    loading: Loading
    features: PlannedFeatures
    """What steps read instead of images, if each image is encoded once."""
    host_memory: HostMemory
    disk: Disk
    checkpoints: CheckpointCounts
    checkpoint: int
    """Bytes of one checkpoint."""
    robot: Exchange
    rate_hz: float
    concurrent: ConcurrentRuns | None
    """Several experiments at once on one GPU; None if a run uses several GPUs."""
    money: Money
    parameters: int
    trained: int
    capturable: bool
    """Whether a step can be a CUDA graph on this site, whatever `config.step` is."""
    waits: tuple[str, ...]
    """Where a policy of the user's own makes the host wait for the GPU."""

    @property
    def peak(self) -> int:
        """Bytes of peak memory per GPU."""
        return self.memory.total + self.frames_on_gpu

    @property
    def samples_per_s(self) -> float:
        return (
            self.config.steps * self.split.global_batch / (self.run_time.seconds - self.run_time.first_pass_s)
        )

    @property
    def epochs(self) -> float:
        return self.config.steps * self.split.global_batch / max(1, self.data.frames)

    @property
    def data_bound(self) -> bool:
        return self.run_time.later.bound


def make_plan(
    config: TrainConfig,
    data: Data,
    site: Site,
    hardware: Hardware,
    *,
    traces: Traces | None = None,
    speeds: Speeds | None = None,
    speed: Speed | None = None,
    rate_hz: float = FPS,
    executed: int | None = None,
    search: bool = True,
) -> Plan:
    """Plan a run. The policy's features must be filled in.

    `speed`: the measured loading speed of this data, if there is one. `rate_hz`, `executed`: the robot's actions per
    second, and how many actions of a chunk it executes. Without `search`, the largest batch size is not computed.
    """
    config, split = settled(config, site, data)
    features = features_on(site, config, data, split.global_batch, speeds, speed)
    config = with_features(config, features)
    cache = config.dataset.cache
    planner = _planner(config, site, traces)
    trace = planner.trace(split.batch_size, split.accumulation)
    loading = loading_on(site, config, data, split, features)
    frames = features.stored_in("gpu") if loading.features else gpu_cache_bytes(data, loading, cache)
    memory, fits = _memory(planner, trace, frames)
    parallelism = memory.parallelism
    step = step_time(trace, site.gpu, config=config, parallelism=parallelism, speeds=speeds, links=site.links)
    run_time = predict_run_time(step, config, data, site, split, loading, speed, features)
    checkpoint = _checkpoint(trace, config, parallelism.shards > 1)
    checkpoints = _checkpoints(config)
    copy = _host_copy(trace, config, parallelism.shards, site.gpus)
    host = host_memory(data, loading, cache, copy, sum(trace.float32_on_host), features.stored_in("ram"))
    return Plan(
        config=config,
        data=data,
        site=site,
        split=split,
        memory=memory,
        frames_on_gpu=frames,
        fits=fits,
        largest_batch=planner.largest_batch(split.accumulation, like=trace) if search else None,
        run_time=run_time,
        loading=loading,
        features=features,
        host_memory=host,
        disk=disk_needed(data, loading, cache, checkpoint, checkpoints, features.stored_in("disk")),
        checkpoints=checkpoints,
        checkpoint=checkpoint,
        robot=_robot(config.policy, rate_hz, executed),
        rate_hz=rate_hz,
        concurrent=_concurrent_runs(site, memory, host, run_time, config),
        money=costs(site, run_time.hours, run_time.busy, hardware),
        parameters=trace.parameters,
        trained=trace.trained,
        capturable=is_captured(replace(config, step="auto"), site.gpu, trace, parallelism),
        waits=trace.waits,
    )


def _planner(config: TrainConfig, site: Site, traces: Traces | None) -> MemoryPlanner:
    return MemoryPlanner(
        config, site.gpu, world_size=site.world_size, local_world_size=site.gpus, traces=traces
    )


def _memory(planner: MemoryPlanner, trace: Trace, frames: int) -> tuple[MemoryPlan, bool]:
    """The memory of a run beside the cached frames on its GPU, and whether it fits."""
    memory, room = planner.plan(trace), usable(planner.gpu) - frames
    fits = memory.total <= room or (not frames and planner.fits(trace.batch_size, trace.accumulation))
    return (memory.within(room) if fits else memory), fits


def _checkpoints(config: TrainConfig) -> CheckpointCounts:
    keep = config.checkpoint
    return checkpoints_kept(config.steps, config.save_freq, keep.keep_last, keep.keep_every)


def _checkpoint(trace: Trace, config: TrainConfig, sharded: bool) -> int:
    if not config.save_checkpoint:
        return 0
    return checkpoint_bytes(
        trace.saved,
        sum(_sizes(trace, "optimizer")),
        lora=config.lora.r > 0,
        sharded=sharded,
        export=config.checkpoint.export,
    )


def _host_copy(trace: Trace, config: TrainConfig, shards: int, gpus: int) -> int:
    """Bytes of a node's memory from which its processes save in the background: see `checkpoint.saver.HostCopy`."""
    if not (config.save_checkpoint and config.checkpoint.asynchronous):
        return 0
    in_bf16 = Counter(size // 2 for size in trace.float32_on_host)  # these are in host memory anyway
    weights = [*(Counter(_sizes(trace, "weights")) - in_bf16).elements()] * (2 if config.ema.enable else 1)
    copy = sum(pinned_bytes(-(-size // shards)) for size in weights + _sizes(trace, "optimizer"))
    return copy * (gpus if shards > 1 else 1)


def _sizes(trace: Trace, category: Category) -> list[int]:
    """Bytes of each tensor of a category that is never freed."""
    sizes = {event.storage: event.nbytes for event in trace.events if event.kind == "alloc"}
    return [sizes[storage] for storage in unfreed(trace.events) if trace.category[storage] == category]


def settled(config: TrainConfig, site: Site, data: Data) -> tuple[TrainConfig, Split]:
    """The settings as the trainer will resolve them for this number of processes."""
    config = settle_for_gpu(config, site.gpu.compute_capability)
    split = split_batch(config, site.world_size)
    return resolve_batch(config, split, data.frames), split


def features_on(
    site: Site,
    config: TrainConfig,
    data: Data,
    global_batch: int,
    speeds: Speeds | None = None,
    speed: Speed | None = None,
) -> PlannedFeatures:
    """Features of a run's images on one site. The settings are settled for its GPU."""
    around = Around(site.host.memory, site.host.disk, site.host.cores, site.gpus)
    samples = config.steps * global_batch if config.epochs is None else round(config.epochs * data.frames)
    return plan_features(config, data, site.gpu, around, samples, speeds=speeds, speed=speed)


def loading_on(
    site: Site, config: TrainConfig, data: Data, split: Split, features: PlannedFeatures = NONE
) -> Loading:
    encoded = features.tier != "off"
    tier = (
        "stream"
        if encoded
        else choose_tier(data, config.dataset.cache, site.host.memory, site.host.disk, rgb=False)
    )
    return Loading(
        batch_size=split.batch_size,
        accumulation=split.accumulation,
        ranks=site.gpus,
        world_size=site.world_size,
        workers=config.num_workers,
        tier=tier,
        gpu_decoder=config.dataset.decoder == "nvdec" and not encoded,
        features=features.image_bytes if encoded else 0,
    )


def predict_run_time(
    step: StepTime,
    config: TrainConfig,
    data: Data,
    site: Site,
    split: Split,
    loading: Loading,
    speed: Speed | None = None,
    features: PlannedFeatures = NONE,
) -> RunTime:
    """The time of the steps, including waiting for data, and of the pass that encodes all images."""
    demand = split.global_batch / site.nodes / step.seconds
    speed = features.speed(data) if loading.features else speed or expected_speed(data)
    first = supply(data, speed, loading, demand, site.host.cores)
    later = supply(data, speed, loading, demand, site.host.cores, cached=loading.tier != "stream")
    samples = config.steps * split.global_batch / site.nodes
    seconds = loading_seconds(samples, -(-data.frames // site.nodes), first, later)
    return RunTime(step, first, later, seconds + features.first_pass_s, features.first_pass_s)


def _robot(policy: PolicyConfig, rate_hz: float, executed: int | None) -> Exchange:
    """The data exchanged between a robot with this policy and its server."""
    horizon = len(policy.action_deltas)
    executed = executed or max(1, min(policy.action_steps, horizon))
    if not 0 < executed <= horizon:
        raise ConfigError(
            f"--executed={executed}: a chunk has only {horizon} actions. Use at most {horizon}."
        )
    state = sum(f.shape[0] for f in policy.input_features.values() if f.type is not Kind.VISUAL)
    cameras = [(f.shape[1], f.shape[2]) for f in policy.input_features.values() if f.type is Kind.VISUAL]
    actions = sum(feature.shape[0] for feature in policy.output_features.values())
    return exchange(
        cameras, state=state, actions=actions, horizon=horizon, executed=executed, rate_hz=rate_hz
    )


def _concurrent_runs(
    site: Site, memory: MemoryPlan, host: HostMemory, run_time: RunTime, config: TrainConfig
) -> ConcurrentRuns | None:
    if site.world_size > 1:
        return None
    machine = Resources(usable(site.gpu), site.host.memory, site.host.cores)
    run = Resources(memory.total, host.total, 1 + min(config.num_workers, run_time.later.threads))
    return concurrent_runs(machine, run, max(0.01, run_time.busy))


def costs(site: Site, hours: float, busy: float, hardware: Hardware) -> Money:
    """Energy on your own machine, the rent, and the price of such a machine."""
    gpu, count, prices = site.gpu, site.world_size, hardware.prices
    energy = money.energy(gpu, count, hours, prices, busy=busy)
    price = hardware.purchases.get(gpu.name)
    purchase = money.buy(gpu, count, price, prices, busy=busy) if price else None
    if site.usd_per_hour is None:
        return Money(energy, None, purchase, None)
    rent = money.rent(site.usd_per_hour, hours, site.billed_by_s)
    break_even = money.break_even(purchase, site.usd_per_hour, HOURS_PER_MONTH, prices) if purchase else None
    return Money(energy, rent, purchase, break_even)
