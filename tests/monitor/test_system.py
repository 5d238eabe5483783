"""Samples of the machine beside a run: a file of limited size, without gaps in time, that nothing stops."""

import json
import threading
from pathlib import Path

import pytest

from flexor.monitor import system
from flexor.monitor.system import ProcessOnHost, Sampler, sampler_for
from flexor.monitor.system_file import (
    SystemFile,
    for_log,
    forget_after,
    merge,
    over_hosts,
    read_lines,
    summary,
    system_file,
    system_files,
    thinned,
)
from support.limits import LIMIT_S, wait_for


def sample(number: int, span: float = 5.0, **more) -> dict:
    return {"time": number * span, "span": span, "step": number, "cpu": number % 2, **more}


def test_a_long_run_has_a_short_file(tmp_path):
    file = SystemFile(tmp_path / "system.jsonl", recent=10, older=20)
    longest = 0
    for number in range(1, 2001):
        file.append(sample(number, energy_j=2.0))
        longest = max(longest, len(read_lines(file.path)))
    lines = read_lines(file.path)
    assert longest <= 31, "10 new ones, 20 old ones, and the one that is too many"
    assert sum(line["span"] for line in lines) == 2000 * 5, "no time is left out"
    assert sum(line["energy_j"] for line in lines) == pytest.approx(4000)
    assert [line["step"] for line in lines[-10:]] == list(range(1991, 2001))
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    spans = [line["span"] for line in lines]
    assert max(spans) < 10_000 / 5, "the beginning is not lost in one line"
    assert sum(line["span"] * line["cpu"] for line in lines) / 10_000 == pytest.approx(0.5, abs=0.01)


def test_old_lines_of_the_shortest_span_are_merged_first():
    lines = thinned([sample(1, 40), sample(2, 40), sample(3, 5), sample(4, 5), sample(5, 5)], 3)
    assert [line["span"] for line in lines] == [40, 40, 15]


def test_one_line_for_two():
    first = {"span": 1, "step": 1, "host": "a", "cpu": 1.0, "cpu_cores": [0.0, 1.0], "load": 3.0}
    second = {"span": 3, "step": 2, "host": "a", "cpu": 0.0, "cpu_cores": [1.0, 1.0], "new": 5}
    first["gpus"] = [{"index": 0, "name": "x", "util": 1.0, "energy_j": 5, "throttled": ["power_cap"]}]
    second["gpus"] = [{"index": 0, "name": "x", "util": 0.0, "energy_j": 7, "throttled": ["temperature"]}]
    assert merge(first, second) == {
        "span": 4,
        "step": 2,
        "host": "a",
        "cpu": 0.25,
        "cpu_cores": [0.75, 1.0],
        "load": 3.0,
        "new": 5,
        "gpus": [
            {"index": 0, "name": "x", "util": 0.25, "energy_j": 12, "throttled": ["power_cap", "temperature"]}
        ],
    }


def test_summary_for_a_log_line():
    gpus = [{"index": 0, "util": 1.0, "energy_j": 10, "throttled": ["power_cap"]}, {"index": 1, "util": 0.5}]
    other = [{"index": 0, "util": 1.0, "energy_j": 10, "throttled": []}, {"index": 1, "util": 0.5}]
    figures = summary(merge(for_log(sample(1, gpus=gpus)), for_log(sample(2, gpus=other))))
    assert figures == {
        "cpu": 0.5,
        "gpu_util": 0.75,
        "gpu_energy_j": 20.0,
        "gpu_throttled": 0.5,
        "gpu_slowed": 0.0,
    }
    assert summary(None) == {}
    assert over_hosts([figures, {}, {"cpu": 1.0, "gpu_energy_j": 5.0}]) == {
        "cpu": 0.75,
        "gpu_util": 0.75,
        "gpu_energy_j": 25.0,
        "gpu_throttled": 0.5,
        "gpu_slowed": 0.0,
    }


def test_lines_of_repeated_steps_are_forgotten(tmp_path):
    paths = [system_file(tmp_path, rank) for rank in (0, 8)]
    assert [path.name for path in paths] == ["system.jsonl", "system-8.jsonl"]
    for path in paths:
        text = "".join(json.dumps(sample(number)) + "\n" for number in range(1, 8))
        path.write_bytes(text.encode() + b'{"step": 2, "cp')
    assert system_files(tmp_path) == paths
    forget_after(paths[0], 4)
    assert [line["step"] for line in read_lines(paths[0])] == [1, 2, 3, 4]
    SystemFile(paths[0]).append(sample(5))
    assert paths[0].read_text().count("\n") == 5


@pytest.mark.parametrize("rubbish", [b"5\n", b"\xff\xfe\n", b"null\n", b'{"step": "x"}\n', b"\0" * 50])
def test_a_damaged_file_is_no_error(rubbish, tmp_path):
    path = tmp_path / "system.jsonl"
    path.write_bytes(json.dumps(sample(1)).encode() + b"\n" + rubbish)
    forget_after(path, 5)
    assert [line["step"] for line in read_lines(path)] == [1]


def everyone(*hosts: str) -> list[ProcessOnHost]:
    return [ProcessOnHost(host, rank, 100 + rank, f"gpu{rank}") for rank, host in enumerate(hosts)]


def test_the_first_process_of_each_host_samples_it(tmp_path):
    run = everyone("a", "a", "b", "b")
    samplers = [sampler_for(me, run, tmp_path, 5, 0) for me in run]
    assert [s.file.path.name if s.file else None for s in samplers] == [
        *("system.jsonl", None),
        *("system-2.jsonl", None),
    ]
    assert samplers[2].uuids == {"gpu2": [102], "gpu3": [103]} and samplers[2].pids == [102, 103]
    assert sampler_for(run[0], run, tmp_path, 0, 0).file is None


def test_a_thread_samples_this_machine(tmp_path):
    path = tmp_path / "system.jsonl"
    with Sampler(path, "here", {}, [1], 0.1, step=7) as sampler:
        wait_for(lambda: len(read_lines(path)) >= 2)
        sampler.step = 8
        wait_for(lambda: read_lines(path)[-1]["step"] == 8)
        taken = sampler.take()
    lines = read_lines(path)
    assert taken["load"] >= 0 and "span" not in taken and "step" not in taken
    assert all(line["host"] == "here" for line in lines)
    covered = sum(line["span"] for line in lines[1:])
    assert covered == pytest.approx(lines[-1]["time"] - lines[0]["time"], abs=0.5)


def test_problems_are_told_once_and_stop_nothing(tmp_path, monkeypatch, caplog):
    with Sampler(Path("/proc/no/such/system.jsonl"), "here", {"gone": [1]}, [1], 0.1) as sampler:
        wait_for(lambda: sampler.take() != {})
        wait_for(lambda: sampler.take() != {})
    assert caplog.text.count("can't write to") == 1
    assert caplog.text.count("GPUs are not sampled") == 1


def test_a_driver_that_hangs_does_not_hold_the_end_of_a_run(tmp_path, monkeypatch):
    answer = threading.Event()
    monkeypatch.setattr(system, "open_gpus", lambda _: answer.wait(LIMIT_S))
    monkeypatch.setattr(system, "LEAVE_S", 0.1)
    with Sampler(tmp_path / "system.jsonl", "here", {"x": [1]}, [1], 0.1) as sampler:
        assert sampler.take() == {}
    assert sampler._thread.is_alive()  # it still waits
    answer.set()


def test_a_failure_of_any_kind_ends_only_the_sampling(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(system, "count", lambda _: 1 / 0)
    with Sampler(tmp_path / "system.jsonl", "here", {}, [1], 0.1):
        wait_for(lambda: "no longer sampled" in caplog.text)
