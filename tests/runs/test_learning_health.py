"""Rules over the figures of a run: each fault is found when it begins, once, and noise is no fault."""

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexor.runs.health import LearningHealth, findings, from_record, to_json
from support.run_folders import report


def lines(losses, norms=None, every=200):
    norms = norms or [10.0] * len(losses)
    return [
        report((n + 1) * every, loss=loss, grad_norm=norm, lr=1e-4)
        for n, (loss, norm) in enumerate(zip(losses, norms))
    ]


def falling(count, seed=0, noise=0.1):
    """A loss as runs have it: it falls, and every line is a little off."""
    draw = random.Random(seed)
    return [(2 * math.exp(-n / 30) + 0.2) * math.exp(draw.gauss(0, noise)) for n in range(count)]


def names(faults):
    return [finding.name for finding in faults]


@given(
    seed=st.integers(0, 10**6),
    noise=st.floats(0.0, 0.6),
    tail=st.sampled_from(["normal", "laplace", "exponential"]),
    count=st.integers(1, 250),
)
def test_noise_is_no_fault(seed, noise, tail, count):
    draw = random.Random(seed)

    def off():
        if tail == "normal":
            return math.exp(draw.gauss(0, noise))
        if tail == "laplace":
            return math.exp(noise / 2 * draw.choice([-1, 1]) * draw.expovariate(1))
        return 1 + noise * draw.expovariate(1)

    losses = [(2 * math.exp(-n / 30) + 0.2) * off() for n in range(count)]
    run = lines(losses, [5 * off() for _ in range(count)])
    for n in range(9, count, 10):
        run[n] |= {"held_out_loss": (math.exp(-n / 30) + 0.3) * (1 + 0.05 * draw.gauss(0, 1))}
    assert findings(run) == []


def test_a_spike_is_found_with_its_figures_and_only_once():
    losses = falling(100)
    losses[60:62] = [5.0, 4.5]
    run = lines(losses)
    run[60] |= {"l1_loss": 0.1, "kld_loss": 40.0}
    for line in run[:60] + run[61:]:
        line |= {"l1_loss": 0.1, "kld_loss": 0.02}
    (spike,) = findings(run, {"optimizer": {"grad_clip_norm": 10.0}})
    assert spike.name == "loss spike"
    assert "loss 5 at step 12200, usually 0.601, most of all kld_loss: 40, usually 0.02" in spike.evidence
    assert "--optimizer.lr (now 0.0001) or lower --optimizer.grad_clip_norm (now 10)" in spike.fix


def test_many_spikes_are_few_findings():
    losses = falling(700, noise=0.05)
    for n in range(50, 700, 25):
        losses[n] = 50.0
    spikes = findings(lines(losses))
    assert names(spikes)[0] == "loss spike" and len(spikes) <= 2


def test_a_loss_that_stays_up_has_exploded():
    faults = findings(lines(falling(60) + [30.0] * 40), {"optimizer": {"grad_clip_norm": 0}})
    assert names(faults) == ["loss spike", "loss exploded"]
    assert "high for 5 log lines" in faults[1].evidence
    assert "--optimizer.grad_clip_norm=1" in faults[1].fix


def test_a_loss_that_explodes_at_once_or_slowly():
    assert names(findings(lines([0.5, 20.0, 900.0, 1e4, 1e5]))) == ["loss exploded"]
    slowly = falling(60) + [0.3 * 1.05**n for n in range(150)]
    assert names(findings(lines(slowly))) == ["loss exploded"]


def test_another_phase_of_training_has_another_loss():
    first = [{"step": n, "loss": 0.01, "grad_norm": 1.0, "commitment_loss": 0.1} for n in range(1, 40)]
    second = [{"step": n, "loss": 5.0, "grad_norm": 900.0, "offset_loss": 1.0} for n in range(40, 80)]
    assert findings(first + second) == []
    for line in second:
        line["commitment_loss"] = line.pop("offset_loss")
    assert names(findings(first + second)) == ["loss spike", "gradients explode", "loss exploded"]


def test_gradients():
    losses, usual = falling(100), [10.0, 12.0, 9.0, 11.0] * 25
    assert findings(lines(losses, [*usual[:70], 4000.0, *usual[:29]])) == []  # one is normal
    (explodes,) = findings(lines(losses, usual[:70] + [4000.0] * 30))
    assert explodes.name == "gradients explode"
    assert "gradient norm 4,000 at step 14600, usually 10" in explodes.evidence
    (vanish,) = findings(lines([1.0] * 100, usual[:50] + [1e-5] * 50))
    assert vanish.name == "gradients vanish" and "at step 11000" in vanish.evidence
    (dead,) = findings(lines([1.0] * 20, [0.0] * 20))
    assert dead.name == "gradients vanish" and "at step 1000" in dead.evidence
    learned = [math.exp(-n / 5) + 1e-6 for n in range(100)]
    assert findings(lines(learned, [10 * loss for loss in learned])) == []  # there is nothing left to learn


def held_out(values, every=1000):
    run = lines(falling(len(values) * 5))
    for number, value in enumerate(values, 1):
        run.insert(number * 6 - 1, {"step": number * every, "held_out_loss": value})
    return run


def test_a_held_out_loss_that_rises():
    values = [1.0, 0.6, 0.5, 0.46, 0.5, 0.56, 0.62, 0.7, 0.8, 0.9]
    (rises,) = findings(held_out(values), checkpoints=[2000, 4000, 6000])
    assert rises.name == "held-out loss rises"
    assert "the lowest was 0.46 at step 4000; the training loss went from" in rises.evidence
    assert "use checkpoint 004000, which has the lowest held-out loss" in rises.fix
    (rises,) = findings(held_out(values), checkpoints=[3000, 6000])
    assert "use checkpoint 003000, the nearest to the lowest held-out loss" in rises.fix
    (rises,) = findings(held_out(values))
    assert "--save_freq" in rises.fix
    assert findings(held_out([1.0, 0.6, 0.5, 0.46, 0.45, 0.46, 0.45, 0.46])) == []
    assert len(findings(held_out([*values, 0.4, 0.3, 0.3, 0.5, 0.7, 0.8, 0.9]))) == 2  # a new lowest one


def test_values_that_are_not_finite_are_skipped():
    run = lines(falling(60))
    for line in run[::7]:
        line |= {"grad_norm": None, "l1_loss": None}
    run[30] |= {"loss": None}
    assert findings(json.loads(json.dumps(run))) == []
    limits = [1e308, 5e-324] * 30  # of floats: no ratio of them overflows
    assert "gradients explode" not in names(findings(lines(limits, limits[::-1])))
    assert findings([{}, {"step": 1}, {"loss": "x", "held_out_loss": []}]) == []


def test_the_rest_of_a_run_finds_what_the_whole_run_finds():
    run = lines(falling(60) + [30.0] * 40)
    health = LearningHealth({}, list)
    before = [finding for line in run[:62] for finding in health.update(line)]
    after = [finding for line in run[62:] for finding in health.update(line)]
    assert before + after == findings(run)
    assert names(before) == ["loss spike"] and names(after) == ["loss exploded"]


@pytest.mark.parametrize("record", [None, "x", 3, [1, None, "a"], [{"evidence": "x"}], {"what": "x"}])
def test_a_record_that_nobody_wrote(record):
    assert from_record(record) == []


def test_texts_of_a_record_are_one_line():
    (finding,) = from_record([{"what": "a\x1b[2J", "evidence": "b\nc", "step": 3}])
    assert to_json(finding) == {"what": "a [2J", "evidence": "b c", "change": "", "step": 3.0}
