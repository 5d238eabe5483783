"""Energy, rent, and when buying beats renting, with numbers worked by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexor.plan.site.hardware import GPU, Prices, Purchase, load_hardware
from flexor.plan.site.money import Purchased, break_even, buy, energy, rent

PRICES = Prices(kwh=0.25, workstation=1500, resale=0.4, years=3)
CARD = GPU("card", 24, 1000, {"fp32": 10}, tdp_w=400)
SPARK = GPU("whole", 100, 270, {"fp32": 10}, tdp_w=140, unified=True)


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


def test_rent_is_by_what_is_begun() -> None:
    assert rent(6.0, 1.0, 60) == 6
    assert rent(6.0, 1 / 60, 60) == pytest.approx(0.1)  # a minute is not two for rounding's sake
    assert rent(6.0, 61 / 3600, 60) == pytest.approx(0.2)
    assert rent(6.0, 1.01, 3600) == 12
    assert rent(6.0, 0, 60) == 0


@given(st.floats(0, 1e4), st.sampled_from([1, 60, 3600]))
def test_rent_is_the_hours_and_less_than_a_unit_more(hours: float, unit: int) -> None:
    paid = rent(3600.0, hours, unit)  # a dollar a second
    assert hours * 3600 - 1e-3 <= paid <= hours * 3600 + unit + 1e-3


def test_buying() -> None:
    purchase = buy(CARD, 2, Purchase(2000), PRICES)
    assert purchase == Purchased(5500, 2200, pytest.approx(0.92 * 0.25))
    assert purchase.lost == 3300
    assert buy(SPARK, 1, Purchase(4000, whole_machine=True), PRICES).usd == 4000


def test_when_it_pays() -> None:
    # loses 3300, saves 1.33 - 0.23 = 1.10 an hour: 3000 hours, 15 months of 200
    purchase = Purchased(5500, 2200, 0.23)
    result = break_even(purchase, 1.33, 200, PRICES)
    assert result.hours == pytest.approx(3000)
    assert result.months == pytest.approx(15)
    assert result.within_lifetime
    assert not break_even(purchase, 1.33, 80, PRICES).within_lifetime  # 37.5 months
    never = break_even(purchase, 0.20, 200, PRICES)
    assert never.hours is None and not never.within_lifetime


@given(st.floats(100, 1e5), st.floats(0, 0.9), st.floats(0.01, 2), st.floats(0.01, 20))
def test_at_break_even_both_cost_the_same(usd: float, resale: float, own_hour: float, more: float) -> None:
    purchase = Purchased(usd, usd * resale, own_hour)
    hours = break_even(purchase, own_hour + more, 100, PRICES).hours
    assert hours is not None
    assert purchase.lost + hours * own_hour == pytest.approx(hours * (own_hour + more))


def test_every_gpu_with_an_offer_can_be_compared() -> None:
    hardware = load_hardware()
    for name, purchase in hardware.purchases.items():
        gpu = hardware.gpus[name]
        for offer in hardware.offers(gpu)[:1]:
            purchase = buy(gpu, 1, purchase, hardware.prices)
            assert break_even(purchase, offer.usd_per_hour, 100, hardware.prices).hours, name
