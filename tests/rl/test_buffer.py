"""The buffer: next states are right wherever an episode ends, and what can be drawn follows from the records alone."""

import numpy as np
import pytest
import torch

from flexor.core.rng import Noise
from flexor.policies.features import Kind, PolicyFeature
from flexor.rl.buffer import ReplayBuffer
from flexor.rl.records import first_record, record_type, step_record

LAYOUT = record_type({"observation.state": PolicyFeature(Kind.STATE, (2,))}, 1)
CPU = torch.device("cpu")


def episodes(lengths: list[int], interventions: set[int] = frozenset(), first: int = 0) -> np.ndarray:
    """Records whose states are [episode, step]; the action of a step is its number over all episodes."""
    records, number = [], first
    for episode, length in enumerate(lengths):
        records.append(first_record(LAYOUT, state(episode, 0)))
        for step in range(1, length + 1):
            ends = step == length
            outcome = {"terminated": ends and episode % 2 == 0, "truncated": ends and episode % 2 == 1}
            helped = number in interventions
            records.append(
                step_record(LAYOUT, state(episode, step), np.array([number]), intervention=helped, **outcome)
            )
            number += 1
    return np.concatenate(records)


def state(episode: int, step: int) -> dict[str, np.ndarray]:
    return {"observation.state": np.array([episode, step], np.float32)}


def buffer(capacity: int, demonstrations: np.ndarray | None = None, **options) -> ReplayBuffer:
    return ReplayBuffer(
        LAYOUT, capacity, np.zeros(0, LAYOUT) if demonstrations is None else demonstrations, CPU, **options
    )


def draw(replay: ReplayBuffer, count: int = 4000, ratio: float = 0.5, seed: int = 0) -> tuple:
    noise = Noise(seed, 0, torch.arange(count))
    rows = replay.sample(count, ratio, replay.bounds(), noise, "")
    before, after, step = replay.gather(rows)
    return before["observation.state"], after["observation.state"], step


@pytest.mark.parametrize("capacity", [7, 10, 23, 100])
@pytest.mark.parametrize("lengths", [[3, 1, 5, 4], [20], [1, 1, 1, 1, 1, 1, 1, 1, 1]])
def test_every_transition_that_can_be_drawn_is_one_step_of_one_episode(capacity, lengths):
    """Also those across the ring's head, and those whose first observation the ring has overwritten."""
    records, replay = episodes(lengths), buffer(capacity)
    for place in range(len(records)):
        replay.extend(records[place : place + 1])
        if not records["is_step"][place]:
            continue
        before, after, step = draw(replay, 300)
        assert (before[:, 0] == after[:, 0]).all()
        assert (before[:, 1] + 1 == after[:, 1]).all()
        number = records["action"][place, 0]
        stored = records["action"][max(0, place + 1 - capacity) + 1 : place + 1, 0]
        steps = records["is_step"][max(0, place + 1 - capacity) + 1 : place + 1] == 1
        assert {*step["action"][:, 0].tolist()} == {*stored[steps].tolist()}, f"after step {number}"


@pytest.mark.parametrize("capacity", [7, 20, 61])
def test_actors_take_turns_and_every_next_state_is_of_the_same_actor(capacity):
    """Three actors of different speeds: each transition that can be drawn is one step of one of them, and none whose
    records are both in the ring is missing."""
    rng, replay = np.random.default_rng(capacity), buffer(capacity)
    pending = []
    for actor in range(3):
        records = episodes([4, 9, 2, 6, 5], interventions={*range(0, 26, 3)})
        records["actor"], records["observation.state"][:, 0] = (
            actor,
            records["observation.state"][:, 0] + 100 * actor,
        )
        pending.append(list(records))
    stored = []
    while any(pending):
        actor = rng.choice(3, p=[0.6, 0.3, 0.1])
        if pending[actor]:
            stored.append(pending[actor].pop(0))
            replay.extend(np.array(stored[-1:], LAYOUT))
        expected = expected_transitions(stored, capacity)
        assert replay.collected.count == len(expected)
        if expected:
            before, after, _ = draw(replay, 4000)
            assert {(*b, *a) for b, a in zip(before.tolist(), after.tolist())} == expected
    assert replay.transitions == 78


def expected_transitions(stored: list, capacity: int) -> set:
    last, transitions = {}, set()
    for number, record in enumerate(stored):
        before = last.get(int(record["actor"]))
        if record["is_step"] and before is not None and before[0] >= len(stored) - capacity:
            transitions.add((*before[1], *record["observation.state"].tolist()))
        last[int(record["actor"])] = number, record["observation.state"].tolist()
    return transitions


def test_an_end_in_time_is_no_end_of_the_task():
    replay = buffer(50)
    replay.extend(episodes([3, 3]))
    _, after, step = draw(replay)
    ends = after[:, 1] == 3
    assert (step["terminated"][ends & (after[:, 0] == 0)] == 1).all()
    assert (step["terminated"][ends & (after[:, 0] == 1)] == 0).all()
    assert (step["terminated"][~ends] == 0).all()


def test_half_of_a_batch_is_demonstrations_and_interventions():
    replay = buffer(100, episodes([10], first=1000))
    replay.extend(episodes([20], interventions={3, 4, 5, 11, 12}))
    before, after, step = draw(replay, 6000)
    actions = step["action"][:, 0]
    assert (before[:, 0] == after[:, 0]).all() and (before[:, 1] + 1 == after[:, 1]).all()
    online, shown = actions[:3000], actions[3000:]
    assert {*online.tolist()} == {*range(20)}
    assert {*shown.tolist()} == {*range(1000, 1010), 3, 4, 5, 11, 12}
    counts = torch.stack([(shown == value).sum() for value in {*shown.tolist()}])
    assert counts.min() > 3000 / 15 * 0.7 and counts.max() < 3000 / 15 * 1.3  # each as often as any other


def test_without_demonstrations_a_batch_is_full():
    replay = buffer(100)
    replay.extend(episodes([20]))
    assert len(draw(replay, 64)[2]["action"]) == 64


def test_without_demonstrations_half_of_a_batch_is_interventions():
    replay = buffer(100)
    replay.extend(episodes([20], interventions={3, 4}))
    actions = draw(replay, 1000)[2]["action"][:, 0]
    assert {*actions[:500].tolist()} == {*range(20)} and {*actions[500:].tolist()} == {3, 4}


def discard(records: np.ndarray, episode: int) -> np.ndarray:
    """The records, of which a person has discarded an episode."""
    last = np.append(np.flatnonzero(records["is_step"] == 0)[1:], len(records)) - 1
    records["discarded"][last[episode]] = 1
    return records


@pytest.mark.parametrize("capacity", [9, 13, 100])
@pytest.mark.parametrize("chunk", [1, 4, 50])
def test_a_discarded_episode_is_not_drawn_but_counts_as_steps(capacity, chunk):
    """Wherever the ring's head is, and however many records come at once."""
    records = discard(episodes([4, 3, 5, 2], interventions={5, 6, 8}), 1)
    replay = buffer(capacity)
    for place in range(0, len(records), chunk):
        replay.extend(records[place : place + chunk])
    before, after, step = draw(replay, 500)
    newest = records[-capacity + 1 :] if capacity < len(records) else records
    kept = {*newest["action"][newest["is_step"] == 1, 0].tolist()} - {4.0, 5.0, 6.0}
    assert {*step["action"][:250, 0].tolist()} == kept
    assert {*step["action"][250:, 0].tolist()} == {8.0}
    assert (before[:, 0] == after[:, 0]).all() and (before[:, 1] + 1 == after[:, 1]).all()
    assert replay.transitions == 14 and replay.discarded == 3


@pytest.mark.parametrize("chunk", [1, 3, 50])
def test_what_is_drawn_follows_from_the_records_not_from_when_they_came(chunk, tmp_path):
    records = episodes([3, 8, 2, 9, 4], interventions={2, 3, 10, 11, 20})
    shown = episodes([4], first=500)
    plain, other = buffer(13, shown), buffer(13, shown, file=tmp_path)
    for place in range(len(records)):
        plain.extend(records[place : place + 1])
    for place in range(0, len(records), chunk):
        other.extend(records[place : place + chunk])
    for first, second in zip(draw(plain)[:2], draw(other)[:2]):
        assert torch.equal(first, second)
    assert torch.equal(plain.bounds(), other.bounds())


def test_images_are_bytes():
    """LeRobot's buffer of 100,000 transitions with two cameras of 128 x 128 takes 39 GB, as float32."""
    cameras = {f"observation.images.{name}": PolicyFeature(Kind.VISUAL, (3, 128, 128)) for name in ("a", "b")}
    layout = record_type(cameras, 4)
    replay = ReplayBuffer(layout, 100, np.zeros(0, layout), CPU)
    assert replay.nbytes() * 1000 < 9.9e9
