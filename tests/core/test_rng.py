"""Noise is a function of seed, step, sample and name, and looks like noise."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexor.core.rng import Noise, _mix, key_of, mix_numpy, seed_everything

IDS = torch.arange(12) * 37
SHAPE = (12, 4, 3)
KINDS = ["normal", "uniform", "integers"]


def draw(kind: str, ids=IDS, seed: int = 1, step: int = 2, name: str = "x", shape=(4, 3)) -> torch.Tensor:
    more = (1000,) if kind == "integers" else ()
    return getattr(Noise(seed, step, ids), kind)(name, (len(ids), *shape), *more)


@pytest.mark.parametrize("kind", KINDS)
@given(st.permutations(range(12)), st.integers(1, 11))
@settings(max_examples=20)
def test_a_sample_keeps_its_noise_wherever_it_is_drawn(kind, order, cut):
    full_batch = draw(kind)
    assert torch.equal(draw(kind, IDS[order]), full_batch[order])
    assert torch.equal(torch.cat([draw(kind, IDS[:cut]), draw(kind, IDS[cut:])]), full_batch)


@pytest.mark.parametrize("kind", KINDS)
def test_repeats_exactly_and_differs_by_everything_that_names_it(kind):
    first = draw(kind)
    assert torch.equal(first, draw(kind))
    for other in (draw(kind, seed=3), draw(kind, step=3), draw(kind, name="y"), draw(kind, IDS + 1)):
        assert (first == other).float().mean() < 0.1


def test_history_and_torchs_own_generator_do_not_matter():
    noise = Noise(1, 2, IDS)
    noise.normal("something else", SHAPE)
    torch.manual_seed(5)
    assert torch.equal(noise.normal("x", SHAPE), draw("normal"))


def test_a_longer_draw_starts_like_a_shorter_one():
    assert torch.equal(draw("uniform", shape=(10,))[:, :4], draw("uniform", shape=(4,)))


def test_normal_has_the_moments_of_one():
    x = draw("normal", torch.arange(200), shape=(2000,)).double()
    assert torch.isfinite(x).all()
    assert abs(x.mean()) < 0.01 and abs(x.std() - 1) < 0.01
    assert abs((x**3).mean()) < 0.03 and abs((x**4).mean() - 3) < 0.1
    assert (x > 2).double().mean().item() == pytest.approx(0.02275, abs=0.001)


def test_uniform_is_inside_and_even():
    x = draw("uniform", torch.arange(200), shape=(2000,))
    assert x.min() > 0 and x.max() < 1
    counts = torch.histc(x, 20, 0, 1) / x.numel()
    assert (counts - 0.05).abs().max() < 0.002


def test_samples_and_positions_are_independent():
    x = draw("normal", torch.arange(300), shape=(300,)).double()
    across = np.corrcoef(x.numpy())[np.triu_indices(300, 1)]
    along = np.corrcoef(x.numpy().T)[np.triu_indices(300, 1)]
    for correlation in (across, along):
        assert np.abs(correlation).max() < 0.35 and abs(correlation.std() - 300**-0.5) < 0.01


@given(st.integers(1, 10_000))
def test_integers_stay_below(high):
    x = Noise(0, 0, torch.arange(50)).integers("t", (50, 20), high)
    assert x.dtype == torch.int64 and x.min() >= 0 and x.max() < high


def test_the_batch_comes_first():
    with pytest.raises(AssertionError, match="batch first"):
        Noise(0, 0, IDS).normal("x", (3, 12))


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20))
def test_numpy_and_torch_mix_alike(values):
    numbers = np.array(values, np.int64)
    mixed = mix_numpy(numbers.view(np.uint64)).view(np.int64)
    assert np.array_equal(_mix(torch.from_numpy(numbers)).numpy(), mixed)


def test_keys_differ():
    keys = {key_of("a", i, j) for i in range(100) for j in range(100)}
    assert len(keys) == 10_000 and all(0 <= key < 2**64 for key in keys)


def test_seeding_torch():
    seed_everything("dropout", 1)
    value = torch.rand(3)
    seed_everything("dropout", 1)
    assert torch.equal(value, torch.rand(3))
    seed_everything("dropout", 2)
    assert not torch.equal(value, torch.rand(3))


def test_torch_is_seeded_as_by_torch_itself():
    seed_everything("dropout", 1)
    ours = torch.get_rng_state()
    torch.manual_seed(key_of("dropout", 1) & ((1 << 63) - 1))
    assert torch.equal(ours, torch.get_rng_state())


@pytest.mark.gpu
def test_gpus_are_seeded_as_by_torch_itself():
    seed_everything("dropout", 1)
    ours = torch.rand(3, device="cuda")
    torch.manual_seed(key_of("dropout", 1) & ((1 << 63) - 1))
    assert torch.equal(ours, torch.rand(3, device="cuda"))


@pytest.mark.parametrize("ids", [torch.arange(64), torch.tensor([-1]), torch.arange(16) * 2**40])
def test_a_few_numbers_are_those_of_a_large_draw(ids, monkeypatch):
    """numpy draws them then, not torch."""
    few = {kind: draw(kind, ids) for kind in KINDS}
    monkeypatch.setattr("flexor.core.rng.FEW", 0)
    assert all(torch.equal(few[kind], draw(kind, ids)) for kind in KINDS)
