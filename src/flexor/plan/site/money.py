"""Energy and money: what a run costs where it is rented, what it costs at home, and when buying beats renting.

Deliberately simple: a GPU draws by how busy it is; a bought machine loses the same share of its price whenever it is
sold within the years it is reckoned to last, so what pays early pays a little earlier still. Prices are those of
`gpus.toml`, which are dated and meant to be overridden.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flexor.plan.site.hardware import GPU, Flavor, Prices, Purchase

IDLE = 0.2  # share of its power that a GPU draws while it waits
HOST_W = 120.0  # of a workstation around its GPUs; of a machine that is sold whole, its own figure holds all
HOURS_PER_MONTH = 730.0


@dataclass(frozen=True)
class Energy:
    watts: float
    kwh: float
    usd: float


def energy(
    gpu: GPU, gpus: int, hours: float, prices: Prices, *, busy: float = 1.0, host_w: float | None = None
) -> Energy:
    """Of a run on a machine of one's own. `busy`: share of the time that the GPUs compute."""
    assert 0 <= busy <= 1 and hours >= 0
    around = (0.0 if gpu.unified else HOST_W) if host_w is None else host_w
    watts = gpus * gpu.tdp_w * (IDLE + (1 - IDLE) * busy) + around
    return Energy(watts, watts * hours / 1e3, watts * hours / 1e3 * prices.kwh)


def rent(flavor: Flavor, hours: float) -> float:
    """US dollars for so many hours, by the cloud's smallest unit of time."""
    return rent_of(flavor.usd_per_hour, hours, flavor.billed_by_s)


def rent_of(usd_per_hour: float, hours: float, billed_by_s: int = 1) -> float:
    begun = math.ceil(hours * 3600 / billed_by_s - 1e-9)
    return begun * billed_by_s / 3600 * usd_per_hour


def rent_for_gpus(flavor: Flavor, gpus: int, hours: float) -> float:
    """The same where several such machines are needed, all for the whole time."""
    return -(-gpus // flavor.gpus) * rent(flavor, hours)


@dataclass(frozen=True)
class Purchased:
    """A machine of one's own: what is paid for it, what is left of that, what an hour of it costs."""

    usd: float
    resale: float
    usd_per_hour: float

    @property
    def lost(self) -> float:
        return self.usd - self.resale


def buy(gpu: GPU, gpus: int, purchase: Purchase, prices: Prices, *, busy: float = 1.0) -> Purchased:
    """So many GPUs and what they are put into."""
    paid = purchase.usd * gpus + (0 if purchase.whole_machine else prices.workstation)
    return Purchased(paid, paid * prices.resale, energy(gpu, gpus, 1, prices, busy=busy).usd)


@dataclass(frozen=True)
class BuyOrRent:
    """When a machine of one's own has cost less than renting the same."""

    hours: float | None
    """Of use until then; None if it never does."""
    months: float | None
    """Until then, at the use that was given."""
    buys: bool
    """Whether that is within the years that the machine is reckoned to last."""


def buy_or_rent(
    own: Purchased, rented_usd_per_hour: float, hours_per_month: float, prices: Prices
) -> BuyOrRent:
    """Renting costs by the hour; owning costs what the machine loses in value, and energy by the hour."""
    assert 0 < hours_per_month <= HOURS_PER_MONTH
    saved = rented_usd_per_hour - own.usd_per_hour
    if saved <= 0:
        return BuyOrRent(None, None, False)
    hours = own.lost / saved
    return BuyOrRent(hours, hours / hours_per_month, hours <= prices.years * 12 * hours_per_month)
