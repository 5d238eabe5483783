"""Memory and cores of the host, with numbers worked by hand and against what the loader itself does."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexor.core.machine import pinned_bytes
from flexor.data.loader.open import ahead_bytes
from flexor.data.settings import CacheConfig
from flexor.plan.data.host import (
    Camera,
    Data,
    DataSupply,
    HostMemory,
    Loading,
    Resources,
    Speed,
    choose_tier,
    concurrent_runs,
    expected_speed,
    gpu_cache_bytes,
    host_memory,
    loading_seconds,
    measured_speed,
    pool_bytes,
    step_bytes,
    steps_in_memory,
    supply,
)

VGA = Camera(480, 640)  # 460,800 bytes as planes, 921,600 as RGB
TWO = Data(frames=50_000, cameras=(VGA, VGA), row_bytes=200, file_bytes=3_000_000_000)
STREAM = CacheConfig()


# Pictures.


def test_frames_lie_in_memory_as_planes() -> None:
    assert VGA.frame_bytes() == 480 * 640 * 3 // 2
    assert VGA.frame_bytes(rgb=True) == 480 * 640 * 3
    assert Camera(481, 640).frame_bytes() == 481 * 640 * 3  # odd sizes have no planes
    assert Camera(480, 640, layout="gray").frame_bytes(rgb=True) == 480 * 640
    assert Camera(480, 640, size=(224, 224)).frame_bytes() == 224 * 224 * 3 // 2


def test_all_frames_kept() -> None:
    assert TWO.cache_bytes(STREAM) == 50_000 * 2 * 460_800  # 46 GB
    assert TWO.cache_bytes(CacheConfig(format="jpeg")) == 50_000 * 2 * 460_800 // 5
    small = CacheConfig(size="224x224")
    assert TWO.scaled(small).cache_bytes(small) == 50_000 * 2 * 75_264


def test_the_tier_is_what_has_room() -> None:
    need = TWO.cache_bytes(STREAM)
    assert choose_tier(TWO, STREAM, 4 * need, 0) == "ram"
    assert choose_tier(TWO, STREAM, 4 * need - 4, 4 * need) == "disk"
    assert choose_tier(TWO, STREAM, 0, 4 * need - 4) == "stream"
    assert choose_tier(TWO, CacheConfig(gb=50), 0, 0) == "ram"  # the user says that there is room
    assert choose_tier(TWO, CacheConfig(tier="gpu"), 0, 0) == "gpu"
    assert choose_tier(Data(10, ()), STREAM, 10**12, 10**12) == "stream"


# The host's memory.


def test_pinned_memory_comes_in_powers_of_two() -> None:
    assert [pinned_bytes(n) for n in (0, 1, 2, 3, 4, 5, 1000)] == [0, 1, 2, 4, 4, 8, 1024]


@given(st.integers(1, 2**45))
def test_pinned_is_less_than_twice_as_much(size: int) -> None:
    assert size <= pinned_bytes(size) < 2 * size or size == pinned_bytes(size) == 1


def test_a_step_of_batches() -> None:
    # 8 samples of one camera: 3,686,400 bytes as planes, pinned as 4 MiB; two cameras; two micro-batches
    assert step_bytes(TWO, Loading(batch_size=8, accumulation=2)) == 2 * 2 * 4 * 2**20
    assert step_bytes(TWO, Loading(batch_size=8, gpu=False)) == 2 * 8 * 921_600


def test_steps_that_wait() -> None:
    # RGB counts: 8 x 2 x 921,600 = 14.7 MB. 64 MiB hold a group of 4, and 256 MiB hold 4 groups that wait
    assert steps_in_memory(TWO, Loading(batch_size=8)) == 4 * (1 + 4)
    # 64 samples: 118 MB, two of them wait
    assert steps_in_memory(TWO, Loading(batch_size=64)) == 1 + 2
    assert steps_in_memory(TWO, Loading(batch_size=64, accumulation=8)) == 1 + 1
    assert steps_in_memory(Data(10, ()), Loading(batch_size=8)) == 128 * (1 + 8)


def test_the_pool() -> None:
    # 4 units of 2 moments of 2 frames for each of 64 samples: 472 MB
    assert pool_bytes(TWO, Loading(batch_size=64), STREAM) == 4 * 64 * 2 * 2 * 460_800
    assert pool_bytes(TWO, Loading(batch_size=8), STREAM) == 256 << 20  # at least
    rare = Data(1000, (Camera(480, 640, gop=250),))
    assert pool_bytes(rare, Loading(batch_size=64), STREAM) == 2_000_000_000  # at most
    assert pool_bytes(TWO, Loading(batch_size=64), CacheConfig(pool_gb=0.5)) == 500_000_000
    assert pool_bytes(TWO, Loading(batch_size=32, ranks=2), STREAM) == pool_bytes(TWO, Loading(64), STREAM)


def test_memory_of_a_machine() -> None:
    loading = Loading(batch_size=8, ranks=2, workers=4, tier="ram")
    needed = host_memory(TWO, loading, STREAM, checkpoint=123)
    assert needed == HostMemory(
        processes=2 * 3_500_000_000,
        decoders=2 * 4 * 460_800 * 12,  # both cameras are of one kind
        table=2 * 50_000 * 200,
        pool=256 << 20,
        batches=2 * 20 * 2 * 4 * 2**20,
        cache=50_000 * 2 * 460_800,
        checkpoint=123,
    )
    assert (
        needed.total
        == 7_000_000_000 + 44_236_800 + 20_000_000 + 268_435_456 + 335_544_320 + 46_080_000_000 + 123
    )


def test_what_stays_elsewhere_takes_no_memory() -> None:
    for tier in ("stream", "disk", "gpu"):
        assert host_memory(TWO, Loading(8, tier=tier), STREAM).cache == 0
    decoded = host_memory(TWO, Loading(8, gpu_decoder=True), STREAM)
    assert decoded.decoders == decoded.pool == 0
    bare = host_memory(Data(1000, ()), Loading(8), STREAM)
    assert bare.total == 3_500_000_000 + 1000 * 256


def test_training_on_the_cpu_keeps_rgb() -> None:
    needed = host_memory(TWO, Loading(8, tier="ram", gpu=False), STREAM)
    assert needed.cache == 50_000 * 2 * 921_600
    assert needed.processes == 600_000_000


def test_frames_on_the_gpu() -> None:
    loading = Loading(8, ranks=4, tier="gpu")
    assert gpu_cache_bytes(TWO, loading, STREAM) == (12_500 + 1024) * 2 * 460_800
    assert gpu_cache_bytes(TWO, Loading(8), STREAM) == 0


@given(st.integers(1, 64), st.integers(1, 8), st.integers(0, 32), st.sampled_from(["stream", "ram", "disk"]))
def test_more_of_anything_never_takes_less(batch: int, ranks: int, workers: int, tier: str) -> None:
    base = host_memory(TWO, Loading(batch, ranks=ranks, workers=workers, tier=tier), STREAM).total
    assert host_memory(TWO, Loading(batch, ranks=ranks + 1, workers=workers, tier=tier), STREAM).total > base
    assert host_memory(TWO, Loading(batch, ranks=ranks, workers=workers + 1, tier=tier), STREAM).total >= base


# Cores.


def test_expected_speed_goes_by_codec_key_frames_and_pixels() -> None:
    speed = expected_speed(Data(1, (VGA, Camera(240, 320, codec="h264", gop=250))))
    assert speed.decode_s == pytest.approx(3.0e-3 + 2.0e-3 / 4 + 2 * 30e-6)
    assert speed.gather_s == pytest.approx(0.1e-3 * 1.25)
    # scaling makes less to gather, not less to decode
    scaled = expected_speed(TWO.scaled(CacheConfig(size="240x320")))
    assert scaled.decode_s == expected_speed(TWO).decode_s
    assert scaled.gather_s == pytest.approx(expected_speed(TWO).gather_s / 4)


def test_small_images_are_limited_by_the_interpreters_of_the_ranks() -> None:
    data = Data(1_000_000, (Camera(96, 96),))
    demand = 1_000_000.0
    supplies = [
        supply(data, expected_speed(data), Loading(64, ranks=n, workers=200), demand, 999) for n in (1, 2)
    ]
    assert [result.loaded for result in supplies] == pytest.approx([100_000, 200_000])
    assert all(result.bound and result.loaded == result.most for result in supplies)
    large = Data(1_000_000, (VGA,))
    assert supply(large, expected_speed(large), Loading(64, workers=8), 1000.0, 9).loaded < 100_000


def test_decode_processes_take_memory() -> None:
    few, many = (host_memory(TWO, Loading(8, workers=n), STREAM).decoders for n in (2, 4))
    assert many - 2 * few == 4 * (45_000_000 + ahead_bytes(STREAM, 1))


def test_measured_speed_is_what_the_benchmark_found() -> None:
    report = {
        "threads": 2,
        "decode_limit_frames_per_s": 800,
        "memory_limit_frames_per_s": 20_000,
        "of_limit": 0.9,
    }
    speed = measured_speed(TWO, report)
    assert speed.decode_s == pytest.approx(2 * 2 / 800)  # two cameras, two threads
    assert speed.gather_s == pytest.approx(2 * 2 / 20_000)
    assert (speed.reached, speed.source) == (0.9, "measured")
    nothing = measured_speed(TWO, {"threads": 2, "decode_limit_frames_per_s": None, "of_limit": None})
    assert nothing.decode_s == expected_speed(TWO).decode_s


@pytest.mark.parametrize(
    ("camera", "cached", "measured"),
    [
        (Camera(480, 640), False, 605),
        (Camera(480, 640), True, 16_130),
        (Camera(480, 640, codec="h264", gop=250), False, 992),
    ],
)
def test_expected_is_near_what_was_measured(camera: Camera, cached: bool, measured: float) -> None:
    """docs/bench.md: frames/s of two cameras on two ARM cores with nothing beside them. Rather less than more."""
    data = Data(6000, (camera, camera))
    result = supply(data, expected_speed(data), Loading(64, workers=2), 1, cores=3, cached=cached)
    assert 0.7 * measured < 2 * result.loaded <= 1.05 * measured


def test_memory_is_near_what_was_measured() -> None:
    """benchmarks/results, 2026-11-15: 0.90 GB while streaming. The plan is a bound: the pool need not fill."""
    data = Data(6000, (VGA, VGA))
    streaming = host_memory(data, Loading(64, workers=2, gpu=True), STREAM)
    without_process = streaming.total - streaming.processes + 270_000_000  # what importing takes there
    assert 0.9e9 < without_process < 1.4e9


def test_threads_that_bring_what_is_wanted() -> None:
    # 6 ms to decode, 2 ms to gather, 80 % reached: 10 ms of a core per sample
    speed = Speed(decode_s=6e-3, gather_s=2e-3, reached=0.8)
    result = supply(TWO, speed, Loading(8, workers=8), demand=400, cores=8)
    assert result.threads == 4 and result.cores == 5
    assert result.loaded == pytest.approx(700)  # 7 cores beside the one that trains
    assert not result.bound and result.stretch == 1
    short = supply(TWO, speed, Loading(8, workers=8), demand=400, cores=3)
    assert short.loaded == pytest.approx(200)
    assert short.bound and short.stretch == pytest.approx(2)
    assert supply(TWO, speed, Loading(8, workers=1), demand=400, cores=8).loaded == pytest.approx(100)


def test_kept_frames_are_only_gathered() -> None:
    speed = Speed(decode_s=6e-3, gather_s=2e-3, reached=0.8)
    assert supply(TWO, speed, Loading(8), 400, 8, cached=True).threads == 1
    assert supply(TWO, speed, Loading(8), 400, 8, cached=True).loaded == pytest.approx(4 / 2.5e-3)


def test_windows_decode_a_little_twice() -> None:
    speed = Speed(decode_s=8e-3, gather_s=0, reached=1)
    windows = Data(1000, (Camera(480, 640, steps=2),))
    assert supply(windows, speed, Loading(8, workers=1), 1, 8).loaded == pytest.approx(1 / 8.8e-3)


def test_the_decoder_of_the_gpu() -> None:
    speed = Speed(decode_s=6e-3, gather_s=0.2e-3, reached=0.8)
    result = supply(TWO, speed, Loading(8, gpu_decoder=True), demand=1000, cores=8)
    assert result.loaded == pytest.approx(3500 / 2)  # two cameras
    assert not result.bound
    two_gpus = supply(TWO, speed, Loading(8, ranks=2, gpu_decoder=True), demand=1000, cores=8)
    assert two_gpus.loaded == pytest.approx(3500)


def test_no_cameras_no_waiting() -> None:
    result = supply(Data(10, ()), Speed(0, 0), Loading(8), 1e6, 1)
    assert not result.bound and result.stretch == 1 and result.threads == 0


@given(st.floats(1, 5000), st.integers(1, 128), st.integers(1, 8), st.booleans())
def test_the_cores_it_asks_for_are_enough(demand: float, cores: int, ranks: int, cached: bool) -> None:
    speed = expected_speed(TWO)
    estimate = supply(TWO, speed, Loading(8, ranks=ranks), demand, cores, cached=cached)
    workers = math.ceil(estimate.threads / ranks)
    enough = supply(
        TWO, speed, Loading(8, ranks=ranks, workers=workers), demand, estimate.cores, cached=cached
    )
    assert enough.loaded >= demand * (1 - 1e-6)
    assert not enough.bound or enough.stretch < 1.001


def test_the_first_epoch_may_be_slower() -> None:
    first, later = DataSupply(100, 50, 1, 1), DataSupply(100, 1000, 1, 1)
    assert loading_seconds(3000, 1000, first, later) == pytest.approx(1000 / 50 + 2000 / 100)
    assert loading_seconds(500, 1000, first, later) == pytest.approx(10)


# Several runs on one GPU.


def test_experiments_at_once() -> None:
    machine = Resources(gpu_memory=80 * 10**9, host_memory=64 * 10**9, cores=16)
    run = Resources(gpu_memory=9 * 10**9, host_memory=6 * 10**9, cores=3)
    result = concurrent_runs(machine, run, busy=0.4)
    assert (result.fit, result.limit) == (5, "cores")
    assert result.useful == 3 and result.faster == pytest.approx(2.5)
    assert concurrent_runs(machine, run, busy=1.0).useful == 1
    assert concurrent_runs(machine, run, busy=1.0).faster == 1
    large = concurrent_runs(machine, Resources(90 * 10**9, 1, 1), busy=0.5)
    assert (large.fit, large.limit, large.useful) == (0, "GPU memory", 0)


@given(st.floats(0.01, 1), st.integers(1, 100), st.integers(1, 100))
def test_sharing_is_never_worse_than_taking_turns(busy: float, memory: int, cores: int) -> None:
    result = concurrent_runs(Resources(memory, 1000, cores), Resources(1, 1, 1), busy)
    assert result.fit == min(memory, cores)
    assert 1 <= result.faster <= 1 / busy + 1e-9
    assert result.useful <= result.fit
