"""Energy and cost: what a run costs on rented hardware or on your own machine, and when buying is cheaper than renting.

The model is simple on purpose. A GPU's power depends on its load. A bought machine loses the same share of its price
whenever it is sold within its assumed lifetime, so buying pays off slightly earlier than computed if that is soon.
Prices come from `gpus.toml`; they have a date and are meant to be overridden.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flexor.plan.site.hardware import GPU, Prices, Purchase

IDLE = 0.2  # share of its power that an idle GPU draws
HOST_W = 120.0  # of a workstation without its GPUs; with unified memory, tdp_w covers the whole machine
HOURS_PER_MONTH = 730.0


@dataclass(frozen=True)
class Energy:
    watts: float
    kwh: float
    usd: float


def energy(gpu: GPU, gpus: int, hours: float, prices: Prices, *, busy: float = 1.0) -> Energy:
    """Energy of a run on your own machine. `busy`: share of the time in which the GPUs compute."""
    assert 0 <= busy <= 1 and hours >= 0
    watts = gpus * gpu.tdp_w * (IDLE + (1 - IDLE) * busy) + (0.0 if gpu.unified else HOST_W)
    return Energy(watts, watts * hours / 1e3, watts * hours / 1e3 * prices.kwh)


def rent(usd_per_hour: float, hours: float, billed_by_s: int = 1) -> float:
    """US dollars for these hours, rounded up to the cloud's billing unit."""
    units = math.ceil(hours * 3600 / billed_by_s - 1e-9)
    return units * billed_by_s / 3600 * usd_per_hour


@dataclass(frozen=True)
class Purchased:
    """Your own machine: its price, its resale value, and the energy cost per hour."""

    usd: float
    resale: float
    usd_per_hour: float

    @property
    def lost(self) -> float:
        return self.usd - self.resale


def buy(gpu: GPU, gpus: int, purchase: Purchase, prices: Prices, *, busy: float = 1.0) -> Purchased:
    """The GPUs and the machine around them."""
    usd = purchase.usd * gpus + (0 if purchase.whole_machine else prices.workstation)
    return Purchased(usd, usd * prices.resale, energy(gpu, gpus, 1, prices, busy=busy).usd)


@dataclass(frozen=True)
class BreakEven:
    """When your own machine has cost less than renting the same."""

    hours: float | None
    """Hours of use until then; None if that never happens."""
    months: float | None
    """Months until then, with the given use."""
    within_lifetime: bool
    """Whether that is before the end of the machine's assumed lifetime."""


def break_even(
    purchase: Purchased, rented_usd_per_hour: float, hours_per_month: float, prices: Prices
) -> BreakEven:
    """Compare the hourly rent with the machine's loss of value plus hourly energy."""
    assert 0 < hours_per_month <= HOURS_PER_MONTH
    saved = rented_usd_per_hour - purchase.usd_per_hour
    if saved <= 0:
        return BreakEven(None, None, False)
    hours = purchase.lost / saved
    return BreakEven(hours, hours / hours_per_month, hours <= prices.years * 12 * hours_per_month)
