"""Counters of real machines, as they are and damaged, and what they say about the time between two readings."""

import os
import sys
import time

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexor.core import cgroups
from flexor.monitor import host
from flexor.monitor.host import HostCounters
from support.limits import wait_for

STAT = """\
cpu  1845833 531854 212539 774870 14497 0 3102 40700 0 0
cpu0 873404 243345 100652 464848 7637 0 1492 20327 0 0
cpu1 972428 288509 111886 310022 6860 0 1610 20373 0 0
intr 14627924 0 0 0 1 16
ctxt 30979489
"""
DISKS = """\
   7       0 loop0 5 0 40 0 0 0 0 0 0 0 0 0 0 0 0 0 0
 254       0 vda 464611 41964 28685074 2560397 140449 491754 198279224 1634177 1 296632 4241082 299832 36 5 4 7 2
 253       0 zram0 9 0 72 0 9 0 72 0 0 0 0
   8       0 sda 10 0 1000 0 10 0 2000 0 0 0 0
   8       1 sda1 10 0 1000 0 10 0 2000 0 0 0 0
 252       0 dm-0 10 0 1000 0 10 0 2000 0 0 0 0
"""
NETWORK = """\
Inter-| Receive | Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
 lo: 5616711671 3751820 0 0 0 0 0 0 5616711671 3751820 0 0 0 0 0 0
 ifb0: 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
docker0: 999 1 0 0 0 0 0 0 999 1 0 0 0 0 0 0
 eth0:5381077238 123459 0 0 0 0 0 0 5936402 76605 0 0 0 0 0 0
 ib0: 10 1 0 0 0 0 0 0 20 1 0 0 0 0 0 0
"""
PRESSURE = """\
some avg10=37.62 avg60=12.73 avg300=3.12 total=153465198
full avg10=23.19 avg60=9.45 avg300=2.32 total=87027594
"""
MEMORY = """\
MemTotal:       24682416 kB
MemFree:        14454980 kB
MemAvailable:   22821936 kB
SwapTotal:        999420 kB
SwapFree:         999420 kB
HugePages_Total:       0
"""
FILES = {
    "stat": STAT,
    "meminfo": MEMORY,
    "diskstats": DISKS,
    "net/dev": NETWORK,
    "vmstat": "pswpin 0\npswpout 0\n",
}
READERS = (
    host.read_pressure,
    host.read_core_wait,
    cgroups.read_throttled,
    cgroups.read_cores,
    cgroups.read_files,
)
TEXTS = (PRESSURE, *FILES.values())


@pytest.fixture
def proc(tmp_path, monkeypatch):
    """A folder that psutil reads instead of /proc."""
    if not sys.platform.startswith("linux"):
        pytest.skip("no other system has a /proc")
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    (tmp_path / "net").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(host, "_names", lambda folder: {"vda", "sda", "loop0", "zram0", "dm-0"})
    return tmp_path


def test_counters_of_a_real_machine(proc):
    seconds = host.read_cores() * os.sysconf("SC_CLK_TCK")
    assert seconds.shape == (2, 4)
    assert seconds[0].tolist() == pytest.approx([873404 + 243345 + 100652 + 1492, 7637, 20327, 1711705])
    total, available, _ = host.read_memory()
    assert (total, available) == (24682416 * 1024, 22821936 * 1024)
    assert host.read_disks() == ((28685074 + 1000) * 512, (198279224 + 2000) * 512)  # whole disks only
    assert host.read_network() == (5381077238 + 10, 5936402 + 20)


def test_a_core_that_is_switched_off_between_two_readings(proc):
    before = HostCounters(cores=host.read_cores())
    (proc / "stat").write_text("\n".join(STAT.split("\n")[:2]) + "\n")
    assert "cpu" not in HostCounters(cores=host.read_cores()).since(before)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.sampled_from(["stat", "meminfo", "diskstats", "net/dev"]), st.data())
def test_a_damaged_proc_leaves_figures_out(proc, name, data):
    text = FILES[name]
    cut = data.draw(st.integers(0, len(text)))
    (proc / name).write_text(text[:cut] + data.draw(st.text(max_size=20)))
    host.count([os.getpid()]).since(host.count([os.getpid()]))
    (proc / name).write_text(text)


def test_texts_of_a_real_machine():
    assert host.read_pressure(PRESSURE) == {"some": 153465198, "full": 87027594}
    assert cgroups.read_throttled("nr_periods 5\nnr_throttled 2\nthrottled_usec 1500000\n") == 1.5
    assert cgroups.read_throttled("nr_periods 5\nnr_throttled 2\nthrottled_time 1500000000\n") == 1.5
    assert cgroups.read_throttled("usage_usec 5\n") is None


@given(st.sampled_from(READERS), st.sampled_from(TEXTS), st.data())
def test_damaged_texts_are_no_error(read, text, data):
    cut = data.draw(st.integers(0, len(text)))
    rubbish = data.draw(st.text(max_size=20))
    read(text[:cut] + rubbish)
    read(text[:cut] + rubbish + text[cut + len(rubbish) :])


def test_figures_of_the_time_between():
    before = HostCounters(
        100.0,
        np.zeros((2, 4)),
        None,
        (0, 0),
        (1000, 0),
        {"io": {"some": 0, "full": 0}},
        0.0,
        {7: (1.0, 5), 8: (1.0, 5)},
        {(7, 7): 1.0, (7, 8): 9.0},
    )
    after = HostCounters(
        110.0,
        np.array([[9.9, 0.0, 0.0, 10.0], [0.1, 2.0, 1.0, 10.0]]),
        (8 * 10**9, 2 * 10**9, 10**8),
        (50_000_000, 0),
        (0, 20_000_000),
        {"io": {"some": 2_500_000, "full": 11_000_000}, "cpu": {"some": 5}},
        5.0,
        {7: (21.0, 10**9), 9: (50.0, 10**9)},
        {(7, 7): 4.0, (7, 8): 16.0, (9, 9): 99.0},
        frozenset({0, 1}),
        1.5,
        (5 * 10**9, 4 * 10**9),
    )
    assert after.since(before) == {
        "cpu": 0.5,
        "cpu_io_wait": 0.1,
        "cpu_stolen": 0.05,
        "cpu_cores": [0.99, 0.01],
        "ram_total_gb": 8.0,
        "ram_used_gb": 6.0,
        "swap_used_gb": 0.1,
        "disk_read_mb_s": 5.0,
        "disk_write_mb_s": 0.0,
        "net_in_mb_s": 0.0,
        "net_out_mb_s": 2.0,  # a network that was taken away counts as none
        "pressure_io": 0.25,
        "pressure_io_full": 1.0,
        "cpu_throttled": 0.5,
        "cpu_own": 2.0,
        "ram_own_gb": 2.0,
        "cpu_usable": 1.5,
        "cpu_allowed": 2.0,
        "cpu_wait": 1.0,  # of the threads that are in both
        "cpu_others": 0.0,  # both cores together were less busy than the run's own two
        "ram_limit_gb": 5.0,
        "ram_limit_used_gb": 4.0,
    }


def test_limits_of_control_groups(tmp_path):
    inner = tmp_path / "user.slice" / "job"
    for folder, limit in ((tmp_path, "max 100000"), (inner.parent, "150000 100000"), (inner, "max 100000")):
        folder.mkdir(exist_ok=True)
        (folder / "cpu.max").write_text(limit)
    folders = cgroups.group_folders("0::/user.slice/job\n", "cpu", tmp_path)
    assert folders == [inner, inner.parent, tmp_path]
    assert [cgroups.read_cores((folder / "cpu.max").read_text()) for folder in folders] == [None, 1.5, None]
    old = "4:cpu,cpuacct:/docker/1\n0::/\n"
    assert cgroups.group_folders(old, "cpu", tmp_path)[0] == tmp_path / "cpu" / "docker" / "1"
    assert cgroups.group_folders("0::/../..\n", "cpu", tmp_path) == [tmp_path]
    assert cgroups.read_cores("-1 100000") is None and cgroups.read_cores("") is None
    assert cgroups.read_files("anon 5\nactive_file 3\ninactive_file 4\ntotal_active_file 3\n") == 7


def test_a_thread_that_runs_and_one_that_sleeps():
    thread = host.ThreadTime()

    def shares_differ() -> bool:
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
        busy = thread.take()
        time.sleep(0.2)
        idle = thread.take()
        return busy["ran"] > idle["ran"] and idle["ran"] < 0.5

    wait_for(shares_differ)  # a thread that gets no core runs no more than one that sleeps


def test_this_machine():
    before = host.count([os.getpid(), 2**22 + 1])  # the second process does not exist
    sum(i * i for i in range(300_000))
    figures = host.count([os.getpid()]).since(before)
    assert figures["cpu_own"] > 0 and figures["ram_own_gb"] > 0.01
    if sys.platform.startswith("linux"):
        assert 0 <= figures["cpu"] <= 1 and 0 < figures["ram_used_gb"] < figures["ram_total_gb"]
        assert len(figures["cpu_cores"]) >= len(os.sched_getaffinity(0))


def test_a_system_that_counts_nothing(tmp_path, monkeypatch):
    for module in (host, cgroups):
        monkeypatch.setattr(module, "_text", lambda path: "")
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    monkeypatch.setattr(psutil, "disk_io_counters", lambda **_: {})  # it looks for them in /sys too
    monkeypatch.setattr(host, "_names", lambda folder: None)
    assert host.count([1]).since(host.count([1])) == {}
