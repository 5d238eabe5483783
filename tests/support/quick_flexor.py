"""Commands of the docs, made quick: fewer steps and episodes, and a tiny network.

Apart from the numbers that `shrink` changes, what is run is what the docs say.
"""

from __future__ import annotations

import os

from flexor.bench import limits
from flexor.cli.main import VERBS
from flexor.plan.speed import ceilings
from support import small_resnet

STEPS = 10_000  # this many steps in the docs are one here
COUNTED_IN_STEPS = ("steps", "save_freq", "log_freq", "eval_steps", "env_eval_freq")
AT_MOST = {"episodes": 4, "eval.n_episodes": 2, "batches": 4, "warmup": 1}
TINY_POLICY = {
    "chunk_size": 8,
    "n_action_steps": 8,
    "dim_model": 16,
    "n_heads": 2,
    "dim_feedforward": 32,
    "n_encoder_layers": 1,
    "n_vae_encoder_layers": 1,
    "latent_dim": 4,
    "pretrained_backbone_weights": "null",
    "vision_backbone": small_resnet.NAME,
}


def shrink(arguments: list[str], demonstrations: str) -> list[str]:
    """A command of the docs, made quick. What a quick one has started is so already.

    `demonstrations` is a small dataset for `flexor demo`, which would record a large one.
    """
    # it may be another module, such as a decode worker, which has no arguments
    if "RANK" in os.environ or not arguments or arguments[0] not in VERBS:
        return arguments
    verb, *words = arguments
    words = [_smaller(word) for word in words]
    flags = {word.lstrip("-").partition("=")[0] for word in words}
    if verb in ("eval", "demo") and "eval.n_episodes" not in flags:
        words.append("--eval.n_episodes=2")
    if verb in ("eval", "demo") or "env.type" in flags:
        words.append("--env.max_steps=10")
    if verb == "record" and "episodes" not in flags:
        words.append("--episodes=4")
    if verb == "demo":
        words.append(f"--dataset.root={demonstrations}")
    if verb in ("train", "demo"):
        words += ["--num_workers=0", "--batch_size=4", "--log_freq=1", "--policy.device=cpu"]
        words += [] if "steps" in flags else ["--steps=2"]
    if verb == "plan" and "gpus" not in flags:
        words.append("--gpus=1")  # and not all numbers of them
    if verb == "plan" and not {"dataset.root", "cameras"} & flags:
        words.append("--cameras=1x96x96")  # and not several large ones
    if verb == "bench" and words[0] == "step":
        words += ["--policy.device=cpu", "--steps=1"]
        words += (
            [] if "batch_size" in flags else ["--batch_size=1"]
        )  # a CPU takes seconds for more in bfloat16
        ceilings.WINDOWS, ceilings.WINDOW_S = 1, 0.01  # what this machine can do is measured for seconds
        ceilings.CPU_EDGE, ceilings.CPU_COPY = 64, 1 << 20
    if verb == "bench" and words[0] == "data":
        limits.SECONDS, limits.GATHERED = 0.05, 1 << 20
    if verb == "bench" and words[0] == "serve":
        words.append("--requests=8")
    measured = verb == "bench" and (words[0] == "step" or "policy.type" in flags)
    if verb in ("train", "demo", "plan") or measured:
        words += [f"--policy.{k}={v}" for k, v in TINY_POLICY.items()] if _is_act(words) else []
    return [verb, *words]


def _is_act(words: list[str]) -> bool:
    """Other policies have other settings, and a checkpoint has its own."""
    values = dict(word.lstrip("-").partition("=")[::2] for word in words)
    return values.get("policy.type", "act") == "act" and "policy.path" not in values


def _smaller(word: str) -> str:
    key, _, value = word.removeprefix("--").partition("=")
    if not word.startswith("--") or not value.isdigit():
        return word
    if key in COUNTED_IN_STEPS:
        return f"--{key}={max(1, int(value) // STEPS)}"
    return f"--{key}={min(int(value), AT_MOST.get(key, int(value)))}"
