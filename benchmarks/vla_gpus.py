"""Which large policy can be trained in how much GPU memory: a table of docs/vla.md. It needs no GPU.

    python benchmarks/vla_gpus.py

A cell is the largest batch that fits, planned with two cameras of 480x640, in bf16.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from flexor.config.parse import load_config
from flexor.plan.data.imagined_robot import Robot
from flexor.plan.memory.memory import MemoryPlanner
from flexor.plan.site.hardware import load_hardware
from flexor.plan.trace.traces import Traces

ROBOT = Robot(cameras=2, height=480, width=640)
SIZES = {8: 7.6, 12: 11.76, 16: 15.6, 24: 23.65, 48: 44.4, 80: 79.2, 96: 94.9}
"""GB by which a card is sold, and GiB that torch sees on such cards."""
WAYS = {
    "SmolVLA, the action expert": ["smolvla"],
    "SmolVLA, everything": [
        "smolvla",
        "--policy.train_expert_only=false",
        "--policy.freeze_vision_encoder=false",
    ],
    "pi0, adapters": ["pi0", "--lora.r=16"],
    "pi0, adapters on an 8-bit base": ["pi0", "--lora.r=16", "--lora.base=8bit"],
    "pi0, adapters on a 4-bit base": ["pi0", "--lora.r=16", "--lora.base=4bit"],
    "pi0.5, adapters": ["pi05", "--lora.r=16"],
    "pi0.5, adapters on a 4-bit base": ["pi05", "--lora.r=16", "--lora.base=4bit"],
    "pi0, the action expert": ["pi0", "--policy.train_expert_only=true"],
    "pi0, everything, bf16 weights": [
        "pi0",
        "--policy.dtype=bfloat16",
        "--activation_checkpointing=true",
    ],
    "pi0, everything": ["pi0"],
}


def largest_batches(flags: list[str]) -> list[int]:
    """For each of SIZES."""
    policy, *more = flags
    common = ["--dataset.repo_id=made/up", "--policy.load_vlm_weights=false", "--precision=bf16"]
    config = load_config([f"--policy.type={policy}", *common, *more])
    config = replace(config, policy=ROBOT.fill_in(config.policy))
    card, traces = load_hardware().find("RTX 4090"), Traces(config)
    planners = [MemoryPlanner(config, replace(card, memory_gib=gib), traces=traces) for gib in SIZES.values()]
    return [planner.largest_batch() for planner in planners]


def table() -> str:
    lines = [
        f"| What is trained | {' | '.join(f'{size} GB' for size in SIZES)} |",
        f"| --- |{' --- |' * len(SIZES)}",
    ]
    for way, flags in WAYS.items():
        lines.append(f"| {way} | {' | '.join(str(size or '-') for size in largest_batches(flags))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    print(table())
