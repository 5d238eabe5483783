"""What a run leaves on disk, with numbers worked by hand and against saving and removing, step by step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexor.data.settings import CacheConfig
from flexor.plan.data.disk import CheckpointCounts, checkpoint_bytes, checkpoints_kept, disk_needed
from flexor.plan.data.host import Camera, Data, Loading

STREAM = CacheConfig()
TWO = Data(frames=50_000, cameras=(Camera(480, 640), Camera(480, 640)), file_bytes=3_000_000_000)


def test_what_a_checkpoint_takes() -> None:
    # 520,719,368 parameters: 6,248,868,367 bytes were written whole, 8,335,416,373 sharded and exported
    weights = 4 * 520_719_368
    assert checkpoint_bytes(weights, 2 * weights) == pytest.approx(6_248_868_367, rel=1e-4)
    assert checkpoint_bytes(weights, 2 * weights, sharded=True) == pytest.approx(8_335_416_373, rel=1e-3)
    assert checkpoint_bytes(10, 20, ema=True) == 20 + 3 * 10
    assert checkpoint_bytes(10, 2, lora=True) == 2 + 2 * 10  # adapters merged to act with, and not
    assert checkpoint_bytes(10, 2, lora=True, sharded=True) == 2 + 2 * 10
    assert checkpoint_bytes(10, 20, ema=True, sharded=True) == 20 + 10 + 10 + 10
    assert checkpoint_bytes(10, 20, sharded=True, export=False) == 30


def test_how_many_are_kept() -> None:
    assert checkpoints_kept(100_000, 20_000, None, None) == CheckpointCounts(5, 5, 5)
    assert checkpoints_kept(100_000, 20_000, 2, None) == CheckpointCounts(5, 3, 2)
    assert checkpoints_kept(100_000, 20_000, 1, 40_000) == CheckpointCounts(
        5, 3, 3
    )  # 40, 80 and 100 thousand
    assert checkpoints_kept(100_000, 0, 2, None) == CheckpointCounts(1, 1, 1)
    assert checkpoints_kept(50, 20, None, None) == CheckpointCounts(3, 3, 3)  # the last step is saved too


@given(
    st.integers(1, 300), st.integers(-1, 40), st.none() | st.integers(1, 6), st.none() | st.integers(1, 60)
)
def test_kept_is_what_saving_and_removing_leaves(
    steps: int, freq: int, last: int | None, every: int | None
) -> None:
    saved = [s for s in range(1, steps + 1) if s == steps or (freq > 0 and s % freq == 0)]
    there: list[int] = []
    most = 0
    for step in saved:
        there.append(step)
        most = max(most, len(there))
        if last is not None:
            there = [s for s in there[:-last] if every and s % every == 0] + there[-last:]
    assert checkpoints_kept(steps, freq, last, every) == CheckpointCounts(len(saved), most, len(there))


def test_disk() -> None:
    needed = disk_needed(TWO, Loading(8, tier="disk"), STREAM, 6_000, CheckpointCounts(5, 3, 2))
    assert (needed.dataset, needed.cache, needed.checkpoints) == (3_000_000_000, 46_080_000_000, 18_000)
    assert needed.total == 49_080_018_000
    assert disk_needed(TWO, Loading(8, tier="ram"), STREAM, 0, CheckpointCounts(1, 1, 1)).cache == 0
    small = disk_needed(
        TWO, Loading(8, tier="disk"), CacheConfig(size="224x224"), 0, CheckpointCounts(1, 1, 1)
    )
    assert small.cache == 50_000 * 2 * 75_264
