"""Figures of runs that were held back in every way there is, and of healthy ones: the rules name it, or stay quiet."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexor.runs.diagnosis.figures import Reports, figures_of
from flexor.runs.diagnosis.live import LiveDiagnosis
from flexor.runs.diagnosis.rules import diagnose_lines
from flexor.runs.diagnosis.verdict import Diagnosis
from flexor.runs.state import is_alarm

H200 = {
    "machine": {"device": "NVIDIA H200", "processes": 1, "precision": "bf16"},
    "dataset": {"decoded_gb": 20.0},
}
CPU = {
    "machine": {"device": "CPU (x86_64)", "processes": 1, "precision": "no"},
    "dataset": {"decoded_gb": 20.0},
}
CONFIG = {
    "global_batch_size": 8,
    "batch_size": 8,
    "num_workers": 4,
    "step": "auto",
    "compile": False,
    "dataset": {"decoder": "auto", "cache": {"tier": "auto", "format": "raw", "size": None, "pool_gb": None}},
}
# 20 steps of 0.1 s: a line for 2 s
LOADER = {
    "threads": 4,
    "read_s": 0.1,
    "decode_s": 0.3,
    "decode_cpu_s": 0.29,
    "keep_s": 0.0,
    "assemble_s": 0.4,
    "assemble_cpu_s": 0.39,
    "wait_slots_s": 0.0,
    "bytes": 4_000_000,
    "frames_decoded": 160,
    "frames_cached": 0,
    "source": "disk",
    "cache": "none",
}
HOST = {
    "cpu_own": 1.5,
    "cpu_wait": 0.1,
    "cpu_allowed": 16.0,
    "cpu_usable": 16.0,
    "cpu_others": 0.3,
    "cpu_throttled": 0.0,
    "pressure_cpu": 0.02,
    "pressure_memory": 0.0,
    "pressure_io": 0.0,
    "ram_total_gb": 128.0,
    "ram_used_gb": 30.0,
    "ram_own_gb": 12.0,
}
GPU = {
    "gpu_util": 0.98,
    "gpu_sm_mhz": 1755.0,
    "gpu_sm_max_mhz": 1980.0,
    "gpu_throttled": 0.9,  # the power limit, as usual with much to do
    "gpu_slowed": 0.0,
    "gpu_power_w": 690.0,
    "gpu_power_limit_w": 700.0,
    "gpu_power_default_w": 700.0,
    "gpu_temperature_c": 60.0,
    "gpu_vram_total_gb": 150.0,
    "gpu_vram_used_gb": 60.0,
    "gpu_vram_others_gb": 0.0,
}
HEALTHY: dict[str, Any] = {
    "samples_per_s": 80.0,
    "data_wait": 0.01,
    "gpu_busy": 0.97,
    "step_s": 0.1,
    "forward_s": 0.03,
    "backward_s": 0.055,
    "optimizer_s": 0.01,
    "launch_s": 0.02,
    "epoch": 3.0,
    "loader": LOADER,
    "system": {**HOST, **GPU},
}
ON_CPU = {
    **{name: value for name, value in HEALTHY.items() if name not in ("gpu_busy", "launch_s")},
    "system": {**HOST, "cpu_own": 1.0, "cpu_allowed": 2.0, "cpu_usable": 2.0},
}


def lines_of(line: dict[str, Any], count: int = 8, first: int = 20) -> list[dict[str, Any]]:
    return [{"step": step, "time": 1e9 + step / 10, **line} for step in range(first, first + 20 * count, 20)]


def changed(line: dict[str, Any], *, loader: Any = None, system: Any = None, **more: Any) -> dict[str, Any]:
    new = {**copy.deepcopy(line), **more}
    new["loader"] |= loader or {}
    new["system"] |= system or {}
    return new


def verdict_of(line: dict[str, Any], record: dict[str, Any] = H200, **settings: Any) -> Diagnosis:
    return diagnose_lines(lines_of(line), {**CONFIG, **settings}, record)[0]


def assert_names(diagnosis: Diagnosis, verdict: str, *flags: str) -> None:
    assert diagnosis.verdict is not None and diagnosis.verdict.name == verdict, diagnosis.to_json()
    suggested = [fix.flag or "" for fix in diagnosis.verdict.fixes]
    assert all(any(flag in item for item in suggested) for flag in flags), suggested
    assert diagnosis.verdict.evidence and diagnosis.verdict.figures
    assert diagnosis.verdict.cost == 0 or not diagnosis.healthy


# --- healthy


def test_a_healthy_run_on_a_gpu():
    diagnosis = verdict_of(HEALTHY)
    assert_names(diagnosis, "GPU-bound")
    assert diagnosis.healthy and len(diagnosis.findings) == 1
    precise = {**H200, "machine": {**H200["machine"], "precision": "no"}}
    assert_names(verdict_of(HEALTHY, precise), "GPU-bound", "--precision=bf16")


def test_a_healthy_run_on_a_cpu():
    diagnosis = verdict_of(ON_CPU, CPU)
    assert_names(diagnosis, "compute-bound (CPU)")
    assert diagnosis.healthy and len(diagnosis.findings) == 1


def learning_online(acting: float, learning: float) -> Diagnosis:
    line = {
        "samples_per_s": 2560.0,
        "step_s": 0.1,
        "transitions_per_s": 10.0,
        "updates_per_s": 10.0,
        "environment_share": acting,
        "learning_share": learning,
    }
    return diagnose_lines(lines_of(line), {"rl": {"updates": 1}}, H200)[0]


def test_a_run_that_waits_for_its_environment_is_healthy():
    """As a robot takes its time; more updates would cost little."""
    diagnosis = learning_online(0.9, 0.1)
    assert_names(diagnosis, "environment-bound", "--rl.updates=9")
    assert diagnosis.healthy and "90 %" in diagnosis.verdict.evidence
    assert not is_alarm("environment-bound: the environment takes 90 % of the time")


def test_a_run_whose_updates_take_the_time_is_healthy():
    diagnosis = learning_online(0.1, 0.9)
    assert_names(diagnosis, "update-bound")
    assert diagnosis.healthy


def test_neighbours_that_take_nothing_from_the_run_are_no_alarm():
    busy = {"cpu_others": 14.0, "cpu_wait": 0.6, "pressure_cpu": 0.9}
    assert verdict_of(changed(HEALTHY, system=busy)).healthy  # the GPU has enough to do
    used_cores = {
        "cpu_own": 1.95,
        "cpu_wait": 3.0,
        "cpu_others": 0.02,
    }  # the run's own threads wait for each other
    assert verdict_of(changed(ON_CPU, system=used_cores), CPU).healthy


# --- data


DECODING = {"decode_s": 7.4, "decode_cpu_s": 7.2, "assemble_s": 0.3}


def test_decoding():
    line = changed(
        HEALTHY, data_wait=0.6, gpu_busy=0.38, loader=DECODING, system={"cpu_own": 5, "gpu_util": 0.35}
    )
    diagnosis = verdict_of(line)
    assert_names(diagnosis, "data-bound (decode)", "--num_workers=")
    (threads,) = [change for change in diagnosis.verdict.fixes if "num_workers" in (change.flag or "")]
    assert threads.flag == "--num_workers=14" and threads.speedup == pytest.approx(2.5)
    stream = {"dataset": {"cache": {"tier": "stream"}}}
    assert_names(verdict_of(line, **stream), "data-bound (decode)", "--dataset.cache.tier=ram")
    large = {**H200, "dataset": {"decoded_gb": 500.0}}  # more than the memory that is free
    assert_names(verdict_of(line, large, **stream), "data-bound (decode)", "--dataset.cache.tier=disk")


def test_more_threads_are_no_help_without_cores():
    line = changed(
        HEALTHY,
        data_wait=0.6,
        gpu_busy=0.38,
        loader=DECODING,
        system={"cpu_own": 3.9, "cpu_allowed": 4, "cpu_usable": 4},
    )
    diagnosis = verdict_of(line)
    assert_names(diagnosis, "data-bound (decode)")
    assert not any("num_workers" in (fix.flag or "") for fix in diagnosis.verdict.fixes)


def test_a_slow_disk():
    slow = {"read_s": 7.0, "decode_s": 0.4, "decode_cpu_s": 0.4, "bytes": 2_000_000}
    line = changed(HEALTHY, data_wait=0.7, gpu_busy=0.3, loader=slow, system={"gpu_util": 0.25})
    assert_names(verdict_of(line), "data-bound (disk)", "--num_workers=8")
    assert "1 MB/s" in verdict_of(line).verdict.evidence
    # a cache on disk is a mapped file: reading it is time of assembling that is not on a core
    mapped = {
        "assemble_s": 7.0,
        "assemble_cpu_s": 0.4,
        "cache": "disk",
        "decode_s": 0.0,
        "frames_cached": 160,
    }
    line = changed(HEALTHY, data_wait=0.7, gpu_busy=0.3, loader=mapped)
    assert_names(verdict_of(line), "data-bound (disk)", "--dataset.cache.tier=ram")


@pytest.mark.parametrize(
    ("source", "flag"), [("hub", "--dataset.streaming=false"), ("bucket", "--num_workers=8")]
)
def test_a_slow_network(source: str, flag: str):
    slow = {"read_s": 7.0, "bytes": 2_000_000, "source": source}
    assert_names(verdict_of(changed(HEALTHY, data_wait=0.7, loader=slow)), "data-bound (network)", flag)


def test_copying_in_memory():
    slow = {"assemble_s": 7.5, "assemble_cpu_s": 7.4, "decode_s": 0.0, "cache": "ram"}
    assert_names(verdict_of(changed(HEALTHY, data_wait=0.5, loader=slow)), "data-bound (memory copy)")
    to_gpu = changed(HEALTHY, copy_s=0.03, gpu_busy=0.7)
    assert_names(verdict_of(to_gpu), "data-bound (memory copy)", "--dataset.cache.tier=gpu")


def test_threads_that_wait_for_python() -> None:
    waiting = {**DECODING, "decode_cpu_s": 2.0, "decode_in": "threads"}
    line = changed(HEALTHY, data_wait=0.6, gpu_busy=0.4, loader=waiting)
    assert_names(verdict_of(line), "data-bound (interpreter)", "--dataset.decode_in=processes")
    processes = {**LOADER, "decode_in": "processes", "plan_cpu_s": 1.9, "decode_s": 3.0}
    line = changed(HEALTHY, data_wait=0.6, gpu_busy=0.4, loader=processes)
    assert_names(verdict_of(line), "data-bound (interpreter)")
    idle = changed(line, loader={"plan_cpu_s": 0.2})
    assert_names(verdict_of(idle), "data-bound (decode)")


def test_host_steps_of_the_policy():
    slow = {"host_steps_s": 7.5, "decode_s": 0.1, "cache": "ram"}
    assert_names(verdict_of(changed(HEALTHY, data_wait=0.5, loader=slow)), "data-bound (processing)")


def test_no_room_for_decoded_frames():
    line = changed(HEALTHY, data_wait=0.5, loader={"wait_slots_s": 1.5})
    assert_names(verdict_of(line), "data-bound (room for frames)", "--dataset.cache.pool_gb=4")


def test_the_first_epoch_fills_the_cache():
    line = changed(
        HEALTHY, data_wait=0.5, epoch=0.3, loader={**DECODING, "cache": "ram"}, system={"cpu_own": 15.5}
    )
    diagnosis = verdict_of(line)
    assert_names(diagnosis, "data-bound (decode)")
    assert "first epoch" in diagnosis.verdict.fixes[0].text


def test_an_old_run_that_says_little():
    line = {"samples_per_s": 80.0, "data_wait": 0.4, "gpu_busy": 0.6}
    assert_names(verdict_of(line), "data-bound")
    assert_names(verdict_of({"samples_per_s": 80.0, "data_wait": 0.0, "gpu_busy": 0.99}), "GPU-bound")


# --- cores


def test_starved_by_neighbours():
    hogs = {"cpu_own": 0.3, "cpu_wait": 1.4, "cpu_others": 1.7}
    diagnosis = verdict_of(changed(ON_CPU, system=hogs), CPU)
    assert_names(diagnosis, "starved by neighbours")
    assert diagnosis.verdict.cost == pytest.approx(1 - 0.3 / 1.7)
    # on a GPU it matters as far as the GPU waits for cores: for decoding, not for reading
    hogs = {"cpu_own": 2.0, "cpu_wait": 3.5, "cpu_others": 13.9, "gpu_util": 0.4}
    decoding = changed(
        HEALTHY, data_wait=0.6, gpu_busy=0.4, loader={**DECODING, "decode_cpu_s": 2.0}, system=hogs
    )
    assert_names(verdict_of(decoding), "starved by neighbours")
    assert [item.name for item in verdict_of(decoding).findings[1:]] == ["data-bound (decode)"]
    reading = changed(
        HEALTHY, data_wait=0.6, gpu_busy=0.4, loader={"read_s": 7.5, "decode_s": 0.1}, system=hogs
    )
    assert_names(verdict_of(reading), "data-bound (disk)")


def test_starved_by_a_limit():
    limit = {"cpu_own": 1.0, "cpu_usable": 1.0, "cpu_allowed": 16.0, "cpu_wait": 2.5, "cpu_throttled": 0.9}
    assert_names(verdict_of(changed(ON_CPU, system=limit), CPU), "starved by its CPU limit")
    stopped = {"cpu_own": 0.2, "cpu_wait": 0.01}  # by cpulimit: neither running nor waiting
    assert_names(verdict_of(changed(ON_CPU, system=stopped), CPU), "starved by its CPU limit")
    slow = changed(ON_CPU, data_wait=0.8, loader={"read_s": 7.0}, system=stopped)  # it waits for its disk
    assert_names(verdict_of(slow, CPU), "data-bound (disk)")


# --- GPU


def test_launching():
    line = changed(HEALTHY, launch_s=0.098, gpu_busy=0.99, system={"gpu_util": 0.45})
    assert_names(verdict_of(line, step="eager"), "host-launch-bound", "--step=auto", "--batch_size=16")
    diagnosis = verdict_of(line)
    assert_names(diagnosis, "host-launch-bound", "--batch_size=16")
    assert not any("--step" in (fix.flag or "") for fix in diagnosis.verdict.fixes)
    # a full queue makes launching as slow as the GPU is: that is no reason
    assert verdict_of(changed(HEALTHY, launch_s=0.099)).healthy
    # without the time of launching: the GPU idles within steps
    line = changed(HEALTHY, gpu_busy=0.99, system={"gpu_util": 0.45})
    del line["launch_s"]
    assert_names(verdict_of(line), "host-launch-bound")
    assert_names(verdict_of(changed(HEALTHY, gpu_busy=0.6, launch_s=0.01)), "host-launch-bound")


@pytest.mark.parametrize(
    ("system", "evidence"),
    [
        ({"gpu_slowed": 0.8, "gpu_sm_mhz": 1200.0, "gpu_temperature_c": 92.0}, "heat"),
        ({"gpu_power_limit_w": 350.0, "gpu_sm_mhz": 1300.0}, "350 W instead of 700 W"),
        ({"gpu_throttled": 0.0, "gpu_sm_mhz": 600.0}, "its clock is limited"),
    ],
)
def test_throttled(system: dict[str, float], evidence: str):
    diagnosis = verdict_of(changed(HEALTHY, system=system))
    assert_names(diagnosis, "throttled")
    assert evidence in diagnosis.verdict.evidence
    # a GPU that idles has low clocks too
    idle = {**system, "gpu_util": 0.1, "gpu_slowed": 0.0}
    waits = verdict_of(changed(HEALTHY, data_wait=0.85, gpu_busy=0.1, loader=DECODING, system=idle))
    assert_names(waits, "data-bound (decode)")


def test_another_process_on_the_gpu():
    other_gb = {"gpu_util_others": 0.45, "gpu_vram_others_gb": 30.0}
    diagnosis = verdict_of(changed(HEALTHY, system=other_gb))
    assert_names(diagnosis, "starved by neighbours")
    assert "30 GB" in diagnosis.verdict.evidence


def test_gpu_memory_that_is_full():
    lines = lines_of(HEALTHY)
    for number, line in enumerate(lines):
        line["memory"] = {"peak_gb": 147.0, "retries": 3 + 2 * number}
    diagnosis = diagnose_lines(lines, CONFIG, H200)[0]
    assert_names(diagnosis, "memory-pressure", "--batch_size=4", "--activation_checkpointing=true")
    for line in lines:
        line["memory"]["retries"] = 3  # once, long ago
    assert diagnose_lines(lines, CONFIG, H200)[0].healthy


def test_host_memory_that_is_full():
    stalls = {"pressure_memory": 0.5, "ram_used_gb": 127.0, "swap_used_gb": 3.0}
    diagnosis = verdict_of(
        changed(HEALTHY, data_wait=0.6, loader={"read_s": 6.0, "cache": "ram"}, system=stalls)
    )
    assert_names(diagnosis, "memory-pressure", "--dataset.cache.tier=disk")
    limit = {"ram_limit_gb": 8.0, "ram_limit_used_gb": 7.9}
    assert_names(verdict_of(changed(HEALTHY, system=limit)), "memory-pressure")
    assert verdict_of(changed(HEALTHY, system={"ram_used_gb": 110.0})).healthy


# --- ranks

TWO = {"machine": {"device": "NVIDIA H200", "processes": 2, "precision": "bf16"}}


def test_a_slow_rank():
    late = {"rank": 1, "host": "b", "own_s": 0.09, "others_s": 0.03}
    diagnosis = verdict_of(changed(HEALTHY, slowest=late, communication_s=0.06), TWO)
    assert_names(diagnosis, "straggler rank 1")
    assert (
        "on b" in diagnosis.verdict.evidence and len(diagnosis.findings) == 1
    )  # the exchange itself is quick
    waits = changed(
        HEALTHY, data_wait=0.6, slowest=late, communication_s=0.06, loader=DECODING, system={"cpu_own": 15}
    )
    assert_names(verdict_of(waits, TWO), "straggler rank 1")
    lines = lines_of(HEALTHY)
    for number, line in enumerate(lines):
        line["slowest"] = {**late, "rank": number % 2}  # now this one, now that one: noise
    assert diagnose_lines(lines, CONFIG, TWO)[0].healthy


def test_communication():
    even = {"rank": 1, "host": "b", "own_s": 0.055, "others_s": 0.054}
    line = changed(HEALTHY, slowest=even, communication_s=0.04)
    assert_names(verdict_of(line, TWO), "communication-bound", "--batch_size=16")
    sharded = verdict_of(line, TWO, parallel={"strategy": "fsdp"})
    assert_names(sharded, "communication-bound", "--parallel.strategy=ddp")


def test_saving_all_the_time():
    saved = changed(HEALTHY, checkpoint_s=0.04)  # 40 % of a step, on average
    diagnosis = verdict_of(saved, save_freq=10)
    assert_names(diagnosis, "saving-bound", "--save_freq=500")
    assert "0.4 s every 10 steps" in diagnosis.verdict.evidence and diagnosis.steps == 140
    # in every third line: 12 of 40 seconds
    lines = [line | {"checkpoint_s": 0.09 * (i % 3 == 0)} for i, line in enumerate(lines_of(HEALTHY, 21))]
    diagnosis = diagnose_lines(lines, {**CONFIG, "save_freq": 60}, H200)[0]
    assert_names(diagnosis, "saving-bound", "--save_freq=2000")
    assert len(diagnosis.findings) == 1


def test_saving_now_and_then_is_no_alarm():
    lines = [line | {"checkpoint_s": 0.05 * (i % 8 == 0)} for i, line in enumerate(lines_of(HEALTHY, 40))]
    assert diagnose_lines(lines, {**CONFIG, "save_freq": 160}, H200)[0].healthy


def test_evaluating_all_the_time():
    lines = []
    for line in lines_of(changed(HEALTHY, evaluation_s=0.05), 10):
        lines += [line, {"step": line["step"], "held_out_loss": 1.0}]
    diagnosis = diagnose_lines(lines, {**CONFIG, "eval_steps": 20, "env_eval_freq": 100}, H200)[0]
    assert_names(diagnosis, "evaluation-bound", "--eval_steps=1000 --env_eval_freq=5000")
    live = LiveDiagnosis({**CONFIG, "eval_steps": 20}, H200)
    changes = [item for line in lines if (item := live.add(line))]
    assert [item.verdict.name for item in changes] == ["evaluation-bound"]


# --- which lines count, and no flapping


def test_too_few_reports():
    diagnosis, _, reports = diagnose_lines(lines_of(HEALTHY, 3), CONFIG, H200)
    assert diagnosis.verdict is None and diagnosis.to_json() == {"verdict": None} and len(reports.recent) == 2
    assert diagnose_lines([], {}, {})[0].verdict is None


def test_first_lines_evaluations_and_checkpoints_do_not_count():
    reports = Reports(8)
    slow = changed(HEALTHY, data_wait=0.9)
    lines = lines_of(HEALTHY, 10)
    lines[0] = {**lines[0], **slow}
    lines[3] = {**lines[3], **slow, "checkpoint_s": 0.05}
    lines[6] = {**lines[6], **slow}
    evaluation = {"step": lines[5]["step"], "held_out_loss": 1.0}
    resumed = [{**line, "time": line["time"] + 1000} for line in lines[8:]]
    resumed[0] |= {"data_wait": 0.9}
    for line in (*lines[:6], evaluation, *lines[6:8], *resumed):
        reports.add(line)
    diagnosis = figures_of(reports)
    assert diagnosis.of("data_wait") == pytest.approx(0.01) and diagnosis.steps == 6 * 20


def test_a_run_that_logs_every_step():
    live = LiveDiagnosis(CONFIG, H200)
    changes = [live.add({"step": step, **HEALTHY}) for step in range(1, 2001)]
    assert [item.verdict.name for item in changes if item] == ["GPU-bound"]
    assert len(live.reports.recent) < 70 and live.reports.seconds < 70


def test_verdicts_do_not_flap():
    live, changes, step = LiveDiagnosis(CONFIG, H200), [], 0
    waits = changed(HEALTHY, data_wait=0.6, gpu_busy=0.4, loader=DECODING)
    edge = [changed(HEALTHY, data_wait=wait, loader=DECODING) for wait in (0.13, 0.17)]

    def train(*lines: dict[str, Any]) -> None:
        nonlocal step
        for line in lines:
            step += 20
            if diagnosis := live.add({"step": step, **line}):
                changes.append(diagnosis.verdict.name)

    train(*[HEALTHY] * 40)
    train(waits)  # one report is not enough
    train(*[HEALTHY] * 40)
    assert changes == ["GPU-bound"]
    train(*[waits] * 40)
    assert changes == ["GPU-bound", "data-bound (decode)"]
    train(*edge * 40)  # around the threshold
    assert len(changes) == 2
    train(*[HEALTHY] * 60)
    assert changes[2:] == ["GPU-bound"] and live.for_line()["verdict"] == "GPU-bound"


# --- whatever the lines contain

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NUMBERS = st.floats() | st.integers(-(10**400), 10**400) | st.floats(0, 1)
NAMES = sorted(
    {
        *HEALTHY,
        "slowest",
        "memory",
        "copy_s",
        "communication_s",
        "checkpoint_s",
        "evaluation_s",
        "main_thread",
    }
)
INNER = sorted(
    {*LOADER, *HOST, *GPU, "rank", "own_s", "others_s", "retries", "peak_gb", "cpu_stolen", "ram_limit_gb"}
)


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(NAMES),
            NUMBERS | JSON | st.dictionaries(st.sampled_from(INNER), NUMBERS | JSON, max_size=8),
            max_size=8,
        ),
        min_size=5,
        max_size=8,
    ),
    JSON,
    st.sampled_from([H200, CPU, TWO, {}]),
)
def test_no_figures_are_an_error(lines: list[dict[str, Any]], anything: Any, record: dict[str, Any]):
    numbered = [{**line, "step": 20 * (i + 1), "samples_per_s": 80.0} for i, line in enumerate(lines)]
    config = {**CONFIG, "dataset": anything, "parallel": anything, "batch_size": anything}
    for about in (record, {"machine": anything, "dataset": anything}):
        for given_lines in (numbered, lines, [{**HEALTHY, **line} for line in numbered]):
            json.dumps(diagnose_lines(given_lines, config, about)[0].to_json())


@given(st.sampled_from(sorted(HEALTHY)), st.sampled_from([H200, CPU]))
def test_figures_that_are_missing(name: str, record: dict[str, Any]):
    line = {key: value for key, value in HEALTHY.items() if key != name}
    diagnosis = verdict_of(line, record)
    assert diagnosis.verdict is None or diagnosis.healthy
