"""Rules over runs that learn while they act: each fault is found once, and healthy runs get no alarm."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexor.runs.health import findings

DEMONSTRATED = {"dataset": {"repo_id": "builtin/place_rl"}}


def line(number: int, **values: float) -> dict:
    """A line of a run that went well so far."""
    usual = {
        "step": 500 * number,
        "episodes": 8 * number,
        "transitions_per_s": 30.0,
        "success_rate": min(0.04 * number, 1.0),
        "return": min(0.04 * number, 1.0),
        "discounted_return": min(0.02 * number, 0.5),
        "first_q": min(0.02 * number, 0.5) + 0.05,
        "intervention_rate": max(0.6 - 0.03 * number, 0.0),
        "entropy": -1.4,
        "target_entropy": -1.5,
        "temperature": 0.002,
        "loss": 0.01,
        "grad_norm": 1.0,
    }
    return {**usual, **values}


def names(lines, config=DEMONSTRATED):
    return [finding.name for finding in findings(lines, config)]


@given(st.integers(0, 10**6), st.integers(1, 100))
@settings(max_examples=25)
def test_healthy_runs_get_no_alarm(seed, count):
    """Figures of 20 episodes vary, critics begin too high, the policy begins at random, and losses jump."""
    draw = random.Random(seed)
    run = []
    for number in range(1, count + 1):
        skill = min(0.04 * number, 0.95)
        success = sum(draw.random() < skill for _ in range(20)) / 20
        run.append(
            line(
                number,
                success_rate=success,
                **{"return": success},
                discounted_return=0.5 * success,
                first_q=0.5 * skill + (0.4 if number < 6 else 0.05),
                entropy=1.8 - 0.4 * number if number < 8 else -1.5 + draw.gauss(0, 0.3),
                intervention_rate=max(0.7 * (1 - skill) + draw.gauss(0, 0.05), 0.0),
                loss=0.01 * 10 ** draw.uniform(0, 3),
                grad_norm=10 ** draw.uniform(-2, 2),
            )
        )
    assert names(run) == []


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("critics overestimate", {"first_q": 0.9, "discounted_return": 0.1}),
        ("the policy stopped exploring", {"entropy": -9.0, "success_rate": 0.3}),
        ("the policy acts too much at random", {"entropy": 1.2, "success_rate": 0.0}),
        ("help is not falling", {"intervention_rate": 0.6}),
    ],
)
def test_a_fault_is_found_once_with_its_figures(name, values):
    found = findings([line(number, **values) for number in range(1, 80)], DEMONSTRATED)
    assert [finding.name for finding in found] == [name]
    assert any(
        f"{abs(value):g}" in found[0].evidence or f"{100 * value:.0f} %" in found[0].evidence
        for value in values.values()
    )
    assert "--rl." in found[0].fix


def test_a_run_without_any_reward():
    nothing = {
        "success_rate": 0.0,
        "return": 0.0,
        "discounted_return": 0.0,
        "first_q": 0.0,
        "intervention_rate": 0.0,
    }
    run = [line(number, **nothing) for number in range(1, 40)]
    assert names(run, {}) == ["no rewards to learn from"]
    assert names(run, DEMONSTRATED) == []  # those have rewards
    once = [{**each, "return": 0.05 if number == 3 else 0.0} for number, each in enumerate(run)]
    assert names(once, {}) == []


def test_a_fault_that_comes_back_is_found_again():
    good = [line(number) for number in range(20, 40)]
    bad = [line(number, first_q=2.0) for number in range(40, 60)]
    assert names([*good, *bad, *good, *bad]) == ["critics overestimate"] * 2


@given(
    st.dictionaries(st.sampled_from([*line(1)]), st.none() | st.text(max_size=3) | st.floats(), max_size=6)
)
@settings(max_examples=50)
def test_lines_of_a_stranger_are_no_error(values):
    names([{**line(number), **values} for number in range(1, 15)], {"dataset": None})
