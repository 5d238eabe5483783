"""Nobody hangs silently: real processes hang, freeze and die, and the others say which one it was."""

import ctypes
import itertools
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from flexor.core.errors import FlexorError
from flexor.core.log import setup_logging
from flexor.train.ranks import watchdog as module
from flexor.train.ranks.heartbeats import PREFIX, Activity, Heartbeat
from flexor.train.ranks.watchdog import HUNG, Watchdog
from support import environment
from support.limits import FOREVER_S, LIMIT_S, wait_for
from support.runs import SERVER

pytestmark = pytest.mark.ranks(waits=True)

TIMEOUT_S = 45.0  # half of it without a word is silence: on a busy machine, a rank may get no core for long
TICK_S = 4.0  # five of them are silence after a collective has failed
KILLED = -signal.SIGKILL
Scene = Callable[[Watchdog], None]


def join(folder: Path, rank: int, world_size: int) -> dist.Store:
    """The store that rank 0 keeps, found by a file."""
    if rank == 0:
        store = dist.TCPStore(
            "127.0.0.1", 0, world_size, True, timedelta(seconds=LIMIT_S), wait_for_workers=False
        )
        (folder / "port.part").write_text(str(store.port))
        (folder / "port.part").rename(folder / "port")
        return store
    while not (folder / "port").exists():
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int((folder / "port").read_text()), world_size, False)


def become(folder: Path, rank: int, world_size: int, scene: Scene) -> None:
    """What a rank does: a scene under the watchdog, with its words in a file, and the exit code of the program."""
    code = 1
    try:
        os.dup2(os.open(folder / f"rank{rank}", os.O_CREAT | os.O_WRONLY), 2)
        sys.stderr = os.fdopen(2, "w", 1)
        setup_logging()
        torch.set_num_threads(1)
        module.TICK_S, module.GRACE_S, module.LOG_S = TICK_S, 2.0, 1.0
        store = join(folder, rank, world_size)
        limit = timedelta(hours=1)  # as in a run: the watchdog decides, not the collective
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
        store = dist.distributed_c10d._get_default_store()
        hosts = [f"host-{rank}" for rank in range(world_size)]
        with Watchdog(rank, hosts, store, TIMEOUT_S) as watchdog:
            scene(watchdog)
        code = 0
    except FlexorError as error:
        print(error, file=sys.stderr)
        code = error.exit_code
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class Play:
    """Ranks in processes of their own that do a scene."""

    def __init__(self, folder: Path, scene: Scene, world_size: int):
        self.folder = folder
        self.ranks = [
            SERVER.Process(target=become, args=(folder, rank, world_size, scene))
            for rank in range(world_size)
        ]
        for process in self.ranks:
            process.start()

    def end(self, *codes: int | None) -> list[str]:
        """They must end with these codes; None: must not end. What each has said."""
        for process, code in zip(self.ranks, codes):
            if code is not None:
                process.join(LIMIT_S)
        outputs = [(self.folder / f"rank{rank}").read_text() for rank in range(len(codes))]
        assert [process.exitcode for process in self.ranks] == list(codes), "\n\n".join(outputs)
        return outputs


@pytest.fixture(scope="module")
def plays(tmp_path_factory) -> Iterator[dict[Scene, Play]]:
    """All scenes at once: what they do is wait."""
    started = {
        scene: Play(tmp_path_factory.mktemp(scene.__name__), scene, size) for scene, size in CAST.items()
    }
    yield started
    for process in itertools.chain.from_iterable(play.ranks for play in started.values()):
        process.kill()


def step(watchdog: Watchdog, number: int) -> None:
    watchdog.beat(number, "reading data")
    watchdog.beat(number, "backward")
    dist.all_reduce(torch.ones(1))


def be_heard(watchdog: Watchdog) -> None:
    """Wait until the others can know where this rank is."""
    last, store = Heartbeat(watchdog.rank, watchdog.host), dist.distributed_c10d._get_default_store()
    while last.activity != watchdog._activity:
        time.sleep(0.01)
        last.update(store.get(f"{PREFIX}{watchdog.rank}"), 0)


def hang_in_data(watchdog: Watchdog) -> None:
    for number in range(3):
        step(watchdog, number)
    if watchdog.rank == 1:
        watchdog.beat(3, "reading data")
        time.sleep(FOREVER_S)
    step(watchdog, 3)


def test_a_rank_that_hangs_is_named_by_itself_and_by_those_who_wait(plays):
    outputs = plays[hang_in_data].end(HUNG, HUNG, HUNG)
    message = (
        r"rank 1 on host-1 has made no progress for \d+ s: step 3, reading data. Ranks 0 and 2 wait for it."
    )
    for rank in range(3):
        assert re.search(message, outputs[rank]), outputs[rank]
    sleeping = hang_in_data.__code__.co_firstlineno + 5
    assert re.search(rf"{Path(__file__).name}:{sleeping} in hang_in_data", outputs[1]), outputs[1]
    for rank in (0, 2):
        assert f"This is rank {rank} on host-{rank}, at step 3, backward" in outputs[rank]


def hang_in_backward(watchdog: Watchdog) -> None:
    step(watchdog, 0)
    watchdog.beat(1, "backward")
    time.sleep(FOREVER_S)


def test_ranks_that_hang_in_the_same_place_all_say_their_stacks(plays):
    outputs = plays[hang_in_backward].end(HUNG, HUNG)
    both = "rank 0 on host-0, rank 1 on host-1 have made no progress"
    assert both in outputs[0]
    # on a busy machine, rank 0 may have ended long before, and its store with it
    assert both in outputs[1] or "hosted by rank 0 on host-0 or its launcher, has not answered" in outputs[1]
    for rank in range(2):
        assert "in hang_in_backward" in outputs[rank]


def freeze(watchdog: Watchdog, which: int) -> None:
    step(watchdog, 0)
    if watchdog.rank == which:
        be_heard(watchdog)
        os.kill(os.getpid(), signal.SIGSTOP)
    step(watchdog, 1)


def freeze_1(watchdog: Watchdog) -> None:
    freeze(watchdog, 1)


def freeze_0(watchdog: Watchdog) -> None:
    freeze(watchdog, 0)


def test_a_frozen_rank_is_named_by_those_who_wait(plays):
    (output, _) = plays[freeze_1].end(HUNG, None)
    assert re.search(
        r"rank 1 on host-1 has sent no heartbeat for \d+ s: dead, frozen or cut off, last seen at step 0, backward",
        output,
    )
    assert "in all_reduce" in output


def test_a_store_that_is_frozen_does_not_freeze_the_watchdog(plays):
    (_, output) = plays[freeze_0].end(None, HUNG)
    assert (
        "The torch.distributed store of this run, hosted by rank 0 on host-0 or its launcher, has not answered for"
        in output
    )
    assert "This is rank 1 on host-1, at step 1, backward" in output


def hold_the_interpreter(watchdog: Watchdog) -> None:
    step(watchdog, 0)
    if watchdog.rank == 1:
        be_heard(watchdog)
        # PyDLL: unlike CDLL, without letting other threads run
        ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
    step(watchdog, 1)


def test_a_rank_that_no_thread_can_speak_for_says_its_stack_all_the_same(plays):
    outputs = plays[hold_the_interpreter].end(HUNG, None)
    assert "rank 1 on host-1 has sent no heartbeat" in outputs[0]
    assert "in hold_the_interpreter" in outputs[1]


def die(watchdog: Watchdog, which: int) -> None:
    step(watchdog, 0)
    if watchdog.rank == which:
        be_heard(watchdog)
        os.kill(os.getpid(), signal.SIGKILL)
    step(watchdog, 1)


def die_1(watchdog: Watchdog) -> None:
    die(watchdog, 1)


def die_0(watchdog: Watchdog) -> None:
    die(watchdog, 0)


def test_a_dead_rank_is_named_by_those_whose_collective_fails(plays):
    (output, _) = plays[die_1].end(HUNG, KILLED)
    assert "rank 1 on host-1 has sent no heartbeat" in output
    assert "Traceback" not in output


def test_a_dead_rank_0_that_kept_the_store(plays):
    (_, output) = plays[die_0].end(KILLED, HUNG)
    assert (
        "The torch.distributed store of this run, hosted by rank 0 on host-0 or its launcher, has not answered for"
        in output
    )


def fail(watchdog: Watchdog) -> None:
    step(watchdog, 0)
    if watchdog.rank == 1:
        watchdog.beat(1, "reading data")
        raise FlexorError("videos/top.mp4 is broken.")
    step(watchdog, 1)


def test_the_error_of_a_rank_is_told_to_the_others(plays):
    outputs = plays[fail].end(HUNG, 1)
    assert (
        "rank 1 on host-1 has ended at step 1, reading data: FlexorError: videos/top.mp4 is broken."
        in outputs[0]
    )
    assert outputs[1] == "videos/top.mp4 is broken.\n"


def fail_unnoticed(watchdog: Watchdog) -> None:
    """As with NCCL: that the other one is gone does not end a wait."""
    watchdog.timeout_s, module.GONE_S = FOREVER_S, 1.0
    step(watchdog, 0)
    if watchdog.rank == 1:
        raise FlexorError("no room on the disk.")
    watchdog.beat(1, "backward")
    time.sleep(FOREVER_S)


def test_who_waits_for_a_rank_that_failed_does_not_wait_for_long(plays):
    outputs = plays[fail_unnoticed].end(HUNG, 1)
    assert "rank 1 on host-1 has ended at step 0, backward: FlexorError: no room on the disk." in outputs[0]
    assert "in fail_unnoticed" in outputs[0]


def take_long(watchdog: Watchdog) -> None:
    """Rank 0 takes its time; the others wait in a collective, one of them patiently."""
    step(watchdog, 0)
    if watchdog.rank == 0:
        with watchdog.without_limit("evaluating"):
            time.sleep(1.2 * TIMEOUT_S)
            dist.barrier()
    elif watchdog.rank == 2:
        with watchdog.without_limit("waiting for the evaluation"):
            dist.barrier()
    else:
        dist.barrier()
    for number in range(1, 4):
        step(watchdog, number)
        time.sleep(0.2)
    dist.barrier()


def test_nobody_gets_impatient_with_a_rank_that_may_take_long(plays):
    outputs = plays[take_long].end(0, 0, 0)
    assert "rank 0: still evaluating after 0 min" in outputs[0]
    assert outputs[1] == ""
    assert "rank 2: still waiting for the evaluation after 0 min" in outputs[2]


def freeze_while_saving(watchdog: Watchdog) -> None:
    with watchdog.without_limit("saving"):
        if watchdog.rank == 1:
            be_heard(watchdog)
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()


def test_patience_ends_with_the_life_of_a_rank(plays):
    (output, _) = plays[freeze_while_saving].end(HUNG, None)
    assert "rank 1 on host-1 has sent no heartbeat" in output


def give_up_early(watchdog: Watchdog) -> None:
    """The collective has a time limit of its own, shorter than the watchdog's."""
    step(watchdog, 0)
    group = dist.new_group()  # making it may take as long as it likes
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.1), group)
    watchdog.beat(1, "reading data")
    be_heard(watchdog)
    dist.barrier()
    if watchdog.rank == 1:
        time.sleep(FOREVER_S)
    watchdog.beat(1, "backward")
    dist.barrier(group)


def test_who_is_behind_is_named_also_when_a_collective_gives_up(plays):
    (output, _) = plays[give_up_early].end(HUNG, HUNG)
    assert re.search(
        r"rank 1 on host-1 has made no progress for \d+ s: step 1, reading data. Rank 0 waits", output
    )


CAST = {
    hang_in_data: 3,
    hang_in_backward: 2,
    freeze_1: 2,
    freeze_0: 2,
    hold_the_interpreter: 2,
    die_1: 2,
    die_0: 2,
    fail: 2,
    fail_unnoticed: 2,
    take_long: 3,
    freeze_while_saving: 2,
    give_up_early: 2,
}

ALONE = """
import os, signal, sys, time
from flexor.train.ranks.watchdog import Watchdog

def read_video():
    if sys.argv[2] == "suspended":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        sys.stdin.readline()

with Watchdog(0, ["here"], None, float(sys.argv[1])) as watchdog:
    with watchdog.without_limit("loading"):
        time.sleep(0.8)
    watchdog.beat(7, "reading data")
    read_video()
assert "torch" not in sys.modules
"""


def alone(timeout_s: float, reading: str, log: Path) -> subprocess.Popen[str]:
    """A process that reads until it is told to end, or that is suspended while it reads."""
    return subprocess.Popen(
        [sys.executable, "-c", ALONE, str(timeout_s), reading],
        stdin=subprocess.PIPE,
        stderr=log.open("w"),
        text=True,
        env=environment.for_cpu(),
    )


def test_one_process_says_where_it_hangs_and_lives_on(tmp_path):
    log = tmp_path / "log"
    process = alone(0.5, "patiently", log)
    wait_for(lambda: "in read_video" in log.read_text())
    process.communicate("go on\n", timeout=LIMIT_S)
    output = log.read_text()
    assert process.returncode == 0, output
    assert "rank 0 on here has made no progress for" in output and "step 7, reading data" in output
    assert "in read_video" in output and "loading" not in output


def test_a_process_that_was_suspended_has_not_hung(tmp_path):
    log = tmp_path / "log"
    process = alone(5.0, "suspended", log)
    assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1]), log.read_text()
    time.sleep(6.0)
    process.send_signal(signal.SIGCONT)
    assert process.wait(LIMIT_S) == 0 and "no progress" not in log.read_text()


def test_many_ranks_make_a_short_message():
    watchdog = Watchdog(0, [f"host-{rank}" for rank in range(100)], dist.HashStore(), 600)
    watchdog.beat(5, "backward")
    for peer in watchdog._peers().values():
        late = peer.rank >= 50
        peer.update(
            Heartbeat(peer.rank, peer.host, Activity(4 if late else 5, 1, "reading data"), 610)
            .to_json(1)
            .encode(),
            0,
        )
    culprits, message = watchdog._behind()
    assert culprits == list(range(50, 100))
    assert "rank 57 on host-57 and 42 more have made no progress for 610 s: step 4, reading data." in message
    assert "50 ranks wait for them." in message
