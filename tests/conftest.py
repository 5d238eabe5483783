"""What tests share: tiny datasets made once, flags of a tiny policy, and the program's log."""

import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from flexor.data.writer import DatasetWriter
from flexor.log import log
from flexor.sim.record import record_dataset

LOW_DIM_LENGTHS = (11, 9, 13, 10)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Which tests belong together where two workers share them, and which come first.

    Those of a file share what it makes. Those that start many processes come one after the other, and begin at once,
    for they take longest.
    """
    groups = {item: _group(item) for item in items}
    items.sort(key=lambda item: groups[item] != "processes")
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))


def _group(item: pytest.Item) -> str:
    return "processes" if item.path.parent.name in ("distributed", "launch") else item.path.stem


@pytest.fixture(scope="session", autouse=True)
def quiet_machine(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One thread each, so that tests side by side do not fight; nothing kept in the user's cache."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background by a shell
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("FLEXOR_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True)
def ordinary_priority() -> Iterator[None]:
    """A video encoder may make the thread that opens it a real-time one, and all that tests start from then on."""
    yield
    if sys.platform.startswith("linux"):
        assert os.sched_getscheduler(0) == os.SCHED_OTHER


@pytest.fixture(autouse=True)
def same_kernels() -> Iterator[None]:
    """A product in bfloat16 on a CPU that has none makes torch do without oneDNN, and compute float32 differently."""
    torch.backends.mkldnn.set_flags(True)
    yield
    torch.backends.mkldnn.set_flags(True)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four demonstrations of the built-in task, pictures of 32 pixels. Only to be read: copy to change."""
    return record_dataset(tmp_path_factory.mktemp("datasets") / "place", episodes=4, image_size=32)


@pytest.fixture(scope="session")
def lowdim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four episodes without pictures, of two tasks: a policy on it has kilobytes instead of megabytes."""
    return write_lowdim(tmp_path_factory.mktemp("datasets") / "lowdim")


def write_lowdim(root: Path, lengths: tuple[int, ...] = LOW_DIM_LENGTHS, reward: bool = True) -> Path:
    vector = {"dtype": "float32", "names": None}
    features = {
        "observation.environment_state": {**vector, "shape": (4,)},
        "observation.state": {**vector, "shape": (2,)},
        "action": {**vector, "shape": (2,)},
    }
    if reward:
        features["next.reward"] = {**vector, "shape": (1,)}
    rng = np.random.default_rng(3)
    with DatasetWriter(root, 10, features) as writer:
        for episode, length in enumerate(lengths):
            for _ in range(length):
                seen = rng.normal(size=4).astype(np.float32)
                frame = {
                    "observation.environment_state": seen,
                    "observation.state": seen[:2] * 2,
                    "action": seen[2:] - seen[:2],
                    "next.reward": seen[:1] ** 2,
                }
                writer.add_frame({name: frame[name] for name in features})
            writer.save_episode("push" if episode % 2 else "pull")
    return root


@pytest.fixture(scope="session")
def tiny_act() -> list[str]:
    """Flags of the smallest ACT; the pictures' ResNet-18 is what it has most of."""
    return [
        "--policy.type=act",
        "--policy.device=cpu",
        "--policy.pretrained_backbone_weights=null",
        "--policy.chunk_size=4",
        "--policy.n_action_steps=4",
        "--policy.dim_model=16",
        "--policy.n_heads=2",
        "--policy.dim_feedforward=32",
        "--policy.n_encoder_layers=1",
        "--policy.n_vae_encoder_layers=1",
        "--policy.latent_dim=4",
    ]


@pytest.fixture
def log_lines() -> Iterator[list[str]]:
    """What the program logs (it does not hand its log on to pytest's own capture)."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, level = Keep(), log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield lines
    log.removeHandler(handler)
    log.setLevel(level)
