"""Chooses the machine and the timeout for `flexor launch hf-jobs`, by the plan.

It chooses the machine with the lowest cost for the whole run, of those on which the run fits (GPU, memory and disk).
The training is the same on all machines: the same samples in every optimizer step, in as few passes as fit.
"""

from __future__ import annotations

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
from flexor.train.ranks.split import resolve_lr_factor, split_batch

CLOUD = "hf-jobs"
DAY = 24 * 3600
STARTING = 1800  # seconds until the first step: find a machine, install packages, download the dataset
BESIDES = 0.1  # extra time besides the steps, as a share of theirs: checkpoints, evaluation


class CantPlan(Exception):
    """Why a run can't be planned."""


def offers_of(hardware: Hardware) -> dict[str, Flavor]:
    """The flavors of Hugging Face Jobs, by name."""
    return {flavor.name: flavor for flavor in hardware.flavors if flavor.cloud == CLOUD}


def settle_machine(
    training: Training, flavor: str, seconds: int | None, offers: Sequence[Flavor]
) -> tuple[str, int]:
    """Choose the flavor and the timeout, unless the user has given them.

    The training's settings are completed so that the run is the planned one.
    """
    if flavor and seconds:
        return flavor, seconds
    try:
        offer, plan = _planned(training, flavor, offers)
    except CantPlan as error:
        if not flavor:
            raise ConfigError(
                f"This run can't be planned on this machine ({error}), so Flexor can't choose a flavor. Give one with "
                "--flavor: `hf jobs hardware` lists them."
            ) from error
        log.warning(
            "using a timeout of 24h: the time of this run can't be planned on this machine (%s)", error
        )
        return flavor, DAY
    if not flavor:
        training.flags |= _dealt_out(training, plan)
    _announce(offer, plan, named=bool(flavor))
    if seconds and seconds < _needed(plan):
        log.warning(
            "By the plan, --timeout may be too short. The run saves and stops before the limit; start it again with "
            "the same --output_dir to resume it."
        )
    return offer.name, seconds or timeout_of(plan)


def timeout_of(plan: Plan) -> int:
    """Seconds, in whole hours."""
    return math.ceil(_needed(plan) / 3600) * 3600


def _needed(plan: Plan) -> float:
    """Seconds from the job's start to its end, at the slow end of the plan's estimate."""
    return STARTING + plan.run_time.seconds * (1 + plan.run_time.step.spread + BESIDES) + SAVING


def _announce(offer: Flavor, plan: Plan, named: bool) -> None:
    log.info(
        "flavor %s: %s of %s, %.1f h (give or take %.0f %%), %.2f $%s; %s",
        offer.name,
        gigabytes(plan.peak),
        gigabytes(plan.site.gpu.memory),
        plan.run_time.hours,
        100 * plan.run_time.step.spread,
        plan.money.rent or 0.0,
        "" if named else ", the cheapest on which this run fits",
        plan.split,
    )
    if not plan.fits:
        log.warning(
            "By the plan, this run does not fit. `flexor plan --gpu='%s' --gpus=%d` with the same flags shows what to "
            "change.",
            plan.site.gpu.name,
            plan.site.gpus,
        )


# Planning.


def _planned(training: Training, flavor: str, offers: Sequence[Flavor]) -> tuple[Flavor, Plan]:
    """The given flavor, else the best available one, and the plan of the run on it."""
    if training.on_cpu:
        raise CantPlan("the plan does not support training on the CPU")
    offers = [offer for offer in offers if not flavor or offer.name == flavor]
    if not offers:
        raise CantPlan(f"the plan does not know the GPU of {flavor or 'any flavor on the Hub'}")
    config, data = _job(training.config)
    if flavor:  # raise now the error that the job would raise
        split_batch(config, training.gpus or offers[0].gpus)
    else:
        split = split_batch(config, training.gpus or 1)
        config = replace(config, global_batch_size=split.global_batch, gradient_accumulation_steps=None)
        offers = [offer for offer in offers if _can_share(split.global_batch, offer, training.gpus)]
        if not offers:
            raise ConfigError(
                f"No machine of Hugging Face Jobs can split a global batch of {split.global_batch} over its GPUs."
            )
    market = Market(config, data, training.gpus)
    try:
        if flavor:
            return offers[0], market.plan(offers[0], config.batch_size)
        cheapest = market.cheapest(offers)
    except Exception as error:  # tracing a policy can raise anything
        raise CantPlan(f"{type(error).__name__}: {error}") from error
    if cheapest is None:
        raise ConfigError(market.nothing_fits(offers))
    return cheapest


def _can_share(global_batch: int, offer: Flavor, gpus: int | None) -> bool:
    """Whether a machine has this many GPUs and each gets the same number of samples."""
    return offer.gpus >= (gpus or 1) and global_batch % (gpus or offer.gpus) == 0


def _job(config: TrainConfig) -> tuple[TrainConfig, Data]:
    """Settings with features filled in, and the data: the run's, or a typical dataset if it can't be opened here."""
    try:
        return open_for_plan(config)
    except DatasetError as error:
        why = str(error).partition(". ")[0]  # the rest is advice for training on this machine
    policy = config.policy
    if not policy.input_features:
        try:
            _, policy = usual_robot(policy)
        except ConfigError as error:
            raise CantPlan(f"{why}; and {error}") from error
    inputs = ", ".join(f"{name} {list(feature.shape)}" for name, feature in policy.input_features.items())
    log.warning(
        "The dataset can't be opened on this machine: %s. Planning with %d frames of %s instead",
        why,
        FRAMES,
        inputs,
    )
    return replace(config, policy=policy), imagined_data(policy, FRAMES)


class Market:
    """Plans of one run on every available machine; without `gpus`, on all GPUs of a machine."""

    def __init__(self, config: TrainConfig, data: Data, gpus: int | None):
        self.config, self.data, self.gpus = config, data, gpus
        self.hardware, self.speeds, self.traces = load_hardware(), assumed(), Traces(config)

    def site(self, offer: Flavor) -> Site:
        return rented(Site(self.hardware.gpus[offer.gpu], self.gpus or offer.gpus), offer)

    def plan(self, offer: Flavor, batch_size: int) -> Plan:
        """The plan with at most `batch_size` samples per pass."""
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
        """The machine with the lowest cost for the whole run, of all on which it fits."""
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
        """Why, and what to change: on the largest machine, with a batch size of 1."""
        offer = max(offers, key=lambda offer: (self.hardware.gpus[offer.gpu].memory, offer.gpus))
        plan = self.plan(offer, 1)
        text = f"This run does not fit on any machine of Hugging Face Jobs. On {offer.name}, with a batch size of 1, "
        if plan.fits:
            return text + f"it takes more than available: {lacking(plan)}."
        text += f"it takes {gigabytes(plan.peak)} of {gigabytes(plan.site.gpu.memory)}. "
        _, remedy = advise(plan, self.hardware, replace(self.config, batch_size=1), self.traces)
        if remedy:
            return text + f"It would fit with {' '.join(change.setting for change in remedy)}."
        return text + "Flexor knows no setting that makes it fit: train a smaller policy."


def lacking(plan: Plan) -> str:
    """What the machine has too little of (memory, disk), and how to need less; empty if it has enough."""
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
    """Settings that split the global batch as planned, if the user's settings would split it differently."""
    config = training.config
    if plan.split == split_batch(config, training.gpus or 1):
        return {}
    flags: dict[str, Any] = {
        "batch_size": plan.split.batch_size,
        "global_batch_size": plan.split.global_batch,
        "gradient_accumulation_steps": "null",
    }
    if config.scale_lr:  # by the requested batch
        config = replace(config, global_batch_size=plan.split.global_batch)
        flags["lr_factor"] = resolve_lr_factor(config).lr_factor
    return flags
