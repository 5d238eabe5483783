"""What `flexor launch hf-jobs` leaves to the plan: which of Hugging Face's machines, and for how long.

The machine is the one on which the whole run costs least, of those that it fits on: GPU, memory and disk. The training
is the same on all of them: the same samples in every optimizer step, in as few passes as fit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flexor.config.schema import TrainConfig
from flexor.core.errors import ConfigError, DatasetError
from flexor.core.log import log
from flexor.core.machine import gigabytes
from flexor.launch.hf.request import SAVING, Training
from flexor.plan.advise import advise
from flexor.plan.data import FRAMES
from flexor.plan.data.from_dataset import open_for_plan
from flexor.plan.data.host import Data
from flexor.plan.data.imagined_robot import imagined_data, usual_robot
from flexor.plan.plan import Plan, Site, make_plan, rented
from flexor.plan.rank import Ranking
from flexor.plan.site.hardware import Flavor, Hardware, load_hardware
from flexor.plan.speed.speeds import assumed
from flexor.plan.trace.traces import Traces
from flexor.train.ranks.split import scale_learning_rate, split_batch

CLOUD = "hf-jobs"
DAY = 24 * 3600
STARTING = 1800  # seconds until the first step: a machine is found, packages are installed, the dataset comes
BESIDES = 0.1  # of the time that all steps take, for what is no step: checkpoints, evaluation


class CantPlan(Exception):
    """Why a run can't be planned."""


def offers_of(hardware: Hardware) -> dict[str, Flavor]:
    """What Hugging Face rents out, by name."""
    return {flavor.name: flavor for flavor in hardware.flavors if flavor.cloud == CLOUD}


def settle_machine(
    training: Training, flavor: str, seconds: int | None, offers: Sequence[Flavor]
) -> tuple[str, int]:
    """The flavor and the timeout, as far as the user has left them open.

    The settings of the training get what makes the run the one that was planned.
    """
    if flavor and seconds:
        return flavor, seconds
    try:
        offer, plan = _planned(training, flavor, offers)
    except CantPlan as error:
        if not flavor:
            raise ConfigError(
                f"This run can't be planned here ({error}), so no flavor can be chosen for it. Give one with "
                "--flavor: `hf jobs hardware` lists them."
            ) from error
        log.warning("timeout 24h: how long this run takes can't be planned here (%s)", error)
        return flavor, DAY
    if not flavor:
        training.flags |= _dealt_out(training, plan)
    _announce(offer, plan, named=bool(flavor))
    if seconds and seconds < _needed(plan):
        log.warning(
            "By the plan --timeout may be too short. The run saves and stops before; started again with the same "
            "--output_dir it goes on."
        )
    return offer.name, seconds or timeout_of(plan)


def timeout_of(plan: Plan) -> int:
    """Seconds, in whole hours."""
    return math.ceil(_needed(plan) / 3600) * 3600


def _needed(plan: Plan) -> float:
    """Seconds from the job's start to its end, if all takes as long as the plan thinks possible."""
    return STARTING + plan.pace.seconds * (1 + plan.pace.step.spread + BESIDES) + SAVING


def _announce(offer: Flavor, plan: Plan, named: bool) -> None:
    log.info(
        "flavor %s: %s of %s, %.1f h (give or take %.0f %%), %.2f $%s; %s",
        offer.name,
        gigabytes(plan.peak),
        gigabytes(plan.site.gpu.memory),
        plan.pace.hours,
        100 * plan.pace.step.spread,
        plan.money.rent or 0.0,
        "" if named else ", the cheapest that this run fits on",
        plan.split,
    )
    if not plan.fits:
        log.warning(
            "By the plan this does not fit. `flexor plan --gpu='%s' --gpus=%d` with the same flags says what to "
            "change.",
            plan.site.gpu.name,
            plan.site.gpus,
        )


# Planning.


def _planned(training: Training, flavor: str, offers: Sequence[Flavor]) -> tuple[Flavor, Plan]:
    """The named flavor, else the best of those on offer, and the run on it."""
    if training.on_cpu:
        raise CantPlan("training on the CPU is not planned")
    offers = [offer for offer in offers if not flavor or offer.name == flavor]
    if not offers:
        raise CantPlan(f"{flavor or 'what the Hub offers'} is not among the GPUs that are known")
    config, data = _job(training.config)
    if flavor:  # what the job would refuse is refused here
        split_batch(copy.copy(config), training.gpus or offers[0].gpus)
    else:
        split = split_batch(copy.copy(config), training.gpus or 1)
        config = replace(config, global_batch_size=split.global_batch, gradient_accumulation_steps=None)
        offers = [offer for offer in offers if _can_share(split.global_batch, offer, training.gpus)]
        if not offers:
            raise ConfigError(
                f"No machine of Hugging Face's can share out a global batch of {split.global_batch}."
            )
    market = Market(config, data, training.gpus)
    try:
        if flavor:
            return offers[0], market.plan(offers[0], config.batch_size)
        found = market.cheapest(offers)
    except Exception as error:  # whatever a policy does when it is traced
        raise CantPlan(f"{type(error).__name__}: {error}") from error
    if found is None:
        raise ConfigError(market.nothing_fits(offers))
    return found


def _can_share(global_batch: int, offer: Flavor, gpus: int | None) -> bool:
    """Whether a machine has so many GPUs and each of them gets as many samples."""
    return offer.gpus >= (gpus or 1) and global_batch % (gpus or offer.gpus) == 0


def _job(config: TrainConfig) -> tuple[TrainConfig, Data]:
    """Settings with features filled in, and the data: that of the run, or if it can't be opened here, a usual one."""
    try:
        return open_for_plan(config)
    except DatasetError as error:
        why = str(error).partition(". ")[0]  # what follows is advice for training here
    policy = config.policy
    if not policy.input_features:
        try:
            _, policy = usual_robot(policy)
        except ConfigError as error:
            raise CantPlan(f"{why}; and {error}") from error
    seen = ", ".join(f"{name} {list(feature.shape)}" for name, feature in policy.input_features.items())
    log.warning(
        "The dataset can't be opened here: %s. Planned for %d frames of %s instead", why, FRAMES, seen
    )
    return replace(config, policy=policy), imagined_data(policy, FRAMES)


class Market:
    """One run on every machine that is on offer; without `gpus`, on all of a machine's."""

    def __init__(self, config: TrainConfig, data: Data, gpus: int | None):
        self.config, self.data, self.gpus = config, data, gpus
        self.hardware, self.speeds, self.traces = load_hardware(), assumed(), Traces(config)

    def site(self, offer: Flavor) -> Site:
        return rented(Site(self.hardware.gpus[offer.gpu], self.gpus or offer.gpus), offer)

    def plan(self, offer: Flavor, batch_size: int) -> Plan:
        """With at most so many samples in a pass."""
        config = replace(self.config, batch_size=batch_size)
        return make_plan(
            config,
            self.data,
            self.site(offer),
            self.hardware,
            traces=self.traces,
            speeds=self.speeds,
            search=False,
        )

    def cheapest(self, offers: Sequence[Flavor]) -> tuple[Flavor, Plan] | None:
        """What costs least for the whole run, of all that have room for it."""
        ranking = Ranking(
            self.config, self.data, self.hardware, self.speeds, traces=self.traces, calibrated=False
        )
        choices = [(ranking.on(self.site(offer)), offer) for offer in offers]
        fitting = [
            (choice.usd or 0.0, choice.hours, choice.split, offer)
            for choice, offer in choices
            if choice.split
        ]
        for _, _, split, offer in sorted(fitting, key=lambda of: of[:2]):
            plan = self.plan(offer, split.batch_size)
            if plan.fits and not lacking(plan):
                return offer, plan
        return None

    def nothing_fits(self, offers: Sequence[Flavor]) -> str:
        """Why, and what to change: by the largest machine, with one sample at a time."""
        offer = max(offers, key=lambda offer: (self.hardware.gpus[offer.gpu].memory, offer.gpus))
        plan = self.plan(offer, 1)
        text = f"This run fits on no machine of Hugging Face's. On {offer.name}, one sample at a time, "
        if plan.fits:
            return text + f"it takes more than there is: {lacking(plan)}."
        text += f"it takes {gigabytes(plan.peak)} of {gigabytes(plan.site.gpu.memory)}. "
        _, remedy = advise(plan, self.hardware, replace(self.config, batch_size=1), self.traces)
        if remedy:
            return text + f"It would fit with {' '.join(change.setting for change in remedy)}."
        return text + "No change that is known here makes it fit: train a smaller policy."


def lacking(plan: Plan) -> str:
    """What the machine around the GPUs has too little of, and what takes less; nothing if all is there."""
    host, lacks = plan.site.host, []
    if plan.host_memory.total > host.memory:
        lacks.append(
            f"{gigabytes(plan.host_memory.total)} of {gigabytes(host.memory)} of memory (--dataset.cache.tier=stream "
            "or a smaller --num_workers take less)"
        )
    if plan.disk.total > host.disk:
        lacks.append(
            f"{gigabytes(plan.disk.total)} of {gigabytes(host.disk)} of disk (--checkpoint.keep_last and "
            "--dataset.streaming=true take less)"
        )
    return ", ".join(lacks)


def _dealt_out(training: Training, plan: Plan) -> dict[str, Any]:
    """Settings with which the global batch is dealt out as planned, where the user's would do something else."""
    config = training.config
    if plan.split == split_batch(copy.copy(config), training.gpus or 1):
        return {}
    flags: dict[str, Any] = {
        "batch_size": plan.split.batch_size,
        "global_batch_size": plan.split.global_batch,
        "gradient_accumulation_steps": "null",
    }
    if config.scale_lr:  # by the batch that was asked for
        config = replace(config, global_batch_size=plan.split.global_batch)
        scale_learning_rate(config)
        flags["lr_factor"] = config.lr_factor
    return flags
