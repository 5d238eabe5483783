"""The built-in policies. To add one: add a folder with a Policy, and a line here.

Policies are imported only when they are used: some require optional packages.
"""

import importlib
from contextlib import nullcontext

from flexor.core.errors import ConfigError
from flexor.core.typed import closest
from flexor.policies.base import Policy, PolicyConfig
from flexor.policies.external import installed, is_code, load_external
from flexor.policies.sizes import building

POLICIES = {
    "act": "flexor.policies.act.policy:ACT",
    "diffusion": "flexor.policies.diffusion.policy:Diffusion",
    "vqbet": "flexor.policies.vqbet.policy:VQBeT",
    "tdmpc": "flexor.policies.tdmpc.policy:TDMPC",
    "multi_task_dit": "flexor.policies.multi_task_dit.policy:MultiTaskDiT",
    "pi0": "flexor.policies.pi0.policy:Pi0",
    "pi05": "flexor.policies.pi0.policy:Pi05",
    "smolvla": "flexor.policies.smolvla.policy:SmolVLA",
    "pi0_fast": "flexor.policies.pi0_fast.policy:Pi0Fast",
    "eo1": "flexor.policies.eo1.policy:EO1",
    "xvla": "flexor.policies.xvla.policy:XVLA",
    "groot": "flexor.policies.groot.policy:Groot",
    "wall_x": "flexor.policies.wall_x.policy:WallX",
}

ONLINE_POLICIES = {"sac": "flexor.policies.sac.policy:SAC"}
"""Those that learn from rewards while they act: see `flexor.rl`."""

LEROBOT_TYPES = {"gaussian_actor": "sac"}
"""LeRobot's types whose policies have other names here."""

REWARD_MODELS = {"reward_classifier": "flexor.policies.reward_classifier.policy:RewardClassifier"}
"""Those that do not act: they learn from a dataset which rewards a policy deserves."""

BUILT_IN = {**POLICIES, **ONLINE_POLICIES, **REWARD_MODELS}

ONLY_IN_LEROBOT = (
    "evo1",
    "fastwam",
    "lingbot_va",
    "molmoact2",
    "vla_jepa",
)
"""LeRobot's types of policies that Flexor does not have."""


def policy_class(kind: str) -> type[Policy]:
    """The policy of a type: a built-in one, one from an installed package, or code that the user names."""
    kind = LEROBOT_TYPES.get(kind, kind)
    if kind in BUILT_IN:
        return _built_in(kind)
    if is_code(kind):
        return load_external(kind)
    registered = installed()
    if kind not in registered and kind in ONLY_IN_LEROBOT:
        raise ConfigError(
            f"policy.type={kind} is a policy of LeRobot's that Flexor does not have: neither its training settings nor "
            f"its checkpoints can be used here. Train it with lerobot-train. Flexor has {', '.join(BUILT_IN)}."
        )
    if kind not in registered:
        raise ConfigError(
            f"policy.type={kind!r} is not known. {closest(kind, [*BUILT_IN, *registered])} "
            "For your own policy, use --policy.type=path/to/file.py:CLASS."
        )
    return load_external(kind, registered[kind])


def make_policy(config: PolicyConfig) -> Policy:
    """A policy with these settings. What can't be built is an error that says so."""
    cls = policy_class(config.type)
    with building(config.type) if config.type in BUILT_IN else nullcontext():
        return cls(config)


def _built_in(kind: str) -> type[Policy]:
    module, _, name = BUILT_IN[kind].partition(":")
    try:
        cls: type[Policy] = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"policy.type={kind} requires {error.name}, which is not installed: pip install {error.name}."
        ) from error
    return cls


__all__ = ["BUILT_IN", "POLICIES", "Policy", "PolicyConfig", "make_policy", "policy_class"]
