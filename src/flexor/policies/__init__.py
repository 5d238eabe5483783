"""The policies there are. To add one: a file with a Policy in it, and a line here.

They are named, not imported: some need packages that not everybody has.
"""

import importlib

from flexor.errors import ConfigError
from flexor.policies.base import Policy, PolicyConfig
from flexor.tree import closest

POLICIES = {
    "act": "flexor.policies.act:ACT",
    "diffusion": "flexor.policies.diffusion:Diffusion",
    "vqbet": "flexor.policies.vqbet:VQBeT",
    "tdmpc": "flexor.policies.tdmpc:TDMPC",
    "multi_task_dit": "flexor.policies.multi_task_dit:MultiTaskDiT",
}


def policy_class(name: str) -> type[Policy]:
    """The policy that `--policy.type` names."""
    if name not in POLICIES:
        raise ConfigError(f"policy.type={name!r} is not known. {closest(name, POLICIES)}")
    module, _, attribute = POLICIES[name].partition(":")
    try:
        found: type[Policy] = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise ConfigError(f"policy.type={name} can't be used: there is no module {error.name}.") from error
    return found


__all__ = ["POLICIES", "Policy", "PolicyConfig", "policy_class"]
