"""What to change if a run does not fit, in order of least harm.

Least harm is first of all to what is learned: a change that computes the same comes before one that rounds differently,
and that before one that is another training. Among equals the faster one comes first. What a change would save is found
by planning again with it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import IntEnum

from flexor.config.parse import parse_flags
from flexor.config.schema import TrainConfig, validate_weights
from flexor.core.errors import ConfigError
from flexor.core.typed import coerce, field_types
from flexor.data.settings import picture_size
from flexor.plan.plan import Plan, make_plan, site_of
from flexor.plan.site.hardware import GPU, Hardware
from flexor.plan.trace.traces import Traces
from flexor.policies.features import Kind

WORTH_IT = 0.01  # of the peak that a change saves at least, to be named


class Harm(IntEnum):
    """What a change does to a run."""

    TIME = 1
    """The same result, later."""
    HARDWARE = 2
    """The same result, on more GPUs."""
    ROUNDING = 3
    """The same training, computed less exactly."""
    LEARNING = 4
    """Another training: results have to be judged anew."""


KINDS = {
    "frames": Harm.TIME,
    "decoder": Harm.TIME,
    "accumulation": Harm.TIME,
    "checkpointing": Harm.TIME,
    "sharding": Harm.HARDWARE,
    "precision": Harm.ROUNDING,
    "8-bit optimizer": Harm.ROUNDING,
    "weights": Harm.ROUNDING,
    "average": Harm.LEARNING,
    "lora": Harm.LEARNING,
    "pictures": Harm.LEARNING,
    "batch": Harm.LEARNING,
}
"""Every change there is, and its harm; of two that harm and cost the same, the first one is better."""


@dataclass(frozen=True)
class Effect:
    """What a change is predicted to do."""

    memory: int
    """Bytes of each GPU that it saves at the peak."""
    time: float = 1.0
    """Times as long as a step takes."""
    gpus: float = 1.0
    """Times as many GPUs."""
    fits: bool = False
    """Whether the run fits with this change alone."""


@dataclass(frozen=True)
class Change:
    """One thing to change."""

    name: str
    """One of `KINDS`."""
    setting: str
    """What to add to the command."""
    why: str
    """What it does, in a sentence."""
    effect: Effect | None = None

    def __post_init__(self) -> None:
        assert self.name in KINDS, self.name

    @property
    def harm(self) -> Harm:
        return KINDS[self.name]


def in_order(changes: Iterable[Change]) -> list[Change]:
    """Least harm first; then what takes fewer GPUs, less time, and saves more."""
    places = list(KINDS)

    def key(change: Change) -> tuple[float, ...]:
        effect = change.effect or Effect(0)
        return change.harm, effect.gpus, effect.time, places.index(change.name), -effect.memory

    return sorted(changes, key=key)


def remedy(changes: Iterable[Change], fits: Callable[[list[Change]], bool]) -> list[Change]:
    """The least harmful changes that make a run fit together; none if all of them do not.

    One that is enough by itself is better than several as harmful as it. What they save overlaps, so `fits` is asked.
    """
    ordered = in_order(changes)
    chosen: list[Change] = []
    for harm in sorted({change.harm for change in ordered}):
        as_harmful = [change for change in ordered if change.harm == harm]
        alone = next((change for change in as_harmful if change.effect and change.effect.fits), None)
        if alone is not None:
            return [alone]
        for change in as_harmful:
            if _goes_with(change, chosen):
                chosen.append(change)
                if len(chosen) > 1 and fits(chosen):
                    return chosen
    return []


def _goes_with(change: Change, chosen: list[Change]) -> bool:
    """Whether it changes another setting than those do."""
    keys = {key for other in chosen for key in parse_flags(other.setting.split())}
    return not keys & parse_flags(change.setting.split()).keys()


def possible_changes(
    config: TrainConfig, gpu: GPU, gpus: int = 1, at_a_time: int | None = None
) -> list[Change]:
    """What this run could do to take less of a GPU's memory, without a prediction of what it would save.

    `at_a_time`: samples in a pass instead of batch_size, a divisor of it; half of them unless given.
    """
    fewer = at_a_time or (config.batch_size // 2 if config.batch_size % 2 == 0 else 1)
    changes = [*_same_result(config, fewer), *_more_gpus(config, gpus), *_other_result(config, gpu, fewer)]
    return in_order(changes)


def _same_result(config: TrainConfig, fewer: int) -> list[Change]:
    changes = []
    if config.dataset.cache.tier == "gpu":
        changes.append(
            Change("frames", "--dataset.cache.tier=ram", "frames stay in the host's memory, not the GPU's")
        )
    if config.dataset.decoder == "nvdec":
        changes.append(
            Change("decoder", "--dataset.decoder=cpu", "the GPU's decoder and its pool take of its memory")
        )
    if config.batch_size > 1:
        changes.append(_accumulate(config, fewer))
    if not config.activation_checkpointing:
        changes.append(
            Change(
                "checkpointing",
                "--activation_checkpointing=true",
                "blocks are computed again in the backward pass instead of kept",
            )
        )
    return changes


def _accumulate(config: TrainConfig, fewer: int) -> Change:
    why = f"{fewer} at a time instead of {config.batch_size}, as many samples per optimizer step as before"
    if config.global_batch_size is not None:
        return Change("accumulation", f"--batch_size={fewer}", why)
    passes = (config.gradient_accumulation_steps or 1) * config.batch_size // fewer
    return Change("accumulation", f"--batch_size={fewer} --gradient_accumulation_steps={passes}", why)


def _more_gpus(config: TrainConfig, gpus: int) -> list[Change]:
    if config.parallel.strategy in ("fsdp", "hsdp"):
        return []
    if gpus > 1:
        return [
            Change("sharding", "--parallel.strategy=fsdp", f"each of {gpus} GPUs holds a part of the model")
        ]
    return [Change("sharding", "--gpus=2 --parallel.strategy=fsdp", "two GPUs hold half of the model each")]


def _other_result(config: TrainConfig, gpu: GPU, fewer: int) -> list[Change]:
    changes = []
    half = next((dtype for dtype in ("bf16", "fp16") if dtype in gpu.tflops), None)
    if config.precision == "no" and half:
        changes.append(
            Change(
                "precision", f"--precision={half}", f"matrix products and what they leave behind in {half}"
            )
        )
    if config.optimizer.type in (None, "adam", "adamw"):
        changes.append(
            Change(
                "8-bit optimizer",
                "--optimizer.type=adamw_8bit",
                "Adam's two numbers for each weight in 8 bits",
            )
        )
    if config.weights_dtype == "float32" and "bf16" in gpu.tflops:
        setting = (
            "--weights_dtype=bf16" if config.precision == "bf16" else "--precision=bf16 --weights_dtype=bf16"
        )
        changes.append(Change("weights", setting, "weights, gradients and optimizer in half of the bytes"))
    if not config.lora.r and not config.policy.moves_weights:
        changes.append(Change("lora", "--lora.r=16", "small matrices are trained beside weights that stay"))
    if config.ema.enable:
        changes.append(Change("average", "--ema.enable=false", "no second copy of the weights"))
    if config.dataset.cache.size is None:
        changes.append(Change("pictures", "--dataset.cache.size=224x224", "train on smaller pictures"))
    if config.batch_size > 1:
        changes.append(Change("batch", f"--batch_size={fewer}", "fewer samples per optimizer step"))
    return changes


# Effects.


def advise(
    plan: Plan, hardware: Hardware, config: TrainConfig, traces: Traces
) -> tuple[list[Change], list[Change]]:
    """All changes that save something, with what they are predicted to do, and the least harmful that are enough.

    `config` is what was asked for, before a plan settled its batch; `traces` are those of the plan.
    """
    tried = [
        (change, with_changes(plan, hardware, config, traces, [change]))
        for change in possible_changes(config, plan.site.gpu, plan.site.world_size, _at_a_time(plan, config))
    ]
    changes = in_order(
        replace(change, effect=_effect(plan, after))
        for change, after in tried
        if after is not None and plan.peak - after.peak > WORTH_IT * plan.peak
    )

    def fits(chosen: list[Change]) -> bool:
        after = with_changes(plan, hardware, config, traces, chosen)
        return after is not None and after.fits

    return changes, remedy(changes, fits)


def _at_a_time(plan: Plan, config: TrainConfig) -> int | None:
    """The most samples that fit and divide the batch; a few are left, as passes that add up gradients take more."""
    most = int(0.9 * (plan.largest_batch or 0))
    return max(
        (n for n in range(1, config.batch_size) if config.batch_size % n == 0 and n <= most), default=None
    )


# Settings that leave a pass over some samples as it is.
SAME_PASS = {
    "batch_size",
    "gradient_accumulation_steps",
    "parallel.strategy",
    "dataset.cache.tier",
    "dataset.decoder",
}


def with_changes(
    plan: Plan, hardware: Hardware, config: TrainConfig, traces: Traces, changes: Iterable[Change]
) -> Plan | None:
    """The plan with some changes; None if the policy does not allow them."""
    flags = parse_flags([word for change in changes for word in change.setting.split()])
    site = plan.site
    gpus = int(flags.pop("gpus", site.gpus))
    if gpus != site.gpus:
        site = site_of(hardware, site.gpu, gpus, site.nodes, link=site.link)
        config = replace(config, global_batch_size=plan.split.global_batch)
    try:
        changed = applied(config, flags)
        traces = Traces(changed, scalable=False) if flags.keys() - SAME_PASS else traces
        return make_plan(changed, plan.data, site, hardware, traces=traces, search=False)
    except (ConfigError, NotImplementedError):
        return None


def applied(config: TrainConfig, flags: dict[str, str]) -> TrainConfig:
    """The settings with some others, as flags say them."""
    config = copy.deepcopy(config)
    for key, value in flags.items():
        *groups, name = key.split(".")
        owner = config
        for group in groups:
            owner = getattr(owner, group)
        setattr(owner, name, coerce(value, field_types(type(owner))[name], key))
    size = picture_size(config.dataset.cache.size)
    if "dataset.cache.size" in flags and size:
        policy = config.policy
        smaller = {
            name: replace(feature, shape=(feature.shape[0], *size))
            if feature.type is Kind.VISUAL
            else feature
            for name, feature in policy.input_features.items()
        }
        config.policy = replace(policy, input_features=smaller)
    config.policy.validate()
    validate_weights(config)
    return config


def _effect(before: Plan, after: Plan) -> Effect:
    samples = after.split.global_batch / before.split.global_batch
    return Effect(
        before.peak - after.peak,
        after.pace.step.seconds / before.pace.step.seconds / samples,
        after.site.world_size / before.site.world_size,
        after.fits,
    )
