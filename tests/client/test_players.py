"""Players on a simulated clock: what is asked when, what is executed, and what happens if the server is lost."""

import threading

import numpy as np
import pytest

from flexor_client import (
    ActionLimits,
    ChunkPlayer,
    ClientError,
    LimitError,
    RealTimePlayer,
    RefusedError,
    ServerLostError,
)
from flexor_client.players import in_background
from support.limits import LIMIT_S

FPS = 10
FLEXOR = {"action_steps": 6, "continues_chunks": False}


class CountingPolicy:
    """Entry i of a chunk is the step of its observation plus i. It notes what it is asked."""

    def __init__(self, metadata=FLEXOR, length=8):
        self.metadata, self.length = metadata, length
        self.requests, self.episodes = [], []

    def reset(self, episode=None):
        self.episodes.append(episode)

    def chunk(self, observation, task="", **options):
        self.requests.append({"observation": observation, "task": task, **options})
        last = observation["at"][-1] if isinstance(observation["at"], list) else observation["at"]
        return (last[0] + np.arange(self.length, dtype=np.float32))[:, None]


class World:
    """A clock, and requests that take their time or fail."""

    def __init__(self, latency_s: float):
        self.now, self.latency_s, self.lost = 0.0, latency_s, False

    def start(self, work):
        world, ready, lost = self, self.now + self.latency_s, self.lost
        value = None if lost else work()

        class Answer:
            def done(self):
                return world.now >= ready - 1e-9

            def result(self):
                if lost:
                    raise ServerLostError("gone.")
                return value

        return Answer()


def player_in(world: World, policy: CountingPolicy, **settings) -> RealTimePlayer:
    return RealTimePlayer(policy, FPS, clock=lambda: world.now, start=world.start, **settings)


def play(player, world, steps: int, first: int = 0) -> list:
    """The robot's state is the number of the actions executed; returns the actions, None where there was none."""
    done, state = [], first
    for _ in range(steps):
        action = player.act({"at": np.array([state], np.float32)}, "fold")
        done.append(None if action is None else float(action[0]))
        state += action is not None
        world.now += 1 / FPS
    return done


@pytest.mark.parametrize("latency_s, waits", [(0.0, 0), (0.05, 1), (0.2, 2), (0.25, 3), (0.4, 4)])
def test_the_robot_never_waits_after_the_first_chunk(latency_s, waits):
    world, policy = World(latency_s), CountingPolicy()
    player = player_in(world, policy)
    done = play(player, world, 60)
    assert done == [None] * waits + list(range(60 - waits))
    assert player.idle_steps == 0 and not player.lost
    assert player.timeline.delay == waits


def test_what_will_be_executed_meanwhile_is_sent():
    world, policy = World(0.2), CountingPolicy()
    player = player_in(world, policy, margin=1)
    play(player, world, 10)
    first, second, third = policy.requests[:3]
    assert "previous" not in first and first["step"] == 0 and first["task"] == "fold"
    # Six are to be executed, the answer takes two steps, one step is the margin: asked after three actions.
    assert second["observation"]["at"].tolist() == [3] and second["step"] == 5
    assert second["delay"] == 2
    np.testing.assert_array_equal(second["previous"], np.arange(3, 8, dtype=np.float32)[:, None])
    assert third["observation"]["at"].tolist() == [6]
    np.testing.assert_array_equal(third["previous"][:, 0], np.arange(6, 11))


def test_other_servers_get_nothing_they_do_not_know_and_the_client_blends():
    world, policy = World(0.2), CountingPolicy(metadata={})
    player = player_in(world, policy, execute=4)
    assert play(player, world, 30)[2:] == pytest.approx(list(range(28)))
    assert len(policy.requests) > 4 and all("previous" not in each for each in policy.requests)
    assert player.timeline.blend == 3


def test_a_policy_with_a_history_gets_the_steps_it_was_trained_on():
    world = World(0.2)
    policy = CountingPolicy({**FLEXOR, "observation_steps": [-2, 0]})
    play(player_in(world, policy), world, 7)
    sent = [[float(value[0]) for value in each["observation"]["at"]] for each in policy.requests]
    assert sent[:2] == [[0, 0], [1, 3]]


def test_slower_than_a_chunk_the_robot_pauses_and_says_so(caplog):
    world, policy = World(1.0), CountingPolicy(length=8)
    player = player_in(world, policy, lost_after_s=5)
    done = play(player, world, 60)
    assert [action for action in done if action is not None] == list(range(sum(a is not None for a in done)))
    assert player.idle_steps > 5 and "10 steps, but a chunk has 8 actions" in caplog.text


def lose(player, world, after: int, steps: int) -> list:
    done = play(player, world, after)
    world.lost = True
    return [*done, *play(player, world, steps, first=after)]


def test_lost_server_the_chunk_is_finished():
    world, policy = World(0.0), CountingPolicy()
    player = player_in(world, policy, when_lost="finish")
    done = lose(player, world, 6, 10)
    assert done == [*range(13), None, None, None]  # 5 to 12 was the last chunk
    assert player.lost and player.idle_steps == player.held == 3
    world.lost = False
    world.now += 5
    assert play(player, world, 3, first=13) == [13, 14, 15] and not player.lost


def test_lost_server_the_robot_holds():
    world, policy = World(0.0), CountingPolicy()
    player = player_in(world, policy, when_lost="hold")
    # 5 to 12 is the last chunk; the next is asked for when ten are executed, and that the server is lost is known then
    assert lose(player, world, 6, 8) == [*range(10), None, None, None, None]
    world.lost = False
    world.now += 5
    assert play(player, world, 2, first=40) == [40, 41]


def test_lost_server_the_robot_stops():
    world, policy = World(0.0), CountingPolicy()
    player = player_in(world, policy, when_lost="stop")
    with pytest.raises(ServerLostError, match="gone"):
        lose(player, world, 6, 10)


@pytest.mark.parametrize("when_lost", ["finish", "hold", "stop"])
def test_a_server_that_does_not_answer_is_lost(when_lost):
    world, policy = World(0.1), CountingPolicy(length=30)
    player = player_in(world, policy, when_lost=when_lost, lost_after_s=1.0, execute=5)
    play(player, world, 3)
    world.latency_s = 4.0
    if when_lost == "stop":
        with pytest.raises(ServerLostError, match="not answered for 1 s"):
            play(player, world, 40, first=2)
        return
    done = play(player, world, 30, first=2)
    assert player.lost
    executed = sum(action is not None for action in done)
    assert executed < 15 if when_lost == "hold" else executed == 28
    # The late answer is for a world of four seconds ago: it is not executed, but asked for again.
    world.latency_s = 0.1
    count_before = len(policy.requests)
    play(player, world, 12, first=500)
    assert not player.lost and len(policy.requests) > count_before
    assert play(player, world, 2, first=510)[0] >= 500


def test_lost_servers_are_asked_again_with_growing_pauses():
    world, policy = World(0.0), CountingPolicy()
    player = player_in(world, policy)
    tries = []
    start = world.start
    player._start = lambda work: (tries.append(world.now), start(work))[1]
    world.lost = True
    play(player, world, 100)
    pauses = np.diff(tries)
    assert 5 <= len(tries) <= 12 and pauses[0] < 0.25 and pauses[-1] > 1.9


def test_errors_of_the_server_are_raised():
    policy = CountingPolicy()
    policy.chunk = lambda *_, **__: (_ for _ in ()).throw(RefusedError("no state"))
    with pytest.raises(RefusedError, match="no state"):
        play(player_in(World(0), policy), World(0), 1)


def test_limits_hold_for_every_action():
    world = World(0.0)
    player = player_in(world, CountingPolicy(), limits=ActionLimits(step=0.5))
    player.reset(position=np.array([-1.0]))
    assert play(player, world, 4) == [-0.5, 0.0, 0.5, 1.0]
    player = player_in(world, CountingPolicy(), limits=ActionLimits(high=3, when_exceeded="error"))
    with pytest.raises(LimitError):
        play(player, world, 10)
    waits = ChunkPlayer(CountingPolicy(), limits=ActionLimits(high=2))
    assert play(waits, world, 5) == [0, 1, 2, 2, 2]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("limits", [None, ActionLimits(low=-1, high=1), ActionLimits()])
@pytest.mark.parametrize("real_time", [True, False])
def test_what_is_not_finite_never_leaves(bad, limits, real_time):
    """With or without limits, wherever in a chunk it is."""
    policy, world = CountingPolicy(), World(0.0)
    usual = policy.chunk
    policy.chunk = lambda *a, **k: np.where(usual(*a, **k) >= 7, bad, usual(*a, **k)).astype(np.float32)
    player = player_in(world, policy, limits=limits) if real_time else ChunkPlayer(policy, limits=limits)
    with pytest.raises(LimitError, match="not finite"):
        play(player, world, 1)


@pytest.mark.parametrize("chunk", [None, [[1.0]], np.zeros(3), np.zeros((0, 1)), np.zeros((2, 1), int)])
def test_what_is_no_chunk_never_leaves(chunk):
    policy = CountingPolicy()
    policy.chunk = lambda *a, **k: chunk
    for player in (player_in(World(0.0), policy), ChunkPlayer(policy)):
        with pytest.raises(LimitError):
            play(player, World(0.0), 1)


@pytest.mark.parametrize("real_time", [True, False])
def test_what_is_far_outside_of_the_training_data_never_leaves(real_time):
    """Also where limits would clamp it: 1e37 is no reason to drive to the end of the range."""

    def player(**settings):
        policy = CountingPolicy({**FLEXOR, "action_range": {"low": [0.0], "high": [4.0]}}, length=30)
        return player_in(world, policy, **settings) if real_time else ChunkPlayer(policy, **settings)

    world = World(0.0)
    for limits in (None, ActionLimits(high=2)):
        acts = player(limits=limits, execute=30)
        assert len(play(acts, world, 9)) == 9  # up to 8, which is the width of the range beyond it
        with pytest.raises(
            LimitError, match=r"is 9, but in the training data it is from 0 to 4.*beyond_training"
        ):
            play(acts, world, 1)
    assert len(play(player(beyond_training=5, execute=30), world, 24)) == 24
    assert len(play(player(beyond_training=None, execute=30), world, 30)) == 30
    with pytest.raises(LimitError):
        play(player(beyond_training=0), world, 6)
    with pytest.raises(ClientError, match="beyond_training=-1"):
        player(beyond_training=-1)


def test_a_new_episode_forgets_the_last_and_what_is_under_way():
    world, policy = World(0.2), CountingPolicy()
    player = player_in(world, policy)
    play(player, world, 4)
    player.reset(episode=7)
    assert policy.episodes[-1] == 7
    assert play(player, world, 4, first=100) == [None, None, 100, 101]


def test_one_that_waits_asks_when_all_is_executed():
    world, policy = World(0.0), CountingPolicy()
    player = ChunkPlayer(policy)
    assert play(player, world, 13) == list(range(13))
    assert [each["step"] for each in policy.requests] == [0, 6, 12]
    player = ChunkPlayer(policy, execute=1)
    policy.requests.clear()
    play(player, world, 5)
    assert len(policy.requests) == 5


def test_one_that_waits_sends_every_step_to_a_server_that_wants_it():
    policy = CountingPolicy({"action_steps": 6, "reply": "action", "observation_steps": [-1, 0]}, length=1)
    assert play(ChunkPlayer(policy), World(0), 4) == [0, 1, 2, 3]
    assert [each["observation"]["at"].tolist() for each in policy.requests] == [[0], [1], [2], [3]]
    with pytest.raises(ClientError, match="temporal ensembling"):
        RealTimePlayer(policy, FPS)


@pytest.mark.parametrize(
    "settings, message", [({"when_lost": "panic"}, "finish, hold, stop"), ({"fps": 0}, "per second")]
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ClientError, match=message):
        RealTimePlayer(CountingPolicy(), **{"fps": FPS, **settings})


def test_requests_run_in_a_thread_and_the_first_chunk_can_be_waited_for():
    policy, go = CountingPolicy(), threading.Event()
    answered = policy.chunk
    policy.chunk = lambda *a, **k: (go.wait(LIMIT_S), answered(*a, **k))[1]
    player = RealTimePlayer(policy, FPS)
    observation = {"at": np.zeros(1, np.float32)}
    assert player.act(observation) is None  # it does not wait
    go.set()
    player.reset()
    player.wait(observation, timeout_s=LIMIT_S)
    assert player.act(observation).tolist() == [0]
    answer = in_background(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        answer.result()
