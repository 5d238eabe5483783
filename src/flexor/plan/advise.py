"""What to change if a run does not fit, in order of least harm.

Least harm is first of all to what is learned: a change that computes the same comes before one that rounds differently,
and that before one that is another training. Among equals the faster one comes first. What a change would save is not
known here: whoever has a model of memory and time fills in `effect`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from flexor.config import TrainConfig
from flexor.plan.hardware import GPU


class Harm(IntEnum):
    """What a change does to a run."""

    NONE = 0
    """The same result in the same time."""
    TIME = 1
    """The same result, later."""
    HARDWARE = 2
    """The same result, on more GPUs."""
    ROUNDING = 3
    """The same training, computed less exactly."""
    LEARNING = 4
    """Another training: results have to be judged anew."""


KINDS = {
    "segments": Harm.NONE,
    "frames": Harm.TIME,
    "decoder": Harm.TIME,
    "accumulation": Harm.TIME,
    "checkpointing": Harm.TIME,
    "sharding": Harm.HARDWARE,
    "precision": Harm.ROUNDING,
    "8-bit optimizer": Harm.ROUNDING,
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


def enough(changes: Iterable[Change], missing: int) -> list[Change]:
    """The least harmful changes that together save so many bytes; all that help, if they do not.

    One that is enough by itself is better than several as harmful as it. Savings overlap, so plan again with them.
    """
    helping = [change for change in in_order(changes) if change.effect and change.effect.memory > 0]
    chosen: list[Change] = []
    for change in helping:
        alone = next((c for c in helping if c.harm == change.harm and _saved([c]) >= missing), None)
        if alone is not None:
            return [alone]
        chosen.append(change)
        if _saved(chosen) >= missing:
            return chosen
    return chosen


def _saved(changes: Iterable[Change]) -> int:
    return sum(change.effect.memory for change in changes if change.effect)


def possible_changes(config: TrainConfig, gpu: GPU, gpus: int = 1) -> list[Change]:
    """What this run could do to take less of a GPU's memory, without a prediction of what it would save."""
    changes = [*_same_result(config), *_more_gpus(config, gpus), *_other_result(config, gpu)]
    return in_order(changes)


def _same_result(config: TrainConfig) -> list[Change]:
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
        changes.append(_accumulate(config))
    if not config.activation_checkpointing:
        changes.append(
            Change(
                "checkpointing",
                "--activation_checkpointing=true",
                "blocks are computed again in the backward pass instead of kept",
            )
        )
    return changes


def _accumulate(config: TrainConfig) -> Change:
    half = config.batch_size // 2
    why = f"{half} samples at a time instead of {config.batch_size}, as many per optimizer step as before"
    if config.global_batch_size is not None:
        return Change("accumulation", f"--batch_size={half}", why)
    if config.batch_size % 2:
        half, why = (
            1,
            f"1 sample at a time instead of {config.batch_size}, as many per optimizer step as before",
        )
    passes = (config.gradient_accumulation_steps or 1) * config.batch_size // half
    return Change("accumulation", f"--batch_size={half} --gradient_accumulation_steps={passes}", why)


def _more_gpus(config: TrainConfig, gpus: int) -> list[Change]:
    if config.parallel.strategy in ("fsdp", "hsdp"):
        return []
    if gpus > 1:
        return [
            Change("sharding", "--parallel.strategy=fsdp", f"each of {gpus} GPUs holds a part of the model")
        ]
    return [Change("sharding", "--gpus=2 --parallel.strategy=fsdp", "two GPUs hold half of the model each")]


def _other_result(config: TrainConfig, gpu: GPU) -> list[Change]:
    changes = []
    half = next((dtype for dtype in ("bf16", "fp16") if dtype in gpu.tflops), None)
    if config.precision == "no" and half:
        changes.append(
            Change(
                "precision", f"--precision={half}", f"matrix products and what they leave behind in {half}"
            )
        )
    if config.ema.enable:
        changes.append(Change("average", "--ema.enable=false", "no second copy of the weights"))
    if config.dataset.cache.size is None:
        changes.append(Change("pictures", "--dataset.cache.size=224x224", "train on smaller pictures"))
    if config.batch_size > 1:
        half_batch = config.batch_size // 2
        changes.append(Change("batch", f"--batch_size={half_batch}", "fewer samples per optimizer step"))
    return changes
