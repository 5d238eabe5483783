"""Plans of runs that learn while they act: the buffer's real size, memory, disk and time, and what is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from flexor.cli.main import main
from flexor.config.parse import config_from_flags
from flexor.plan.data.imagined_robot import Robot
from flexor.plan.plan import WORKSTATION
from flexor.plan.site.hardware import load_hardware
from flexor.rl.buffer import ReplayBuffer
from flexor.rl.planning import buffer_bytes, plan_online, trace_updates
from flexor.rl.records import record_type

LARGEST = 10_500_000_000  # bytes of 100,000 transitions with two cameras of 128x128
ACTIONS = 6


@pytest.fixture(scope="module")
def config():
    flags = {"policy.type": "sac", "env.type": "place", "rl.capacity": "100000", "steps": "100000"}
    config = config_from_flags(flags)
    return replace(config, policy=Robot(2, 128, 128, state=14, action=ACTIONS).fill_in(config.policy))


@pytest.fixture(scope="module")
def gpu():
    return load_hardware().find("H200")


@pytest.fixture(scope="module")
def trace(config, gpu):
    return trace_updates(config, gpu, record_type(config.policy.observed, ACTIONS))


def with_rl(config, **settings):
    return replace(config, rl=replace(config.rl, **settings))


def test_100_000_transitions_with_two_cameras_take_less_than_10_5_gb(config):
    """The real buffer's own figure, of tensors without memory; small ones in memory grow by the same per transition."""
    layout = record_type(config.policy.observed, ACTIONS)
    none = np.zeros(0, layout)
    full = ReplayBuffer(layout, 100_000, none, torch.device("meta")).nbytes()
    assert full <= LARGEST
    assert full == buffer_bytes(layout, 100_000, 0)
    small, larger = (ReplayBuffer(layout, size, none, torch.device("cpu")).nbytes() for size in (10, 30))
    assert small + (larger - small) // 20 * (100_000 - 10) == full


def test_a_plan_has_the_buffer_where_it_is(config, gpu, trace):
    plans = {
        storage: plan_online(with_rl(config, storage=storage), ACTIONS, 0, gpu, WORKSTATION, trace)
        for storage in ("auto", "cpu", "file")
    }
    assert [plan.storage for plan in plans.values()] == ["cuda", "cpu", "file"]
    on_gpu, in_memory, in_file = plans.values()
    assert all(plan.fits and plan.buffer <= LARGEST for plan in plans.values())
    assert on_gpu.gpu_memory - in_memory.gpu_memory > 0.9 * on_gpu.buffer
    assert in_memory.host_memory - on_gpu.host_memory == on_gpu.buffer
    assert in_file.disk - on_gpu.disk == on_gpu.buffer
    assert on_gpu.records == 100_000 * record_type(config.policy.observed, ACTIONS).itemsize
    assert on_gpu.update.graph and not in_memory.update.graph
    assert in_memory.update_s > on_gpu.update_s > 0
    assert on_gpu.seconds(10.0) == pytest.approx(100_000 * (0.1 + on_gpu.update_s))


def test_an_update_never_waits_for_the_gpu(trace):
    """Nothing is read on the host, so that an update can be one CUDA graph."""
    assert [str(point) for point in trace.sync_points] == []
    assert trace.nbytes("optimizer") >= 2 * 4 * trace.trained * 0.9  # two moments of each trained weight
    first, second = trace.steps
    assert second.end > second.start > first.start


def test_what_does_not_fit_is_refused_with_a_way_out(config, gpu, trace):
    small = replace(gpu, memory_gib=4)
    on_gpu = plan_online(with_rl(config, storage="cuda"), ACTIONS, 0, small, WORKSTATION, trace)
    assert not on_gpu.fits and "--rl.storage=cpu" in on_gpu.reasons[0]
    host = replace(WORKSTATION, memory=8_000_000_000)
    in_memory = plan_online(with_rl(config, storage="cpu"), ACTIONS, 0, gpu, host, trace)
    assert not in_memory.fits and "--rl.storage=file" in in_memory.reasons[0]
    assert plan_online(with_rl(config, storage="file"), ACTIONS, 0, gpu, host, trace).fits


def test_the_command(capsys):
    small = ["--policy.image_encoder_hidden_dim=4", "--cameras=1x64x64", "--state=5", "--action=3"]
    assert main(["plan", "--policy.type=sac", "--gpu=H200", *small, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] and plan["buffer"]["observations"] == 200_000 and plan["updates_per_s"] > 0
    assert main(["plan", "--policy.type=sac", "--gpu=H200", *small, "--rl.capacity=9000000"]) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out
    assert main(["plan", "--policy.type=sac", "--gpu=H200", "--gpus=2"]) == 2
    assert "--gpus has no effect" in capsys.readouterr().err


def test_the_features_of_an_environment(capsys):
    env = ["--env.type=place", "--env.kwargs={obs_type: environment_state_agent_pos, reward: sparse}"]
    assert main(["plan", "--policy.type=sac", "--gpu=H200", *env, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["buffer"]["bytes"] < 20_000_000 and plan["parameters"] < 2_000_000
