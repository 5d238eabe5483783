"""Updates of SAC per second, with the batches drawn from a buffer: LeRobot's, and Flexor's eager and as a CUDA graph.

    python benchmarks/sac_updates.py [--device cuda] [--batch-size 256] [--updates 100] [--records 2000] [--output FILE]

Two cameras of 128x128, a state of 14 and 6 actions; the small convolutions of both, trained; LeRobot's settings of the
algorithm (`--rl.preset=lerobot`). The buffers are full of made-up transitions. LeRobot 0.6.1 is measured if it is
installed here, with its buffer in host memory, as it is by default, and on the device.
"""

import argparse
import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flexor.config.rl import RLConfig
from flexor.core.log import log
from flexor.policies import make_policy
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.pretrained import Pretrained
from flexor.policies.sac.config import GaussianHead, SACConfig
from flexor.rl.buffer import ReplayBuffer
from flexor.rl.graph import GraphUpdate
from flexor.rl.learner import Learner
from flexor.rl.records import record_type

SHAPES = {
    "observation.state": ("STATE", (14,)),
    "observation.images.top": ("VISUAL", (3, 128, 128)),
    "observation.images.wrist": ("VISUAL", (3, 128, 128)),
}
ACTIONS = 6
IMAGE_STATS = {"mean": [[[0.5]]] * 3, "std": [[[0.25]]] * 3}
STATS: dict[str, dict[str, Any]] = {
    "observation.state": {"min": [-1.0] * 14, "max": [1.0] * 14},
    "observation.images.top": IMAGE_STATS,
    "observation.images.wrist": IMAGE_STATS,
    "action": {"min": [-1.0] * ACTIONS, "max": [1.0] * ACTIONS},
}


def measured(update: Callable[[], Any], updates: int, device: torch.device) -> float:
    """Updates per second."""
    for _ in range(min(updates, 10)):
        update()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(updates):
        update()
    synchronize(device)
    return updates / (time.perf_counter() - start)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def made_up(layout: np.dtype[Any], count: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    records = np.zeros(count, layout)
    for name, (_, shape) in SHAPES.items():
        high = 256 if len(shape) == 3 else 1
        records[name] = rng.random((count, *shape), np.float32) * high
    records["action"] = rng.random((count, ACTIONS), np.float32) * 2 - 1
    records["is_step"] = np.arange(count) % 50 != 0
    records["reward"] = rng.random(count) < 0.02
    return records


def flexor_learner(batch_size: int, count: int, device: torch.device) -> Learner:
    features = {name: PolicyFeature(Kind(kind), shape) for name, (kind, shape) in SHAPES.items()}
    config = SACConfig(
        input_features=features,
        output_features={"action": PolicyFeature(Kind.ACTION, (ACTIONS,))},
        policy_kwargs=GaussianHead(std_min=1e-5, std_max=10.0),
    )
    before, after = config.pipelines(STATS, str(device))
    pretrained = Pretrained(make_policy(config).to(device), before, after)
    layout = record_type(features, ACTIONS)
    records = made_up(layout, count)
    buffer = ReplayBuffer(layout, count, records[: count // 2], device)
    buffer.extend(records)
    return Learner(pretrained, buffer, RLConfig(preset="lerobot", batch_size=batch_size), seed=0)


def flexor_update(batch_size: int, count: int, device: torch.device, graph: bool) -> Callable[[], Any]:
    learner = flexor_learner(batch_size, count, device)
    if graph:
        learner.compute = GraphUpdate(device)

    def update() -> None:
        learner.compute(learner)
        learner.updates += 1

    return update


def lerobot_update(batch_size: int, count: int, device: torch.device, storage: str) -> Callable[[], Any]:
    from lerobot.configs.types import FeatureType
    from lerobot.configs.types import PolicyFeature as LerobotFeature
    from lerobot.policies.factory import make_pre_post_processors
    from lerobot.policies.gaussian_actor.configuration_gaussian_actor import GaussianActorConfig
    from lerobot.policies.gaussian_actor.modeling_gaussian_actor import GaussianActorPolicy
    from lerobot.rl.algorithms.sac import SACAlgorithm, SACAlgorithmConfig
    from lerobot.rl.data_sources.data_mixer import OnlineOfflineMixer
    from lerobot.rl.trainer import preprocess_rl_batch

    config = GaussianActorConfig(
        input_features={
            name: LerobotFeature(FeatureType(kind), shape) for name, (kind, shape) in SHAPES.items()
        },
        output_features={"action": LerobotFeature(FeatureType.ACTION, (ACTIONS,))},
        dataset_stats=STATS,
        device=str(device),
        freeze_vision_encoder=False,
    )
    policy = GaussianActorPolicy(config).train()
    algorithm = SACAlgorithm(policy=policy, config=SACAlgorithmConfig.from_policy_config(config))
    algorithm.make_optimizers_and_scheduler()
    stats = {key: {name: torch.tensor(value) for name, value in each.items()} for key, each in STATS.items()}
    before, _ = make_pre_post_processors(config, dataset_stats=stats)
    buffers = [lerobot_buffer(device, storage, count // 2) for _ in range(2)]
    iterator = OnlineOfflineMixer(*buffers, online_ratio=0.5).get_iterator(batch_size, async_prefetch=False)
    processed = (preprocess_rl_batch(before, batch) for batch in iterator)
    return lambda: algorithm.update(processed)


def lerobot_buffer(device: torch.device, storage: str, count: int) -> Any:
    from lerobot.rl.buffer import ReplayBuffer as LerobotBuffer

    buffer = LerobotBuffer(
        count, str(device), list(SHAPES), storage_device=storage, optimize_memory=True, use_drq=True
    )
    for _ in range(count):
        state = {name: torch.rand(1, *shape) for name, (_, shape) in SHAPES.items()}
        buffer.add(state, torch.rand(1, ACTIONS) * 2 - 1, 0.0, state, False, False)
    return buffer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--records", type=int, default=2000, help="in the buffers, at least 100")
    parser.add_argument("--output", type=Path)
    parsed = parser.parse_args()
    device, size, count = torch.device(parsed.device), parsed.batch_size, parsed.records
    ways = {"Flexor, eager": lambda: flexor_update(size, count, device, graph=False)}
    if device.type == "cuda":
        ways["Flexor, one CUDA graph"] = lambda: flexor_update(size, count, device, graph=True)
    if importlib.util.find_spec("lerobot"):
        ways["LeRobot, buffer in host memory"] = lambda: lerobot_update(size, count, device, "cpu")
        ways["LeRobot, buffer on the device"] = lambda: lerobot_update(size, count, device, str(device))
    results = {}
    for way, make in ways.items():
        results[way] = round(measured(make(), parsed.updates, device), 2)
        print(f"{way:34} {results[way]:8.2f} updates/s", flush=True)
    flexor, lerobot = (
        max((speed for way, speed in results.items() if way.startswith(name)), default=None)
        for name in ("Flexor", "LeRobot")
    )
    if flexor and lerobot:
        results["times_lerobot"] = round(flexor / lerobot, 2)
        print(f"{results['times_lerobot']} times the fastest of LeRobot's")
    if parsed.output:
        parsed.output.write_text(json.dumps({"device": str(device), "batch_size": size, **results}, indent=1))


if __name__ == "__main__":
    log.setLevel("INFO")
    main()
