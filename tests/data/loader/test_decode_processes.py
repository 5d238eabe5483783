"""Decode processes: the same frames as threads deliver, whatever happens to a process, and none is left."""

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from flexor.core.batch import SAMPLE_ID
from flexor.core.errors import DatasetError, FlexorError, SourceError
from flexor.data.dataset import open_dataset
from flexor.data.frames.decode_processes import DecodeProcesses
from flexor.data.frames.shared_memory import SharedMemory
from flexor.data.frames.slots import Pool
from flexor.data.loader.open import open_loader
from flexor.data.settings import CacheConfig, DatasetConfig, OrderConfig
from support.damage import overwrite_packets
from support.file_server import FileServer
from support.limits import LIMIT_S, wait_for
from support.samples import write_sample

TOP, WRIST = "observation.images.top", "observation.images.wrist"
WINDOW = {TOP: [-6, -3, 0], WRIST: [-1, 0]}
FRAME = 48 * 64 * 3 // 2


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_sample(tmp_path_factory.mktemp("processes") / "data")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXOR_CACHE", str(tmp_path / "cache"))


def load(root, deltas=None, *, decode_in="processes", tier="stream", bad="raise", **options):
    pool_gb, order = options.pop("pool_gb", None), options.pop("order", OrderConfig())
    settings = DatasetConfig(
        on_bad_frame=bad, cache=CacheConfig(tier=tier, pool_gb=pool_gb), order=order, decode_in=decode_in
    )
    options = {"batch_size": 6, "seed": 7, "num_workers": 2, "device": "cpu"} | options
    return open_loader(open_dataset(root=root), settings, deltas or {}, cameras=[TOP, WRIST], **options)


def check_same(steps, others) -> None:
    for (batch,), (other,) in zip(steps, others, strict=True):
        assert batch[SAMPLE_ID].tolist() == other[SAMPLE_ID].tolist()
        for camera in (TOP, WRIST):
            assert torch.equal(batch[camera], other[camera]), camera


def children() -> list[psutil.Process]:
    """The decode processes of this one."""
    return [
        child
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and "decode_worker" in " ".join(child.cmdline())
    ]


@pytest.mark.parametrize("tier", ["stream", "ram"])
@pytest.mark.parametrize("deltas", [{}, WINDOW], ids=["single", "window"])
def test_frames_are_those_of_threads_from_any_step_on(root, deltas, tier):
    loader = load(root, deltas, tier=tier)
    check_same(loader.steps(2, 14), load(root, deltas, decode_in="threads", tier=tier).steps(2, 14))
    assert loader.in_processes and loader.counters()["bytes_read"] > 0
    assert children() == []


def test_frames_of_a_server_are_those_of_threads(root):
    with FileServer(root) as server:
        loader = load(server.address)
        assert loader.dataset.store.remote
        check_same(loader.steps(0, 8), load(root, decode_in="threads", order=loader.order_config).steps(0, 8))


@pytest.mark.parametrize("frames", [0, 3, 9])
def test_memory_stays_within_the_budget(root, frames):
    order = OrderConfig("streaming", lanes=1, pool=38, unit=1)
    loader = load(root, order=order, pool_gb=frames * FRAME / 1e9)
    check_same(loader.steps(0, 8), load(root, decode_in="threads", order=order).steps(0, 8))


@pytest.fixture
def broken(root, tmp_path):
    """The second group of pictures of the first video is noise from its second packet on."""
    copy = shutil.copytree(root, tmp_path / "broken")
    overwrite_packets(sorted(copy.glob(f"videos/{TOP}/**/*.mp4"))[0], range(5, 8))
    return copy


@pytest.mark.parametrize("bad", ["skip", "nearest"])
def test_bad_frames_are_handled_as_by_threads(broken, bad):
    loaders = [load(broken, decode_in=where, bad=bad) for where in ("processes", "threads")]
    check_same(*(loader.steps(0, 19) for loader in loaders))
    counts = [Counter(loader.problem_counts()) for loader in loaders]
    assert counts[0]["bad_frames"] > 0 and counts[0] == counts[1]


def test_a_bad_frame_can_stop_the_run(broken):
    with pytest.raises(DatasetError, match=r"episode \d, camera .*top, .*frame \d+: .*on_bad_frame=skip"):
        list(load(broken, bad="raise").steps(0, 7))
    assert children() == []


def test_a_file_that_becomes_shorter_has_bad_frames(root, tmp_path):
    copy = shutil.copytree(root, tmp_path / "copy")
    loader = load(copy, bad="skip")
    for video in sorted(copy.glob(f"videos/{TOP}/**/*.mp4"))[:1]:
        os.truncate(video, video.stat().st_size * 3 // 4)
    list(loader.steps(0, 7))
    assert loader.problem_counts()["bad_frames"] > 0


def test_files_that_are_removed_are_an_error(root, tmp_path):
    copy = shutil.copytree(root, tmp_path / "copy")
    loader = load(copy, bad="skip")
    for video in copy.glob(f"videos/{TOP}/**/*.mp4"):
        video.unlink()
    with pytest.raises(SourceError, match="can't be opened"):
        list(loader.steps(0, 7))


def test_a_process_that_is_killed_is_named_and_nothing_hangs(root):
    steps = load(root).steps(0, 1000)
    next(steps)
    killed = children()[0].pid
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(FlexorError, match=rf"process {killed}\) was killed by SIGKILL.*num_workers"):
        list(steps)
    assert children() == []


def test_signals_to_all_processes_of_a_run_do_not_end_decoding(root):
    steps = load(root).steps(0, 50)
    next(steps)
    for child in children():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            child.send_signal(number)
    assert len(list(steps)) == 49


KILLED_PARENT = """
import sys, time
sys.path[:] = {path!r}
from test_decode_processes import children, load
steps = load({root!r}).steps(0, 10**6)
next(steps)
print(*(child.pid for child in children()), flush=True)
for _ in steps:
    pass
"""


def test_processes_end_with_their_parent(root):
    path = [str(Path(__file__).parent), *sys.path]
    code = KILLED_PARENT.format(path=path, root=str(root))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        numbers = [int(number) for number in parent.stdout.readline().split()]
        assert len(numbers) == 2
        parent.kill()
        parent.wait(LIMIT_S)
    wait_for(lambda: not any(map(psutil.pid_exists, numbers)), "they go on without their parent")


def test_processes_that_are_not_needed_are_not_started(root):
    loader = load(root, tier="ram")
    list(loader.steps(0, 7))
    steps = loader.steps(7, 14)
    next(steps)
    assert children() == []
    steps.close()


def test_slots_are_where_processes_find_them():
    memory = SharedMemory()
    pool = Pool(5000, memory=memory)
    slots = [(size, number) for size in (1000, 700) for number in pool.take({size: 9}, force=True)[size]]
    for value, (size, number) in enumerate(slots, 1):
        pool.slot(size, number)[:] = value
    for value, (size, number) in enumerate(slots, 1):
        (offset,) = pool.offsets(size, np.array([number]))
        assert os.pread(memory.descriptor, size, offset) == bytes([value]) * size
    memory.close()


def test_closing_what_never_started():
    processes = DecodeProcesses(3, SharedMemory())
    assert processes.process_ids == []
    processes.close()
    assert np.array_equal(children(), [])
