"""Time of one ACT training step on this machine: forward, backward, clip, AdamW; batch already on the device.

    python benchmarks/act_step.py --batch 8 --precision no --size 480 640 --cameras 2

The setting is that of the peers' figures: two cameras of 480x640, state and action of 14, default ACT.
Prints one JSON object with the median milliseconds per step and the memory at the peak.
"""

import argparse
import json
import statistics
import time

import torch

from flexor.core.batch import ACTION, STATE
from flexor.core.rng import Noise
from flexor.policies.act.config import ACTConfig
from flexor.policies.act.policy import ACT
from flexor.policies.features import Kind, PolicyFeature
from flexor.train.engine.base import Engine, pick_device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--precision", choices=("no", "bf16", "fp16"), default="no")
    parser.add_argument("--size", type=int, nargs=2, default=(480, 640))
    parser.add_argument("--cameras", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()

    device = pick_device(None)
    engine = Engine(device, args.precision)
    cameras = {
        f"observation.images.{i}": PolicyFeature(Kind.VISUAL, (3, *args.size)) for i in range(args.cameras)
    }
    config = ACTConfig(
        pretrained_backbone_weights=None,
        input_features={**cameras, STATE: PolicyFeature(Kind.STATE, (14,))},
        output_features={ACTION: PolicyFeature(Kind.ACTION, (14,))},
    )
    policy = ACT(config).to(device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5, fused=True)
    engine.prepare(policy, optimizer)
    batch = {
        **{name: torch.rand(args.batch, 3, *args.size, device=device) for name in cameras},
        STATE: torch.rand(args.batch, 14, device=device),
        ACTION: torch.rand(args.batch, config.chunk_size, 14, device=device),
        f"{ACTION}_is_pad": torch.zeros(args.batch, config.chunk_size, dtype=torch.bool, device=device),
    }
    times = []
    for step in range(args.steps):
        started = time.perf_counter()
        with engine.forward(0, step, 0):
            loss = policy(batch, Noise(0, step, torch.arange(args.batch, device=device))).per_sample.mean()
        engine.backward(loss)
        engine.clip_grad_norm(optimizer, 10.0)
        engine.step(optimizer)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    result = {
        **vars(args),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "median_ms": round(statistics.median(times[args.steps // 3 :]), 2),
        "allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)
        if device.type == "cuda"
        else None,
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2) if device.type == "cuda" else None,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
