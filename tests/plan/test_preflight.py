"""A run that plans itself: what it says, what it chooses, and that a plan that fails stops nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flexor.config.parse import load_config
from flexor.config.schema import TrainConfig
from flexor.plan import preflight
from flexor.plan.site.hardware import GPU, Hardware, gpu_here, load_hardware
from flexor.plan.speed.ceilings import ceiling_of_run
from flexor.policies.fit import fit_to_dataset
from flexor.train.datasets import build_datasets
from flexor.train.ranks.processes import Processes

CUDA = torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[GPU]:
    """The GPU that the machine seems to have; tests may change its memory."""
    gpus = [load_hardware().find("RTX 4090")]

    def here(_: Hardware) -> GPU:
        return gpus[0]

    monkeypatch.setattr(preflight, "gpu_here", here)
    return gpus


def run_of(dataset: Path, tiny_act: list[str], *flags: str) -> tuple[TrainConfig, preflight.Dataset]:
    config = load_config([f"--dataset.root={dataset}", *tiny_act, "--batch_size=32", *flags])
    training, _ = build_datasets(config.dataset)
    return replace(config, policy=fit_to_dataset(config.policy, training)), training


def plan_of(
    config: TrainConfig, training: preflight.Dataset, device: torch.device = CUDA
) -> tuple[TrainConfig, preflight.Plan | None]:
    """The settings of the run that was planned, and the plan."""
    check = preflight.Preflight()
    return check.before(config, training, Processes(), device), check.plan


def test_a_run_says_what_it_expects(
    dataset: Path, tiny_act: list[str], gpu: list[GPU], log_lines: list[str]
) -> None:
    config, training = run_of(dataset, tiny_act)
    plan = preflight.plan_run(config, training, Processes(), CUDA)
    assert plan is not None and plan.fits and plan.split.batch_size == 32
    assert any(line.startswith("planned:") and "RTX 4090" in line for line in log_lines)
    figures = preflight.compare(plan, {"samples_per_s": 64.0, "data_wait": 0.5}, CUDA)
    assert figures["step_s"] == pytest.approx(0.25)
    before = preflight.Preflight()
    assert before.planned() == {}
    before.plan = plan
    planned = before.planned()
    assert {*planned} == {"planned_allocated_bytes", "planned_step_s", "planned_run_s"}
    assert planned.items() <= figures.items() and all(value > 0 for value in planned.values())


def test_a_run_knows_the_flops_of_its_step(
    dataset: Path, tiny_act: list[str], gpu: list[GPU], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, training = run_of(dataset, tiny_act, "--precision=bf16")
    measured = {(CUDA, "bf16"): 5e14}  # of a GPU that is not there
    monkeypatch.setattr(preflight, "ceiling_of_run", lambda *run: measured[run])
    before = preflight.Preflight()
    assert before.arithmetic(CUDA) is None
    before.plan = preflight.plan_run(config, training, Processes(), CUDA)
    arithmetic, plan = before.arithmetic(CUDA), before.plan
    assert arithmetic is not None and plan is not None
    assert arithmetic.ceiling == 5e14 and arithmetic.flops == plan.run_time.step.flops > 0


@pytest.mark.gpu
def test_the_ceiling_of_this_gpu_leaves_nothing_behind() -> None:
    """Neither memory nor other random values; and it is less than the data sheet says."""
    torch.zeros((), device="cuda")
    before, state = torch.cuda.memory_allocated(), torch.cuda.get_rng_state()
    arithmetic = ceiling_of_run(torch.device("cuda", 0), "bf16")
    gpu = gpu_here(load_hardware())
    assert arithmetic is not None and gpu is not None and 0 < arithmetic < gpu.flops("bf16")
    assert torch.cuda.memory_allocated() == torch.cuda.max_memory_allocated() <= before
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_what_does_not_fit_is_a_warning(
    dataset: Path, tiny_act: list[str], gpu: list[GPU], log_lines: list[str]
) -> None:
    gpu[0] = replace(gpu[0], memory_gib=0.6)
    config, training = run_of(dataset, tiny_act, "--policy.vision_backbone=resnet18")
    plan = preflight.plan_run(config, training, Processes(), CUDA)
    assert plan is not None and not plan.fits
    assert any("does not fit" in line for line in log_lines)


def test_auto_keeps_the_global_batch_and_what_is_given(
    dataset: Path, tiny_act: list[str], gpu: list[GPU]
) -> None:
    config, training = run_of(dataset, tiny_act, "--auto=true", "--batch_size=512")
    config, plan = plan_of(config, training)
    assert plan is not None and (config.batch_size, config.global_batch_size) == (512, 512)
    assert not config.activation_checkpointing and not config.auto

    gpu[0] = replace(gpu[0], memory_gib=(plan.peak - (4 << 20)) / preflight.ROOM / 2**30)
    config, training = run_of(dataset, tiny_act, "--auto=true", "--batch_size=512", "--num_workers=3")
    config, smaller = plan_of(config, training)
    assert smaller is not None and smaller.peak < plan.peak
    assert config.batch_size < 512 and config.global_batch_size == 512 and config.num_workers == 3
    assert smaller.split.batch_size * smaller.split.accumulation == 512


def test_auto_gives_each_rank_its_share_of_the_threads(
    dataset: Path, tiny_act: list[str], gpu: list[GPU], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "usable_cores", lambda: 100_000)
    config, training = run_of(dataset, tiny_act, "--auto=true", "--batch_size=512")
    four = Processes(world_size=4, local_world_size=4)
    planner = preflight.RunPlanner(config, training, four)
    large = [replace(camera, height=960, width=1280) for camera in planner.data.cameras]
    planner.data = replace(planner.data, cameras=tuple(large))
    config = preflight.choose(config, planner)
    threads = planner.plan(config).run_time.first.threads
    assert threads > 4 and 0 <= 4 * config.num_workers - threads < 4


def test_nothing_is_planned_without_a_gpu(dataset: Path, tiny_act: list[str]) -> None:
    config, training = run_of(dataset, tiny_act, "--auto=true")
    assert plan_of(config, training, torch.device("cpu")) == (config, None)


def test_a_plan_that_fails_stops_nothing(
    dataset: Path, tiny_act: list[str], log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(_: Hardware) -> GPU:
        raise RuntimeError("no such card")

    monkeypatch.setattr(preflight, "gpu_here", unknown)
    config, training = run_of(dataset, tiny_act)
    assert preflight.plan_run(config, training, Processes(), CUDA) is None
    assert any("no such card" in line for line in log_lines)
