"""Time and peak memory of a training step on this GPU: LeRobot's, and Flexor's eager and as one CUDA graph.

    python benchmarks/step_speed.py [--policies act diffusion vqbet tdmpc] [--compile] [--output FILE.json]

Batches are made up and lie on the GPU. All cases run one after the other in this process, so that they meet the same
machine. LeRobot 0.6.1 is measured if it is installed here, in float32 and in bf16; ratios are to the faster of the two.
Cameras are 2 of 480x640 for ACT and Diffusion Policy, 1 of 96x96 for VQ-BeT (its second phase), 1 of 84x84 for TD-MPC.
"""

import argparse
import gc
import importlib.util
import json
import statistics
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexor.bench.step import RepeatedStep
from flexor.config.parse import load_config
from flexor.plan.data.imagined_robot import Robot
from flexor.policies.base import PolicyConfig
from flexor.policies.features import Kind
from flexor.policies.fit import deltas_of

WARM_UP, STEPS, WINDOWS = 6, 10, 3


class Case(NamedTuple):
    policy: str
    batch: int
    robot: Robot


CASES = [
    Case("act", 8, Robot(cameras=2)),
    Case("act", 32, Robot(cameras=2)),
    Case("diffusion", 8, Robot(cameras=2)),
    Case("diffusion", 32, Robot(cameras=2)),
    Case("vqbet", 8, Robot(cameras=1, height=96, width=96)),
    Case("tdmpc", 256, Robot(cameras=1, height=84, width=84)),
]
PLAIN = ["--step=eager", "--precision=no", "--channels_last=false"]
WAYS = {
    "eager, float32": PLAIN,
    "eager, bf16": [*PLAIN, "--precision=bf16"],
    "graph, float32": [*PLAIN, "--step=graph"],
    "graph, bf16": [*PLAIN, "--step=graph", "--precision=bf16"],
    "graph, bf16, channels last": ["--step=graph", "--precision=bf16", "--channels_last=true"],
}
COMPILED = {"the same, compiled": [*WAYS["graph, bf16, channels last"], "--compile=true"]}


def timed(step: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds per step (median of windows), and the peak memory from the first step on."""
    torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    found = []
    for _ in range(WINDOWS):
        started = time.perf_counter()
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - started) / STEPS)
    return {
        "ms": round(statistics.median(found), 2),
        "peak_mb": round(torch.cuda.max_memory_allocated() / 1e6),
    }


def flexor(case: Case, flags: list[str]) -> dict[str, float]:
    settings = [f"--policy.type={case.policy}", f"--batch_size={case.batch}", "--dataset.repo_id=made/up"]
    config = load_config([*settings, *flags])
    config.policy = case.robot.fill_in(config.policy)
    return timed(RepeatedStep(config, torch.device("cuda", 0)))


def lerobot(case: Case, bf16: bool) -> dict[str, float]:
    config, policy, optimizer = lerobot_policy(case)
    policy.cuda().train()
    batch = lerobot_batch(config, case.batch)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16) if bf16 else nullcontext():
            loss, _ = policy.forward(dict(batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        if hasattr(policy, "update"):
            policy.update()

    return timed(step)


def lerobot_policy(case: Case) -> tuple[PolicyConfig, Any, torch.optim.Optimizer]:
    """LeRobot's policy of the same settings and features, with the optimizer that it asks for."""
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.factory import get_policy_class, make_policy_config

    ours = case.robot.fill_in(
        load_config([f"--policy.type={case.policy}", "--dataset.repo_id=made/up"]).policy
    )
    inputs, outputs = (
        {name: PolicyFeature(FeatureType(f.type.value), tuple(f.shape)) for name, f in features.items()}
        for features in (ours.input_features, ours.output_features)
    )
    settings: dict[str, Any] = {"input_features": inputs, "output_features": outputs, "device": "cuda"}
    if case.policy != "tdmpc":
        settings["pretrained_backbone_weights"] = None
    config = make_policy_config(case.policy, **settings)
    policy = get_policy_class(case.policy)(config)
    if case.policy == "vqbet":  # the second phase
        policy.vqbet.action_head.vqvae_model.discretized = torch.tensor(True)
    return ours, policy, config.get_optimizer_preset().build(policy.get_optim_params())


def lerobot_batch(config: PolicyConfig, size: int) -> dict[str, Tensor]:
    """Normalised values on the GPU, as LeRobot's processing hands them on."""
    deltas = deltas_of(config)
    batch: dict[str, Tensor] = {"index": torch.arange(size).cuda()}
    for name, feature in {**config.input_features, **config.output_features}.items():
        steps = [len(deltas[name])] if name in deltas else []
        make = torch.rand if feature.type is Kind.VISUAL else torch.randn
        batch[name] = make(size, *steps, *feature.shape, device="cuda").clamp(-1, 1)
        if steps:
            batch[f"{name}_is_pad"] = torch.zeros(size, *steps, dtype=torch.bool, device="cuda")
    if config.reward_deltas is not None:
        shape = size, len(config.reward_deltas)
        batch |= {"next.reward": torch.rand(shape, device="cuda")}
        batch |= {"next.reward_is_pad": torch.zeros(shape, dtype=torch.bool, device="cuda")}
    return batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", nargs="*", default=["act", "diffusion", "vqbet", "tdmpc"])
    parser.add_argument("--compile", action="store_true", help="also with compiled blocks: minutes more")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    ways: dict[str, Callable[[Case], dict[str, float]]] = {}
    if importlib.util.find_spec("lerobot"):
        ways |= {
            "LeRobot, float32": lambda case: lerobot(case, False),
            "LeRobot, bf16": lambda case: lerobot(case, True),
        }
    mine = {**WAYS, **(COMPILED if given.compile else {})}
    ways |= {name: lambda case, flags=flags: flexor(case, flags) for name, flags in mine.items()}
    report: dict[str, Any] = {
        "date": str(date.today()),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cases": [],
    }
    for case in (case for case in CASES if case.policy in given.policies):
        found: dict[str, Any] = {}
        for name, measure in ways.items():
            gc.collect()
            torch._C._cuda_clearCublasWorkspaces()  # of the streams of the previous way
            torch.cuda.empty_cache()
            try:
                found[name] = measure(case)
            except Exception as error:
                found[name] = {"error": f"{type(error).__name__}: {error}"[:200]}
                traceback.print_exc(limit=5)
            print(f"{case.policy} {case.batch}: {name}: {found[name]}", flush=True)
        report["cases"].append({"policy": case.policy, "batch": case.batch, "ways": found})
        if given.output:
            given.output.write_text(json.dumps(report, indent=1))
    print(table(report))


def table(report: dict[str, Any]) -> str:
    lines = [
        "| policy | batch | way | ms | times LeRobot's speed | peak, MB |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for case in report["cases"]:
        theirs = [way["ms"] for name, way in case["ways"].items() if "LeRobot" in name and "ms" in way]
        for name, way in case["ways"].items():
            ratio = f"{min(theirs) / way['ms']:.1f}" if theirs and "ms" in way else "-"
            lines.append(
                f"| {case['policy']} | {case['batch']} | {name} | {way.get('ms', way.get('error'))} | {ratio} "
                f"| {way.get('peak_mb', '-')} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
