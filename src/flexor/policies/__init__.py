"""The policies there are. To add one: a file with a Policy in it, and a line here."""

from flexor.errors import ConfigError
from flexor.policies.act import ACT
from flexor.policies.base import Policy, PolicyConfig
from flexor.tree import closest

POLICIES: dict[str, type[Policy]] = {
    "act": ACT,
}


def policy_class(name: str) -> type[Policy]:
    if name not in POLICIES:
        raise ConfigError(f"policy.type={name!r} is not known. {closest(name, POLICIES)}")
    return POLICIES[name]


__all__ = ["POLICIES", "Policy", "PolicyConfig", "policy_class"]
