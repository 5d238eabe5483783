"""What a run leaves on disk, with numbers worked by hand and against saving and removing, step by step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from flexor.config.schema import EMAConfig
from flexor.data.settings import CacheConfig
from flexor.plan.data.disk import CheckpointCounts, checkpoint_bytes, checkpoints_kept, disk_needed
from flexor.plan.data.host import Camera, Data, Loading
from flexor.plan.plan import make_plan, site_of
from flexor.plan.site.hardware import load_hardware
from flexor.plan.trace.events import SavedWeights
from flexor.plan.trace.rehearsal import Rehearsal
from flexor.plan.trace.trace import OperationTracker
from flexor.policies.adapters import LoraConfig
from support.plans import settings

STREAM = CacheConfig()
TWO = Data(frames=50_000, cameras=(Camera(480, 640), Camera(480, 640)), file_bytes=3_000_000_000)


def test_what_a_checkpoint_takes() -> None:
    # 520,719,368 parameters: 6,248,868,367 bytes were written whole, 8,335,416,373 sharded and exported
    size = 4 * 520_719_368
    weights = SavedWeights(raw=size, exported=size)
    assert checkpoint_bytes(weights, 2 * size) == pytest.approx(6_248_868_367, rel=1e-4)
    assert checkpoint_bytes(weights, 2 * size, sharded=True) == pytest.approx(8_335_416_373, rel=1e-3)
    plain, averaged = SavedWeights(raw=10, exported=11), SavedWeights(raw=10, average=12, exported=13)
    adapted = SavedWeights(raw=10, exported=9, adapters=1)
    assert checkpoint_bytes(averaged, 20) == 20 + 10 + 12 + 13
    assert checkpoint_bytes(adapted, 2, lora=True) == 2 + 10 + 9 + 1  # adapters merged to act with, and not
    assert checkpoint_bytes(adapted, 2, lora=True, sharded=True) == 2 + 10 + 9 + 1
    assert checkpoint_bytes(averaged, 20, sharded=True) == 20 + 10 + 12 + 13
    assert checkpoint_bytes(plain, 20, sharded=True) == 20 + 10 + 11
    assert checkpoint_bytes(plain, 20, sharded=True, export=False) == 30


RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "act": ("act", {"ema": EMAConfig(enable=True)}),  # a ResNet's buffers are saved too
    "pi0": ("pi0", {}),  # two heads that nothing uses
    "pi0 with adapters": ("pi0", {"lora": LoraConfig(r=4), "policy_path": "somewhere/base"}),
    "pi05 in bf16, averaged": (
        "pi05",
        {"ema": EMAConfig(enable=True), "weights_dtype": "bf16", "precision": "bf16"},
    ),
}


@pytest.mark.parametrize("kind, more", RUNS.values(), ids=RUNS)
def test_a_checkpoint_is_as_large_as_planned(kind: str, more: dict[str, Any], tmp_path: Path) -> None:
    config = settings(kind, batch_size=2, steps=1, **more)
    run = Rehearsal(config, 2, 1, OperationTracker("cpu"), torch.device("cpu"))
    run.step(0)
    folder = tmp_path / "checkpoint"
    (folder / "training_state").mkdir(parents=True)
    run.state.snapshot(export=True).write(folder)
    hardware = load_hardware()
    plan = make_plan(config, TWO, site_of(hardware, hardware.find("RTX 4090")), hardware, search=False)
    small = ("rng_state", "policy_")  # random generators, statistics of the data
    files = [file for file in folder.rglob("*.safetensors") if not file.name.startswith(small)]
    assert plan.checkpoint == sum(tensor.nbytes for file in files for tensor in load_file(file).values())


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
    stored: list[int] = []
    most = 0
    for step in saved:
        stored.append(step)
        most = max(most, len(stored))
        if last is not None:
            stored = [s for s in stored[:-last] if every and s % every == 0] + stored[-last:]
    assert checkpoints_kept(steps, freq, last, every) == CheckpointCounts(len(saved), most, len(stored))


def test_disk() -> None:
    needed = disk_needed(TWO, Loading(8, tier="disk"), STREAM, 6_000, CheckpointCounts(5, 3, 2))
    assert (needed.dataset, needed.cache, needed.checkpoints) == (3_000_000_000, 46_080_000_000, 18_000)
    assert needed.total == 49_080_018_000
    assert disk_needed(TWO, Loading(8, tier="ram"), STREAM, 0, CheckpointCounts(1, 1, 1)).cache == 0
    small = disk_needed(
        TWO, Loading(8, tier="disk"), CacheConfig(size="224x224"), 0, CheckpointCounts(1, 1, 1)
    )
    assert small.cache == 50_000 * 2 * 75_264
