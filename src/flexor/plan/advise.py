"""Suggest changes if a run does not fit, the least harmful first.

Harm means first of all a different training result: a change that computes the same comes first, then one that rounds
differently, then one that changes the training. Among equally harmful changes the faster one comes first. The saved
memory is found by planning again with the change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import groupby

from flexor.config.for_gpu import COMPUTE_IN_BF16, settle_for_gpu
from flexor.config.parse import parse_flags
from flexor.config.schema import SHARDED, TrainConfig, validate_weights
from flexor.core.errors import ConfigError
from flexor.core.typed import with_settings
from flexor.data.settings import parse_image_size
from flexor.plan.memory.memory import MemoryPlanner
from flexor.plan.plan import Plan, Site, make_plan, site_of
from flexor.plan.site.hardware import GPU, Hardware
from flexor.plan.trace.traces import Traces
from flexor.policies.features import Kind

WORTH_IT = 0.01  # share of the peak that a change must save to be suggested


class Impact(IntEnum):
    """The cost of a change for a run."""

    TIME = 1
    """The same result, later."""
    HARDWARE = 2
    """The same result, on more GPUs."""
    ROUNDING = 3
    """The same training, computed less exactly."""
    LEARNING = 4
    """Different training: its results must be evaluated again."""


KINDS = {
    "features": Impact.TIME,
    "frames": Impact.TIME,
    "decoder": Impact.TIME,
    "accumulation": Impact.TIME,
    "checkpointing": Impact.TIME,
    "sharding": Impact.HARDWARE,
    "precision": Impact.ROUNDING,
    "8-bit optimizer": Impact.ROUNDING,
    "weights": Impact.ROUNDING,
    "average": Impact.LEARNING,
    "lora": Impact.LEARNING,
    "pictures": Impact.LEARNING,
    "batch": Impact.LEARNING,
}
"""Every kind of change and its impact. Of two with equal impact and effect, the first one is better."""


@dataclass(frozen=True)
class Effect:
    """What a change is predicted to do."""

    memory: int
    """Bytes that it saves of each GPU's peak memory."""
    time: float = 1.0
    """Factor on the step time."""
    gpus: float = 1.0
    """Factor on the number of GPUs."""
    fits: bool = False
    """Whether the run fits with this change alone."""


@dataclass(frozen=True)
class Change:
    """One thing to change."""

    name: str
    """One of `KINDS`."""
    setting: str
    """The flags to add to the command."""
    why: str
    """What it does, in a sentence."""
    effect: Effect | None = None

    def __post_init__(self) -> None:
        assert self.name in KINDS, self.name

    @property
    def impact(self) -> Impact:
        return KINDS[self.name]


def in_order(changes: Iterable[Change]) -> list[Change]:
    """Least harmful first; then fewer GPUs, less time, more memory saved."""
    places = list(KINDS)

    def key(change: Change) -> tuple[float, ...]:
        effect = change.effect or Effect(0)
        return change.impact, effect.gpus, effect.time, places.index(change.name), -effect.memory

    return sorted(changes, key=key)


def remedy(changes: Iterable[Change], fits: Callable[[list[Change]], bool]) -> list[Change]:
    """The least harmful changes that together make a run fit; empty if all of them together are not enough.

    A single sufficient change is better than several changes of the same harm. Savings overlap and can't be added up,
    so `fits` is called for a combination.
    """
    combined: list[Change] = []
    settings: set[str] = set()  # of the combined changes
    for _, changes_of_impact in groupby(in_order(changes), key=lambda change: change.impact):
        equal = list(changes_of_impact)
        alone = next((change for change in equal if change.effect and change.effect.fits), None)
        if alone is not None:
            return [alone]
        for change in equal:
            names = parse_flags(change.setting.split()).keys()
            if not names & settings:
                combined.append(change)
                settings |= names
                if len(combined) > 1 and fits(combined):
                    return combined
    return []


def possible_changes(config: TrainConfig, gpu: GPU, gpus: int = 1, fewer: int | None = None) -> list[Change]:
    """Changes that could reduce this run's GPU memory, without a prediction of their effect.

    `fewer`: samples per pass instead of batch_size, a divisor of it (default: half of batch_size).
    """
    fewer = fewer or (config.batch_size // 2 if config.batch_size % 2 == 0 else 1)
    changes = [*_same_result(config, fewer), *_more_gpus(config, gpus), *_other_result(config, gpu, fewer)]
    return in_order(changes)


def _same_result(config: TrainConfig, fewer: int) -> Iterator[Change]:
    if config.dataset.cache.features == "gpu":
        why = "keeps the features of images in host memory"
        yield Change("features", "--dataset.cache.features=ram", why)
    if config.dataset.cache.tier == "gpu":
        why = "caches frames in host memory instead of GPU memory"
        yield Change("frames", "--dataset.cache.tier=ram", why)
    if config.dataset.decoder == "nvdec":
        why = "decodes on the CPU: the GPU's decoder and its pool use GPU memory"
        yield Change("decoder", "--dataset.decoder=cpu", why)
    if config.batch_size > 1:
        why = f"{fewer} samples per pass instead of {config.batch_size}, with the same number per optimizer step"
        passes = (config.gradient_accumulation_steps or 1) * config.batch_size // fewer
        flags = "" if config.global_batch_size is not None else f" --gradient_accumulation_steps={passes}"
        yield Change("accumulation", f"--batch_size={fewer}{flags}", why)
    if not config.activation_checkpointing:
        why = "recomputes blocks in the backward pass instead of storing activations"
        yield Change("checkpointing", "--activation_checkpointing=true", why)


def _more_gpus(config: TrainConfig, gpus: int) -> Iterator[Change]:
    if config.parallel.strategy not in SHARDED:
        flags, stored = (
            ("", f"{gpus} GPUs stores a part") if gpus > 1 else ("--gpus=2 ", "two GPUs stores half")
        )
        yield Change("sharding", f"{flags}--parallel.strategy=fsdp", f"each of {stored} of the model")


def _other_result(config: TrainConfig, gpu: GPU, fewer: int) -> Iterator[Change]:
    half = next((dtype for dtype in ("bf16", "fp16") if dtype in gpu.tflops), None)
    if config.precision == "no" and half:
        why = f"computes matrix products and stores their activations in {half}"
        yield Change("precision", f"--precision={half}", why)
    if config.optimizer.type in (None, "adam", "adamw"):
        why = "stores Adam's two values per weight in 8 bits"
        yield Change("8-bit optimizer", "--optimizer.type=adamw_8bit", why)
    if config.weights_dtype == "float32" and "bf16" in gpu.tflops:
        flags = "" if config.precision in COMPUTE_IN_BF16 else "--precision=bf16 "
        why = "stores weights, gradients and optimizer state in half of the bytes"
        yield Change("weights", f"{flags}--weights_dtype=bf16", why)
    if not config.lora.r and not config.policy.moves_weights:
        yield Change("lora", "--lora.r=16", "trains small added matrices and freezes the weights")
    if config.ema.enable:
        why = "keeps no moving average, which is a second copy of the weights"
        yield Change("average", "--ema.enable=false", why)
    if config.dataset.cache.size is None:
        yield Change("pictures", "--dataset.cache.size=224x224", "trains on smaller images")
    if config.batch_size > 1:
        yield Change("batch", f"--batch_size={fewer}", "fewer samples per optimizer step")


# Effects.


def advise(
    plan: Plan, hardware: Hardware, config: TrainConfig, traces: Traces
) -> tuple[list[Change], list[Change]]:
    """All changes that save memory, with their predicted effects, and the least harmful ones that are sufficient.

    `config` holds the requested settings, before the plan resolved batch size and steps; `traces` are the plan's.
    """
    config = settle_for_gpu(config, plan.site.gpu.compute_capability)
    changes = []
    for change in possible_changes(config, plan.site.gpu, plan.site.world_size, _smaller_pass(plan, config)):
        after = with_changes(plan, hardware, config, traces, [change])
        if after is not None and plan.peak - after.peak > WORTH_IT * plan.peak:
            changes.append(replace(change, effect=_effect(plan, after)))
    changes = in_order(changes)

    def fits(combined: list[Change]) -> bool:
        if keeps_too_much(plan, hardware, config, traces, combined):
            return False
        after = with_changes(plan, hardware, config, traces, combined)
        return after is not None and after.fits

    return changes, remedy(changes, fits)


def _smaller_pass(plan: Plan, config: TrainConfig) -> int | None:
    """The largest divisor of the batch size that fits. 10 % stay free: accumulating gradients takes extra memory."""
    most = min(int(0.9 * (plan.largest_batch or 0)), config.batch_size - 1)
    return max((n for n in range(1, most + 1) if config.batch_size % n == 0), default=None)


def would_be_captured(plan: Plan) -> bool:
    """Whether `--step=auto` would make an eager run faster, because the host launches operations too slowly."""
    return plan.run_time.step.bound == "host" and plan.config.step == "eager" and plan.capturable


# Settings that do not change what one pass computes.
SAME_PASS = {
    *("batch_size", "gradient_accumulation_steps", "parallel.strategy", "step"),
    *("dataset.cache.tier", "dataset.cache.features", "dataset.decoder"),
}
# Settings that do not change what stays from step to step: weights, the optimizer's state, a moving average.
SAME_STATE = SAME_PASS | {"activation_checkpointing"}


def with_changes(
    plan: Plan, hardware: Hardware, config: TrainConfig, traces: Traces, changes: Iterable[Change]
) -> Plan | None:
    """The plan with some changes; None if the policy does not allow them."""
    try:
        changed, site, names = _changed(plan, hardware, config, changes)
        traces = Traces(changed, scalable=False) if names - SAME_PASS else traces
        return make_plan(changed, plan.data, site, hardware, traces=traces, search=False)
    except (ConfigError, NotImplementedError):
        return None


def keeps_too_much(
    plan: Plan, hardware: Hardware, config: TrainConfig, traces: Traces, changes: Iterable[Change]
) -> bool:
    """Whether some changes can't be enough, which the plan's own trace shows: what is kept alone is too large."""
    try:
        changed, site, names = _changed(plan, hardware, config, changes)
    except ConfigError:
        return False
    planner = MemoryPlanner(
        changed, site.gpu, world_size=site.world_size, local_world_size=site.gpus, traces=traces
    )
    trace = traces.at(plan.split.batch_size, plan.split.accumulation, site.gpu)
    return not names - SAME_STATE and planner.never_fits(trace)


def _changed(
    plan: Plan, hardware: Hardware, config: TrainConfig, changes: Iterable[Change]
) -> tuple[TrainConfig, Site, set[str]]:
    """The settings and the site with some changes, and the names of the settings."""
    flags = parse_flags([word for change in changes for word in change.setting.split()])
    site = plan.site
    gpus = int(flags.pop("gpus", site.gpus))
    if gpus != site.gpus:
        links = (site.interconnect, site.network)
        site = site_of(hardware, site.gpu, gpus, site.nodes, *links)
        config = replace(config, global_batch_size=plan.split.global_batch)
    return applied(config, flags), site, set(flags)


def applied(config: TrainConfig, flags: dict[str, str]) -> TrainConfig:
    """The settings, changed by these flags."""
    config = with_settings(config, flags)
    size = parse_image_size(config.dataset.cache.size)
    if "dataset.cache.size" in flags and size:
        policy = config.policy
        smaller = {
            name: replace(feature, shape=(feature.shape[0], *size))
            if feature.type is Kind.VISUAL
            else feature
            for name, feature in policy.input_features.items()
        }
        config = replace(config, policy=replace(policy, input_features=smaller))
    config.policy.validate()
    validate_weights(config)
    return config


def _effect(before: Plan, after: Plan) -> Effect:
    samples = after.split.global_batch / before.split.global_batch
    return Effect(
        before.peak - after.peak,
        after.run_time.step.seconds / before.run_time.step.seconds / samples,
        after.site.world_size / before.site.world_size,
        after.fits,
    )
