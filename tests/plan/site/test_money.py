"""Energy, rent, and when buying beats renting, with numbers worked by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexor.plan.site.hardware import GPU, Flavor, Prices, Purchase, load_hardware
from flexor.plan.site.money import Purchased, buy, buy_or_rent, energy, rent

PRICES = Prices(kwh=0.25, workstation=1500, resale=0.4, years=3)
CARD = GPU("card", 24, 1000, {"fp32": 10}, tdp_w=400)
SPARK = GPU("whole", 100, 270, {"fp32": 10}, tdp_w=140, unified=True)


def flavor(usd: float, gpus: int = 1, billed_by_s: int = 60) -> Flavor:
    return Flavor("cloud", "name", "card", gpus, usd, 8, 30, billed_by_s=billed_by_s)


def test_energy_of_a_workstation() -> None:
    # 2 cards at full power and 120 W around them, for 10 hours
    used = energy(CARD, 2, 10, PRICES)
    assert used.watts == 920
    assert used.kwh == pytest.approx(9.2)
    assert used.usd == pytest.approx(2.3)


def test_a_gpu_that_waits_draws_less() -> None:
    assert energy(CARD, 1, 1, PRICES, busy=0).watts == pytest.approx(400 * 0.2 + 120)
    assert energy(CARD, 1, 1, PRICES, busy=0.5).watts == pytest.approx(400 * 0.6 + 120)
    assert energy(SPARK, 1, 1, PRICES).watts == 140  # nothing around it
    assert energy(SPARK, 1, 1, PRICES, host_w=60).watts == 200


def test_rent_is_by_what_is_begun() -> None:
    assert rent(flavor(6.0), 1.0) == 6
    assert rent(flavor(6.0), 1 / 60) == pytest.approx(0.1)  # a minute is not two for rounding's sake
    assert rent(flavor(6.0), 61 / 3600) == pytest.approx(0.2)
    assert rent(flavor(6.0, billed_by_s=3600), 1.01) == 12
    assert rent(flavor(6.0), 0) == 0


@given(st.floats(0, 1e4), st.sampled_from([1, 60, 3600]))
def test_rent_is_the_hours_and_less_than_a_unit_more(hours: float, unit: int) -> None:
    paid = rent(flavor(3600.0, billed_by_s=unit), hours)  # a dollar a second
    assert hours * 3600 - 1e-3 <= paid <= hours * 3600 + unit + 1e-3


def test_buying() -> None:
    own = buy(CARD, 2, Purchase(2000), PRICES)
    assert own == Purchased(5500, 2200, pytest.approx(0.92 * 0.25))
    assert own.lost == 3300
    assert buy(SPARK, 1, Purchase(4000, whole_machine=True), PRICES).usd == 4000


def test_when_it_pays() -> None:
    # loses 3300, saves 1.33 - 0.23 = 1.10 an hour: 3000 hours, 15 months of 200
    own = Purchased(5500, 2200, 0.23)
    found = buy_or_rent(own, 1.33, 200, PRICES)
    assert found.hours == pytest.approx(3000)
    assert found.months == pytest.approx(15)
    assert found.buys
    assert not buy_or_rent(own, 1.33, 80, PRICES).buys  # 37.5 months
    never = buy_or_rent(own, 0.20, 200, PRICES)
    assert never.hours is None and not never.buys


@given(st.floats(100, 1e5), st.floats(0, 0.9), st.floats(0.01, 2), st.floats(0.01, 20))
def test_at_break_even_both_cost_the_same(usd: float, resale: float, own_hour: float, more: float) -> None:
    own = Purchased(usd, usd * resale, own_hour)
    hours = buy_or_rent(own, own_hour + more, 100, PRICES).hours
    assert hours is not None
    assert own.lost + hours * own_hour == pytest.approx(hours * (own_hour + more))


def test_every_gpu_with_an_offer_can_be_compared() -> None:
    hardware = load_hardware()
    for name, purchase in hardware.purchases.items():
        gpu = hardware.gpus[name]
        for offer in hardware.offers(gpu)[:1]:
            own = buy(gpu, 1, purchase, hardware.prices)
            assert buy_or_rent(own, offer.usd_per_hour, 100, hardware.prices).hours, name
