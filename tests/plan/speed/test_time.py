"""Times of steps: by hand for small traces, and by what must follow from more work, more GPUs and slower ones."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from flexor.config.schema import ParallelConfig
from flexor.plan.data.imagined_robot import Robot
from flexor.plan.memory.memory import Parallelism
from flexor.plan.site.hardware import GPU, load_hardware
from flexor.plan.site.links import Interconnect, Links
from flexor.plan.speed import calibrate
from flexor.plan.speed.calibrate import merged, per_operation
from flexor.plan.speed.overlap import packing
from flexor.plan.speed.speeds import (
    GAP,
    KERNEL,
    UNALIGNED,
    UNCALIBRATED_GPU,
    Sample,
    Speeds,
    assumed,
    extents,
    limit,
    read,
    sample_of,
    save,
)
from flexor.plan.speed.time import PACKING, step_time, steps_ops
from flexor.plan.trace.events import Trace
from flexor.plan.trace.ops import UNALIGNED_ROWS, Op
from flexor.plan.trace.trace import trace_step
from support.plans import plan_memory, settings

PHASES = ("load", "batch", "forward", "backward", "clip", "optimizer")
FREE = {"any": {"step": 0.0, **dict.fromkeys(PHASES, 0.0)}}


@pytest.fixture(scope="module")
def h200() -> GPU:
    return load_hardware().find("H200")


@pytest.fixture(scope="module")
def trace(h200: GPU) -> Trace:
    return trace_step(settings("act"), 4, h200)


def speeds(host: dict[str, dict[str, float]] = FREE, samples: tuple[Sample, ...] = ()) -> Speeds:
    return Speeds("H200", torch.__version__, "2026-11-15", samples, host)


def product(rows: int = 4096, dtype: torch.dtype = torch.bfloat16) -> Op:
    size = rows * rows * dtype.itemsize
    return Op("mm", "matmul", "forward", 2.0 * rows**3, 2 * size, size, dtype, (1, rows, rows, rows))


# Limits.


def test_a_limit_is_the_largest_of_computing_moving_and_launching(h200: GPU) -> None:
    assert limit(product(8192), h200) == pytest.approx(2 * 8192**3 / 989.4e12)
    assert limit(product(8192, torch.float32), h200) == pytest.approx(2 * 8192**3 / 494.7e12)
    copy = Op("copy_", "memory", "forward", 0, 2 << 30, 2 << 30, torch.float32)
    assert limit(copy, h200) == pytest.approx((4 << 30) / 4.8e12)
    assert limit(Op("add", "memory", "forward", 0, 4, 4, torch.float32), h200) == KERNEL


def test_without_samples_an_operation_takes_its_limit() -> None:
    assert speeds().times(product()) == 1


def test_a_sample_says_how_many_times_its_limit_an_operation_takes(h200: GPU) -> None:
    measured = speeds(samples=(sample_of(product(), 3 * limit(product(), h200), h200),))
    assert measured.times(product()) == pytest.approx(3)
    half = replace(h200, tflops={**h200.tflops, "bf16": 494.7})
    assert limit(product(), half) == pytest.approx(2 * limit(product(), h200))


def test_the_nearest_sample_of_the_same_name_and_type_counts() -> None:
    def sample(name: str, dtype: str, rows: int, times: float) -> Sample:
        return Sample(name, dtype, extents(product(rows)), times)

    measured = speeds(
        samples=(
            *(sample("mm", "bfloat16", 64, 9.0) for _ in range(3)),
            *(sample("mm", "bfloat16", 4096, 2.0) for _ in range(3)),
            *(sample("mm", "float32", 4096, 7.0) for _ in range(3)),
            *(sample("addmm", "bfloat16", 4096, 5.0) for _ in range(3)),
        )
    )
    assert measured.times(product()) == pytest.approx(2)
    assert measured.times(product(64)) == pytest.approx(9)
    assert measured.times(product(4096, torch.float32)) == pytest.approx(7)


def memory(name: str, read: int, written: int) -> Op:
    return Op(name, "memory", "forward", 0, read, written, torch.bfloat16)


def test_a_memory_operation_is_like_those_that_read_and_write_in_the_same_ratio(h200: GPU) -> None:
    def samples(read: int, written: int, times: float) -> list[Sample]:
        ops = (memory("mul", n * read, n * written) for n in (1 << 24, 1 << 25, 1 << 26))
        return [sample_of(op, times * limit(op, h200), h200) for op in ops]

    measured = speeds(samples=(*samples(2, 1, 1.2), *samples(1, 1, 3.3)))
    assert measured.times(memory("mul", 2 << 29, 1 << 29)) == pytest.approx(1.2)
    assert measured.times(memory("mul", 1 << 29, 1 << 29)) == pytest.approx(3.3)


def test_an_operation_that_was_not_measured_is_like_most_others(h200: GPU) -> None:
    names = {"add": 1.0, "mul": 1.1, "gelu": 1.2, "native_batch_norm": 9.0}
    measured = speeds(
        samples=tuple(
            Sample(name, "bfloat16", extents(memory(name, 1 << 28, 1 << 28)), times)
            for name, times in names.items()
        )
    )
    assert measured.times(memory("flexor::gate", 1 << 28, 1 << 28)) == pytest.approx(1.15)
    assert measured.times(memory("native_batch_norm", 1 << 28, 1 << 28)) == pytest.approx(9)


def test_a_product_with_unaligned_rows_takes_longer() -> None:
    aligned, unaligned = product(), product()
    unaligned.detail = UNALIGNED_ROWS
    measured = speeds(samples=(Sample("mm", "bfloat16", extents(aligned), 1.5),))
    assert measured.times(unaligned) == pytest.approx(UNALIGNED * measured.times(aligned))


def test_a_sample_of_the_same_memory_format_counts(h200: GPU) -> None:
    def convolution(layout: str) -> Op:
        made = Op("convolution", "convolution", "forward", 1e9, 1, 1, torch.float32, (64, 64, 64))
        made.layout = layout
        return made

    slow, quick = (
        sample_of(convolution(layout), times * limit(convolution(layout), h200), h200)
        for layout, times in (("", 4.0), ("nhwc", 2.0))
    )
    assert (slow.name, quick.name) == ("convolution", "convolution nhwc")
    both, old, new = (speeds(samples=samples) for samples in ((slow, quick), (slow,), (quick,)))
    assert [both.times(convolution(layout)) for layout in ("", "nhwc", "to nhwc")] == pytest.approx([4, 2, 4])
    assert old.times(convolution("nhwc")) == pytest.approx(
        4
    )  # a calibration from before formats were told apart
    assert new.times(convolution("")) == pytest.approx(2)


def test_an_old_calibration_is_read(tmp_path, h200: GPU) -> None:
    plain = asdict(speeds())
    del plain["gap"]
    (tmp_path / "old.json").write_text(json.dumps(plain))
    assert read(tmp_path / "old.json").gap == GAP


def test_speeds_come_back_from_their_file_as_they_were(tmp_path, h200: GPU) -> None:
    measured = speeds(
        {"any": {"forward": 1e-5, "optimizer": 2e-5, "step": 1e-3}}, (Sample("mm", "x", (1.0, 2.0), 3.0),)
    )
    save(measured, tmp_path / "speeds.json")
    assert asdict(read(tmp_path / "speeds.json")) == asdict(measured)


def test_the_reference_is_there_and_no_operation_beats_its_limit_by_much() -> None:
    reference = assumed()
    assert reference.gpu == "H200" and len(reference.samples) > 1000
    slow = [sample for sample in reference.samples if sample.times > 0.45]  # the smallest kernels take 1 us
    assert len(slow) > 0.95 * len(reference.samples)


# Steps.


def test_a_step_that_the_gpu_bounds_is_the_sum_of_its_operations(trace: Trace, h200: GPU) -> None:
    time = step_time(trace, h200, config=settings("act"), speeds=speeds())
    work = [op for op in steps_ops(trace) if op.kind != "view" and op.phase != "load"]
    assert time.bound == "gpu"
    assert time.seconds == pytest.approx(sum(limit(op, h200) for op in work))
    assert time.seconds == pytest.approx(time.gpu_seconds)
    assert time.flops == sum(op.flops for op in work)


def test_a_step_that_the_host_bounds_is_what_issuing_takes(trace: Trace, h200: GPU) -> None:
    slow = {"any": {"step": 0.5, **dict.fromkeys(PHASES, 1e-3)}}
    time = step_time(trace, h200, config=settings("act"), speeds=speeds(slow))
    assert time.bound == "host" and time.seconds == pytest.approx(time.host_seconds)
    assert time.host["step"] == 0.5
    assert time.at_best == pytest.approx(time.gpu_seconds + time.gaps)


def test_compiling_can_save_no_more_than_what_the_passes_move(trace: Trace, h200: GPU) -> None:
    time = step_time(trace, h200, config=settings("act"), speeds=speeds())
    passes = [op for op in steps_ops(trace) if op.phase in ("forward", "backward")]
    moved = sum(limit(op, h200) for op in passes if op.kind == "memory")
    assert time.compiled_at_best == pytest.approx(time.gpu_seconds + time.gaps - moved)
    assert time.compiled_at_best > sum(seconds for kind, seconds in time.gpu.items() if kind != "memory")


def test_a_graph_takes_the_gpu_time_and_a_gap_for_each_kernel(trace: Trace, h200: GPU) -> None:
    slow = {"any": {"step": 0.0, **dict.fromkeys(PHASES, 1e-5)}}
    time = step_time(trace, h200, config=settings("act", step="auto"), speeds=speeds(slow))
    eager = step_time(trace, h200, config=settings("act"), speeds=speeds(slow))
    kernels = sum(op.kernels for op in steps_ops(trace) if op.kind != "view" and op.phase != "load")
    assert (time.graph, time.bound, eager.graph, eager.bound) == (True, "gpu", False, "host")
    assert time.gaps == pytest.approx(kernels * GAP)
    assert time.seconds == pytest.approx(eager.gpu_seconds + time.gaps) == pytest.approx(eager.at_best)
    assert time.host_seconds < 0.2 * eager.host_seconds and time.at_best == time.seconds
    assert {"load", "replay"} <= time.host.keys() and "forward" not in time.host


def test_fp16_does_not_wait_in_a_graph(trace: Trace, h200: GPU) -> None:
    config = settings("act", precision="fp16", step="auto")
    assert step_time(trace, h200, config=config, speeds=speeds()).seconds == pytest.approx(
        step_time(trace, h200, config=replace(config, precision="bf16"), speeds=speeds()).seconds
    )


def test_fp16_waits_before_the_optimizer(trace: Trace, h200: GPU) -> None:
    slow = {"any": {**FREE["any"], "optimizer": 1.0}}  # the GPU is done long before the host is
    config = settings("act")
    eager, waiting = (
        step_time(trace, h200, config=replace(config, precision=precision), speeds=speeds(slow))
        for precision in ("bf16", "fp16")
    )
    late = sum(limit(op, h200) for op in steps_ops(trace) if op.phase == "optimizer" and op.kind != "view")
    assert waiting.seconds == pytest.approx(eager.seconds + eager.gpu_seconds - late)


def test_making_the_optimizer_state_is_not_part_of_every_step(trace: Trace) -> None:
    names = [op.name for op in steps_ops(trace) if op.phase == "optimizer"]
    assert "zeros_like" not in names and any(name.startswith("_fused_adam") for name in names)


def test_passes_beyond_the_second_are_counted(h200: GPU) -> None:
    def work(passes: int) -> float:
        config = settings("act", gradient_accumulation_steps=passes)
        ops = list(steps_ops(trace_step(config, 2, h200)))
        return sum(op.flops for op in ops)

    assert work(4) == pytest.approx(4 * work(1))


def test_of_a_policy_with_phases_the_last_one_counts(h200: GPU) -> None:
    names = {op.name for op in steps_ops(trace_step(settings("vqbet"), 2, h200))}
    assert "convolution" in names  # the first phase does not look at pictures


WIDE = {"dim_model": 512, "dim_feedforward": 3200, "n_heads": 8}  # gradients of several buckets


def links(bandwidth: float, gpus: int = 8) -> Links:
    """Of eight GPUs, without latency or losses."""
    wire = Interconnect("wire", share=1.0, latency=0.0, bandwidth=bandwidth)
    return Links(gpus, 1, wire, wire)


@pytest.mark.parametrize("strategy", ("ddp", "fsdp"))
def test_traffic_hides_behind_computing_as_far_as_it_can(trace: Trace, h200: GPU, strategy: str) -> None:
    config = settings("act")
    parts = 8 if strategy == "fsdp" else 1
    options: dict[str, Any] = {
        "config": config,
        "parallelism": Parallelism(strategy, 8, parts),
        "speeds": speeds(),
    }
    fast = step_time(trace, h200, **options, links=links(1e18))
    slow = step_time(trace, h200, **options, links=links(0.75e9))
    alone = step_time(trace, h200, config=config, speeds=speeds())
    copies = fast.gpu.get(PACKING, 0.0)
    assert fast.exposed == pytest.approx(0, abs=1e-9)
    assert fast.seconds == pytest.approx(alone.seconds + copies) and (copies > 0) == (strategy == "ddp")
    assert slow.bound == "network" and slow.seconds == pytest.approx(alone.seconds + copies + slow.exposed)
    buckets = sum(bucket.nbytes for bucket, _ in packing(trace))
    assert 4 * trace.trained <= buckets <= 1.01 * 4 * trace.trained
    moved = 7 / 8 * (2 * buckets if strategy == "ddp" else 8 * trace.parameters + 4 * trace.trained)
    assert slow.communication == pytest.approx(moved / 0.75e9)
    assert slow.spread > fast.spread == pytest.approx(alone.spread)


def test_gloo_exchanges_after_a_graph(h200: GPU) -> None:
    """It is not part of one. NCCL overlaps with the last backward pass, and so do eager passes over either."""
    for step in ("auto", "eager"):
        for passes, backend in ((1, "nccl"), (2, "nccl"), (1, "gloo")):
            parallel = ParallelConfig(strategy="ddp", backend=backend)  # type: ignore[arg-type]
            more = {"gradient_accumulation_steps": passes, "parallel": parallel}
            config = settings("act", step=step, policy=WIDE, **more)
            traced, ddp = trace_step(config, 2, h200), Parallelism("ddp", 2)
            made = step_time(
                traced, h200, config=config, parallelism=ddp, speeds=speeds(), links=links(1e9, 2)
            )
            assert made.graph == (step == "auto") and made.communication > 0
            overlaps = made.exposed < made.communication * (1 - 1e-6)
            assert overlaps == (step == "eager" or backend == "nccl")


def test_every_gpu_of_the_database_has_a_time(trace: Trace) -> None:
    times = {
        gpu.name: step_time(trace, gpu, config=settings("act"), speeds=assumed()).seconds
        for gpu in load_hardware().gpus.values()
    }
    assert all(seconds > 0 for seconds in times.values())
    assert assumed() is assumed()  # or each of them would look up every operation anew
    assert times["RTX 3060"] >= times["H200"]


def test_only_what_was_measured_on_such_a_gpu_is_a_calibration(trace: Trace, h200: GPU) -> None:
    other, measured = load_hardware().find("RTX 4090"), replace(speeds(), spread_gpu=0.05)
    here = step_time(trace, h200, config=settings("act"), speeds=measured)
    elsewhere = step_time(trace, other, config=settings("act"), speeds=measured)
    assert here.calibrated and here.spread == 0.05
    assert not elsewhere.calibrated and elsewhere.spread == UNCALIBRATED_GPU
    assert not step_time(trace, h200, config=settings("act"), speeds=assumed()).calibrated


# What a calibration makes of measurements.


def test_samples_at_one_place_become_their_median() -> None:
    at = (1.0, 2.0)
    samples = [Sample("add", "float32", at, times) for times in (1.0, 9.0, 2.0)]
    assert merged(samples) == [Sample("add", "float32", at, 2.0)]


def test_the_host_is_charged_by_operation_and_views_cost_less() -> None:
    ops = [Op("mm", "matmul", "forward"), Op("t", "view", "forward"), Op("mm", "matmul", "backward")]
    costs = per_operation(ops, {"forward": 2.8, "backward": 3.0, "ema": 0.7})
    assert costs == {"step": 0.7, "forward": pytest.approx(2.0), "backward": 3.0}


def test_products_of_large_models_become_samples(monkeypatch, h200: GPU) -> None:
    monkeypatch.setattr(calibrate, "ROWS", (8,))
    monkeypatch.setattr(calibrate, "LAYERS", ((16, 32),))
    products = list(calibrate.large_products(torch.device("cpu")))
    assert [(op.name, op.extent) for op, _ in products] == [
        ("addmm", (1, 8, 32, 16)),
        ("mm", (1, 8, 16, 32)),
        ("mm", (1, 32, 16, 8)),
    ]
    for op, seconds in products:
        sample = sample_of(op, seconds, h200)
        assert (sample.dtype, sample.times) == (
            "bfloat16",
            pytest.approx(seconds / limit(op, h200), abs=1e-3),
        )


def test_what_is_measured_can_be_planned(h200: GPU) -> None:
    """Without a GPU. What measures the host stays in memory all the time, in two precisions."""
    host = 0
    for kind, usual in calibrate.calibrations().items():
        config = calibrate.settings(kind, "bf16", channels_last=True)
        assert step_time(trace_step(config, 4, h200), h200, config=config, speeds=assumed()).seconds > 0
        narrow = calibrate.settings(kind, "no", Robot(usual.cameras, 96, 96), **usual.narrow)
        host += 2 * plan_memory(narrow, h200, 2).allocated
    assert host < calibrate.HOSTS_GIB * 2**30
