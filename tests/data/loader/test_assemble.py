"""Processing in the loader's threads: who runs it, what it gets, and what comes of it."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from flexor.core.batch import ACTION, SAMPLE_ID, Batch
from flexor.core.errors import FlexorError
from flexor.data.dataset import open_dataset
from flexor.data.loader.assemble import HeldBack
from flexor.data.loader.loader import Loader
from flexor.data.loader.open import open_loader
from flexor.data.settings import CacheConfig, DatasetConfig, OrderConfig
from support.limits import LIMIT_S
from support.samples import write_sample

TOP, WRIST = "observation.images.top", "observation.images.wrist"


@dataclass
class Host:
    process: Callable[[Batch, int], Batch]
    uses_images: bool = False

    def __call__(self, batch: Batch, step: int) -> Batch:
        return self.process(batch, step)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_sample(tmp_path_factory.mktemp("host") / "data")


def load(root, process, uses_images=False, *, device="cpu", **options) -> Loader:
    settings = DatasetConfig(cache=CacheConfig(tier="stream"), order=OrderConfig("uniform"), decoder="cpu")
    options = {"batch_size": 2, "accumulation": 2, "num_workers": 2, "seed": 3} | options
    host_steps = Host(process, uses_images)
    dataset = open_dataset(root=root)
    return open_loader(
        dataset,
        settings,
        {ACTION: [0, 1]},
        cameras=[TOP, WRIST],
        device=device,
        host_steps=host_steps,
        **options,
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loaders_threads_process_each_micro_batch_once(root, workers):
    calls: list[tuple[str, int, tuple[int, ...]]] = []

    def process(batch: Batch, step: int) -> Batch:
        ids = batch[SAMPLE_ID]
        calls.append((threading.current_thread().name, step, tuple(ids.tolist())))
        return {**batch, "doubled": 2 * ids}

    loader = load(root, process, num_workers=workers)
    steps = list(loader.steps(3, 6))
    delivered = [
        (number, tuple(batch[SAMPLE_ID].tolist())) for number, step in enumerate(steps, 3) for batch in step
    ]
    assert sorted(call[1:] for call in calls) == sorted(delivered)
    assert all(torch.equal(b["doubled"], 2 * b[SAMPLE_ID]) for step in steps for b in step)
    in_training_thread = [name == threading.current_thread().name for name, *_ in calls]
    assert all(in_training_thread) if workers == 0 else not any(in_training_thread)


def test_later_batches_are_processed_while_a_step_computes(root):
    """The first step is not over before the batch of the second has been processed."""
    processed = {number: threading.Event() for number in range(4)}

    def process(batch: Batch, step: int) -> Batch:
        processed[step].set()
        return batch

    for number, _ in enumerate(load(root, process, accumulation=1).steps(0, 4)):
        assert number == 3 or processed[number + 1].wait(LIMIT_S)


@pytest.mark.parametrize("workers", [0, 2])
def test_its_error_ends_the_run_in_the_training_thread(root, workers):
    def process(batch: Batch, step: int) -> Batch:
        if step == 2:
            raise FlexorError("this task has no words")
        return batch

    steps = load(root, process, num_workers=workers).steps(0, 10)
    next(steps), next(steps)
    with pytest.raises(FlexorError, match="this task has no words"):
        next(steps)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


def test_images_are_held_back_unless_they_are_used(root):
    plain = [step[0] for step in load(root, lambda batch, step: batch).steps(0, 3)]

    def rename(batch: Batch, step: int) -> Batch:
        assert isinstance(batch[TOP], HeldBack) and isinstance(batch[WRIST], HeldBack)
        return {"renamed" if name == TOP else name: value for name, value in batch.items()}

    for (batch, _), expected in zip(load(root, rename).steps(0, 3), plain, strict=True):
        assert torch.equal(batch["renamed"], expected[TOP]) and TOP not in batch
        assert torch.equal(batch[WRIST], expected[WRIST])

    def cut(batch: Batch, step: int) -> Batch:
        images = batch[TOP]
        assert images.dtype == torch.uint8 and images.shape == (2, 3, 48, 64)
        rest = {name: value for name, value in batch.items() if name != TOP}
        return {**rest, "patches": images.unfold(2, 16, 16).unfold(3, 16, 16).float()}

    for device in ("cpu", None):  # None: as before the transfer to a GPU
        for (batch, _), expected in zip(load(root, cut, True, device=device).steps(0, 3), plain, strict=True):
            assert TOP not in batch and torch.equal(batch[WRIST], expected[WRIST])
            patches = expected[TOP].unfold(2, 16, 16).unfold(3, 16, 16).float()
            assert torch.equal(batch["patches"], patches)


def test_its_time_is_the_loaders(root):
    def process(batch: Batch, step: int) -> Batch:
        return {**batch, "sum": sum(range(200_000))}

    idle = load(root, lambda batch, step: batch, num_workers=0)
    loader = load(root, process, num_workers=0)
    for each in (idle, loader):
        list(each.steps(0, 4))
    assert loader.work()["host_steps_s"] > 0 and "host_steps_s" in idle.work()


@pytest.mark.gpu
@pytest.mark.parametrize("uses_images", [False, True])
def test_what_it_makes_arrives_on_the_gpu(root, uses_images):
    def process(batch: Batch, step: int) -> Batch:
        ids = batch[SAMPLE_ID]
        made = {
            "tokens": torch.stack([ids, ids + 1], 1),
            "scale": ids.bfloat16()[None],
            "words": ["go"] * len(ids),
        }
        if uses_images:
            made["patches"] = batch[TOP].unfold(2, 16, 16).unfold(3, 16, 16).float()
        return {**batch, **made}

    on_cpu = load(root, process, uses_images).steps(0, 6)
    on_gpu = load(root, process, uses_images, device="cuda").steps(0, 6)
    for expected, arrived in zip(on_cpu, on_gpu, strict=True):
        for cpu_batch, gpu_batch in zip(expected, arrived, strict=True):
            assert cpu_batch.keys() == gpu_batch.keys() and gpu_batch["words"] == ["go"] * 2
            for name, value in cpu_batch.items():
                if isinstance(value, torch.Tensor):
                    near = (
                        gpu_batch[name].cpu().float() - value.float()
                    ).abs() <= 1  # colours are rounded otherwise
                    assert gpu_batch[name].is_cuda and near.all(), name
