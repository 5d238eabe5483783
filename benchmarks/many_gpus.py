"""Planned time of a training step on several GPUs: the tables of docs/multi_gpu.md.

    python benchmarks/many_gpus.py                          plan every case, and print the tables
    python benchmarks/many_gpus.py --json FILE.json         also write the results to this file
    python benchmarks/many_gpus.py --table FILE.json        print the tables of a file

It needs no GPU. Each case is `flexor plan` with DDP, a batch of 8 per GPU and two cameras of 480x640. The times of
kernels, of copies into buckets and of the host follow from measurements of one H200 (`flexor plan --calibrate`). The
speed of links follows from data sheets and published results of nccl-tests (`src/flexor/plan/site/links.py`). No
exchange between two GPUs was ever run.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from flexor.config.parse import load_config
from flexor.config.schema import TrainConfig
from flexor.plan.data import FRAMES
from flexor.plan.data.imagined_robot import Robot, imagined_data
from flexor.plan.plan import Plan, make_plan, site_of
from flexor.plan.site.hardware import load_hardware
from flexor.plan.speed.speeds import assumed
from flexor.plan.trace.traces import Traces

COMMON = ["--dataset.repo_id=made/up", "--batch_size=8", "--steps=1000", "--parallel.strategy=ddp"]
ROBOT = Robot(cameras=2, height=480, width=640)


class Policy(NamedTuple):
    name: str
    """As the tables show it."""
    flags: list[str]

    def config(self) -> TrainConfig:
        config = load_config([*COMMON, *self.flags])
        return replace(config, policy=ROBOT.fill_in(config.policy))


class Machine(NamedTuple):
    name: str
    gpu: str
    gpus: int
    nodes: int = 1
    network: str | None = None


POLICIES = [
    Policy("ACT", ["--policy.type=act"]),
    Policy("Diffusion", ["--policy.type=diffusion"]),
    Policy("SmolVLA, the action expert", ["--policy.type=smolvla", "--policy.load_vlm_weights=false"]),
    Policy("pi0, LoRA", ["--policy.type=pi0", "--lora.r=16", "--policy.load_vlm_weights=false"]),
    Policy("pi0, everything", ["--policy.type=pi0", "--policy.load_vlm_weights=false"]),
]
TABLES = [
    [
        Machine("H200", "H200", 1),
        *(Machine(f"{n}, NVLink", "H200", n) for n in (2, 4, 8)),
        Machine("2 x 8, InfiniBand", "H200", 8, 2, "infiniband"),
        Machine("2 x 8, Ethernet", "H200", 8, 2, "ethernet"),
    ],
    [Machine("RTX 4090", "RTX 4090", 1), *(Machine(f"{n}, PCIe", "RTX 4090", n) for n in (2, 4))],
]


def case(policy: Policy, machine: Machine, plan: Plan) -> dict[str, Any]:
    step = plan.run_time.step
    return {
        "policy": policy.name,
        "flags": policy.flags,
        "machine": machine.name,
        "gpu": machine.gpu,
        "gpus": machine.gpus,
        "nodes": machine.nodes,
        "links": str(plan.site.links),
        "fits": plan.fits,
        "graph": step.graph,
        "step_ms": 1e3 * step.seconds,
        "communication_ms": 1e3 * step.communication,
        "exposed_ms": 1e3 * step.exposed,
        "spread": step.spread,
        "allocated_bytes": plan.memory.allocated,
    }


def cases(policy: Policy) -> list[dict[str, Any]]:
    """All machines with this policy; a machine on which it does not fit has no time."""
    config, hardware = policy.config(), load_hardware()
    traces, data = Traces(config, scalable=False), imagined_data(config.policy, FRAMES)
    result = []
    for machine in (machine for machines in TABLES for machine in machines):
        gpu = hardware.find(machine.gpu)
        site = site_of(hardware, gpu, machine.gpus, machine.nodes, network=machine.network)
        plan = make_plan(config, data, site, hardware, traces=traces, speeds=assumed(), search=False)
        result.append(case(policy, machine, plan))
    return result


def tables(results: dict[str, Any]) -> str:
    """Milliseconds per step and, of several GPUs, how much of the work of one GPU alone each does."""
    pages = []
    for machines in TABLES:
        names = [machine.name for machine in machines]
        lines = [f"| Policy | {' | '.join(names)} |", f"| --- {'| --- ' * len(names)}|"]
        for policy in POLICIES:
            of_policy = [row for row in results["cases"] if row["policy"] == policy.name]
            by_machine = {row["machine"]: row for row in of_policy}
            cells = [cell(by_machine[name], by_machine[names[0]]) for name in names]
            lines.append(f"| {policy.name} | {' | '.join(cells)} |")
        pages.append("\n".join(lines))
    return "\n\n".join(pages)


def cell(row: dict[str, Any], alone: dict[str, Any]) -> str:
    if not row["fits"]:
        return "does not fit"
    ms = row["step_ms"]
    text = f"{ms:.1f}" if ms < 100 else f"{ms:,.0f}"
    return text if row is alone else f"{text} ({alone['step_ms'] / ms:.0%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE.json", help="also write the results to this file")
    parser.add_argument(
        "--table", type=Path, metavar="FILE.json", help="plan nothing; print the tables of a file"
    )
    args = parser.parse_args()
    if args.table:
        print(tables(json.loads(args.table.read_text())))
        return
    planned = [row for policy in POLICIES for row in cases(policy)]
    results = {"date": date.today().isoformat(), "cases": planned}
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    print(tables(results))


if __name__ == "__main__":
    main()
