"""Batches: the same whoever reads them, whole micro-batches, errors that come through, no threads left."""

import threading

import numpy as np
import pytest
import torch

from flexor.core.batch import ACTION, SAMPLE_ID, VALID_STEPS
from flexor.data.dataset import open_dataset
from flexor.data.loader.loader import PREFETCH_GROUPS, Loader, sample_rows, to_tensors

DELTAS = {ACTION: range(4)}


@pytest.fixture(scope="module")
def opened(lowdim):
    return open_dataset(root=lowdim)


def loader_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("loader")]


def loader(dataset, **options) -> Loader:
    return Loader(dataset, DELTAS, **{"batch_size": 4, "accumulation": 2, "seed": 5} | options)


def same(batch: dict, other: dict) -> bool:
    assert batch.keys() == other.keys()
    return all(
        torch.equal(v, other[k]) if isinstance(v, torch.Tensor) else v == other[k] for k, v in batch.items()
    )


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_same_batches_for_any_number_of_workers(workers, opened):
    expected = list(loader(opened).steps(3, 14))
    steps = list(loader(opened, num_workers=workers).steps(3, 14))
    assert len(steps) == 11 and all(len(step) == 2 for step in steps)
    for step, other in zip(expected, steps, strict=True):
        assert all(same(a, b) for a, b in zip(step, other, strict=True))
    assert loader_threads() == []


@pytest.mark.parametrize("workers", [0, 2])
def test_pictures_too(workers, dataset):
    opened = open_dataset(root=dataset)
    step = next(loader(opened, num_workers=workers).steps(0, 1))
    rows = np.concatenate([batch[SAMPLE_ID].numpy() for batch in step])
    expected = to_tensors(opened.read(rows, DELTAS))
    pictures = torch.cat([batch["observation.image"] for batch in step])
    assert torch.equal(pictures, expected["observation.image"]) and pictures.dtype == torch.uint8


def test_any_step_can_be_the_first(opened):
    steps = list(loader(opened).steps(0, 12))
    later = list(loader(opened).steps(7, 12))
    assert all(same(a[0], b[0]) for a, b in zip(steps[7:], later, strict=True))


def test_splitting_a_batch_changes_nothing_but_the_split(opened):
    for step, (undivided, halves) in enumerate(
        zip(
            loader(opened, batch_size=8, accumulation=1).steps(0, 9),
            loader(opened, batch_size=2, accumulation=4).steps(0, 9),
        )
    ):
        (full,) = undivided
        for key in (ACTION, SAMPLE_ID, f"{ACTION}_is_pad"):
            assert torch.equal(full[key], torch.cat([part[key] for part in halves])), step
        assert {part[VALID_STEPS] for part in halves} == {full[VALID_STEPS]}


def test_valid_steps_is_the_mean_over_the_whole_step(opened):
    for step in loader(opened).steps(0, 12):
        valid = torch.cat([(~batch[f"{ACTION}_is_pad"]).sum(1) for batch in step]).double()
        assert len(valid) == 8
        assert all(batch[VALID_STEPS] == pytest.approx(valid.mean().item()) for batch in step)


def test_without_actions_there_is_nothing_to_count(opened):
    (batch,) = next(Loader(opened, {}, batch_size=3).steps(0, 1))
    assert VALID_STEPS not in batch


def test_an_epoch_shows_every_frame(opened):
    steps = Loader(opened, DELTAS, batch_size=1).steps(0, len(opened))
    assert sorted(int(batch[SAMPLE_ID]) for (batch,) in steps) == list(range(len(opened)))


def test_last_frames_can_be_dropped(opened):
    rows = sample_rows(opened, 3)
    episodes = opened.episodes
    expected = [r for s, e in zip(episodes.start, episodes.end) for r in range(s, e - 3)]
    assert rows.tolist() == expected
    assert sample_rows(opened, 1000).tolist() == episodes.start.tolist()  # a short episode keeps one


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_a_worker_comes_through(workers, opened, monkeypatch):
    original = type(opened).read

    def broken(self, rows, *more):
        if 17 in rows:
            raise OSError("the disk is gone")
        return original(self, rows, *more)

    monkeypatch.setattr(type(opened), "read", broken)
    with pytest.raises(OSError, match="the disk is gone"):
        list(loader(opened, num_workers=workers).steps(0, 12))
    assert loader_threads() == []


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_closing_early_leaves_no_threads(taken, opened):
    steps = loader(opened, num_workers=3).steps(0, 10_000)
    for _ in range(taken):
        next(steps)
    steps.close()
    assert loader_threads() == []


def test_reading_ahead_is_bounded(opened, monkeypatch):
    reads = []
    original = type(opened).read
    monkeypatch.setattr(
        type(opened), "read", lambda self, rows, *more: reads.append(rows) or original(self, rows, *more)
    )
    bounded = loader(opened, num_workers=2, accumulation=1)
    steps = bounded.steps(0, 10_000)
    for _ in range(10):
        next(steps)
    steps.close()
    grouped = bounded.grouped
    assert sum(map(len, reads)) <= bounded.batch_size * grouped * (-(-10 // grouped) + PREFETCH_GROUPS)
