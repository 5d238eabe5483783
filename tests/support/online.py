"""Small runs that learn while they act: the built-in task with a sparse reward, seconds each."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from flexor.config.parse import config_from_flags, parse_flags
from flexor.rl.records import RECORDS
from flexor.rl.run import train_online
from flexor.sim.record import record_dataset
from flexor.train.loop import TrainResult
from support.runs import Forked

STATE_ENV = ["--env.type=place", "--env.kwargs={obs_type: environment_state_agent_pos, reward: sparse}"]
SMALL = [
    "--policy.type=sac",
    "--policy.device=cpu",
    *STATE_ENV,
    "--policy.latent_dim=8",
    "--policy.actor_network_kwargs={hidden_dims: [16, 16]}",
    "--rl.critic_network_kwargs={hidden_dims: [16, 16]}",
    "--rl.batch_size=8",
    "--rl.capacity=500",
    "--rl.learning_starts=20",
    "--rl.reward=success",
    "--env_eval_freq=0",
    "--log_freq=10",
]


def demonstrations(folder: Path, episodes: int = 2) -> Path:
    """Recorded without disturbances: what is recorded is what was done."""
    return record_dataset(folder, episodes=episodes, obs_type="environment_state_agent_pos", noise=0.0)


def arguments(folder: Path, data: Path | None, *more: str) -> list[str]:
    dataset = [f"--dataset.root={data}"] if data else []
    return [*SMALL, *dataset, f"--output_dir={folder}", *more]


def train(folder: Path, data: Path | None, *more: str) -> TrainResult:
    return train_online(config_from_flags(parse_flags(arguments(folder, data, *more))))


def start(logs: Path, folder: Path, data: Path | None, *more: str) -> Forked:
    """The same in a process of its own, which can be killed."""
    return Forked(logs, "train", *arguments(folder, data, *more))


def records(folder: Path) -> np.ndarray:
    """All records of a run."""
    described = json.loads((folder / "records/schema.json").read_text())["fields"]
    fields = [(name, kind, *[tuple(shape) for shape in rest]) for name, kind, *rest in described]
    return np.fromfile(folder / "records" / RECORDS, np.dtype(fields))


def tensors(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Everything that is learned, in the checkpoint of a step."""
    checkpoint = next(folder.glob(f"checkpoints/*{step}"))
    files = sorted(checkpoint.rglob("*.safetensors"))
    return {f"{file.relative_to(checkpoint)} {k}": v for file in files for k, v in load_file(file).items()}


def assert_same(first: Path, second: Path, step: int) -> None:
    """The same transitions and the same weights and averages, to the last bit."""
    assert records(first).tobytes() == records(second).tobytes()
    ours, theirs = tensors(first, step), tensors(second, step)
    assert ours.keys() == theirs.keys()
    different = [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]
    assert not different, different
